"""What the elementwise benchmark times gives the results of its references, and a wrong result is found."""

from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"


def test_every_operator_gives_its_reference(monkeypatch, device):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from elementwise import check
    from elementwise_cases import OPERATORS, Sizes

    for rows in (1, 5):
        sizes = Sizes(rows, 64, 96, 50, torch.device(device))
        for operator in OPERATORS.values():
            inputs = operator.inputs(sizes)
            check(operator, [each.clone() for each in inputs])
            eager = operator.eager(*inputs)
            assert [each.shape for each in eager] == [each.shape for each in operator.reference(*inputs)]
            assert operator.moved(sizes) > 0
            spoilt = replace(operator, ours=lambda *given, ours=operator.ours: [x.float() * nan for x in ours(*given)])
            with pytest.raises(AssertionError, match="off by"):
                check(spoilt, [each.clone() for each in inputs])
