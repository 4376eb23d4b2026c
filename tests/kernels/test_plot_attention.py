"""The picture of attention over context: its lines are the results, as milliseconds a token."""

import importlib
import json
import random
import subprocess
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

from tests.support.cases import drawn_of

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
PEER = [{"name": "other, whole step", "context": 8192, "milliseconds": 9.5}]


@pytest.fixture
def plot(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("plot_attention")


def results(formats=("int4", "no_quant", "fp8_e4m3"), contexts=(1024, 8192, 71680)):
    made = [
        {"format": name, "context": context, "microseconds_per_layer": random.uniform(1, 900), "layers": 40}
        for name in formats
        for context in contexts
    ]
    random.shuffle(made)
    return made


def test_lines_are_milliseconds_a_token_by_context(plot):
    given = results()
    lines = {line.label: line.points for line in plot.attention_lines(given)}
    assert list(lines) == ["unquantized", "int4", "fp8_e4m3"]
    for result in given:
        label = {"no_quant": "unquantized"}.get(result["format"], result["format"])
        contexts, times = zip(*lines[label], strict=True)
        assert list(contexts) == [1024, 8192, 71680]
        assert times[contexts.index(result["context"])] == pytest.approx(result["microseconds_per_layer"] * 0.04)


def test_a_format_looks_the_same_in_every_picture(plot):
    every = {line.label: (line.colour, line.marker) for line in plot.attention_lines(results(plot.FORMATS))}
    assert len(set(every.values())) == len({colour for colour, _ in every.values()}) == len(plot.FORMATS)
    [alone] = plot.attention_lines(results(["int4"]))
    assert (alone.colour, alone.marker) == every["int4"]


def test_peers_are_told_apart_from_formats(plot):
    [line] = plot.peer_lines(
        [{"name": "x", "context": 9, "milliseconds": 2}, {"name": "x", "context": 3, "milliseconds": 1}]
    )
    assert (line.label, line.points, line.peer) == ("x", [(3, 1.0), (9, 2.0)], True)
    assert line.colour not in {line.colour for line in plot.attention_lines(results(plot.FORMATS))}


@pytest.mark.parametrize(
    "change", [{"format": "int3"}, {"context": 0}, {"microseconds_per_layer": float("nan")}, {"layers": 0}, None]
)
def test_odd_results_are_refused(plot, change):
    given = results()
    given.append({**given[0], "context": 5, **change} if change else given[0])
    with pytest.raises(ValueError, match=r"int3|context"):
        plot.attention_lines(given)


@pytest.mark.parametrize("ending", drawn_of(["png", "svg"], 1))
def test_the_script_draws(tmp_path, ending):
    (tmp_path / "r.json").write_text(json.dumps(results()))
    (tmp_path / "p.json").write_text(json.dumps(PEER))
    picture = tmp_path / f"picture.{ending}"
    line = [sys.executable, str(SCRIPTS / "plot_attention.py"), str(tmp_path / "r.json"), str(picture)]
    done = subprocess.run([*line, "--peer", str(tmp_path / "p.json")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if ending == "png":
        assert picture.read_bytes()[:4] == b"\x89PNG"
        assert int.from_bytes(picture.read_bytes()[16:20], "big") == 1400
        return
    texts = {element.text for element in Xml.parse(picture).iter() if element.tag.endswith("}text")}
    assert {"unquantized", "int4", "fp8_e4m3", "other, whole step", "ms a token", "context (tokens)"} <= texts
