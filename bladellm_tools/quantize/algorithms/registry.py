"""The algorithms by name, each a smoother and a rounder."""

from bladellm_runtime.errors import ConfigError
from bladellm_tools.quantize.algorithms.algorithm import Algorithm, Rounder
from bladellm_tools.quantize.algorithms.awq import AwqSmoother
from bladellm_tools.quantize.algorithms.clip import ClipRounder
from bladellm_tools.quantize.algorithms.fold import Heads
from bladellm_tools.quantize.algorithms.gptq import Gptq
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.layer import GROUPS
from bladellm_tools.quantize.algorithms.minmax import MinMax
from bladellm_tools.quantize.algorithms.smoothquant import SmoothQuant
from bladellm_tools.quantize.algorithms.smoothquant_plus import SmoothQuantPlus

NAMES = ("minmax", "gptq", "awq", "smoothquant", "smoothquant+", "smoothquant_gptq")
DEFAULT_ALPHA = 0.5
"""SmoothQuant's α where none is given: the paper's."""
EVERYWHERE = frozenset(group.name for group in GROUPS)
"""SmoothQuant's paper smooths after norms alone. But gated MLPs have outliers before down_proj too, and attention may
before o_proj. On the test model with outliers made in all four places W8A8 rounding raised perplexity by 61 %; with
those after norms smoothed by 18 %, with all by 0.3 %. Without outliers there it made no difference."""


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
        return Algorithm(name, rounder, True, SmoothQuant(DEFAULT_ALPHA if alpha is None else alpha), EVERYWHERE)
    raise ConfigError(f"--quant_algo {name} is not known; use one of {', '.join(NAMES)}")
