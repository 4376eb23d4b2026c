"""BladeLLM Open's runtime: one engine behind every command."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from bladellm_runtime.llm import LLM
    from bladellm_runtime.request import SamplingParams


def __getattr__(name: str) -> Any:
    # Lazy: `blade_llm --version` must not load torch.
    if name == "LLM":
        from bladellm_runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from bladellm_runtime.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
