"""The algorithms by name, each a smoother and a rounder."""

from bladellm_runtime.errors import ConfigError
from bladellm_tools.quantize.algorithm import Algorithm, Rounder
from bladellm_tools.quantize.awq import AwqSmoother
from bladellm_tools.quantize.clip import ClipRounder
from bladellm_tools.quantize.fold import Heads
from bladellm_tools.quantize.gptq import Gptq
from bladellm_tools.quantize.grid import Grid
from bladellm_tools.quantize.layer import GATE_UP, GROUPS, QKV
from bladellm_tools.quantize.minmax import MinMax
from bladellm_tools.quantize.smoothquant import SmoothQuant
from bladellm_tools.quantize.smoothquant_plus import SmoothQuantPlus

NAMES = ("minmax", "gptq", "awq", "smoothquant", "smoothquant+", "smoothquant_gptq")
DEFAULT_ALPHA = 0.5
"""SmoothQuant's α where none is given: the paper's."""
AFTER_NORMS = frozenset({QKV.name, GATE_UP.name})
EVERYWHERE = frozenset(group.name for group in GROUPS)


def make_algorithm(
    name: str,
    grid: Grid,
    *,
    alpha: float | None = None,
    damp: float = 0.01,
    desc_act: bool = True,
    static_groups: bool = True,
    heads: Heads | None = None,
) -> Algorithm:
    """The algorithm called name. Raises `ConfigError` for a name that is not one of `NAMES`.

    alpha: SmoothQuant's, 0.5 where None; SmoothQuant+'s as `search_alpha` found it, None for no smoothing. damp,
    desc_act, static_groups: GPTQ's. heads: the attention's, for AWQ to search s of o_proj as v_proj can take it.
    """
    gptq = Gptq(grid, damp=damp, desc_act=desc_act, static_groups=static_groups)
    if name == "minmax":
        return Algorithm(name, MinMax(grid), needs_statistics=False)
    if name == "gptq":
        return Algorithm(name, gptq, needs_statistics=True)
    if name == "awq":
        return Algorithm(name, ClipRounder(grid), True, AwqSmoother(grid, heads), EVERYWHERE)
    if name == "smoothquant+":
        return Algorithm(name, ClipRounder(grid), True, SmoothQuantPlus(alpha), EVERYWHERE)
    if name in ("smoothquant", "smoothquant_gptq"):
        rounder: Rounder = MinMax(grid) if name == "smoothquant" else gptq
        return Algorithm(name, rounder, True, SmoothQuant(DEFAULT_ALPHA if alpha is None else alpha), AFTER_NORMS)
    raise ConfigError(f"--quant_algo {name} is not known; use one of {', '.join(NAMES)}")
