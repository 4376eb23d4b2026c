"""cuBLASLt by measured algorithms: the binding against `cublasLt.h`, when one is taken, and results on a GPU."""

import ctypes
import warnings

import pytest
import torch
from bladellm_kernels import cublaslt as module
from bladellm_kernels import cublaslt_library as library_module
from bladellm_kernels import linear as linear_module
from bladellm_kernels.cublaslt import multiply
from bladellm_kernels.cublaslt_library import (
    CONFIG_TYPES,
    SIGNATURES,
    Algorithm,
    CapAttribute,
    ConfigAttribute,
    DescAttribute,
    HeuristicResult,
    PreferenceAttribute,
    Reduction,
    find_library,
    mapped_libraries,
)
from bladellm_kernels.cublaslt_product import product_of
from bladellm_kernels.linear import linear, linear_reference, linear_silu_mul, linear_silu_mul_reference
from bladellm_kernels.linear_schedules import (
    CublasLtSchedule,
    DotSchedule,
    Entry,
    ScheduleTable,
    load_table,
    save_table,
)

from tests.kernels.conditions import assert_close
from tests.kernels.cublaslt_support import (
    VERSION,
    FakeCublasLt,
    FakeLibrary,
    FakeProduct,
    algorithm,
    matrices,
    schedule_of,
)
from tests.kernels.test_many_rows_linear import OnHopper

HALVES = (torch.float16, torch.bfloat16)


def test_structures_are_as_large_as_in_the_header():
    assert ctypes.sizeof(Algorithm) == 8 * 8
    assert ctypes.sizeof(HeuristicResult) == 64 + 8 + 4 + 4 + 4 * 4
    offsets = {name: getattr(HeuristicResult, name).offset for name, *_ in HeuristicResult._fields_}
    assert offsets == {"algorithm": 0, "workspace": 64, "state": 72, "waves": 76, "reserved": 80}


def test_values_are_those_of_the_header():
    """As listed in cublasLt.h and cublas_api.h of cuBLAS 13.0; counted from 0 where nothing is left out."""
    assert [each.value for each in ConfigAttribute] == list(range(9))
    assert {name.name: ctypes.sizeof(kind) for name, kind in CONFIG_TYPES.items()} == {
        **dict.fromkeys(("ID", "TILE_ID", "SPLITK_NUM", "REDUCTION_SCHEME", "CTA_SWIZZLING", "CUSTOM_OPTION"), 4),
        "STAGES_ID": 4,
        "INNER_SHAPE_ID": 2,
        "CLUSTER_SHAPE_ID": 2,
    }
    assert (DescAttribute.TRANSA, DescAttribute.TRANSB, DescAttribute.EPILOGUE) == (3, 4, 7)
    assert (DescAttribute.BIAS_POINTER, DescAttribute.BIAS_DATA_TYPE) == (8, 26)
    assert [each.value for each in PreferenceAttribute] == [1, 3, 5, 6, 7, 8]
    assert [each.value for each in Reduction] == [1, 2, 4]
    assert (CapAttribute.OUT_OF_PLACE_RESULT_SUPPORT, CapAttribute.TILE_IDS, CapAttribute.STAGES_IDS) == (4, 6, 13)
    assert [each.value for each in CapAttribute if "ALIGNMENT" in each.name] == [16, 17, 18, 19]
    assert library_module.COMPUTE_32F == 68
    assert [len(SIGNATURES[f"cublasLtMatmul{name}"]) for name in ("", "AlgoGetHeuristic", "AlgoCheck")] == [16, 10, 8]


def test_an_algorithm_survives_its_text():
    found = algorithm(2**63 + 5)
    assert Algorithm.of(found.text).text == found.text
    assert len(found.text) == 128


def test_the_mapped_library_is_found_whatever_its_path():
    maps = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /opt/a b/nvidia/cu13/lib/libcublasLt.so.13
