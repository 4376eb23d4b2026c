"""The shape of the code: imports go one way, torch stays out of the front end, nothing unsafe, nothing too long."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from bladellm_tools import cli
from bladellm_tools.flags import normalise

ROOT = Path(__file__).parent.parent
PACKAGES = ("bladellm_runtime", "bladellm_tools", "kernels/bladellm_kernels")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

BASE = {"errors", "flags", "config", "request", "logs", "fields", "garbage"}
BELOW_ENGINE = {
    *BASE,
    "wire",
    "scheduler",
    "models",
    "layers",
    "kv",
    "quantization",
    "kernels",
    "distributed",
    "ranks",
    "lora",
}
MAY_IMPORT = {
    "kernels": set(),
    "errors": set(),
    "flags": {"errors"},
    "config": {"errors", "flags"},
    "request": {"errors"},
    "logs": set(),
    "garbage": set(),
    "fields": {"errors"},
    "wire": BASE,
    "text": {*BASE, "wire"},
    "guided": {*BASE, "text"},
    "kv": {*BASE, "kernels"},
    "quantization": BASE,
    "distributed": {*BASE, "quantization", "kernels"},
    "layers": {*BASE, "kv", "quantization", "kernels", "distributed"},
    "models": {*BASE, "layers", "kv", "quantization", "kernels", "distributed"},
    "lora": {*BASE, "models"},
    "scheduler": {*BASE, "wire", "kv"},
    "ranks": {*BASE, "wire", "scheduler", "kv"},
    "engine": {*BELOW_ENGINE, "guided"},
    "llm": {*BELOW_ENGINE, "engine", "text", "guided"},
    "server": {*BASE, "__init__", "wire", "engine", "text", "models", "guided", "lora"},
    "__init__": {"llm", *BASE},
    "tools": {*BELOW_ENGINE, "__init__", "llm", "server", "engine", "text", "guided"},
}
"""What each room may import besides itself."""
TORCH_FREE = ("scheduler", "wire", "ranks", "server", "text", "guided", "request", "flags", "config", "errors")
UNSAFE_MODULES = {"pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


@dataclass
class Contents:
    """What the rules look at in a file; its syntax tree, many times as large, is not kept."""

    docstring: str | None
    imports: list[tuple[int, str]] = field(default_factory=list)
    """(line, module) of every import, those inside functions too."""
    calls: list[tuple[int, str, list[str | None]]] = field(default_factory=list)
    """(line, dotted name, keywords that are not a plain False)."""
    functions: list[tuple[str, int]] = field(default_factory=list)
    """(name, lines)."""


@cache
def parsed(path: Path) -> Contents:
    tree = ast.parse(path.read_text())
    found = Contents(ast.get_docstring(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found.imports += [(node.lineno, alias.name) for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the direction"
                found.imports.append((node.lineno, node.module or ""))
            case ast.Call():
                found.calls.append((node.lineno, dotted(node.func), [each.arg for each in node.keywords if on(each)]))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.functions.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
    return found


def dotted(node: ast.expr) -> str:
    """`a.b.c`; of what is called otherwise, its last names behind a dot."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def on(keyword: ast.keyword) -> bool:
    return not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)


def room_of(module: str) -> str | None:
    """The room a dotted module name lies in; None for other people's modules."""
    parts = module.split(".")
    if parts[0] == "bladellm_runtime":
        return parts[1] if len(parts) > 1 else "__init__"
    return {"bladellm_tools": "tools", "bladellm_kernels": "kernels"}.get(parts[0])


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT / "kernels" if "kernels" in path.relative_to(ROOT).parts[:1] else ROOT)
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    for path in sources(package):
        own = room_of(module_name(path))
        assert own in MAY_IMPORT, f"{own} is a new room: say in MAY_IMPORT what it may import"
        for line, module in parsed(path).imports:
            room = room_of(module)
            assert room in (None, own) or room in MAY_IMPORT[own], f"{path}:{line}: {own} must not import {room}"


def files_of(room: str) -> list[Path]:
    folder = ROOT / "bladellm_runtime" / room
    return sources(f"bladellm_runtime/{room}") if folder.is_dir() else [folder.with_suffix(".py")]


