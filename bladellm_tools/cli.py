"""The command line: `blade_llm COMMAND` and the entry points `blade_llm_server`, `_quantize`, `_split`, `_check`
and `_bench`.

Every command is a row of `COMMANDS`: dataclasses whose fields are its flags, and a function that takes one instance of
each and returns the exit code. The function's module, and with it torch or fastapi, is imported only to run it. A name
of two words is a command of a group: `blade_llm bench sweep`.
"""

import contextlib
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from bladellm_runtime import __version__
from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.flags import flag
from bladellm_tools.console import fail
from bladellm_tools.flags import Flag, flags_of, nearest, normalise
from bladellm_tools.help import HelpfulCommand, layout, page_width

INTERRUPTED = 130


@dataclass(frozen=True)
class CommonArgs:
    """Flags that every command has."""

    config: str | None = flag(None, "YAML recipe with values of these flags; a flag given here wins.", group="Command")
    print_config: bool = flag(False, "Print the values in effect as a recipe and exit.", group="Command")
    debug: bool = flag(False, "Show the traceback of an error.", group="Command")
    version: bool = flag(False, "Print the version and exit.", group="Command")


@dataclass(frozen=True)
class Command:
    """A command: `sections`, `run` and `presets` are `module:name`, imported when needed.

    Where two sections have a field of the same name, the flag is the first section's. `presets` names a mapping from
    the values of the flag `--preset` to values of other flags.
    """

    summary: str
    sections: tuple[str, ...]
    run: str
    presets: str | None = None

    @cached_property
    def classes(self) -> list[type]:
        """The argument dataclasses."""
        return [load(section) for section in self.sections]

    @cached_property
    def owners(self) -> dict[str, type]:
        """Which dataclass a flag sets."""
        return {item.name: cls for cls in reversed(self.classes) for item in flags_of(cls)}

    @cached_property
    def own_flags(self) -> list[Flag]:
        """The flags a recipe may set, in the order of help."""
        return [item for cls in self.classes for item in flags_of(cls) if self.owners[item.name] is cls]

    @cached_property
    def flags(self) -> list[Flag]:
        """All flags."""
        return [*self.own_flags, *flags_of(CommonArgs)]

    def execute(self, given: dict[str, Any]) -> int:
        """Merge the values, check, and run. Returns the exit code."""
        common = CommonArgs(**{item.name: given.pop(item.name, item.default) for item in flags_of(CommonArgs)})
        if common.version:
            return print_version()
        values = self.merge(common.config, given)
        sections = [
            cls(**{name: values[name] for name, owner in self.owners.items() if owner is cls}) for cls in self.classes
        ]
        if common.print_config:
            from bladellm_tools.recipe import to_yaml

            print(to_yaml(values), end="")
            return 0
        with leaving_at_once():
            run = load(self.run)
        return int(run(*sections))

    def merge(self, recipe: str | None, given: dict[str, Any]) -> dict[str, Any]:
        """The values in effect: flag > recipe > preset > default."""
        if recipe is not None:
            from bladellm_tools.recipe import read_recipe

            given = read_recipe(recipe, self.own_flags) | given
        values = {item.name: item.default for item in self.own_flags}
        if self.presets is not None:
            values |= load(self.presets).get(given.get("preset"), {})
        return values | given


def bench_sections(*classes: str) -> tuple[str, ...]:
    """Argument dataclasses of `blade_llm bench`."""
    return tuple(f"bladellm_tools.bench.args:{name}" for name in classes)


