"""The command line: quick and light help, one-line errors with the right exit code, colour only on terminals."""

import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import tomllib

import pytest

from bladellm_runtime import __version__
from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import CheckpointError
from bladellm_tools import cli
from bladellm_tools.flags import flags_of
from tests.support.cases import drawn_of, some_pairs
from tests.tools.command import ENTRY_POINTS, ROOT, command, run, run_forked, run_on_terminal

HEAVY = ("torch", "transformers", "fastapi", "numpy", "uvicorn", "aiohttp", "matplotlib")
QUICK_SECONDS = 0.3
FLAGS = {item.name: item for item in flags_of(ServingArgs) if item.kind in (int, float)}


@pytest.mark.parametrize(("program", "arguments"), some_pairs(ENTRY_POINTS, [["--help"], ["-h"], ["--version"]]))
def test_help_and_version_import_nothing_heavy(program: str, arguments: list[str]) -> None:
    spy = (
        f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr))"
    )
    line = command(program)
    done = subprocess.run([*line[:2], f"{spy}; {line[2]}", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["blade_llm", "--help"],
        ["blade_llm", "serve", "-h"],
        ["blade_llm_server", "--version"],
        ["blade_llm_bench", "compare", "--help"],
    ],
)
def test_help_is_quick(arguments: list[str]) -> None:
    """Processor time, not the clock's: it is the same on an idle machine, and tests share theirs."""
    assert any(processor_seconds(arguments) <= QUICK_SECONDS for _ in range(5))


def processor_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(*arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_console_scripts_are_the_entry_points() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {name: f"bladellm_tools.cli:{function}" for name, function in ENTRY_POINTS.items()}


def test_installed_scripts_run() -> None:
    folder = ROOT / ".venv" / "bin" if sys.prefix != sys.base_prefix else None
    scripts = [path for name in ENTRY_POINTS if folder and (path := folder / name).exists()]
    if not scripts:
        pytest.skip("the package is not installed with its scripts")
    for script in scripts:
        done = subprocess.run([str(script), "--version"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"BladeLLM Open {__version__}\n")


def test_umbrella_help_names_every_command() -> None:
    for arguments, group in ((["blade_llm"], None), (["blade_llm", "bench"], "bench"), (["blade_llm_bench"], "bench")):
        shown = run(*arguments).stdout
        assert all(re.search(rf"^  {name} ", shown, re.M) for name in cli.commands_of(group)), arguments
    words = {name.split()[0] for name in cli.COMMANDS}
    assert words == set(cli.commands_of(None))


@pytest.mark.parametrize("arguments", [["blade_llm"], ["blade_llm_bench"], ["blade_llm", "serve", "-h"]])
def test_help_fits_the_terminal(arguments: list[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, run(*arguments).stdout.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "10")
    assert "Usage" in run(*arguments).stdout, "too narrow for the page"


def test_help_is_the_same_every_time(monkeypatch) -> None:
    """Whatever the order of a set of strings is in a process."""
    shown = set()
    for seed in range(4):
        monkeypatch.setenv("PYTHONHASHSEED", str(seed))
        shown.add(run("blade_llm", "split", "--help").stdout)
    assert len(shown) == 1
    assert "--help, -h" in shown.pop()


@pytest.mark.parametrize(("name", "columns"), some_pairs(cli.COMMANDS, [80, 120], 5))
def test_help_on_a_terminal_shows_whole_names(name: str, columns: int) -> None:
    shown = run_on_terminal("blade_llm", *name.split(), "--help", columns=columns)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "\x1b[" in shown
    assert max(map(len, plain.splitlines())) <= columns
    for item in cli.COMMANDS[name].flags:
        assert re.search(rf"--{item.name}\b", plain), item.name


@pytest.mark.parametrize("name", drawn_of(cli.COMMANDS, 4))
def test_help_in_a_pipe_is_plain(name: str) -> None:
    done = run_forked("blade_llm", *name.split(), "--help")
    assert done.stdout.isascii()
    assert all(f"--{item.name}" in done.stdout for item in cli.COMMANDS[name].flags)
    assert all(item.help.split()[0] in done.stdout for item in cli.COMMANDS[name].flags)


def test_no_color_is_respected() -> None:
    colours = re.compile(r"\x1b\[[\d;]*3\dm")
    assert colours.search(run_on_terminal("blade_llm", "serve", "--prt"))
    assert not colours.search(run_on_terminal("blade_llm", "serve", "--prt", NO_COLOR="1"))
    assert not colours.search(run_on_terminal("blade_llm", "serve", "-h", NO_COLOR="1"))


WRONG_NUMBERS = ["abc", "", "nan", "inf", "1e400", "0x10", "9" * 5000, "[]"]


@pytest.mark.parametrize("name", drawn_of(FLAGS, 12))
def test_row_63_numbers_out_of_range(name, capsys) -> None:
    """Bounds of flags, and a word that is no number."""
    check_refused(FLAGS[name], random.sample(WRONG_NUMBERS, 1), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_row_63_all_numbers_out_of_range(name, capsys) -> None:
    check_refused(FLAGS[name], WRONG_NUMBERS, capsys)


def check_refused(item, wrong: list[str], capsys) -> None:
    """These words, and numbers out of bounds."""
    for text in [*wrong, *([str(item.low - 1), str(item.high * 2 + 1)] if item.low is not None else [])]:
        code = cli.guarded(lambda text=text: cli.dispatch("blade_llm", ["serve", f"--{item.name}={text}"]), debug=False)
        error = capsys.readouterr().err
        assert code == 2, text
        assert error.count("\n") == 1, error
        assert f"--{item.name}" in error
        assert len(error) < 250
        assert "between" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], ["--prot", "--port"]),
        (["serve", "--max-model-lenn=5"], ["--max-model-lenn", "--max_model_len"]),
        (["serve", "--zzzzzz"], ["--zzzzzz", "--help"]),
        (["serve", "--device", "tpu"], ["--device", "auto, cpu, cuda", "tpu"]),
        (["serve", "--port"], ["--port", "needs a value", "65535"]),
        (["serve", "--port", "--host", "x"], ["--port", "needs a value"]),
        (["serve", "--disable_overlap=maybe"], ["--disable_overlap", "true or false", "maybe"]),
        (["serve", "model"], ["'model'", "--model"]),
        (["serve"], ["--model"]),
        (["serve", "--model", ""], ["--model"]),
        (["generate", "--top_k=many"], ["--top_k", "whole number", "many"]),
        (["generate", "--model", "x", "--top_p", "7"], ["--top_p", "at most 1", "7"]),
        (["generate", "--stop_token_ids", "1", "two"], ["--stop_token_ids", "two"]),
        (["check", "--only", "port", "shmm"], ["shmm", "check_shm"]),
        (["check", "--only", "model"], ["--model"]),
        (["check", "--only", "port", "--skip", "port"], ["--only", "--skip"]),
        (["serv"], ["'serv'", "serve"]),
        (["bench", "swep"], ["'swep'", "sweep"]),
        (["bench", "sweep"], ["--endpoint", "http://"]),
        (["bench", "sweep", "--endpoint", "http://h"], ["NAME=URL"]),
        (["bench", "sweep", "--endpoint", "a=ftp://h"], ["'ftp://h'", "http://"]),
        (["bench", "sweep", "--endpoint", "a=cmd:x"], ["{port}"]),
        (["bench", "sweep", "--endpoint", "a=http://h", "--qps", "2,x"], ["--qps", "'x'", "auto"]),
        (["bench", "sweep", "--endpoint", "a=http://h", "--qps", "auto", "2"], ["--qps", "auto 2"]),
        (["bench", "sweep", "--endpoint", "a=http://h", "--stop_when", "late"], ["--stop_when", "'late'"]),
        (["bench", "sweep", "--endpoint", "a=http://h", "--slo", "ttft=1"], ["--slo", "ttft_p99=500ms"]),
        (["bench", "sweep", "--endpoint", "a=http://h", "--find_capacity", "--arrival", "closed"], ["--arrival"]),
        (["bench", "run", "--endpoint", "a=http://h", "--qps", "1", "2"], ["one level", "sweep"]),
        (["bench", "compare", "--endpoint", "a=http://h"], ["two or more", "sweep"]),
        (["bench", "compare", "--endpoint", "a=http://h", "a=http://g"], ["two of the name 'a'"]),
        (["bench", "plot"], ["--results"]),
        (["--prt"], ["--prt"]),
    ],
)
def test_row_63_usage_errors(arguments: list[str], words: list[str], capsys) -> None:
    assert cli.guarded(lambda: cli.dispatch("blade_llm", arguments), debug=False) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert all(word in shown.err for word in words), shown.err


