"""Files of prompts in, files of answers out, for `blade_llm generate`."""

import contextlib
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools.flags import shown

Format = Literal["auto", "jsonl", "txt"]
MAX_LINE_BYTES = 64 * 1024**2
STANDARD = "-"


@dataclass(frozen=True)
class PromptLine:
    """One prompt, where it stood, and the other keys of its object, which go to the answer unchanged."""

    line: int
    prompt: str | list[int]
    extra: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: str, form: Format = "auto") -> list[PromptLine]:
    """All prompts of a file (`-` is standard input); empty lines are left out.

    Raises `UserError` naming file and line for one that is not UTF-8, not JSON, or holds no prompt.
    """
    name = "standard input" if path == STANDARD else path
    jsonl = form == "jsonl" or (form == "auto" and path.endswith((".jsonl", ".json")))
    try:
        prompts = [_prompt(f"{name} line {number}", number, text, jsonl) for number, text in _lines(path, name)]
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}") from error
    if not prompts:
        raise UserError(f"{name} holds no prompt")
    return prompts


def _lines(path: str, name: str) -> Iterator[tuple[int, str]]:
    with sys.stdin.buffer if path == STANDARD else Path(path).open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise UserError(f"{name} line {number} is longer than {MAX_LINE_BYTES} bytes")
            try:
                text = raw.removeprefix(BOM_UTF8).decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{name} line {number} is not UTF-8 text") from error
            if text.strip():
                yield number, text


def _prompt(place: str, number: int, text: str, jsonl: bool) -> PromptLine:
    if not jsonl:
        return PromptLine(number, text)
    try:
        content = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    extra = {}
    if isinstance(content, dict):
        extra = {key: value for key, value in content.items() if key != "prompt"}
        if "prompt" not in content:
            raise UserError(f"{place} has no key 'prompt'")
        content = content["prompt"]
    if not _is_prompt(content):
        raise UserError(f"{place}: a prompt is text or a list of token ids, got {shown(content)}")
    return PromptLine(number, content, extra)


def _is_prompt(content: Any) -> bool:
    if isinstance(content, str):
        return True
    is_ids = isinstance(content, list) and len(content) > 0
    return is_ids and all(type(item) is int and 0 <= item < 2**31 for item in content)


class Output:
    """Where answers go, `-` being standard output: a file is opened as it is, and emptied by the first answer.

    Raises `UserError` where it cannot be written; a context, whose end closes the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_new = True
        with self._errors():
            self._file = _opened(path)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What a full disk has not taken is tried again here, and must not hide the first error.
        with self._errors() if error is None else contextlib.suppress(OSError):
            if self._path != STANDARD:
                self._file.close()

    def write(self, lines: Iterable[str]) -> None:
        """Write lines, and hand them to the system at once."""
        with self._errors():
            if self._is_new and self._path != STANDARD and Path(self._path).is_file():
                self._file.truncate(0)
            self._is_new = False
            self._file.writelines(f"{line}\n" for line in lines)
            self._file.flush()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            name = "standard output" if self._path == STANDARD else f"--output {self._path}"
            raise UserError(f"{name} cannot be written: {error.strerror}") from error


def _opened(path: str) -> TextIO:
    return sys.stdout if path == STANDARD else Path(path).open("a", encoding="utf-8")


def check_apart(source: str, output: str) -> None:
    """Raise `ConfigError` where the answers would take the place of the prompts."""
    if STANDARD in (source, output):
        return
    with contextlib.suppress(OSError):
        if Path(output).is_file() and Path(source).samefile(output):
            raise ConfigError(f"--output {output} is the file of --input; give another one")
