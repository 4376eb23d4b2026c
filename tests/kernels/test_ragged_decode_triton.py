"""The CUDA kernels of decode attention: interpreted, compiled for sm_90, and on a GPU where there is one."""

import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_schedule import ALONE, DecodeSchedule, DecodeSetting, default_schedule
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference

from tests.kernels.conditions import DTYPES, assert_close
from tests.kernels.decode_support import FORMATS, FUSED, compiled_for_hopper, decode_case, plan
from tests.kernels.interpreted import run_interpreted
from tests.support.cases import some_of

THIS = "tests.kernels.test_ragged_decode_triton"


def launched(case, window, schedule):
    from bladellm_kernels.ragged_decode_triton import launch

    out = torch.full_like(case.q, torch.nan)
    work = plan(case, window, schedule)
    launch(DecodeCall(*case.memory, case.scale, work, out))
    return out


def check_launch(format_name, dtype, heads, lens, programs, window=None, **options):
    """programs: of each KV head."""
    case = decode_case(format_name, dtype, heads, lens, window=window, **options)
    out = launched(case, window, DecodeSchedule(64, 3, 4, programs * heads[1]))
    expected = ragged_decode_attention_reference(*case.memory, case.scale, window, case.query_len)
    assert_close(out, expected, dtype)


IN_FLOAT32 = [
    ("no_quant", (4, 2, 16), [1, 0, 129, 64, 65], 3, {}),
    ("int4_affine", (2, 2, 24), [63, 131], 2, {"granule_tokens": 64}),
    ("fp8_e4m3", (2, 1, 16), [63, 131], 2, {"granule_tokens": 7}),
]
FEATURES = [
    ("no_quant", (2, 1, 18), [70, 5], 4, {"paged": True, "granule_tokens": 16}),
    ("int8", (2, 2, 40), [70, 5], 1, {"paged": True, "granule_tokens": 5, "window": 20}),
    ("int4", (3, 1, 8), [131, 0, 66], 2, {"paged": True, "granule_tokens": 128, "query_len": 3}),
    ("int8_affine", (2, 1, 16), [200, 3, 67], 3, {"granule_tokens": 64, "query_len": 3, "window": 66}),
    ("no_quant", (9, 1, 16), [5, 100], 2, {"query_len": 5, "window": 1}),
    ("fp8_e5m2", (4, 2, 16), [0, 0], 2, {}),
    ("no_quant", (4, 2, 16), [300, 0, 1], 9, {"window": 65}),
]


def interpret_some():
    interpret_formats(random.sample(FORMATS, 1), random.sample(IN_FLOAT32, 1))
    interpret_features(random.sample(FEATURES, 3))


def interpret_formats(formats=FORMATS, in_float32=IN_FLOAT32):
    for format_name in formats:
        check_launch(format_name, torch.float16, (4, 2, 16), [1, 0, 129, 64, 65], 3, granule_tokens=128)
    for format_name, heads, lens, programs, options in in_float32:
        check_launch(format_name, torch.float32, heads, lens, programs, **options)


def interpret_features(features=FEATURES):
    for format_name, heads, lens, programs, options in features:
        check_launch(format_name, torch.float16, heads, lens, programs, **options)


WHOLE = ["interpret_formats", "interpret_features"]


@pytest.mark.parametrize("what", some_of(["interpret_some", *WHOLE], ["interpret_some"]))
def test_interpreted(what):
    pytest.importorskip("triton")
    run_interpreted(THIS, what)


