"""The flags of `blade_llm_split`."""

from dataclasses import dataclass

from bladellm_runtime.flags import check_fields, flag


@dataclass(frozen=True)
class SplitArgs:
    """What to split, into how many ranks, and where."""

    model: str = flag(
        "", "Model folder, Hugging Face hub id, or modelscope:org/name; in floating point or quantized.", group="Model"
    )
    output_dir: str = flag("", "Folder for the ranks; it must not exist, or be empty.", group="Model")
    tensor_parallel_size: int = flag(
        1, "Ranks that share every layer; at most the query heads.", group="Ranks", low=1, high=1024, names=("-tp",)
    )
    pipeline_parallel_size: int = flag(
        1, "Stages that share the layers.", group="Ranks", low=1, high=1024, names=("-pp",)
    )
    verify: str | None = flag(
        None, "Split folder to prove, byte for byte, to be the model it was split from, or the --model given.",
        group="Proof",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
