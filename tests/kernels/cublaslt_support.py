"""A libcublasLt in Python: algorithms are numbers in their first word, and products are torch's on the CPU."""

import ctypes
from dataclasses import dataclass, field

import torch
from bladellm_kernels.cublaslt_library import Algorithm, CublasLtError
from bladellm_kernels.linear_schedules import CublasLtSchedule

VERSION = 130002


def algorithm(number: int) -> Algorithm:
    found = Algorithm()
    found.data[0] = number
    return found


def schedule_of(number: int, **fields) -> CublasLtSchedule:
    return CublasLtSchedule(algorithm(number).text, **({"version": VERSION} | fields))


def matrices(rows: int, outputs: int, inputs: int, dtype, device="cpu"):
    """x and weight, views of wider rows, NaN beside them; bias; residual."""
    x = torch.full((rows, inputs + 16), torch.nan, dtype=dtype, device=device)[:, :inputs]
    weight = torch.full((outputs, inputs + 32), torch.nan, dtype=dtype, device=device)[:, :inputs]
    x.copy_(torch.randn(rows, inputs))
    weight.copy_(torch.randn(outputs, inputs) * inputs**-0.5)
    return x, weight, torch.randn(outputs).to(device, dtype), torch.randn(rows, outputs).to(device, dtype)


@dataclass
class FakeLibrary:
    """statuses: that products by algorithms of these numbers return, 0 without one; wrong: numbers of those that read
    what their workspace held."""

    version: int = VERSION
    statuses: dict[int, int] = field(default_factory=dict)
    wrong: tuple[int, ...] = ()

    def check(self, name: str, status: int) -> None:
        if status:
            raise CublasLtError(f"{name}: {status}")


@dataclass
class FakeCublasLt:
    api: FakeLibrary
    workspace: torch.Tensor = field(default_factory=lambda: torch.zeros(64, dtype=torch.uint8))


class FakeProduct:
    """A `PreparedProduct`: runs the algorithms with these numbers, on matrices of any addresses that torch has."""

    def __init__(self, lt, product, numbers=(1, 2, 3)) -> None:
        self.lt, self.product, self.numbers, self.alignment = lt, product, numbers, 16
        self.launched: list[int] = []

    def candidates(self, requested=100, workspaces=()):
        return [algorithm(number) for number in self.numbers]

    def runs(self, found: Algorithm) -> bool:
        return found.data[0] in self.numbers

    def choose(self, found: Algorithm) -> None:
        self.number = found.data[0]

    def run(self, x, weight, bias, residual, out, stream) -> int:
        product, status = self.product, self.lt.api.statuses.get(self.number, 0)
        self.launched.append(self.number)
        if status == 0:
            y = self._at(x, product.rows, product.inputs, product.x).double()
            y = y @ self._at(weight, product.outputs, product.inputs, product.weight).double().t()
            y += self._at(bias, 1, product.outputs, product.outputs).double() if bias else 0
            y += self._at(residual, product.rows, product.outputs, product.residual).double() if residual else 0
            y += self.lt.workspace.view(torch.float32)[0].item() if self.number in self.lt.api.wrong else 0
            self._at(out, product.rows, product.outputs, product.out).copy_(y)
        return status

    def _at(self, address: int, rows: int, columns: int, stride: int) -> torch.Tensor:
        count = (rows - 1) * stride + columns
        memory = (ctypes.c_uint16 * count).from_address(address)
        return torch.frombuffer(memory, dtype=self.product.dtype).as_strided((rows, columns), (stride, 1))
