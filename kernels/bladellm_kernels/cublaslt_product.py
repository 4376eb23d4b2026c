"""Products of 16-bit matrices as cuBLASLt describes them, the algorithms that compute one, and its launch."""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass

import torch

from bladellm_kernels.cublaslt_library import (
    COMPUTE_32F,
    CONFIG_TYPES,
    EPILOGUE_BIAS,
    LAYOUT_ORDER,
    ORDER_ROW,
    TRANSPOSED,
    Algorithm,
    CapAttribute,
    ConfigAttribute,
    DataType,
    DescAttribute,
    HeuristicResult,
    Library,
    Owned,
    PreferenceAttribute,
    Reduction,
)

WORKSPACE_BYTES = 32 << 20
"""Of a device, what torch gives cuBLAS on a Hopper too."""

ALIGNMENT = 16
"""Bytes that addresses and rows must be multiples of at least."""

MIN_ALIGNMENTS = [attribute for attribute in CapAttribute if "ALIGNMENT" in attribute.name]

TYPES = {torch.bfloat16: DataType.R_16BF, torch.float16: DataType.R_16F}

_ONE, _ZERO = c_float(1.0), c_float(0.0)
_ALPHA, _NO_BETA = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


@dataclass(frozen=True, slots=True)
class Product:
    """out [rows, outputs] = x [rows, inputs] · weight [outputs, inputs]ᵀ + bias + residual.

    x, weight, residual, out: numbers from row to row; residual: None where there is none. in_place: out is residual.
    by_rows: the matrices are described as they lie; else as their transposes, whose columns lie one after another.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    x: int
    weight: int
    out: int
    residual: int | None = None
    in_place: bool = True
    bias: bool = False
    by_rows: bool = False


class CublasLt:
    """The library on one device, with the memory that products take there. One product runs at a time."""

    def __init__(self, library: Library, device: torch.device) -> None:
        """Raises CublasLtError, or RuntimeError while a graph is captured: call it once before."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cuBLASLt takes memory at its first call: call it before capturing a graph")
        self.api = library
        handle = c_void_p()
        with torch.cuda.device(device):
            library.call("cublasLtCreate", byref(handle))
        self.handle = handle.value
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class PreparedProduct:
    """A product as the library describes it, and an algorithm for it once `choose` was given one.

    alignment: bytes that the algorithm wants addresses and rows to be multiples of.
    """

    def __init__(self, lt: CublasLt, product: Product) -> None:
        """Raises CublasLtError where the library has no such matrices."""
        self.lt, self.product = lt, product
        library, kind = lt.api, TYPES[product.dtype]
        self._operation = Owned(library, "MatmulDesc", COMPUTE_32F, DataType.R_32F)
        turned = DescAttribute.TRANSB if product.by_rows else DescAttribute.TRANSA
        self._operation.set(turned, c_int32(TRANSPOSED))
        if product.bias:
            self._operation.set(DescAttribute.EPILOGUE, c_uint32(EPILOGUE_BIAS))
            self._operation.set(DescAttribute.BIAS_DATA_TYPE, c_int32(kind))
        residual = product.out if product.residual is None else product.residual
        self._weight = self._layout(product.outputs, product.inputs, product.weight)
        self._x = self._layout(product.rows, product.inputs, product.x)
        self._residual = self._layout(product.rows, product.outputs, residual)
        self._out = self._layout(product.rows, product.outputs, product.out)
        pair = (self._x, self._weight) if product.by_rows else (self._weight, self._x)
        self._layouts = tuple(each.handle for each in (*pair, self._residual, self._out))
        beta = _NO_BETA if product.residual is None else _ALPHA
        self._fixed = (lt.handle, self._operation.handle, _ALPHA, *self._layouts[:2], beta, *self._layouts[2:])
        self._by_rows, self._bias = product.by_rows, 0
        self._matmul = library.functions.cublasLtMatmul
        self._memory = lt.workspace.data_ptr()
        self.alignment = ALIGNMENT
        self._algorithm: Algorithm | None = None
        self._chosen: int | None = None

    def candidates(self, requested: int = 100, workspaces: Sequence[int] = (WORKSPACE_BYTES,)) -> list[Algorithm]:
        """What the library's heuristic proposes for so many bytes of workspace, the best first, each once."""
        found: dict[str, Algorithm] = {}
        for workspace in workspaces:
            preference = _preference(self.lt.api, workspace)
            results, count = (HeuristicResult * requested)(), c_int()
            status = self.lt.api.functions.cublasLtMatmulAlgoGetHeuristic(
                *(self.lt.handle, self._operation.handle, *self._layouts),
                *(preference.handle, requested, results, byref(count)),
            )
            for result in results[: count.value] if status == 0 else []:
                algorithm = Algorithm.from_buffer_copy(result.algorithm)
                if result.state == 0 and self.runs(algorithm):
                    found.setdefault(algorithm.text, algorithm)
        return list(found.values())

    def runs(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm computes this product, sums in float32, within the workspace."""
        result = HeuristicResult()
        status = self.lt.api.functions.cublasLtMatmulAlgoCheck(
            self.lt.handle, self._operation.handle, *self._layouts, byref(algorithm), byref(result)
        )
        if status != 0 or result.workspace > WORKSPACE_BYTES:
            return False
        scheme = config(self.lt.api, algorithm)[ConfigAttribute.REDUCTION_SCHEME]
        if scheme not in (Reduction.NONE, Reduction.COMPUTE_TYPE):
            return False
        apart = capability(self.lt.api, algorithm, CapAttribute.OUT_OF_PLACE_RESULT_SUPPORT)
        return self.product.in_place or bool(apart)

    def choose(self, algorithm: Algorithm) -> None:
        """Compute by this algorithm from now on, one that `runs`."""
        self._algorithm, self._chosen = algorithm, ctypes.addressof(algorithm)
        wanted = (capability(self.lt.api, algorithm, attribute) for attribute in MIN_ALIGNMENTS)
        self.alignment = max(ALIGNMENT, *wanted)

    def run(self, x: int, weight: int, bias: int, residual: int, out: int, stream: int) -> int:
        """Launch the product on matrices at these addresses, 0 where there is none. Returns the library's status."""
        if bias != self._bias:
            self._operation.set(DescAttribute.BIAS_POINTER, c_uint64(bias))
            self._bias = bias
        handle, operation, alpha, a_layout, b_layout, beta, c_layout, d_layout = self._fixed
        a, b = (x, weight) if self._by_rows else (weight, x)
        status: int = self._matmul(
            *(handle, operation, alpha, a, a_layout, b, b_layout, beta, residual or out, c_layout, out, d_layout),
            *(self._chosen, self._memory, WORKSPACE_BYTES, stream),
        )
        return status

    def _layout(self, rows: int, columns: int, stride: int) -> Owned:
        kind = TYPES[self.product.dtype]
        if not self.product.by_rows:
            return Owned(self.lt.api, "MatrixLayout", kind, columns, rows, stride)
        layout = Owned(self.lt.api, "MatrixLayout", kind, rows, columns, stride)
        layout.set(LAYOUT_ORDER, c_int32(ORDER_ROW))
        return layout


def product_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    by_rows: bool = False,
) -> Product:
    """The product of these matrices, whose last strides are 1."""
    rows, inputs = x.shape
    beside = None if residual is None else _row_stride(residual)
    in_place = residual is None or residual.data_ptr() == out.data_ptr()
    strides = _row_stride(x), _row_stride(weight), _row_stride(out)
    return Product(rows, len(weight), inputs, x.dtype, *strides, beside, in_place, bias is not None, by_rows)


