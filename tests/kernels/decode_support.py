"""Random KV memory for the decode tests, poisoned wherever nobody may read, and the kernels without a GPU."""

from dataclasses import dataclass, replace

import torch
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_schedule import ALONE, DecodeSchedule, DecodeSetting
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.kv_format import KV_FORMATS, KvFormat
from bladellm_kernels.kv_layer import KvLayer

FORMATS = list(KV_FORMATS)
FUSED = DecodeSetting(fused=True)
LAYERS = 3
"""Layers interleaved in a row of the memory, the tested one in the middle."""


@dataclass(frozen=True)
class Case:
    """Arguments of the operator, on memory of which only the positions [0, kv_len) of each sequence are not poison."""

    q: torch.Tensor
    kv: KvLayer
    base_rows: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    query_len: int

    @property
    def memory(self):
        return self.q, self.kv, self.base_rows, self.slots, self.kv_lens

    @property
    def longest(self) -> int:
        return int(self.kv_lens.max())

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def decode_case(
    format_name, dtype, heads, lens, device="cpu", granule_tokens=16, paged=False, query_len=1, window=None
) -> Case:
    """heads: query heads, KV heads, head dimension. Positions no query's window reaches are poison too."""
    query_heads, kv_heads, head_dim = heads
    kv_format = KV_FORMATS[format_name]
    columns = max(-(-length // granule_tokens) for length in lens) + 2
    slots = torch.randperm(len(lens) + 2)[: len(lens)]
    granules = (len(lens) + 2) * columns
    # The last granule is poison, and what the table shows where it shows nothing.
    table = torch.full((len(lens) + 2, columns), granules, dtype=torch.int32)
    shuffled = torch.randperm(granules).view(len(lens) + 2, columns).int()
    rows = (granules + 1) * granule_tokens + 1
    width = kv_format.width(head_dim)
    memory = poison((rows, LAYERS, kv_heads, 2, width), kv_format.dtype(dtype))
    payload = memory[:, 1].transpose(1, 2)
    scales = None
    if kv_format.quantized:
        scales = torch.full((granules + 1, kv_heads, 2, kv_format.planes, granule_tokens), torch.nan).half()
    bases = slots * columns * granule_tokens + 1
    for slot, base, length in zip(slots.tolist(), bases.tolist(), lens, strict=True):
        lowest = 0 if window is None else max(0, length - query_len + 1 - window)
        position = torch.arange(lowest, length)
        table[slot, position // granule_tokens] = shuffled[slot, position // granule_tokens]
        granule = table[slot, position // granule_tokens].long()
        row = granule * granule_tokens + position % granule_tokens if paged else base + position
        payload[row] = random_stored((len(position), 2, kv_heads, width), kv_format, dtype)
        if scales is not None:
            scales[granule, :, :, :, position % granule_tokens] = random_scales(len(position), kv_heads, kv_format)
    kv = KvLayer(
        memory.to(device)[:, 1].transpose(1, 2),
        kv_format,
        granule_tokens,
        table.to(device) if paged or kv_format.quantized else None,
        None if scales is None else scales.to(device),
        paged,
    )
    q = torch.randn(len(lens) * query_len, query_heads + 2 * kv_heads, head_dim).to(dtype)[:, :query_heads]
    return Case(q.to(device), kv, bases.to(device), slots.to(device), torch.tensor(lens, device=device), query_len)


def poison(shape, dtype) -> torch.Tensor:
    """NaN where the type has it, else large codes."""
    return torch.full(shape, 119 if dtype in (torch.int8, torch.uint8) else torch.nan, dtype=dtype)


def random_stored(shape, kv_format: KvFormat, dtype) -> torch.Tensor:
    """Every code of the format's range, or normal numbers."""
    if not kv_format.quantized:
        return torch.randn(shape).to(dtype)
    if kv_format.name.startswith("fp8"):
        return (torch.randn(shape) * torch.exp2(torch.randint(-8, 7, shape))).to(kv_format.storage)
    if kv_format.float12:
        return torch.randint(0, 256, shape).to(kv_format.storage)
    together = 8 // kv_format.bits
    codes = torch.randint(int(kv_format.lowest), int(kv_format.highest) + 1, (*shape, together))
    return (codes * 16 ** torch.arange(together)).sum(-1).to(kv_format.storage)


def random_scales(tokens, kv_heads, kv_format: KvFormat) -> torch.Tensor:
    """float16 [tokens, Hk, 2, planes] that bring numbers to about 1."""
    largest = 64 if kv_format.name.startswith("fp8") else kv_format.highest / 2
    scales = (torch.rand(tokens, kv_heads, 2, kv_format.planes) + 0.5) / largest
    if kv_format.affine:
        scales[..., 1] = torch.randn(tokens, kv_heads, 2) / 2 - 1
    return scales.half()


def plan(case: Case, window, schedule: DecodeSchedule, setting: DecodeSetting = ALONE) -> DecodeWork:
    """The work of a case, its workspace poisoned."""
    heads, head_dim = case.q.shape[1:]
    workspace = DecodeWorkspace(
        case.q.device, len(case.kv_lens), heads, case.kv.kv_heads, head_dim, case.query_len, case.kv.format,
        case.q.dtype, schedule,
    )  # fmt: skip
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    return workspace.plan(case.kv_lens, window, case.query_len, setting=setting)


def compiled_for_hopper(
    monkeypatch, case: Case, window, schedule: DecodeSchedule, launches=1, setting=ALONE, kernel="ragged_decode_kernel"
):
    """A kernel of decode attention as the last of `launches` on a plan compiles it for sm_90, without a GPU."""
    from bladellm_kernels import merge_attention_triton as merge_module
    from bladellm_kernels import ragged_decode_triton as module
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    compiled = {}
    run, shape = JITFunction.run, module.decode_shape

    def compile_only(self, *arguments, grid, warmup, **options):
        compiled[self.__name__] = run(self, *arguments, grid=grid, warmup=True, **options)

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    as_on_cuda = case.q.dtype == torch.float32
    changed: dict[str, int] = {"plain": as_on_cuda}
    if not as_on_cuda:
        changed |= {"idle_ns": schedule.idle_ns, "stay_ns": schedule.stay_ns}
    monkeypatch.setattr(module, "decode_shape", lambda *given: replace(shape(*given), **changed))
    for each in (module, merge_module):
        monkeypatch.setattr(each, "early_launch", lambda device: {"EARLY": True, "launch_pdl": True})
    work = plan(case, window, schedule, setting)
    for _ in range(launches):
        module.launch(DecodeCall(*case.memory, case.scale, work, torch.empty_like(case.q)))
    return compiled[kernel]
