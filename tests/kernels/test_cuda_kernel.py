"""Launches by the driver's functions and tensor maps: what the driver is given, and results on a GPU."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch
from bladellm_kernels import cuda_kernel as module
from bladellm_kernels.cuda_compiler import compile_cuda, find_compiler
from bladellm_kernels.cuda_kernel import (
    SIGNATURES,
    CudaKernel,
    DriverLibrary,
    KeptLaunches,
    LaunchAttribute,
    LaunchConfig,
)
from bladellm_kernels.tensor_map import TensorMap, tensor_map

CLUSTER_SUMS = """
// out[block] = in[block] + the numbers of the blocks of its cluster
extern "C" __global__ void cluster_sums(const int* in, int* out) {
    extern __shared__ int own[];
    own[0] = blockIdx.x;
    asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    int sum = 0;
    for (unsigned rank = 0; rank < CLUSTER; ++rank) {
        unsigned at = (unsigned)__cvta_generic_to_shared(own), there;
        int number;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
        asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(number) : "r"(there) : "memory");
        sum += number;
    }
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    asm volatile("griddepcontrol.wait;\\ngriddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x == 0) out[blockIdx.x] = in[blockIdx.x] + sum;
}
"""
COPY_TILE = """
struct alignas(64) TensorMap { char data[128]; };

