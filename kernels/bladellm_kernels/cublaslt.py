"""Linear layers of 16-bit weights by cuBLASLt with an algorithm of our choice, which torch leaves to a heuristic.

cuBLAS has tens of algorithms for a product (tiles, clusters, splits along K), and the one that its heuristic puts first
can take a quarter longer than the best. `kernels/benchmarks/cublaslt.py` measures them, schedule tables name them, and
`multiply` runs them. Sums are float32, those that are divided along K too; no atomics, so that results do not vary.
"""

import warnings
from functools import cache

import torch

from bladellm_kernels.cublaslt_library import Algorithm, CublasLtError, Library, find_library
from bladellm_kernels.cublaslt_product import TYPES, CublasLt, PreparedProduct, product_of
from bladellm_kernels.linear_schedules import CublasLtSchedule

MAX_PRODUCTS = 4096
"""Descriptions kept; with more of them all are made anew. A prefill may have any number of rows."""

_products: dict[tuple[object, ...], PreparedProduct | None] = {}


def multiply(
    schedule: CublasLtSchedule,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> bool:
    """Write `x · weightᵀ + bias + residual` to out by the schedule's algorithm, on the current stream; all on CUDA.

    Products of a device share memory: they must not run beside each other on several streams. Returns False, with
    nothing written, where the algorithm is not for this library, these types, or matrices that lie like that. Raises
    RuntimeError where the library would have to be set up while a graph is captured.
    """
    device = x.get_device()
    if torch._C._cuda_getDevice() != device:
        return False
    x_at, weight_at, out_at = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    bias_at = 0 if bias is None else bias.data_ptr()
    residual_at, residual_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    key = (
        *(schedule.algorithm, schedule.version, schedule.by_rows, device, x.dtype, x.shape, weight.shape),
        *(x.stride(0), weight.stride(0), out.stride(0), residual_stride, residual_at in (0, out_at), bias_at == 0),
    )
    try:
        prepared = _products[key]
    except KeyError:
        prepared = _prepare(schedule, x, weight, bias, residual, out)
        if len(_products) >= MAX_PRODUCTS:
            _products.clear()
        _products[key] = prepared
    if prepared is None or (x_at | weight_at | out_at | residual_at | bias_at) % prepared.alignment:
        return False
    stream = torch._C._cuda_getCurrentRawStream(device)
    status = prepared.run(x_at, weight_at, bias_at, residual_at, out_at, stream)
    if status == 0:
        return True
    # Not once more: what cuBLAS chooses by itself takes over.
    _products[key] = None
    warnings.warn(f"cuBLASLt refused {prepared.product}, status {status}; cuBLAS computes it", stacklevel=2)
    return False


@cache
def cublaslt(index: int, library: Library) -> CublasLt:
    """The library on a CUDA device. Raises CublasLtError, or RuntimeError while a graph is captured."""
    return CublasLt(library, torch.device("cuda", index))


def _prepare(
    schedule: CublasLtSchedule,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> PreparedProduct | None:
    """None where the schedule's algorithm does not compute this product."""
    if str(x.dtype).removeprefix("torch.") != schedule.dtype or x.dtype not in TYPES or len(x) == 0:
        return None
    library = find_library()
    if library is None or library.version != schedule.version or (schedule.by_rows and bias is not None):
        return None
    product = product_of(x, weight, bias, residual, out, schedule.by_rows)
    try:
        prepared = PreparedProduct(cublaslt(x.get_device(), library), product)
    except CublasLtError:
        return None
    algorithm = Algorithm.of(schedule.algorithm)
    if not prepared.runs(algorithm):
        return None
    prepared.choose(algorithm)
    strides = product.x | product.weight | product.out | (product.residual or 0)
    return None if (strides * x.element_size()) % prepared.alignment else prepared
