"""libcublasLt as ctypes calls it: where it lies, its structures, and the values of `cublasLt.h` (CUDA 13) in use."""

import ctypes
import ctypes.util
import importlib.util
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from enum import IntEnum, IntFlag
from functools import cache
from pathlib import Path

import torch


class DataType(IntEnum):
    """cudaDataType."""

    R_32F = 0
    R_16F = 2
    R_16BF = 14


COMPUTE_32F = 68
"""cublasComputeType_t: products and sums in float32."""

TRANSPOSED = 1
"""cublasOperation_t, CUBLAS_OP_T; without it 0."""


class DescAttribute(IntEnum):
    """cublasLtMatmulDescAttributes_t."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    BIAS_DATA_TYPE = 26


EPILOGUE_BIAS = 4
"""cublasLtEpilogue_t: a vector as long as D has rows is added to its columns."""

LAYOUT_ORDER = 1
"""cublasLtMatrixLayoutAttribute_t."""

ORDER_ROW = 1
"""cublasLtOrder_t: rows lie one after another; columns do without it."""


class PreferenceAttribute(IntEnum):
    """cublasLtMatmulPreferenceAttributes_t."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class Reduction(IntFlag):
    """cublasLtReductionScheme_t, of sums that are divided along K: in the output, in float32, in the output's type."""

    NONE = 0
    INPLACE = 1
    COMPUTE_TYPE = 2
    OUTPUT_TYPE = 4


class ConfigAttribute(IntEnum):
    """cublasLtMatmulAlgoConfigAttributes_t."""

    ID = 0
    TILE_ID = 1
    SPLITK_NUM = 2
    REDUCTION_SCHEME = 3
    CTA_SWIZZLING = 4
    CUSTOM_OPTION = 5
    STAGES_ID = 6
    INNER_SHAPE_ID = 7
    CLUSTER_SHAPE_ID = 8


CONFIG_TYPES: dict[ConfigAttribute, type[c_int32] | type[c_uint32] | type[c_uint16]] = {
    ConfigAttribute.ID: c_int32,
    ConfigAttribute.TILE_ID: c_uint32,
    ConfigAttribute.SPLITK_NUM: c_int32,
    ConfigAttribute.REDUCTION_SCHEME: c_uint32,
    ConfigAttribute.CTA_SWIZZLING: c_uint32,
    ConfigAttribute.CUSTOM_OPTION: c_uint32,
    ConfigAttribute.STAGES_ID: c_uint32,
    ConfigAttribute.INNER_SHAPE_ID: c_uint16,
    ConfigAttribute.CLUSTER_SHAPE_ID: c_uint16,
}
CLUSTER_SHAPES = range(2, 52)
"""cublasLtClusterShape_t but for 0, which leaves it to the library."""


