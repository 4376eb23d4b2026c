"""The instructions that a compiled kernel issues in its inner loop."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

LABEL = re.compile(r"^\.(L_x_\d+):")
BRANCH = re.compile(r"\bBRA(?:\.\w+)* .*`\(\.(L_x_\d+)\)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)")


def inner_loop(compiled: Any, folder: Path, product: str) -> list[str]:
    """Names of the instructions in a block of the smallest loop with `product`, but for those that a branch forward can
    skip: what is done seldom."""
    lines = disassembled(compiled, folder)
    labels = {found[1]: place for place, line in enumerate(lines) if (found := LABEL.match(line))}
    branches = [(place, labels[found[1]]) for place, line in enumerate(lines) if (found := BRANCH.search(line))]
    loops = [(start, place) for place, start in branches if start < place]
    holding = [loop for loop in loops if any(product in line for line in lines[slice(*loop)])]
    first, last = min(holding, key=lambda loop: loop[1] - loop[0])
    seldom = {skipped for place, end in branches if place < end <= last for skipped in range(place + 1, end)}
    found = [INSTRUCTION.search(lines[place]) for place in range(first, last + 1) if place not in seldom]
    return [each[1] for each in found if each]


def disassembled(compiled: Any, folder: Path) -> list[str]:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [str(tool), "-c", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def spills_in_the_loop(compiled: Any, folder: Path, product: str = "GMMA") -> list[str]:
    """Instructions of the loop with `product` that keep registers in memory; what its end spills costs little."""
    return [name for name in inner_loop(compiled, folder, product) if name.startswith(("LDL", "STL"))]
