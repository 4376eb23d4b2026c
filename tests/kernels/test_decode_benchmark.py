"""The benchmark of decode attention runs, and counts what it says it counts."""

import json

import pytest

from tests.support.warm import ROOT, run_code

FEW_CALLS = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import decode_problem
decode_problem.MOST_CALLS = 9
runpy.run_path(sys.argv.pop(1) + "/decode_attention.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("format_name", "token_bytes"),
    [pytest.param("no_quant", 2 * 2 * 16 * 2, marks=pytest.mark.slow), ("int4_affine", 2 * 2 * (8 + 4))],
)
def test_it_runs_on_a_cpu(format_name, token_bytes, tmp_path):
    flags = f"--device cpu --heads 4/2/16 --sizes 3x20 mix9 --formats {format_name} --layers 1 3 --paged --compare"
    scripts = ROOT / "kernels" / "benchmarks"
    done = run_code(FEW_CALLS, scripts, *flags.split(), "--repeats", "2", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(each["size"], each["layers"], each["paged"]) for each in results] == [
        (size, layers, paged) for size in ("3x20", "mix9") for layers in (1, 3) for paged in (False, True)
    ]
    assert len(done.stdout.splitlines()) == 1 + len(results)
    for each in results[:4]:
        assert each["tb_s"] * 1e12 * each["us"] * 1e-6 == pytest.approx(60 * token_bytes)
        assert each["share"] == pytest.approx(each["tb_s"] / each["ceiling_tb_s"])
        assert (each["torch_us"] is None) == (format_name != "no_quant")