class CapAttribute(IntEnum):
    """cublasLtMatmulAlgoCapAttributes_t; each a 32-bit number, or where its name ends in IDS many."""

    SPLITK_SUPPORT = 0
    REDUCTION_SCHEME_MASK = 1
    CTA_SWIZZLING_SUPPORT = 2
    OUT_OF_PLACE_RESULT_SUPPORT = 4
    TILE_IDS = 6
    CUSTOM_OPTION_MAX = 7
    STAGES_IDS = 13
    MIN_ALIGNMENT_A_BYTES = 16
    MIN_ALIGNMENT_B_BYTES = 17
    MIN_ALIGNMENT_C_BYTES = 18
    MIN_ALIGNMENT_D_BYTES = 19


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque, and the same in every process with the same version of the library."""

    _fields_ = (("data", c_uint64 * 8),)

    @classmethod
    def of(cls, text: str) -> "Algorithm":
        """From hexadecimal digits."""
        return cls.from_buffer_copy(bytes.fromhex(text))

    @property
    def text(self) -> str:
        return bytes(self).hex()


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; workspace in bytes, state a status."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_LAYOUTS = (c_void_p,) * 4
SIGNATURES: dict[str, tuple[type, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    # Handle, operation, layouts of A, B, C and D, preference, how many, results, how many were found.
    "cublasLtMatmulAlgoGetHeuristic": (
        *(c_void_p, c_void_p, *_LAYOUTS, c_void_p, c_int),
        *(POINTER(HeuristicResult), POINTER(c_int)),
    ),
    "cublasLtMatmulAlgoCheck": (c_void_p, c_void_p, *_LAYOUTS, POINTER(Algorithm), POINTER(HeuristicResult)),
    "cublasLtMatmulAlgoCapGetAttribute": (POINTER(Algorithm), c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    "cublasLtMatmulAlgoConfigGetAttribute": (POINTER(Algorithm), c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    "cublasLtMatmulAlgoConfigSetAttribute": (POINTER(Algorithm), c_int, c_void_p, c_size_t),
    # Handle, operation, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm, workspace,
    # its bytes, stream; addresses all of them.
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}
"""Arguments of the functions in use; all of them return a status, 0 where it went well."""


class CublasLtError(RuntimeError):
    """A function returned another status than 0."""


class Library:
    """The functions of one libcublasLt. version: as cublasLtGetVersion says, 130002 for 13.0.2."""

    def __init__(self, path: str) -> None:
        """Raises OSError or AttributeError where there is none at that path, or one without these functions."""
        self.functions = ctypes.CDLL(path)
        for name, arguments in SIGNATURES.items():
            function = getattr(self.functions, name)
            function.argtypes, function.restype = arguments, c_int
        self.functions.cublasLtGetVersion.argtypes, self.functions.cublasLtGetVersion.restype = (), c_size_t
        self.functions.cublasLtGetStatusName.argtypes, self.functions.cublasLtGetStatusName.restype = (c_int,), c_char_p
        self.version = int(self.functions.cublasLtGetVersion())

    def call(self, name: str, *arguments: object) -> None:
        """Call a function by its name. Raises CublasLtError with the name of its status."""
        self.check(name, getattr(self.functions, name)(*arguments))

    def check(self, name: str, status: int) -> None:
        """Raises CublasLtError unless the status is 0."""
        if status:
            raise CublasLtError(f"{name}: {self.functions.cublasLtGetStatusName(status).decode()}")


class Owned:
    """A descriptor, layout or preference of the library, destroyed with this object. handle: its address."""

    def __init__(self, library: Library, kind: str, *arguments: object) -> None:
        """kind: `MatmulDesc`, `MatrixLayout` or `MatmulPreference`; arguments: of its Create function."""
        self._library, self._kind = library, kind
        self.handle: int | None = None
        created = c_void_p()
        library.call(f"cublasLt{kind}Create", ctypes.byref(created), *arguments)
        self.handle = created.value

    def set(self, attribute: int, value: "ctypes._SimpleCData[int]") -> None:
        """value: of the type that the attribute has, whose size the library checks."""
        call = f"cublasLt{self._kind}SetAttribute"
        self._library.call(call, self.handle, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def __del__(self) -> None:
        if self.handle is not None:
            getattr(self._library.functions, f"cublasLt{self._kind}Destroy")(self.handle)


@cache
def find_library() -> Library | None:
    """The library that torch computes with, else one that is installed; None without CUDA or without one."""
    if torch.version.cuda is None:
        return None
    for path in _paths():
        try:
            return Library(path)
        except (OSError, AttributeError):
            continue
    return None


def _paths() -> list[str]:
    """Where it may lie: mapped into this process, in NVIDIA's packages, where the system's loader looks."""
    maps = Path("/proc/self/maps")
    paths = mapped_libraries(maps.read_text()) if maps.exists() else []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        paths += sorted(str(path) for path in Path(folder).glob("*/lib/libcublasLt.so.*"))
    named = ctypes.util.find_library("cublasLt")
    return list(dict.fromkeys([*paths, *([named] if named else [])]))


def mapped_libraries(maps: str) -> list[str]:
    """Paths of libcublasLt in the text of /proc/self/maps, each once."""
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = [found[5] for found in fields if len(found) == 6]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith("libcublasLt.so")))
