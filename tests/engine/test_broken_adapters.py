"""Requests for a broken adapter after the first: refused without a read and without a slot, until its files change."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from bladellm_runtime import LLM
from bladellm_runtime.engine.ranked_loader import RankedLoader
from bladellm_runtime.lora.broken_folders import FolderState, state_of
from bladellm_runtime.lora.loader import Outcome
from bladellm_runtime.lora.peft_folder import AdapterReader
from bladellm_runtime.lora.policy import Move
from bladellm_runtime.ranks.messages import AdapterMoved
from tests.conftest import DEMO
from tests.engine import reference
from tests.engine.adapted import GREEDY, ask, make_family
from tests.engine.test_adapter_preparer import Desk, FakeRanks, SlowLoader
from tests.lora import folders

MISSING = "adapter_refused: config is broken"


class FolderLoader(SlowLoader):
    """What is broken is so because of its files."""

    def poll(self) -> list[Outcome]:
        return [
            Outcome(each.adapter, each.error, state_of(Path(each.adapter)) if each.error else None)
            for each in super().poll()
        ]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(FolderLoader(), tmp_path)
    desk.loader.broken = {str(tmp_path / "x")}
    desk.ask(0, "x")
    desk.finish()
    assert desk.refused == {0: MISSING}
    return desk


def hold_looks(desk: Desk) -> list[Future[FolderState]]:
    """Looks at folders from now on, which end when told to."""
    looks: list[Future[FolderState]] = []

    def look(adapter: str) -> Future[FolderState]:
        looks.append(Future())
        return looks[-1]

    desk.preparer._broken.look = look
    return looks


def until(desk: Desk, there: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not there():
        assert time.monotonic() < end
        desk.poll()


def test_a_broken_adapter_takes_no_slot_from_others(desk, tmp_path):
    for number, name in enumerate("ab", 1):
        desk.ask(number, name)
    desk.finish(2)
    for number in (1, 2):
        desk.end(number)
    looks = hold_looks(desk)
    for number in range(3, 7):
        assert not desk.ask(number, "x")
    assert desk.stats.lora_waiting == 4
    for look in looks:
        look.set_result(state_of(tmp_path / "x"))
    desk.poll()
    assert len(desk.refused) == 5
    assert {*desk.refused.values()} == {MISSING}
    assert not desk.loader.begun
    assert desk.stats.lora_evictions == desk.stats.lora_waiting == 0
    assert desk.ask(8, "a")
    assert desk.ask(9, "b")


def test_files_that_changed_are_read(desk, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / folders.CONFIG).write_text("{}")
    desk.ask(1, "x")
    until(desk, lambda: bool(desk.loader.begun))
    desk.finish()  # they are broken still
    assert desk.refused[1] == MISSING
    desk.ask(2, "x")
    until(desk, lambda: 2 in desk.refused)
    assert not desk.loader.begun
    (folder / folders.CONFIG).write_text('{"r": 8}')
    desk.loader.broken.clear()
    desk.ask(3, "x")
    until(desk, lambda: bool(desk.loader.begun))
    desk.finish()
    assert 3 in desk.ready


def test_an_adapter_that_is_unloaded_is_read_again(desk, tmp_path):
    desk.preparer.unload(str(tmp_path / "x"))
    desk.ask(1, "x")
    assert [move.adapter for move in desk.loader.begun] == [str(tmp_path / "x")]


def test_requests_in_line_for_what_turns_out_broken_are_refused_with_the_others(tmp_path):
    desk = Desk(FolderLoader(), tmp_path)
    desk.loader.broken = {str(tmp_path / "x")}
    for number, name in enumerate("xabxb"):
        desk.ask(number, name)
    desk.finish(1)
    assert desk.refused == dict.fromkeys((0, 3), MISSING)
    desk.finish(2)
    assert not desk.loader.begun
    assert sorted(desk.ready) == [1, 2, 4]


def test_requests_that_end_while_the_files_are_looked_at_leave_nothing(desk, tmp_path):
    looks = hold_looks(desk)
    desk.ask(1, "x")
    desk.end(1)
    looks[0].set_result(state_of(tmp_path / "x"))
    assert not desk.preparer.poll()
    assert desk.stats.lora_waiting == 0
    assert not desk.loader.begun
    assert 1 not in desk.refused


@pytest.mark.parametrize("own", [True, False])
def test_only_what_this_rank_found_lies_in_files_that_it_can_look_at(tmp_path, own):
    loader = FolderLoader()
    loader.broken = {str(tmp_path)} if own else set()
    ranked = RankedLoader(loader, others := FakeRanks(), 2)
    ranked.begin(Move(str(tmp_path), 0, True))
    others.reports.append(AdapterMoved(1, str(tmp_path), "broken"))
    assert ranked.poll() == []
    loader.finish()
    [outcome] = ranked.poll()
    assert outcome.error is not None
    assert outcome.broken == (state_of(tmp_path) if own else None)


def test_a_broken_folder_is_read_once_until_it_is_mended(tmp_path, monkeypatch):
    family = make_family(reference.load(DEMO)[0], tmp_path, 1)
    tensors = family.folders[0] / folders.TENSORS
    shutil.copy(tensors, tmp_path / "whole")
    tensors.write_bytes(b"no tensors")
    reads, read = [], AdapterReader.read

    def counted(reader, folder, target):
        reads.append(folder)
        read(reader, folder, target)

    monkeypatch.setattr(AdapterReader, "read", counted)
    with LLM(str(DEMO), dtype="float32", device="cpu", kv_cache_gib=0.1, enable_lora=True) as llm:
        sentences = set()
        for _ in range(3):
            outputs = llm.generate([[5, 6, 7]] * 2, GREEDY, lora=[family.folders[0]] * 2)
            sentences |= {output.outputs[0].message for output in outputs}
            assert {output.outputs[0].error for output in outputs} == {"adapter_refused"}
        assert len(reads) == len(sentences) == 1
        assert folders.TENSORS in sentences.pop()
        shutil.copy(tmp_path / "whole", tensors)
        ask(llm, family, [[5, 6, 7]], [0])
        assert len(reads) == 2
