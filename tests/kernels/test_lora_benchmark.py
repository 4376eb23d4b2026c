"""The benchmark of LoRA has the layers of the model that it says, and adapters of their size."""

import importlib.util
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"


def test_a_rank_16_adapter_of_the_8b_shape(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.util.spec_from_file_location("lora_benchmark", SCRIPTS / "lora.py")
    script = importlib.util.module_from_spec(module)
    module.loader.exec_module(script)
    layers = script.shapes(4096, 14336, 32, 8, 128)
    assert [name for name, _, _ in layers] == ["qkv", "output", "gate_up", "down"]
    # Of Llama-3.1-8B with all seven projections: 41,943,040 numbers at rank 16.
    numbers = sum(16 * (len(rows) * inputs + sum(rows)) for _, inputs, rows in layers)
    assert 32 * numbers == 41_943_040
    # And its linear layers but the head: 6,979,321,856 weights.
    assert 32 * sum(inputs * sum(rows) for _, inputs, rows in layers) == 6_979_321_856