def test_row_63_a_usage_error_of_a_process() -> None:
    done = run_forked("blade_llm", "serve", "--prot", "1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--port" in done.stderr


def test_user_errors_keep_their_exit_code(capsys) -> None:
    def action() -> int:
        raise CheckpointError("model.safetensors: key\n 'x' is\x1b[31m missing")

    assert cli.guarded(action, debug=False) == 1
    assert capsys.readouterr().err == "error: model.safetensors: key 'x' is\ufffd[31m missing\n"


def test_bugs_are_one_line_unless_debugged(capsys) -> None:
    def action() -> int:
        raise ZeroDivisionError("by zero")

    assert cli.guarded(action, debug=False) == 1
    assert capsys.readouterr().err == "error: internal error: ZeroDivisionError: by zero; --debug shows where\n"
    assert cli.guarded(action, debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_debug_reaches_the_command() -> None:
    done = run("blade_llm", "serve", "--port", "x", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --port")


def test_interrupt_ends_with_130(capsys) -> None:
    def action() -> int:
        raise KeyboardInterrupt

    assert cli.guarded(action, debug=False) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_closed_pipe_is_no_traceback() -> None:
    line = shlex.join([*command("blade_llm"), "serve", "--help"])
    done = subprocess.run(f"{line} | true", shell=True, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stderr == ""


def test_ignored_interrupts_stay_ignored_while_modules_load() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli.leaving_at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupts_end_the_process_while_modules_load() -> None:
    before = signal.getsignal(signal.SIGINT)
    with cli.leaving_at_once():
        assert signal.getsignal(signal.SIGINT) not in (before, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is before