COMMANDS = {
    "serve": Command(
        "Serve a model over the OpenAI protocol.",
        ("bladellm_runtime.config:ServingArgs",),
        "bladellm_tools.serve:run",
    ),
    "generate": Command(
        "Answer a file of prompts.",
        ("bladellm_tools.generate_args:GenerateArgs", "bladellm_runtime.config:EngineArgs"),
        "bladellm_tools.generate:run",
    ),
    "quantize": Command(
        "Quantize a model: fewer bits for its weights, calibrated layer by layer.",
        ("bladellm_tools.quantize.args:QuantizeArgs",),
        "bladellm_tools.quantize.command:run",
    ),
    "split": Command(
        "Split a model into one folder a rank, and prove the folders to be the model.",
        ("bladellm_tools.split.args:SplitArgs",),
        "bladellm_tools.split.command:run",
    ),
    "check": Command(
        "Check this machine, and whether a model fits it.",
        ("bladellm_tools.check.args:CheckArgs",),
        "bladellm_tools.check.report:run",
    ),
    "eval": Command(
        "Measure a model's perplexity, and how far it is from a baseline.",
        ("bladellm_tools.evaluate.args:EvaluateArgs",),
        "bladellm_tools.evaluate.command:run",
    ),
    "bench run": Command(
        "Measure a server at one level of load.",
        bench_sections("TargetArgs", "WorkloadArgs", "RunLevelArgs", "SloArgs", "OutputArgs"),
        "bladellm_tools.bench.commands:run",
    ),
    "bench sweep": Command(
        "Measure the curves of a server: TTFT and TBT at rising load.",
        bench_sections("TargetArgs", "WorkloadArgs", "LevelArgs", "SweepArgs", "SloArgs", "OutputArgs"),
        "bladellm_tools.bench.commands:sweep",
        "bladellm_tools.bench.args:PRESETS",
    ),
    "bench compare": Command(
        "Measure the curves of two or more servers in turn, with the same requests.",
        bench_sections("TargetArgs", "WorkloadArgs", "LevelArgs", "SweepArgs", "CompareArgs", "SloArgs", "OutputArgs"),
        "bladellm_tools.bench.commands:compare",
        "bladellm_tools.bench.args:PRESETS",
    ),
    "bench plot": Command(
        "Make the report again from stored results, of several folders together.",
        bench_sections("PlotArgs", "SloArgs", "OutputArgs"),
        "bladellm_tools.bench.commands:plot",
    ),
    "bench mock": Command(
        "Serve answers without a model at exact times, to test load generators with.",
        bench_sections("MockArgs"),
        "bladellm_tools.bench.mock:run_mock",
    ),
    "bench check": Command(
        "Test whether this machine can measure: the client against the mock.",
        bench_sections("SelfCheckArgs"),
        "bladellm_tools.bench.selfcheck:run",
    ),
}
GROUPS = {"bench": "Measure TTFT-QPS and TBT-QPS curves of OpenAI-compatible servers."}
"""First words of commands that have two."""


def load(path: str) -> Any:
    """What `module:name` names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process on Ctrl-C while modules are imported: an interrupt raised there can get lost in foreign code.

    Where interrupts are ignored, as in a shell's background jobs, they stay so.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        fail("interrupted")
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_version() -> int:
    """Print the version; returns the exit code."""
    print(f"BladeLLM Open {__version__}")
    return 0


def typer_callback(command: Command) -> Callable[..., dict[str, Any]]:
    """The function typer calls with one keyword a flag, None where it is not given; returns the given values."""

    def callback(**values: Any) -> dict[str, Any]:
        given = {}
        for item in command.flags:
            value = values[identifier(item)]
            if value:
                given[item.name] = item.convert(value if item.is_list else value[-1])
        return given

    parameters = [typer_parameter(item) for item in command.flags]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    callback.__doc__ = command.summary
    return callback


def identifier(flag: Flag) -> str:
    """The flag's name as a Python identifier."""
    return flag.name.replace(".", "__")


def typer_parameter(flag: Flag) -> inspect.Parameter:
    """One flag as typer wants it: every value is text, converted by the flag itself so that errors read the same."""
    option = typer.Option(
        None,
        f"--{flag.name}",
        *flag.names,
        help=" ".join(filter(None, (flag.help, flag.note))),
        metavar=flag.metavar,
        rich_help_panel=flag.group,
        show_default=False,
    )
    return inspect.Parameter(
        identifier(flag), inspect.Parameter.KEYWORD_ONLY, default=option, annotation=list[str] | None
    )


def commands_of(group: str | None) -> dict[str, str]:
    """Summaries of the commands of a group by their last word; of the words after `blade_llm` where it is None."""
    if group is None:
        return {name: command.summary for name, command in COMMANDS.items() if " " not in name} | GROUPS
    prefix = f"{group} "
    return {name[len(prefix) :]: command.summary for name, command in COMMANDS.items() if name.startswith(prefix)}


