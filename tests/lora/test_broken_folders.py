"""A folder is known to be broken for as long as its files are the same, and no more folders are known than may be."""

import os

import pytest

from bladellm_runtime.lora.broken_folders import BrokenFolders, state_of
from tests.lora.folders import CONFIG, TENSORS


def make_folder(path):
    path.mkdir()
    for name in (CONFIG, TENSORS):
        (path / name).write_text("12345678")
    return path


def replace_with_old_date(folder):
    date = (folder / CONFIG).stat().st_mtime_ns
    (folder / "new").write_text("87654321")
    os.utime(folder / "new", ns=(date, date))
    (folder / "new").rename(folder / CONFIG)


CHANGES = {
    "another size": lambda folder: (folder / TENSORS).write_text("123456789"),
    "the same size": lambda folder: os.utime(folder / CONFIG, ns=(1, 1)),
    "a file in place of it": replace_with_old_date,
    "rights": lambda folder: (folder / TENSORS).chmod(0o400),
    "one file less": lambda folder: (folder / TENSORS).unlink(),
    "all gone": lambda folder: folder.rename(folder.parent / "elsewhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_file_is_seen(tmp_path, change):
    folder = make_folder(tmp_path / "a")
    broken, adapter = BrokenFolders(), str(folder)
    broken.add(adapter, state_of(folder), "it is bad")
    (folder / "README.md").write_text("what else is in the folder does not matter")
    for _ in range(2):
        assert broken.reason(adapter, broken.look(adapter).result()) == "it is bad"
    CHANGES[change](folder)
    assert adapter in broken
    assert broken.reason(adapter, broken.look(adapter).result()) is None
    assert adapter not in broken
    broken.close()


def test_files_may_appear(tmp_path):
    broken, adapter = BrokenFolders(), str(tmp_path / "a")
    broken.add(adapter, state_of(tmp_path / "a"), "it is missing")
    assert broken.reason(adapter, broken.look(adapter).result()) == "it is missing"
    make_folder(tmp_path / "a")
    assert broken.reason(adapter, broken.look(adapter).result()) is None
    broken.close()


def test_those_that_nobody_asks_for_are_forgotten():
    broken, state = BrokenFolders(3), (None, None)
    for name in "abc":
        broken.add(name, state, name)
    assert broken.reason("a", state) == "a"
    broken.add("d", state, "d")
    broken.add("c", state, "again")
    assert [name for name in "abcd" if name in broken] == ["a", "c", "d"]
    assert broken.reason("c", state) == "again"
    broken.forget("c")
    assert len(broken) == 2
    assert broken.reason("b", state) is None
    broken.close()
