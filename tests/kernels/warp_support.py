"""Random calls of decode attention by warps with rings of their own, poisoned where they write."""

import torch
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_schedule import PRIVATE_SCHEDULE, DecodeSchedule
from bladellm_kernels.decode_work import DecodeWork

from tests.kernels.decode_support import Case
from tests.kernels.test_ring_decode import random_work

TYPES = [torch.bfloat16, torch.float16]
SCHEDULES = {
    2: PRIVATE_SCHEDULE,
    3: DecodeSchedule(128, 4, 4, 3, merge_beside=True, private_rings=True),
    4: DecodeSchedule(128, 3, 4, 4, merge_beside=True, private_rings=True),
}
"""By programs of an SM."""
MERGE_SHARED_BYTES = 1336
LENS = (1, 31, 32, 33, 127, 128, 129, 0)


def planned_call(case: Case, schedule: DecodeSchedule, programs: int) -> DecodeCall:
    """With cuts anywhere, and all that is written poisoned."""
    work = random_work(case, schedule, None, programs)
    return DecodeCall(*case.memory, case.scale, work, torch.full_like(case.q, torch.nan))


def merged(work: DecodeWork, out: torch.Tensor) -> torch.Tensor:
    """What the kernel behind makes of the states, float32: by the definition of the logarithms."""
    whole = out.float()
    for sequence, (_, _, _, first, count) in enumerate(work.sequences.tolist()):
        if count == 0:
            assert out[sequence].isnan().all(), "nothing is written for a sequence of length 0"
            whole[sequence] = 0
        elif count > 1:
            weights = work.lse[first : first + count].softmax(0)
            whole[sequence] = (work.partial[first : first + count] * weights[:, :, None]).sum(0)
    return whole