def umbrella_help(program: str, group: str | None) -> int:
    """What `blade_llm` alone prints: the commands."""
    about = GROUPS[group] if group else f"BladeLLM Open {__version__}: an LLM inference engine and its toolkit."
    print(f"Usage: {program} COMMAND [FLAGS]\n\n{about}\n\nCommands:")
    print(layout([(name, "", summary) for name, summary in commands_of(group).items()], page_width() - 2, "  ", 11))
    print(f"\n{program} COMMAND --help lists the flags of a command;\n{program} --version prints the version.")
    return 0


def dispatch(program: str, arguments: list[str], group: str | None = None) -> int:
    """`blade_llm`, or one of its groups: find the command and run it. Returns the exit code."""
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "help"):
        return umbrella_help(program, group)
    if first == "--version":
        return print_version()
    known = commands_of(group)
    if first not in known:
        close = nearest(first, known)
        hint = f"did you mean {close}?" if close else f"the commands are {', '.join(known)}"
        raise ConfigError(f"unknown command {first!r}; {hint}")
    if group is None and first in GROUPS:
        return dispatch(f"{program} {first}", arguments[1:], first)
    return run_command(f"{group} {first}" if group else first, f"{program} {first}", arguments[1:])


def run_command(name: str, program: str, arguments: list[str]) -> int:
    """Parse one command's arguments and run it. Returns the exit code."""
    if arguments == ["--version"]:  # quickly: without a parser, which takes longest to load
        return print_version()
    command = COMMANDS[name]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(name, cls=HelpfulCommand, help=command.summary, context_settings=settings)(typer_callback(command))
    parser = typer.main.get_command(app)
    given = parser.main(args=normalise(arguments, command.flags), prog_name=program, standalone_mode=False)
    if given == INTERRUPTED:  # typer has caught a Ctrl-C, and would say nothing
        raise KeyboardInterrupt
    # The command itself runs here, outside typer, which has its own mind about interrupts and broken pipes.
    return command.execute(given) if isinstance(given, dict) else int(given or 0)


def guarded(action: Callable[[], int], debug: bool) -> int:
    """Run an action; an error becomes one line on standard error and an exit code."""
    try:
        code = action()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        fail("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`| head`); without this the interpreter complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        if debug:
            traceback.print_exc()
        fail(str(error))
        return error.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        hint = "" if debug else "; --debug shows where"
        fail(f"internal error: {type(error).__name__}: {error}{hint}")
        return 1


def open_standard_streams() -> None:
    """Let streams that the process was started without lead nowhere: a socket or a child's pipe that got the number of
    one would be taken for it."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def start(action: Callable[[str, list[str]], int], fallback: str) -> NoReturn:
    """Run an entry point with the process's arguments and exit."""
    open_standard_streams()
    arguments = sys.argv[1:]
    program = Path(sys.argv[0]).name if sys.argv[0].endswith(fallback) else fallback
    code = guarded(lambda: action(program, arguments), "--debug" in arguments)
    if code == INTERRUPTED:
        # A thread may be in the middle of loading torch: the interpreter's own end was seen to abort under it.
        os._exit(code)
    sys.exit(code)


def main() -> NoReturn:
    """`blade_llm`."""
    start(dispatch, "blade_llm")


def server() -> NoReturn:
    """`blade_llm_server`: `blade_llm serve` under BladeLLM's name."""
    start(lambda program, arguments: run_command("serve", program, arguments), "blade_llm_server")


def quantize() -> NoReturn:
    """`blade_llm_quantize`: `blade_llm quantize` under BladeLLM's name."""
    start(lambda program, arguments: run_command("quantize", program, arguments), "blade_llm_quantize")


def split() -> NoReturn:
    """`blade_llm_split`: `blade_llm split` under BladeLLM's name."""
    start(lambda program, arguments: run_command("split", program, arguments), "blade_llm_split")


def check() -> NoReturn:
    """`blade_llm_check`: `blade_llm check` under BladeLLM's name."""
    start(lambda program, arguments: run_command("check", program, arguments), "blade_llm_check")


def bench() -> NoReturn:
    """`blade_llm_bench`: `blade_llm bench`."""
    start(lambda program, arguments: dispatch(program, arguments, "bench"), "blade_llm_bench")


if __name__ == "__main__":
    main()