7f0000001000-7f0000002000 r--p 00001000 08:01 42 /opt/a b/nvidia/cu13/lib/libcublasLt.so.13
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000003000-7f0000004000 r-xp 00000000 08:01 43 /opt/lib/libcublas.so.13
"""
    assert mapped_libraries(maps) == ["/opt/a b/nvidia/cu13/lib/libcublasLt.so.13"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is one for CUDA")
def test_without_cuda_there_is_no_library():
    assert find_library() is None


def test_a_table_keeps_algorithms(tmp_path):
    path = tmp_path / "table.json"
    entries = [Entry(16, DotSchedule(16, 64, 64)), Entry(64, None), Entry(300, schedule_of(7, by_rows=True))]
    save_table(ScheduleTable({(96, 32, False): entries}), path)
    loaded = load_table(path)
    assert loaded.entries[96, 32, False] == tuple(entries)
    assert [loaded.choose(rows, 96, 32) for rows in (17, 65, 300, 301)] == [None, *[entries[2].schedule] * 2, None]
    path.write_text(path.read_text().replace(algorithm(7).text, "00ff"))
    with pytest.raises(ValueError, match=r"\(96, 32, False\).*64 bytes"):
        load_table(path)


def test_a_table_has_no_algorithm_for_a_gate(tmp_path):
    save_table(ScheduleTable({(96, 32, True): [Entry(300, schedule_of(7))]}), tmp_path / "table.json")
    with pytest.raises(ValueError, match="gate"):
        load_table(tmp_path / "table.json")


@pytest.fixture
def fake(monkeypatch):
    """The library in Python, for CPU tensors that say they are on a GPU. Returns it and the products prepared."""
    lt, made = FakeCublasLt(FakeLibrary()), []

    def prepare(lt, product):
        made.append(FakeProduct(lt, product))
        return made[-1]

    monkeypatch.setattr(module, "_products", {})
    monkeypatch.setattr(module, "find_library", lambda: lt.api)
    monkeypatch.setattr(module, "cublaslt", lambda index, library: lt)
    monkeypatch.setattr(module, "PreparedProduct", prepare)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *given: -1, raising=False)
    return lt.api, made


def use(monkeypatch, schedule, outputs: int, inputs: int) -> None:
    table = ScheduleTable({(outputs, inputs, False): [Entry(400, schedule)]})
    monkeypatch.setattr(linear_module, "_given_table", table)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_linear_takes_the_algorithm_of_the_table(fake, monkeypatch, rows):
    use(monkeypatch, schedule_of(2), 48, 64)
    x, weight, bias, residual = matrices(rows, 48, 64, torch.bfloat16)
    on_gpu = [each.as_subclass(OnHopper) for each in (x, weight)]
    for _ in range(2):
        assert_close(linear(*on_gpu), linear_reference(x, weight).float(), torch.bfloat16)
        assert_close(linear(*on_gpu, bias), linear_reference(x, weight, bias).float(), torch.bfloat16)
        expected = linear_reference(x, weight, bias, residual).float()
        assert_close(linear(*on_gpu, bias, residual=residual), expected, torch.bfloat16)
        stream = residual.clone()
        assert linear(*on_gpu, out=stream, residual=stream) is stream
        assert_close(stream, linear_reference(x, weight, residual=residual).float(), torch.bfloat16)
    assert [product.launched for product in fake[1]] == [[2, 2]] * 4, "a product is described once"


def test_a_weight_that_nobody_measured_takes_the_schedule_of_another_one(fake, monkeypatch):
    use(monkeypatch, schedule_of(2), 48, 64)
    x, weight, _, _ = matrices(7, 64, 64, torch.bfloat16)
    on_gpu = [each.as_subclass(OnHopper) for each in (x, weight)]
    assert_close(linear(*on_gpu, measured=48), linear_reference(x, weight).float(), torch.bfloat16)
    assert [product.launched for product in fake[1]] == [[2]]
    use(monkeypatch, schedule_of(1), 64, 64)
    linear(*on_gpu, measured=48)
    assert [product.launched for product in fake[1]] == [[2], [1]], "its own, where there is one"


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        ("another version", schedule_of(2, version=VERSION + 100)),
        ("another type", schedule_of(2, dtype="float16")),
        ("an algorithm that does not run", schedule_of(9)),
        ("no library", schedule_of(2)),
    ],
)
def test_where_the_algorithm_does_not_fit_it_is_plain_cublas(fake, monkeypatch, case, schedule):
    use(monkeypatch, schedule, 48, 64)
    if case == "no library":
        monkeypatch.setattr(module, "find_library", lambda: None)
    x, weight, bias, residual = matrices(5, 48, 64, torch.bfloat16)
    out = torch.full_like(residual, torch.nan)
    assert not multiply(schedule, x, weight, bias, residual, out)
    assert out.isnan().all()
    found = linear(x.as_subclass(OnHopper), weight.as_subclass(OnHopper), bias, residual=residual)
    assert_close(found.as_subclass(torch.Tensor), linear_reference(x, weight, bias, residual).float(), torch.bfloat16)
    assert not any(product.launched for product in fake[1])


def test_odd_addresses_and_rows_are_plain_cublas(fake):
    x, weight, bias, residual = matrices(5, 48, 64, torch.bfloat16)
    wide = torch.zeros(5, 64, dtype=torch.bfloat16)
    assert multiply(schedule_of(2), x, weight, None, None, wide[:, :48])
    assert not multiply(schedule_of(2), x, weight, None, None, wide[:, 1:49])
    assert not multiply(schedule_of(2), x, weight, None, None, torch.zeros(5, 49, dtype=torch.bfloat16)[:, :48])
    assert not multiply(schedule_of(2), x, weight, torch.zeros(49, dtype=torch.bfloat16)[1:], None, wide[:, :48])
    assert not multiply(schedule_of(2, by_rows=True), x, weight, bias, residual, wide[:, :48])


def test_an_algorithm_that_is_refused_is_not_tried_again(fake):
    fake[0].statuses[2] = 15
    x, weight, _, out = matrices(5, 48, 64, torch.bfloat16)
    with pytest.warns(UserWarning, match="status 15"):
        assert not multiply(schedule_of(2), x, weight, None, None, out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not multiply(schedule_of(2), x, weight, None, None, out)
    assert fake[1][0].launched == [2]


def test_descriptions_do_not_pile_up(fake, monkeypatch):
    monkeypatch.setattr(module, "MAX_PRODUCTS", 3)
    for rows in range(1, 9):
        x, weight, _, out = matrices(rows, 48, 64, torch.bfloat16)
        assert multiply(schedule_of(2), x, weight, None, None, out)
        assert_close(out, linear_reference(x, weight).float(), torch.bfloat16)
        assert len(module._products) <= 3


def test_a_single_row_has_a_stride_that_the_library_takes():
    x, weight = torch.zeros(64).as_strided((1, 64), (1, 1)), torch.zeros(48, 80)[:, :64]
    product = product_of(x, weight, None, None, torch.zeros(1, 48))
    assert (product.x, product.weight, product.out) == (64, 80, 48)


@pytest.fixture
def lt():
    library = find_library()
    if library is None:
        pytest.skip("torch has no cuBLASLt")
    return module.cublaslt(torch.cuda.current_device(), library)


def proposed(lt, x, weight, place=0) -> CublasLtSchedule:
    """An algorithm that the heuristic proposes for these matrices, the best at place 0."""
    out = torch.empty(len(x), len(weight), device="cuda", dtype=x.dtype)
    prepared = module.PreparedProduct(lt, product_of(x, weight, None, None, out))
    found = prepared.candidates()
    assert found
    chosen = found[min(place, len(found) - 1)].text
    return CublasLtSchedule(chosen, lt.api.version, str(x.dtype).removeprefix("torch."))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_proposed_algorithms_give_the_product_on_a_gpu(dtype, lt, monkeypatch):
    for rows, outputs, inputs in [(1, 64, 128), (33, 1032, 520), (300, 4096, 1024), (529, 264, 4096)]:
        x, weight, bias, residual = matrices(rows, outputs, inputs, dtype, "cuda")
        for place in (0, 1, 5):
            schedule = proposed(lt, x, weight, place=place)
            for with_bias, adds in ((None, None), (bias, None), (None, residual), (bias, residual)):
                out = torch.full((rows + 1, outputs + 8), torch.nan, device="cuda", dtype=dtype)
                expected = linear_reference(x, weight, with_bias, adds).float()
                if multiply(schedule, x, weight, with_bias, adds, out[:rows, :outputs]):
                    assert_close(out[:rows, :outputs], expected, dtype)
                    assert out[rows:].isnan().all()
                    assert out[:, outputs:].isnan().all()
                else:
                    assert with_bias is not None or adds is not None, "what is proposed runs"
            stream = residual.clone()
            if multiply(schedule, x, weight, None, stream, stream):
                assert_close(stream, linear_reference(x, weight, residual=residual).float(), dtype)


@pytest.mark.gpu
def test_an_algorithm_holds_for_fewer_rows(lt):
    """As tables use it: measured with 528 rows, for as many and fewer."""
    for outputs, inputs in ((4096, 4096), (6144, 1024)):
        x, weight, _, residual = matrices(528, outputs, inputs, torch.bfloat16, "cuda")
        schedule = proposed(lt, x, weight)
        taken = 0
        for rows in (1, 17, 397, 511, 528):
            out = residual[:rows].clone()
            if multiply(schedule, x[:rows], weight, None, out, out):
                taken += 1
                expected = linear_reference(x[:rows], weight, residual=residual[:rows]).float()
                assert_close(out, expected, torch.bfloat16)
        assert taken >= 4, "few algorithms are for one number of rows alone"


@pytest.mark.gpu
def test_captured_products_of_two_shapes_give_the_same_bits(lt, monkeypatch):
    """One after the other, in one graph, both with workspace of their own to write to."""
    x, first, *_ = matrices(40, 8192, 1024, torch.bfloat16, "cuda")
    second = matrices(1, 512, 8192, torch.bfloat16, "cuda")[1]
    middle = torch.empty(40, 8192, device="cuda", dtype=torch.bfloat16)
    last = torch.empty(40, 512, device="cuda", dtype=torch.bfloat16)
    schedules = proposed(lt, x, first, place=1), proposed(lt, middle, second, place=1)

    def both() -> None:
        assert multiply(schedules[0], x, first, None, None, middle)
        assert multiply(schedules[1], middle, second, None, None, last)

    both()
    expected, graph = last.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for _ in range(3):
        last.fill_(torch.nan)
        lt.workspace.fill_(255)
        graph.replay()
        assert torch.equal(last, expected)
    x.copy_(torch.randn(40, 1024))
    graph.replay()
    wide = linear_reference(x, first)
    assert_close(last, linear_reference(wide, second.double()).float(), torch.bfloat16)


@pytest.mark.gpu
def test_layers_take_the_table_on_a_gpu(lt, monkeypatch):
    x, weight, bias, residual = matrices(300, 768, 512, torch.bfloat16, "cuda")
    schedule = proposed(lt, x, weight)
    calls = []
    monkeypatch.setattr(linear_module, "multiply", lambda *given: calls.append(multiply(*given)) or calls[-1])
    for version in (lt.api.version, lt.api.version + 1):
        monkeypatch.setattr(module, "_products", {})
        use(monkeypatch, CublasLtSchedule(schedule.algorithm, version), 768, 512)
        assert_close(linear(x, weight), linear_reference(x, weight).float(), torch.bfloat16)
        expected = linear_reference(x, weight, bias, residual).float()
        assert_close(linear(x, weight, bias, residual=residual), expected, torch.bfloat16)
        assert_close(linear_silu_mul(x, weight), linear_silu_mul_reference(x, weight).float(), torch.bfloat16)
    assert calls[0]
    assert not any(calls[3:])
