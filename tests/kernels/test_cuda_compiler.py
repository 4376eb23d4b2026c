"""CUDA C++ compiled by NVRTC: cubins, the folder that keeps them, errors."""

import pytest
from bladellm_kernels import cuda_compiler as module
from bladellm_kernels.cuda_compiler import CudaCompilerError, compile_cuda

SOURCE = """\
extern "C" __global__ void fill(int* out) {
    out[threadIdx.x] = VALUE;
}
"""


@pytest.fixture
def cubins(tmp_path, monkeypatch):
    """An empty folder that keeps cubins."""
    try:
        module.find_compiler()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path / "cubins"


def counts_of(*given) -> tuple[bytes, int, int]:
    """The cubin, and of how many compiled and found ones the listener was told."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "listener", lambda name, found, seconds: told.append(found))
        cubin = compile_cuda(*given)
    return cubin, told.count(False), told.count(True)


def test_a_source_is_compiled_once(cubins):
    cubin, *counts = counts_of(SOURCE, {"VALUE": 3})
    assert cubin[:4] == b"\x7fELF"
    assert b"fill" in cubin
    assert counts == [1, 0]
    assert counts_of(SOURCE, {"VALUE": 3}) == (cubin, 0, 1)
    assert [path.suffix for path in cubins.iterdir()] == [".cubin"]


def test_another_source_macro_or_architecture_is_another_cubin(cubins):
    given = [(SOURCE, {"VALUE": 3}), (SOURCE, {"VALUE": "(1 + 3)"}), (SOURCE, {"VALUE": 3}, "sm_80")]
    given.append((SOURCE.replace("VALUE", "VALUE + 1"), {"VALUE": 4}))
    assert len({compile_cuda(*each) for each in given}) == len(given)
    assert len(list(cubins.iterdir())) == len(given)


def test_errors_say_where_they_are(cubins):
    with pytest.raises(
        CudaCompilerError, match=r'^fill\.cu\(2\): error: identifier "VALUE" is undefined; out\['
    ) as error:
        compile_cuda(SOURCE, {}, name="fill.cu")
    assert "\n" not in str(error.value)
    with pytest.raises(CudaCompilerError, match=r"^kernels\.cu: nvrtc: error: invalid value for --gpu-architecture"):
        compile_cuda(SOURCE, {"VALUE": 3}, "sm_1")
    with pytest.raises(ValueError, match="compute_90"):
        compile_cuda(SOURCE, {"VALUE": 3}, "compute_90")
    assert not cubins.exists()


@pytest.mark.parametrize(
    "damage", [lambda kept: kept[:-9], lambda kept: b"", lambda kept: kept[:99] + b"?" + kept[100:]]
)
def test_a_damaged_cubin_is_compiled_anew(cubins, damage):
    cubin = compile_cuda(SOURCE, {"VALUE": 3})
    (path,) = cubins.iterdir()
    kept = path.read_bytes()
    path.write_bytes(damage(kept))
    assert counts_of(SOURCE, {"VALUE": 3}) == (cubin, 1, 0)
    assert path.read_bytes() == kept


def test_a_folder_that_cannot_be_written_to_is_no_error(cubins):
    cubins.write_text("a file")
    assert [counts_of(SOURCE, {"VALUE": 3})[1:] for _ in range(2)] == [(1, 0)] * 2


def test_without_the_library_the_error_says_so(monkeypatch):
    monkeypatch.setattr(module, "_paths", lambda: iter(["libnone.so.13"]))
    module.find_compiler.cache_clear()
    with pytest.raises(OSError, match="NVRTC"):
        compile_cuda(SOURCE, {"VALUE": 3})
