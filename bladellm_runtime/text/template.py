"""Jinja chat templates under limits: a sandbox, a time limit, and a limit on the size of every text they build.

Templates come only from the model folder or `--chat_template`, never from a request, so this is a second line of
defence. What holds: no attribute or call that Jinja's sandbox forbids; any loop, macro or recursion ends at the time
limit; output, joined, repeated and formatted text are bounded. What does not: a single call of a built-in (`replace`,
`indent(10**9)`) may still take the time and memory it asks for.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_RENDERED_CHARS = 32 * 2**20
RENDER_SECONDS = 10.0
PROBE_SECONDS = 1.0
MAX_POWER_BITS = 4096
_OF_EACH = {jinja2.Environment.call_filter.__code__, jinja2.Environment.call_test.__code__}
"""What `map`, `select` and their like call for each of their items, and no finaliser does."""
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")


class TemplateLimitError(Exception):
    """A template that ran too long or built too much."""


class ChatTemplate:
    """A compiled chat template. A source that is not valid Jinja is a `ValueError` with its line."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        except (RecursionError, OverflowError, MemoryError):
            raise ValueError("it is nested too deeply or too large") from None
        self.reads_content_parts = self._reads_content_parts()
        """Whether message content may be a list of parts; else parts must be joined to one string first."""

    def render(self, variables: Mapping[str, Any], *, seconds: float = RENDER_SECONDS) -> str:
        """The template's output. Raises whatever the template raises, and `TemplateLimitError` at a limit."""
        with _time_limit(seconds):
            return _join(self._template.generate(variables))

    def _reads_content_parts(self) -> bool:
        probe = "content-part-probe"
        content = [{"type": "text", "text": probe}]
        try:
            text = self.render({"messages": [{"role": "user", "content": content}]}, seconds=PROBE_SECONDS)
        except Exception:  # made for strings, or for conversations of another shape: strings always work
            return False
        # A template made for strings may print the list itself.
        return probe in text and "'type'" not in text and '"type"' not in text


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TemplateLimitError` in this thread once template code has run for `seconds`.

    A template is Python code to the interpreter, so a trace function sees each of its lines, also in loops that emit
    nothing, and each item that `map` or `select` hand to a filter or test. It costs about 0.2 µs a template line and
    leaves other threads alone.
    """
    deadline = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        # Other code is left alone: an exception raised in, say, a finaliser would be swallowed and end the tracing.
        of_template = frame.f_code.co_filename == "<template>"
        if (of_template or frame.f_code in _OF_EACH) and time.monotonic() > deadline:
            raise TemplateLimitError(f"it ran for more than {seconds:g} s")
        return trace if of_template else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _join(pieces: Iterable[str]) -> str:
    """`"".join` that stops at `MAX_RENDERED_CHARS`."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        kept.append(piece)
    return "".join(kept)


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise TemplateLimitError(f"it builds more than {MAX_RENDERED_CHARS} characters")


class _LimitedCode(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(")))")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _LimitedCode
    intercepted_binops = frozenset(["*", "**", "%", "+"])
    concat = staticmethod(_join)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do arithmetic whose result has a bounded size."""
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_size(max(_repeated(left, right), _repeated(right, left)))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call, unless a string method is asked for a huge width."""
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_size(max((arg for arg in args if isinstance(arg, int)), default=0))
        return super().call(__context, __obj, *args, **kwargs)


def _repeated(sequence: Any, times: Any) -> int:
    if isinstance(sequence, str | list | tuple) and isinstance(times, int):
        return len(sequence) * times
    if isinstance(sequence, int) and isinstance(times, int):
        return 0 if sequence.bit_length() + times.bit_length() <= MAX_POWER_BITS else MAX_RENDERED_CHARS + 1
    return 0


def _check_format(form: str) -> None:
    if _WIDE_FORMAT.search(form):
        raise TemplateLimitError("it formats with a width of five digits or more")


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_POWER_BITS:
        raise TemplateLimitError("it computes a number that is too large")


class _PlainNamespace(Namespace):
    """Jinja's namespace without underscore names, which could reach the interpreter's own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format(form: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(form))
    return str(form) % (kwargs or args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    for name in ("center", "wordwrap"):  # they build any size in one call, and no chat template needs them
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters["format"] = _format
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = _PlainNamespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()