// The box at (column, row), as it lies in shared memory.
extern "C" __global__ void copy_tile(
    const __grid_constant__ TensorMap map, unsigned long long* out, int column, int row) {
    extern __shared__ __align__(1024) unsigned long long box[];
    unsigned to = (unsigned)__cvta_generic_to_shared(box), barrier = to + BYTES;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(BYTES) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
    }
    __syncthreads();
    for (unsigned done = 0; !done;)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier) : "memory");
    for (unsigned at = threadIdx.x; at < BYTES / 8; at += blockDim.x) out[at] = box[at];
}
"""
ROWS = 24


class FakeDriver:
    """A libcuda whose functions are called through ctypes. launches: of each the bytes of its configuration, of its
    attributes, and the arguments; set: attributes of the function."""

    def __init__(self, parameters=(), status=0) -> None:
        self.parameters, self.status = parameters, status
        self.launches, self.set, self.maps = [], {}, []
        own = {"cuFuncGetParamInfo": self.info, "cuLaunchKernelEx": self.launch, "cuFuncSetAttribute": self.attribute}
        own |= {"cuTensorMapEncodeTiled": self.encode, "cuGetErrorName": self.error}
        for name, types in SIGNATURES.items():
            function = own.get(name, lambda *given: 0)
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(function))

    def info(self, function, place, offset, size):
        if place == len(self.parameters):
            return 1
        size[0] = self.parameters[place]
        return 0

    def attribute(self, function, attribute, value):
        self.set[attribute] = value
        return 0

    def error(self, status, name):
        name[0] = b"CUDA_ERROR_INVALID_CONTEXT"
        return 0

    def launch(self, config, function, arguments, extra):
        assert extra is None
        given = ctypes.string_at(config, 56)
        at, count = struct.unpack_from("QI", given, 40)
        addresses = (ctypes.c_void_p * len(self.parameters)).from_address(arguments)
        values = [ctypes.string_at(*each) for each in zip(addresses, self.parameters, strict=True)]
        self.launches.append((given, [ctypes.string_at(at + 72 * each, 72) for each in range(count)], values))
        return self.status

    def encode(self, made, *given):
        rank = given[1]
        arrays = zip(given[3:7], "QQII", (rank, rank - 1, rank, rank), strict=True)
        lists = [struct.unpack(f"{count}{kind}", ctypes.string_at(at, struct.calcsize(f"{count}{kind}")))
                 for at, kind, count in arrays]  # fmt: skip
        self.maps.append((made, given[:3], *lists, given[7:]))
        return self.status


@pytest.fixture(autouse=True)
def stream(request, monkeypatch):
    """The current stream of device 3, where there is no GPU."""
    current = SimpleNamespace(number=7)
    if not request.node.get_closest_marker("gpu"):
        streams = {3: current}
        name = "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch._C, name, lambda index: streams[index].number, raising=False)
    return current


def fake_kernel(parameters=(), status=0):
    driver = FakeDriver(parameters, status)
    return CudaKernel(b"\x7fELF", "one", torch.device("cuda", 3), DriverLibrary(driver)), driver


def test_structures_are_as_large_as_in_the_header():
    offsets = {name: getattr(LaunchConfig, name).offset for name, *_ in LaunchConfig._fields_}
    assert offsets == {"grid": 0, "block": 12, "shared": 24, "stream": 32, "attributes": 40, "attribute_count": 48}
    assert (ctypes.sizeof(LaunchConfig), ctypes.sizeof(LaunchAttribute), ctypes.sizeof(TensorMap)) == (56, 72, 128)
    assert LaunchAttribute.value.offset == 8


def test_the_driver_gets_the_launch(stream):
    kernel, driver = fake_kernel((128, 8, 4, 4, 8))
    box, tensor = TensorMap.from_buffer_copy(bytes(range(128))), torch.zeros(4)
    launch = kernel.prepare((8, 2, 3), 384, 200_000, 4, True, box, tensor, -5, 0.5, 2**63 + 1)
    launch.run()
    stream.number = 9
    launch.run()
    (first, attributes, values), (second, _, again) = driver.launches
    assert struct.unpack_from("7I4xQ8xI", first) == (8, 2, 3, 384, 1, 1, 200_000, 7, 2)
    assert struct.unpack_from("7I4xQ8xI", second) == (8, 2, 3, 384, 1, 1, 200_000, 9, 2)
    assert [struct.unpack_from("i4x3I", each) for each in attributes] == [(4, 4, 1, 1), (6, 1, 0, 0)]
    assert values[0] == bytes(range(128))
    assert struct.unpack("<QifQ", b"".join(values[1:])) == (tensor.data_ptr(), -5, 0.5, 2**63 + 1)
    assert again == values
    assert driver.set == {8: 200_000, 9: 100}, "shared memory, and as much of it as there is"
    kernel.prepare((16, 1, 1), 32, 0, 16, False, box, tensor, 0, 0, 0).run()
    assert driver.set == {8: 200_000, 9: 100, 14: 1}, "clusters of more than 8"
    kernel.prepare((3, 1, 1), 32, 0, 1, False, box, tensor, 0, 0, 0).run()
    assert driver.launches[-1][1] == []


def test_what_cannot_be_launched_is_refused():
    kernel, driver = fake_kernel((8, 4))
    for given, message in (
        (((6, 1, 1), 32, 0, 4, False, 0, 0), "whole clusters of 4"),
        (((1, 1, 1), 2048, 0, 1, False, 0, 0), "1024 threads"),
        (((32, 1, 1), 32, 0, 32, False, 0, 0), "16 blocks"),
        (((1, 1, 1), 32, 0, 1, False, 0), "takes 2 arguments, not 1"),
        (((1, 1, 1), 32, 0, 1, False, 0, 2**32), "4294967296 is no argument for a parameter of 4 bytes"),
        (((1, 1, 1), 32, 0, 1, False, TensorMap(), 0), "128 bytes is given for a parameter of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.prepare(*given)
    driver.status = 201
    with pytest.raises(RuntimeError, match="launch of one: CUDA_ERROR_INVALID_CONTEXT"):
        kernel.prepare((1, 1, 1), 32, 0, 1, False, 0, 0).run()


def test_no_more_launches_are_kept_than_told():
    kept = KeptLaunches(3)
    for number in (1, 2, 3, 2):
        kept[(number,)] = None
    assert list(kept) == [(1,), (2,), (3,)]
    kept[(4,)] = None
    assert list(kept) == [(4,)]


def test_the_driver_gets_the_tensor():
    driver = FakeDriver()
    made = tensor_map(4096, torch.bfloat16, (640, 300), (1280,), (64, 128), driver=DriverLibrary(driver))
    ((at, *given),) = driver.maps
    assert at == ctypes.addressof(made)
    assert at % 64 == 0
    assert given == [(9, 2, 4096), (640, 300), (1280,), (64, 128), (1, 1), (0, 3, 3, 0)]
    tensor_map(
        16, torch.float32, (8, 2, 3), (32, 64), (4, 1, 2), swizzle=0, promotion=128, driver=DriverLibrary(driver)
    )
    assert driver.maps[1][1:] == ((7, 3, 16), (8, 2, 3), (32, 64), (4, 1, 2), (1, 1, 1), (0, 0, 2, 0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pointer": 4104}, "address 0x1008"),
        ({"dtype": torch.float64}, "no type torch.float64"),
        ({"sizes": (640, 0)}, "sizes"),
        ({"strides_in_bytes": (1288,)}, "strides"),
        ({"strides_in_bytes": ()}, "2 sizes, 0 strides"),
        ({"box": (64, 257)}, "256 along"),
        ({"box": (32, 8)}, "rows of 64 bytes, not 128"),
        ({"swizzle": 0, "box": (4, 8)}, "rows of 8 bytes, not a multiple of 16"),
        ({"swizzle": 48}, "no swizzle 48, only 0, 32, 64, 128"),
    ],
)
def test_a_tensor_that_cannot_be_mapped_is_refused(changed, message):
    given = {"pointer": 4096, "dtype": torch.float16, "sizes": (640, 300), "strides_in_bytes": (1280,), "box": (64, 8)}
    with pytest.raises(ValueError, match=message):
        tensor_map(**given | changed, driver=DriverLibrary(FakeDriver()))


def test_without_a_driver_the_error_says_so(monkeypatch):
    monkeypatch.setattr(module.ctypes, "CDLL", lambda path: SimpleNamespace())
    module.driver_library.cache_clear()
    with pytest.raises(OSError, match="too old"):
        module.driver_library()


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The kernels of this file by their names."""
    try:
        find_compiler()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sums, tile = compile_cuda(CLUSTER_SUMS, {"CLUSTER": 4}), compile_cuda(COPY_TILE, {"BYTES": ROWS * 128})
    return {"cluster_sums": sums, "copy_tile": tile}


