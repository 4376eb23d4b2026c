"""The flags of `blade_llm eval`."""

from dataclasses import dataclass

from bladellm_runtime.config import Device, Dtype
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.flags import check_fields, flag

MODELS, TEXT, RUN = "Models", "Text", "Run"


@dataclass(frozen=True)
class EvaluateArgs:
    """Which models, on which text, and where the result goes."""

    model: str = flag("", "Model folder or hub id to evaluate, quantized or not.", group=MODELS)
    baseline: str | None = flag(
        None, "Model to compare with, as a rule the one before quantization; adds KL divergence and agreement.",
        group=MODELS,
    )  # fmt: skip
    tokenizer_dir: str | None = flag(None, "Folder of the tokenizer; default: the model's.", group=MODELS)
    data: list[str] = flag([], "Text files: .txt, or .jsonl and .parquet with the field `text`.", group=TEXT)
    window: int = flag(2048, "Tokens a window; each window is read from an empty context.", group=TEXT,
                       low=2, high=2**24)  # fmt: skip
    max_windows: int | None = flag(None, "Use the first windows of each file only.", group=TEXT, low=1, high=2**40)
    batch_size: int = flag(1, "Windows in one forward pass.", group=RUN, low=1, high=4096)
    device: Device = flag("auto", "Where to run; auto: cuda if there is a GPU.", group=RUN)
    dtype: Dtype = flag(
        "auto", "Type of weights and activations; auto: the checkpoint's on CUDA, float32 on a CPU.", group=RUN
    )
    json: str | None = flag(None, "File for the result as JSON; - prints it instead of the table.", group=RUN)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model:
            raise ConfigError("--model is missing; give a model folder or a hub id")
        if not self.data:
            raise ConfigError("--data is missing; give one or more .txt, .jsonl or .parquet files")