def test_the_front_end_and_the_scheduler_import_no_torch() -> None:
    """Imported one after another: none brings it in."""
    rooms = {room: files_of(room) for room in TORCH_FREE}
    assert all(rooms.values())
    code = ["import importlib, sys"]
    for room, paths in rooms.items():
        code += [f"importlib.import_module({module_name(path)!r})" for path in paths]
        code += [f"print({room!r}, [name for name in ('torch', 'triton') if name in sys.modules])"]
    line = [sys.executable, "-c", "\n".join(code)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{room} []" for room in rooms]
    for path in [path for paths in rooms.values() for path in paths]:
        assert all(module.split(".")[0] not in ("torch", "triton") for _, module in parsed(path).imports), path


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_unsafe(package: str) -> None:
    """No pickle in any dress, no evaluated text, no remote code, no shell."""
    for path in sources(package):
        for line, module in parsed(path).imports:
            assert module.split(".")[0] not in UNSAFE_MODULES, f"{path}:{line}"
        for line, name, keywords in parsed(path).calls:
            assert name not in UNSAFE_CALLS, f"{path}:{line}"
            assert not {"trust_remote_code", "shell", "allow_pickle"} & set(keywords), f"{path}:{line}"


@pytest.mark.parametrize("folder", [*PACKAGES, "recipes", "kernels/benchmarks"])
def test_files_and_functions_are_short(folder: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in sources(folder)}
    assert lines
    assert [path for path, count in lines.items() if count > MAX_FILE_LINES] == []
    for path in lines:
        for name, length in parsed(path).functions:
            assert length <= MAX_FUNCTION_LINES, f"{path}: {name} has {length} lines"


def test_every_package_folder_says_what_it_is_for() -> None:
    for path in sources(*PACKAGES):
        assert parsed(path).docstring, f"{path} has no docstring"


def blocks(document: str) -> list[str]:
    """The command lines of a document's code blocks, continued lines joined, comments and prompts off."""
    text = (ROOT / document).read_text()
    code = "\n".join(re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.S)).replace("\\\n", " ")
    lines = [line.split(" #")[0].strip().removeprefix("$ ") for line in code.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_commands_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in blocks(document):
        words = line.split()
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words[0] in ("blade_llm", "blade_llm_bench"):
            words = ["blade_llm", "bench", *words[1:]] if words[0] == "blade_llm_bench" else words
            length = 2 if words[1] in cli.GROUPS else 1
            name = " ".join(words[1 : 1 + length])
            assert name in cli.COMMANDS, line
            check_flags(name, words[1 + length :])
        elif words[0].startswith("blade_llm_"):
            name = {"blade_llm_server": "serve"}.get(words[0], words[0].removeprefix("blade_llm_"))
            check_flags(name, words[1:])
        elif words[0] == "python" and words[1].endswith(".py"):
            flags = [word for word in shlex.split(line) if word.startswith("--")]
            source = (ROOT / words[1]).read_text() + (ROOT / "recipes/benchmarks/step_timing.py").read_text()
            assert [flag for flag in flags if f'"{flag}"' not in source] == [], line


def check_flags(command: str, arguments: list[str]) -> None:
    """Raises where a documented flag does not exist."""
    plain = [argument for argument in arguments if argument not in ("&", "|")]
    normalise(plain, cli.COMMANDS[command].flags)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/models/demo/README.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.S)
    named = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|toml|yaml|txt))`", text)
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    folder = (ROOT / document).parent
    for name in [*named, *links]:
        if "/" in name and name.split("/")[0] not in {path.name for path in ROOT.iterdir()} | {".."}:
            continue  # a path inside a model folder, a URL path, a hub id
        assert (ROOT / name).exists() or (folder / name).exists(), f"{document} names {name}"


def test_links_between_documents_lead_somewhere() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = [ROOT / name for name in listed.split()]
    for document in found or [ROOT / name for name in DOCUMENTS]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            name, _, anchor = target.partition("#")
            path = document.parent / name if name else document
            assert "://" in target or path.exists(), f"{document} links to {target}"
            assert not anchor or anchor in anchors(path), f"{document} links to {target}"


def anchors(document: Path) -> set[str]:
    """The headings of a document as a link spells them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


def test_flags_in_prose_exist() -> None:
    known = {
        spelling for command in cli.COMMANDS.values() for item in command.flags for spelling in (item.name, *item.names)
    }
    scripts = "".join(path.read_text() for folder in ("recipes", "kernels") for path in (ROOT / folder).rglob("*.py"))
    for document in DOCUMENTS:
        for flag in re.findall(r"`--([\w-]+)", (ROOT / document).read_text()):
            assert flag in known or f'"--{flag}"' in scripts or flag == "help", f"{document} names --{flag}"


def test_the_readme_has_a_row_for_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"`blade_llm {name}" in text for name in cli.commands_of(None))


def test_the_request_fields_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    listed = re.findall(r"`(\w+)`", text.split("Request fields:")[1].split("Other fields")[0])
    server = "".join(path.read_text() for path in sources("bladellm_runtime/server"))
    assert len(listed) > 20
    assert [name for name in listed if f'"{name}"' not in server] == []


def test_make_runs_scripts_that_exist() -> None:
    scripts = re.findall(r"\$\(RUN\) ([\w/]+\.py)", (ROOT / "Makefile").read_text())
    assert scripts
    assert all((ROOT / script).exists() for script in scripts)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    commands = [line for line in script.splitlines() if line.startswith("make ")]
    assert commands == ["make lint", "make test"]
    assert "make test" in blocks("README.md")


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=!~; \[]", requirement)[0] for requirement in wanted}
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    folded = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    assert folded <= set(pinned)
    assert not [version for version in pinned.values() if "+" in version], "local versions exist on no index"