def resources(compiled, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, of a compiled kernel."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [str(tool), "--dump-resource-usage", str(folder / "kernel.cubin")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[0]
    return int(registers), int(stack)


def check_compiled(monkeypatch, folder, format_name, heads, paged=False, **load):
    """Compiled by default: programs fit an SM as planned, nothing spills, and tiles come in copies of 16 bytes.

    load: the batch and what is around attention. Where no warps of their own fetch.
    """
    schedule = default_schedule(heads[2], KV_FORMATS[format_name], torch.bfloat16, warp_specialized=False, **load)
    tokens = 16 if paged else 256
    case = decode_case(format_name, torch.bfloat16, heads, [5, 9], granule_tokens=tokens, paged=paged)
    compiled = compiled_for_hopper(monkeypatch, case, None, schedule, setting=load.get("setting", ALONE))
    registers, stack = resources(compiled, folder)
    assert "sm_90" in compiled.asm["ptx"]
    assert registers * 32 * schedule.warps * schedule.ctas_per_sm <= 65536
    assert stack == 0
    assert (compiled.metadata.shared + 1024) * schedule.ctas_per_sm <= 228 * 1024
    assert compiled.metadata.shared <= 227 * 1024
    text = compiled.asm["ptx"]
    assert ("nanosleep" in text) == (schedule.idle_ns > 0)
    assert ("%globaltimer" in text) == (schedule.stay_ns > 0)
    assert "mma.sync.aligned.m16n8k16" in text
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10,", text)
    loop = inner_loop(compiled.asm["ttgir"])
    # The granule of the next block; and one of the planes of scales and zeros, which Triton 3.6 does not copy ahead.
    assert loop.count("tt.load") <= 1 + KV_FORMATS[format_name].affine
    assert loop.count("ttg.async_copy_global_to_local") >= 2


def inner_loop(text: str) -> str:
    """The body of the only loop of a known kind in TTGIR."""
    first = re.search(r"\n( *)%\S+ = scf\.for ", text)
    return text[first.start() : text.index(f"\n{first[1]}}}", first.end())]


@pytest.mark.parametrize("format_name", ["no_quant", "int4"])
def test_compiled_for_hopper(format_name, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    check_compiled(monkeypatch, tmp_path, format_name, (32, 8, 128))


@pytest.mark.parametrize("load", [{"batch": 64}, {"setting": FUSED}], ids=str)
def test_compiled_for_many_sequences_and_beside_others(load, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    check_compiled(monkeypatch, tmp_path, "no_quant", (32, 8, 128), **load)


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_a_light_schedule_leaves_half_of_the_shared_memory(batch):
    schedule = default_schedule(128, batch=batch, setting=FUSED)
    assert schedule.ctas_per_sm == 1
    assert (schedule.stages - 1) * schedule.block_kv * 512 < 114 * 1024


def test_programs_that_stay_look_at_the_clock_when_the_next_may_start_and_behind_their_last_store(monkeypatch):
    pytest.importorskip("triton")
    case = decode_case("no_quant", torch.bfloat16, (32, 8, 128), [5, 9], granule_tokens=256)
    schedule = replace(default_schedule(128, setting=FUSED), idle_ns=0, stay_ns=4500)
    text = compiled_for_hopper(monkeypatch, case, None, schedule).asm["ptx"]
    before, between, after = text.split("%globaltimer")
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global" in between
    assert "st.global" in between
    assert "st.global" not in after
    assert "nanosleep" not in text


@pytest.mark.parametrize("launches", [1, 2])
def test_it_waits_before_it_reads_what_earlier_kernels_write(launches, monkeypatch):
    """The first kernel of a plan reads nothing before it waits; those after it only the plan, and nothing is stored."""
    pytest.importorskip("triton")
    case = decode_case("no_quant", torch.bfloat16, (4, 2, 64), [5, 9], granule_tokens=256)
    text = compiled_for_hopper(monkeypatch, case, None, DecodeSchedule(64, 3, 4, 1), launches).asm["ptx"]
    before, after = text.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after
    assert "st.global" not in before
    assert "cp.async" not in before
    assert ("ld.global" in before) == (launches > 1)


def test_a_merge_reads_its_list_before_the_segments_have_ended_and_these_behind(monkeypatch):
    pytest.importorskip("triton")
    case = decode_case("no_quant", torch.bfloat16, (4, 2, 64), [5, 9], granule_tokens=256)
    schedule = DecodeSchedule(64, 3, 4, 1)
    text = compiled_for_hopper(monkeypatch, case, None, schedule, kernel="merge_segments_kernel").asm["ptx"]
    before, after = text.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    # How many there are, the first of them, its first segment and how many it has.
    assert before.count("ld.global") == 4
    assert "ld.global.cg" not in before
    assert "ld.global.cg" in after
    assert "st.global" not in before


def test_where_the_layer_behind_starts_late_a_merge_lets_it_when_the_segments_have_ended(monkeypatch):
    pytest.importorskip("triton")
    case = decode_case("no_quant", torch.bfloat16, (4, 2, 64), [5, 9], granule_tokens=256)
    schedule = DecodeSchedule(64, 3, 4, 1, late=True)
    text = compiled_for_hopper(monkeypatch, case, None, schedule, kernel="merge_segments_kernel").asm["ptx"]
    before, after = text.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" not in before
    assert "griddepcontrol.launch_dependents" in after.split("ld.global.cg")[0], "at once, before what there is to do"


@pytest.mark.parametrize(("format_name", "batch", "setting", "light", "late"), [
    ("no_quant", 4, DecodeSetting(fused=True, late=True), False, True),
    ("no_quant", 8, DecodeSetting(fused=True, late=True), True, False),
    ("no_quant", 1, DecodeSetting(fused=True), True, False),
    ("no_quant", 8, DecodeSetting(fused=True, late=True, long=True), False, True),
    ("no_quant", 8, DecodeSetting(fused=True, long=True), False, False),
    ("no_quant", 8, DecodeSetting(long=True), False, False),
    ("int8", 8, DecodeSetting(fused=True, late=True), False, True),
    ("int8", 8, DecodeSetting(fused=True), False, False),
], ids=str)  # fmt: skip
def test_the_layer_behind_starts_late_where_attention_has_whole_multiprocessors(
    format_name, batch, setting, light, late
):
    schedule = default_schedule(128, KV_FORMATS[format_name], batch=batch, setting=setting)
    assert (schedule.stay_ns > 0) == light
    assert schedule.late == late
    assert (schedule.idle_ns > 0) == (format_name == "int8" and not late)


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("heads", "paged"), [((32, 8, 128), False), ((3, 3, 64), False), ((32, 8, 128), True)])
def test_every_format_compiled_for_hopper(format_name, heads, paged, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    check_compiled(monkeypatch, tmp_path, format_name, heads, paged)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("heads", [(32, 8, 128), (5, 5, 64), (12, 1, 256)], ids=str)
@pytest.mark.parametrize(("window", "query_len", "paged", "granule_tokens"), [
    (None, 1, False, 256), (500, 5, False, 64), (None, 4, True, 16), (900, 1, True, 128),
])  # fmt: skip
def test_on_the_gpu(dtype, format_name, heads, window, query_len, paged, granule_tokens):
    lens = [5, 0, 127, 128, 129, 1009, 4099]
    case = decode_case(format_name, dtype, heads, lens, "cuda", granule_tokens, paged, query_len, window)
    out = ragged_decode_attention(*case.memory, case.longest, case.scale, window, query_len)
    expected = ragged_decode_attention_reference(*case.memory, case.scale, window, query_len)
    assert_close(out, expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", ["no_quant", "int8", "int4_affine"])
@pytest.mark.parametrize("setting", [ALONE, FUSED], ids=str)
def test_a_captured_graph_holds_for_other_lengths(format_name, setting):
    case = decode_case(format_name, torch.bfloat16, (32, 8, 128), [900, 70, 3000, 1], "cuda", 128)
    lens = case.kv_lens.clone()
    workspace = DecodeWorkspace(torch.device("cuda"), 8, 32, 8, 128, 1, case.kv.format, torch.bfloat16)
    out = torch.empty_like(case.q)

    def step():
        work = workspace.plan(lens, setting=setting)
        memory = (case.q, case.kv, case.base_rows, case.slots, lens)
        ragged_decode_attention(*memory, 3000, case.scale, work=work, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for changed in ([900, 70, 3000, 1], [1, 0, 2999, 0], [0, 0, 0, 0], [899, 69, 1, 1], [5, 64, 128, 1]):
        lens.copy_(torch.tensor(changed))
        out.fill_(torch.nan)
        graph.replay()
        memory = (case.q, case.kv, case.base_rows, case.slots, lens)
        assert_close(out, ragged_decode_attention_reference(*memory, case.scale), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("setting", "stay_ns"), [(ALONE, 0), (FUSED, 0), (FUSED, 6000)], ids=str)
def test_layers_of_a_graph_share_a_plan(setting, stay_ns):
    """Each kernel reads what the one before it wrote, though it starts before that one has ended; those that stay take
    as long as they are asked to."""
    case = decode_case("no_quant", torch.bfloat16, (32, 8, 128), [900, 70, 3000, 1], "cuda", 128)
    lens = case.kv_lens.clone()
    schedule = replace(default_schedule(128, setting=FUSED), stay_ns=stay_ns) if stay_ns else None
    workspace = DecodeWorkspace(torch.device("cuda"), 8, 32, 8, 128, 1, case.kv.format, torch.bfloat16, schedule)
    outs = [torch.empty_like(case.q) for _ in range(8)]

    def step():
        work, queries = workspace.plan(lens, setting=setting), case.q
        for out in outs:
            memory = (queries, case.kv, case.base_rows, case.slots, lens)
            ragged_decode_attention(*memory, 3000, case.scale, work=work, out=out)
            queries = out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for changed in ([900, 70, 3000, 1], [1, 0, 2999, 0], [0, 0, 0, 0], [899, 69, 1, 1], [5, 64, 128, 1]) * 4:
        lens.copy_(torch.tensor(changed))
        for out in outs:
            out.fill_(torch.nan)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) > len(outs) * stay_ns / 1e6
        queries = case.q
        for out in outs:
            memory = (queries, case.kv, case.base_rows, case.slots, lens)
            assert_close(out, ragged_decode_attention_reference(*memory, case.scale), torch.bfloat16)
            queries = out


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", ["no_quant", "int8"])
def test_offsets_beyond_31_bits(format_name):
    """Two sequences at both ends of a memory of more than 2^32 elements."""
    near = decode_case(format_name, torch.float16, (8, 2, 64), [300, 300], "cuda", 64)
    rows = 2**32 // near.kv.payload.stride(0) + 1000
    memory = torch.full((rows, near.kv.payload.stride(0)), 119, dtype=near.kv.payload.dtype, device="cuda")
    payload = memory.as_strided((rows, *near.kv.payload.shape[1:]), near.kv.payload.stride())
    bases = torch.tensor([5, rows - 300], device="cuda")
    for old, new in zip(near.base_rows.tolist(), bases.tolist(), strict=True):
        payload[new : new + 300] = near.kv.payload[old : old + 300]
    kv = replace(near.kv, payload=payload)
    out = ragged_decode_attention(near.q, kv, bases, near.slots, near.kv_lens, 300, near.scale)
    assert_close(out, ragged_decode_attention_reference(*near.memory, near.scale), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6])
def test_it_never_waits_for_the_device(window):
    case = decode_case("int8", torch.bfloat16, (32, 8, 128), [3, 500], "cuda")
    ragged_decode_attention(*case.memory, 500, case.scale, window)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ragged_decode_attention(*case.memory, 500, case.scale, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