def test_the_kernels_compile(compiled):
    assert all(cubin.startswith(b"\x7fELF") for cubin in compiled.values())


@pytest.fixture
def load(compiled):
    return lambda name: CudaKernel(compiled[name], name, torch.cuda.current_device())


@pytest.mark.gpu(hopper=True)
def test_clusters_share_memory_on_a_gpu(load):
    """Plainly, early one after another, and so in a captured graph."""
    kernel, blocks = load("cluster_sums"), 4 * 37
    assert kernel.parameters == (8, 8)
    numbers = torch.arange(blocks, device="cuda", dtype=torch.int32)
    sums = numbers.view(-1, 4).sum(1, dtype=torch.int32).repeat_interleave(4)
    buffers = [torch.zeros_like(numbers) for _ in range(4)]
    kernel.prepare((blocks, 1, 1), 32, 16, 4, False, *buffers[:2]).run()
    assert torch.equal(buffers[1], sums)
    launches = [kernel.prepare((blocks, 1, 1), 32, 60_000, 4, True, buffers[i], buffers[i + 1]) for i in range(3)]

    def all_three() -> None:
        buffers[0].add_(1)
        for launch in launches:
            launch.run()

    all_three()
    assert torch.equal(buffers[3], 3 * sums + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_three()
    for replays in range(2, 5):
        graph.replay()
        assert torch.equal(buffers[3], 3 * sums + replays)


@pytest.mark.gpu(hopper=True)
def test_what_the_device_refuses_is_named_on_a_gpu(load):
    kernel, out = load("cluster_sums"), torch.zeros(64, device="cuda", dtype=torch.int32)
    with pytest.raises(RuntimeError, match="CUDA_ERROR"):
        kernel.prepare((4, 1, 1), 32, 1 << 20, 4, False, out, out)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_FOUND"):
        CudaKernel(compile_cuda(CLUSTER_SUMS, {"CLUSTER": 4}), "other", torch.cuda.current_device())
    out.add_(1)
    assert out.sum().item() == 64, "the context goes on"


@pytest.mark.gpu(hopper=True)
def test_a_tile_is_copied_by_its_map_on_a_gpu(load):
    kernel = load("copy_tile")
    matrix = torch.randn(50, 320, device="cuda").to(torch.bfloat16)[:, :256]
    mapped = tensor_map(matrix.data_ptr(), matrix.dtype, (256, 50), (640,), (64, ROWS))
    for column, row in ((0, 0), (128, 7), (192, 40)):
        out = torch.full((ROWS, 8, 8), torch.nan, device="cuda", dtype=torch.bfloat16)
        kernel.prepare((1, 1, 1), 64, ROWS * 128 + 8, 1, False, mapped, out, column, row).run()
        expected = torch.zeros(ROWS, 64, device="cuda", dtype=torch.bfloat16)
        inside = matrix[row : row + ROWS, column : column + 64]
        expected[: len(inside)] = inside
        rows = torch.arange(ROWS, device="cuda")[:, None]
        places = torch.arange(8, device="cuda")[None] ^ rows % 8
        assert torch.equal(out[rows, places].view(ROWS, 64), expected), "pieces of 16 bytes change places"
