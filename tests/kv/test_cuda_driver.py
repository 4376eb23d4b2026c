"""The wrapper of the driver's calls: arguments, errors by name, and nothing half done."""

import threading

import pytest
import torch

from bladellm_runtime.kv.cuda_driver import CudaDriver, probe
from bladellm_runtime.kv.dlpack import bytes_at
from tests.kv.arena_cases import CPU
from tests.kv.fake_cuda import PAGE, CUresult, FakeCuda


@pytest.fixture
def cuda():
    fake = FakeCuda()
    yield fake
    fake.dispose()


@pytest.fixture
def driver(cuda):
    return CudaDriver(0, cuda)


def test_memory_is_mapped_read_and_given_back(driver):
    start = driver.reserve(4 * PAGE)
    handles = driver.create(PAGE), driver.create(2 * PAGE)
    driver.map(start + PAGE, PAGE, handles[0])
    driver.map(start + 2 * PAGE, 2 * PAGE, handles[1])
    rows = bytes_at(start + PAGE, 3 * PAGE, CPU)
    assert (rows == 255).all()
    driver.zero([(start + PAGE, PAGE), (start + 3 * PAGE, PAGE)])
    assert [int(part.sum()) for part in rows.split(PAGE)] == [0, 255 * PAGE, 0]
    driver.unmap(start + 2 * PAGE, 2 * PAGE)
    driver.unmap(start + PAGE, PAGE)
    for handle in handles:
        driver.release(handle)
    driver.free(start, 4 * PAGE)


@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("cuMemAddressReserve", lambda driver, start, handle: driver.reserve(PAGE)),
        ("cuMemCreate", lambda driver, start, handle: driver.create(PAGE)),
        ("cuMemMap", lambda driver, start, handle: driver.map(start, PAGE, handle)),
        ("cuMemSetAccess", lambda driver, start, handle: driver.map(start, PAGE, handle)),
        ("cuCtxSynchronize", lambda driver, start, handle: driver.synchronize()),
    ],
)
@pytest.mark.parametrize("error", [CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_UNKNOWN])
def test_errors_have_the_drivers_name_and_leave_nothing(cuda, driver, call, use, error):
    start, handle = driver.reserve(PAGE), driver.create(PAGE)
    cuda.fail[call] = (0, error)
    kind = MemoryError if error == CUresult.CUDA_ERROR_OUT_OF_MEMORY else OSError
    with pytest.raises(kind, match=f"^{call}: {error.name}$"):
        use(driver, start, handle)
    driver.release(handle)
    driver.free(start, PAGE)


def test_other_threads_need_the_context(driver):
    errors = []

    def work(attach):
        try:
            if attach:
                driver.attach()
            driver.free(driver.reserve(PAGE), PAGE)
        except AssertionError as error:
            errors.append(str(error))

    for attach in (True, False):
        thread = threading.Thread(target=work, args=(attach,))
        thread.start()
        thread.join()
    assert errors == ["cuMemAddressReserve in a thread without a context"]


def test_the_probe_accepts_memory_that_can_be_aliased(cuda, driver):
    probe(driver, CPU)
    assert not cuda.mappings


def test_the_probe_refuses_memory_that_is_not_the_same_twice(cuda, driver):
    cuda.aliases = False
    with pytest.raises(OSError, match="not the same at both"):
        probe(driver, CPU)


@pytest.mark.gpu
def test_the_probe_accepts_this_device(request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("needs --device cuda")
    from bladellm_runtime.kv.cuda_driver import cuda_driver

    driver = cuda_driver(torch.cuda.current_device())
    probe(driver, torch.device("cuda", torch.cuda.current_device()))
    assert driver.granularity % (1 << 16) == 0
