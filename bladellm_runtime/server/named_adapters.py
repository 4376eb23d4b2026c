"""Which adapters have names, as all front ends of a server know it: those of --lora_modules, and what changed since."""

import fcntl
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import msgspec


class NamedAdapter(msgspec.Struct, frozen=True):
    """folder: resolved, the adapter's key for the engine. created: seconds since the epoch."""

    name: str
    folder: str
    created: int


class _Change(msgspec.Struct, frozen=True):
    """A line of the log: a name that was given to a folder, or (None) taken away."""

    name: str
    adapter: NamedAdapter | None


_decode = msgspec.json.Decoder(_Change).decode


class NamedAdapters:
    """Adapters by name. With a `log`, a file in the front ends' common folder, each change is a line of it: whoever
    looks reads the lines that others have added, so that a name holds everywhere once `add` or `remove` has returned.
    """

    def __init__(self, modules: Mapping[str, NamedAdapter], log: Path | None) -> None:
        self._adapters = dict(modules)
        self._log = log
        self._read_bytes = 0

    def current(self) -> Mapping[str, NamedAdapter]:
        """All of them now. Cheap: one look at the size of the log."""
        if self._log is not None and _size(self._log) > self._read_bytes:
            with self._log.open("rb", buffering=0) as file:
                self._catch_up(file)
        return self._adapters

    def add(self, adapter: NamedAdapter) -> bool:
        """Give a folder a name; False where the name is taken."""
        return self._change(_Change(adapter.name, adapter))

    def remove(self, name: str) -> bool:
        """Take a name away; False where there is none."""
        return self._change(_Change(name, None))

    def _change(self, change: _Change) -> bool:
        if self._log is None:
            return self._apply(change)
        with self._log.open("a+b", buffering=0) as file:
            # Held for microseconds, and freed by the system where a process dies with it.
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            if not self._applies(change):
                return False
            self._append(file, msgspec.json.encode(change) + b"\n")
        return self._apply(change)

    def _append(self, file: FileIO, line: bytes) -> None:
        # What a process that died has left of a line, or a full disk of this one, must not begin the next.
        file.truncate(self._read_bytes)
        if file.write(line) != len(line):
            file.truncate(self._read_bytes)
            raise OSError("the log of adapters could not be written")
        self._read_bytes += len(line)

    def _catch_up(self, file: FileIO) -> None:
        """Read the lines that were added; the end of one that is still being written comes next time."""
        file.seek(self._read_bytes)
        lines = file.read().rpartition(b"\n")[0].splitlines()
        for line in lines:
            self._apply(_decode(line))
            self._read_bytes += len(line) + 1

    def _applies(self, change: _Change) -> bool:
        return (change.name in self._adapters) == (change.adapter is None)

    def _apply(self, change: _Change) -> bool:
        if not self._applies(change):
            return False
        if change.adapter is None:
            del self._adapters[change.name]
        else:
            self._adapters[change.name] = change.adapter
        return True


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0  # Nothing has changed yet.
