"""The flags of `blade_llm_check`."""

from dataclasses import dataclass

from bladellm_runtime.flags import check_fields, flag


@dataclass(frozen=True)
class CheckArgs:
    """What to check, and how to report it."""

    model: str | None = flag(
        None, "Model to check for completeness and size; without it check_model is skipped.", group="Check"
    )
    tensor_parallel_size: int = flag(
        1, "GPUs the model will be served on.", group="Check", low=1, high=1024, names=("-tp",)
    )
    port: int = flag(8081, "Port the server will listen on.", group="Check", low=1, high=65535)
    only: list[str] = flag([], "Run these checks alone.", group="Check")
    skip: list[str] = flag([], "Leave these checks out.", group="Check")
    timeout: float = flag(30.0, "Seconds a check may take.", group="Check", low=0.1, high=3600)
    strict: bool = flag(False, "A WARNING fails, too: exit code 1.", group="Check")
    json: bool = flag(False, "Print one JSON object instead of lines.", group="Check")

    def __post_init__(self) -> None:
        check_fields(self)
