"""Kernels in CUDA C++ compiled at run time, by NVRTC: what Triton has no words for, like clusters that share memory.

Sources include nothing: there are no include paths. What was compiled is kept on disk, as Triton keeps its kernels.
"""

import ctypes
import hashlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import torch

FOLDER = Path("~/.cache/bladellm_open/cubins")
"""Where cubins are kept, unless TRITON_CACHE_DIR says where kernels are: then in its folder `cubins`."""

MAJOR_VERSIONS = ("13", "12")
"""Of NVRTC, after the one that torch is built for."""

OPTIONS = ("--std=c++17", "-default-device")
SHOWN_LINES = 3
"""Of the compiler's log in an error."""

MAX_COMPILERS = 8
"""Threads: NVRTC leaves Python's lock to others."""

DIGEST_BYTES = hashlib.sha256().digest_size

SIGNATURES: dict[str, tuple[type, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    # Program, source, its name, how many headers, their texts, their names.
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
}
"""Arguments of the functions in use; all of them return a status, 0 where it went well."""

listener: Callable[[str, bool, float], None] | None = None
"""Told of every cubin that a process makes or finds on the disk: its source's name, whether it was found, seconds."""


class CudaCompilerError(RuntimeError):
    """NVRTC did not compile a source."""


class _SymbolInfo(ctypes.Structure):
    """Dl_info of `dlfcn.h`: file, its address, symbol, its address."""

    _fields_ = (("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p))


class Compiler:
    """The functions of one libnvrtc. version: major and minor, (13, 0), and the library's bytes, of which releases that
    differ by less than these have different numbers."""

    def __init__(self, path: str) -> None:
        """Raises OSError or AttributeError where there is none at that path, or one without these functions."""
        self._functions = ctypes.CDLL(path)
        for name, arguments in SIGNATURES.items():
            function = getattr(self._functions, name)
            function.argtypes, function.restype = arguments, c_int
        self._functions.nvrtcGetErrorString.argtypes = (c_int,)
        self._functions.nvrtcGetErrorString.restype = c_char_p
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        file = _file_of(self._functions.nvrtcVersion)
        _load_builtins(file)
        self.version = major.value, minor.value, file.stat().st_size

    def compile(self, source: str, options: tuple[str, ...], name: str) -> bytes:
        """The cubin of a source. Raises CudaCompilerError with what is wrong with it first."""
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            given = (c_char_p * len(options))(*(option.encode() for option in options))
            status = self._functions.nvrtcCompileProgram(program, len(options), given)
            if status:
                log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                complaint = _complaint(log) or self._status(status)
                raise CudaCompilerError(complaint if complaint.startswith(name) else f"{name}: {complaint}")
            return self._read(program, "CUBIN")
        finally:
            self._functions.nvrtcDestroyProgram(byref(program))

    def _read(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"nvrtcGet{what}Size", program, byref(size))
        text = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw[: size.value]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._functions, name)(*arguments)
        if status:
            raise CudaCompilerError(f"{name}: {self._status(status)}")

    def _status(self, status: int) -> str:
        return str(self._functions.nvrtcGetErrorString(status).decode())


def compile_cuda(
    source: str, defines: Mapping[str, int | str], architecture: str = "sm_90a", name: str = "kernels.cu"
) -> bytes:
    """The cubin of a source in C++17 that includes nothing; functions without a keyword are the device's.

    defines: values of macros; architecture: a real one, `sm_…`; name: of the source, for errors. Kernels are
    `extern "C"`, so that they have the names that the source gives them. Raises CudaCompilerError with the first lines
    of the compiler's errors, ValueError for another architecture, OSError where there is no NVRTC.
    """
    if not architecture.startswith("sm_"):
        raise ValueError(f"architecture {architecture}: cubins are for a real one, sm_…")
    compiler = find_compiler()
    macros = (f"-D{macro}={value}" for macro, value in sorted(defines.items()))
    options = (f"--gpu-architecture={architecture}", *OPTIONS, *macros)
    key = hashlib.sha256(repr((source, options, name, compiler.version)).encode()).hexdigest()
    path = cubin_folder() / f"{key}.cubin"
    started = time.perf_counter()
    cubin = _read_cubin(path)
    found = cubin is not None
    if cubin is None:
        cubin = compiler.compile(source, options, name)
        _write_cubin(path, cubin)
    if listener is not None:
        listener(name, found, time.perf_counter() - started)
    return cubin


def compile_side_by_side(sources: Iterable[tuple[str, Mapping[str, int | str]]], name: str) -> None:
    """Have the cubins of some sources on disk, where `compile_cuda` finds them by the same name. What is wrong with one
    it says there."""
    with ThreadPoolExecutor(MAX_COMPILERS) as pool, suppress(OSError, RuntimeError):
        list(pool.map(lambda source: compile_cuda(source[0], source[1], name=name), sources))


@cache
def find_compiler() -> Compiler:
    """The NVRTC of torch's CUDA version, else one that is installed. Raises OSError where there is none."""
    for path in _paths():
        try:
            return Compiler(path)
        except (OSError, AttributeError):
            continue
    raise OSError("there is no NVRTC: it comes with PyTorch for CUDA, or with nvidia-cuda-nvrtc")


def cubin_folder() -> Path:
    """Where cubins are kept, whether it exists or not."""
    kernels = os.environ.get("TRITON_CACHE_DIR")
    return Path(kernels) / "cubins" if kernels else Path(os.path.expanduser(FOLDER))


def _paths() -> Iterator[str]:
    """Of each version what is loaded or where the system's loader looks, then NVIDIA's packages."""
    own = torch.version.cuda.split(".")[:1] if torch.version.cuda else []
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for version in dict.fromkeys([*own, *MAJOR_VERSIONS]):
        name = f"libnvrtc.so.{version}"
        yield name
        for folder in folders:
            yield from sorted(str(path) for path in Path(folder).glob(f"*/lib/{name}"))


def _file_of(function: object) -> Path:
    """The file of the library that a function of ctypes is in. Raises OSError where the loader does not say."""
    info, find = _SymbolInfo(), ctypes.CDLL(None).dladdr
    find.argtypes, find.restype = (c_void_p, POINTER(_SymbolInfo)), c_int
    if not find(ctypes.cast(function, c_void_p), byref(info)) or not info.file:  # type: ignore[arg-type]
        raise OSError("the loader does not say where NVRTC is")
    return Path(os.fsdecode(info.file))


def _load_builtins(library: Path) -> None:
    """Load what NVRTC loads by name when it compiles: the loader does not look beside NVRTC by itself."""
    for path in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(path))


def _complaint(log: str) -> str:
    """The first lines of a log from its first error on, in one, without those that point at the line above."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip(" ^~")]
    first = next((place for place, line in enumerate(lines) if "error" in line), 0)
    return "; ".join(lines[first : first + SHOWN_LINES])


def _read_cubin(path: Path) -> bytes | None:
    """None where there is none, or a damaged one: a digest follows each, which tools that read cubins skip."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    cubin, digest = kept[:-DIGEST_BYTES], kept[-DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write_cubin(path: Path, cubin: bytes) -> None:
    """Replace the file at once; a folder that cannot be written to is nothing that a start may fail for."""
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(cubin + hashlib.sha256(cubin).digest())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
