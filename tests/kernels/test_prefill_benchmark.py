"""The benchmark of prefill attention, on a tiny case."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "kernels" / "benchmarks" / "prefill_attention.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prefill_attention_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec.loader.exec_module(module)
    return module


def test_it_lists_every_format_beside_the_library(script, capsys):
    formats = ["no_quant", "int8", "int4_affine", "fp8_e5m2"]
    tiny = ["--device", "cpu", "--dtype", "float32", "--heads", "4x2x16", "--repeats", "1", "--json"]
    script.main([*tiny, "--cases", "33", "5+70,20", "--formats", *formats])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["case"], line["name"]) for line in lines] == [
        (case, name)
        for case in ("33", "5+70,20")
        for name in ("torch math", *(f"{each} operator{out}" for each in formats for out in ("", ", out=")))
    ]
    assert all(line["microseconds"] > 0 and line["tflops"] > 0 for line in lines)


def test_a_wrong_result_is_not_timed(script, monkeypatch):
    monkeypatch.setattr(script, "ragged_prefill_attention", lambda q, *_, **options: q.clone())
    with pytest.raises(AssertionError):
        script.main(["--device", "cpu", "--dtype", "float32", "--heads", "4x2x16", "--cases", "5+70"])


def test_operations_are_those_of_visible_scores(script):
    spans = script.parse_case("3+5,2")
    assert [(span.query_len, span.start, span.slot) for span in spans] == [(3, 5, 0), (2, 0, 1)]
    assert script.operations(spans, (4, 2, 16)) == 4 * 4 * 16 * (6 + 7 + 8 + 1 + 2)
