"""Files of prompts in, files of answers out, for `blade_llm generate`."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from bladellm_runtime.errors import UserError
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
                text = raw.decode().rstrip("\r\n")
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


@contextlib.contextmanager
def open_output(path: str) -> Iterator[TextIO]:
    """The file for the answers (`-` is standard output). Raises `UserError` when it cannot be written."""
    if path == STANDARD:
        yield sys.stdout
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("w", encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error.strerror}") from error
        yield file