def _row_stride(matrix: torch.Tensor) -> int:
    """Of a single row no less than its length, as the library wants it."""
    return matrix.stride(0) if len(matrix) > 1 else max(matrix.stride(0), matrix.shape[1])


def config(library: Library, algorithm: Algorithm) -> dict[ConfigAttribute, int]:
    """How an algorithm is set up, by the numbers of `cublasLt.h`; only what it has."""
    found = {}
    for attribute, kind in CONFIG_TYPES.items():
        value, written = kind(), c_size_t()
        status = library.functions.cublasLtMatmulAlgoConfigGetAttribute(
            byref(algorithm), attribute, byref(value), sizeof(value), byref(written)
        )
        if status == 0:
            found[attribute] = int(value.value)
    return {ConfigAttribute.REDUCTION_SCHEME: 0} | found


def capability(library: Library, algorithm: Algorithm, attribute: CapAttribute) -> int:
    """What an algorithm can, 0 where it does not say; not of lists."""
    value, written = c_int32(), c_size_t()
    status = library.functions.cublasLtMatmulAlgoCapGetAttribute(
        byref(algorithm), attribute, byref(value), sizeof(value), byref(written)
    )
    return int(value.value) if status == 0 else 0


def capabilities(library: Library, algorithm: Algorithm, attribute: CapAttribute) -> list[int]:
    """The numbers of a list of what an algorithm can, empty where it does not say."""
    read, written = library.functions.cublasLtMatmulAlgoCapGetAttribute, c_size_t()
    if read(byref(algorithm), attribute, None, 0, byref(written)) != 0 or written.value == 0:
        return []
    values = (c_uint32 * (written.value // sizeof(c_uint32)))()
    status = read(byref(algorithm), attribute, byref(values), sizeof(values), byref(written))
    return [int(value) for value in values] if status == 0 else []


def changed(library: Library, algorithm: Algorithm, values: dict[ConfigAttribute, int]) -> Algorithm | None:
    """The algorithm set up otherwise, None where it cannot be. What it then `runs` is not said."""
    other = Algorithm.from_buffer_copy(algorithm)
    for attribute, number in values.items():
        value = CONFIG_TYPES[attribute](number)
        status = library.functions.cublasLtMatmulAlgoConfigSetAttribute(
            byref(other), attribute, byref(value), sizeof(value)
        )
        if status != 0:
            return None
    return other


def _preference(library: Library, workspace: int) -> Owned:
    """For at most so many bytes of workspace, sums in float32, and matrices from 16-byte addresses."""
    preference = Owned(library, "MatmulPreference")
    preference.set(PreferenceAttribute.MAX_WORKSPACE_BYTES, c_uint64(workspace))
    preference.set(PreferenceAttribute.REDUCTION_SCHEME_MASK, c_uint32(Reduction.COMPUTE_TYPE))
    for attribute in PreferenceAttribute:
        if "ALIGNMENT" in attribute.name:
            preference.set(attribute, c_uint32(ALIGNMENT))
    return preference
