"""The plan of decode attention, which a Triton kernel makes: interpreted, against all blocks that are to be read."""

import random

import pytest
import torch
from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.decode_work import DecodeWorkspace

from tests.kernels.interpreted import run_interpreted
from tests.support.cases import some_of

THIS = "tests.kernels.test_decode_plan_triton"


def check_plan(lens, window, query_len, block_kv, programs, segment_blocks):
    """The plan covers every visible block once, numbers segments as it says, and takes its slowest program no longer
    than equal ranges would."""
    schedule = DecodeSchedule(block_kv, 2, 1, programs, segment_blocks)
    workspace = DecodeWorkspace(torch.device("cpu"), len(lens), 1, 1, 8, query_len, schedule=schedule)
    work = workspace.plan(torch.tensor(lens), window, query_len)
    wanted = visible_blocks(lens, window, query_len, block_kv)
    rows = work.sequences.tolist()
    seen, segments, costs = [], {}, []
    for program, (first, end, sequence) in enumerate(work.programs.tolist()):
        block, cost = first, end - first
        while block < end:
            begin, stop = rows[sequence][:2]
            for each in range(block, min(stop, end)):
                seen.append((sequence, each - begin + rows[sequence][2]))
            if min(stop, end) > block:
                segments.setdefault(sequence, set()).add(program + sequence)
                cost += segment_blocks
            block = min(stop, end)
            sequence += 1
        costs.append(cost)
    assert seen == wanted
    for sequence, (*_, first, count) in enumerate(rows):
        assert segments.get(sequence, set()) == set(range(first, first + count))
        assert first + count <= len(work.partial)
    numbers = [number for each in segments.values() for number in each]
    assert len(numbers) == len(set(numbers))
    number, *merged = work.merges.tolist()
    assert merged[:number] == [sequence for sequence in range(len(lens)) if rows[sequence][4] != 1]
    # The merge of a sequence counts as a block.
    assert max(costs) <= equal_cost(wanted, programs, segment_blocks) + 1
    return sum(rows[sequence][4] > 1 for sequence in range(len(lens)))


def check_even_ranges():
    """Of one sequence programs have as many blocks but for one, those with more first."""
    programs, blocks = random.randint(2, 60), random.randint(1, 900)
    schedule = DecodeSchedule(64, 2, 1, programs)
    workspace = DecodeWorkspace(torch.device("cpu"), 1, 1, 1, 8, schedule=schedule)
    work = workspace.plan(torch.tensor([64 * blocks - random.randint(0, 63)]))
    lengths = (work.programs[:, 1] - work.programs[:, 0]).tolist()
    assert lengths == [blocks // programs + (place < blocks % programs) for place in range(programs)]


def visible_blocks(lens, window, query_len, block_kv):
    """(sequence, block) of all that is to be read, in order."""
    found = []
    for sequence, length in enumerate(lens):
        lowest = 0 if window is None else max(0, length - query_len + 1 - window)
        found += [(sequence, block) for block in range(lowest // block_kv, -(-length // block_kv))]
    return found


def equal_cost(blocks, programs, segment_blocks):
    """What the slowest of programs costs that take as many blocks each, counting segments too."""
    share = max(-(-len(blocks) // programs), 1)
    ranges = [blocks[first : first + share] for first in range(0, len(blocks), share)] or [[]]
    return max(len(part) + segment_blocks * len({sequence for sequence, _ in part}) for part in ranges)


def interpret_some_plans():
    interpret_plans(12)


def interpret_plans(count=100):
    for _ in range(count):
        query_len = random.choice([1, 1, 4])
        most = random.choice([query_len, 70, 1000])
        lens = [random.choice([0, random.randint(query_len, most)]) for _ in range(random.randint(1, 20))]
        window = random.choice([None, 1, 50, 300])
        programs, segment_blocks = random.choice([1, 2, 7, 33]), random.choice([0, 1, 2, 5, 8])
        check_plan(lens, window, query_len, random.choice([16, 64]), programs, segment_blocks)
    check_even_ranges()
    # Whole sequences where programs can take as many each: 16 blocks, 9, and long ones.
    assert check_plan([1024] * 64, None, 1, 64, 33, 2) == 0
    assert check_plan([550] * 64, None, 1, 64, 33, 2) == 0
    assert check_plan([4096] * 32, None, 1, 64, 33, 2) == 0
    assert check_plan([500] * 6 + [0] + [9000], None, 1, 64, 33, 2) >= 1


INTERPRETED = ["interpret_some_plans"]


@pytest.mark.parametrize("what", some_of([*INTERPRETED, "interpret_plans"], INTERPRETED))
def test_interpreted(what):
    pytest.importorskip("triton")
    run_interpreted(THIS, what)
