"""Folders that turned out to be no adapters, and why: until their files change nobody need read them again."""

import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bladellm_runtime.lora.peft_config import CONFIG_FILE
from bladellm_runtime.lora.peft_folder import TENSOR_FILE

MAX_FOLDERS = 256

FolderState = tuple[tuple[int, ...] | None, ...]
"""Of each file of an adapter what changes with it; None for one that is not there, or cannot be looked at."""


def state_of(folder: Path) -> FolderState:
    """How an adapter's files are now. Reads none of them."""
    return tuple(_file_state(folder / name) for name in (CONFIG_FILE, TENSOR_FILE))


class BrokenFolders:
    """What is wrong with folders, by adapter; of more than `most` those that nobody has asked for are forgotten.

    All calls come from one thread, and none waits: a thread of its own looks at the files.
    """

    def __init__(self, most: int = MAX_FOLDERS) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[FolderState, str]] = OrderedDict()
        self._looker = ThreadPoolExecutor(1, "lora-look")

    def __contains__(self, adapter: object) -> bool:
        """Whether the folder was broken when it was read."""
        return adapter in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, adapter: str, state: FolderState, reason: str) -> None:
        """A folder is broken. state: from before it was read."""
        self._known[adapter] = state, reason
        self._known.move_to_end(adapter)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def look(self, adapter: str) -> "Future[FolderState]":
        """How the files are now, for `reason`."""
        return self._looker.submit(state_of, Path(adapter))

    def reason(self, adapter: str, state: FolderState) -> str | None:
        """Why the folder, with its files as they are now, is still broken; None where it is to be read again."""
        known = self._known.get(adapter)
        if known is None or known[0] != state:
            self.forget(adapter)
            return None
        self._known.move_to_end(adapter)
        return known[1]

    def forget(self, adapter: str) -> None:
        """Have the folder read again, whatever its files are."""
        self._known.pop(adapter, None)

    def close(self) -> None:
        """Drop what waits and let the thread end."""
        self._looker.shutdown(wait=False, cancel_futures=True)


def _file_state(file: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    # Times of change and inode too: rights may be given, and a file with its old date may be put in place.
    return found.st_mtime_ns, found.st_size, found.st_ctime_ns, found.st_ino
