"""The flags of `blade_llm_quantize`: BladeLLM's with its defaults, and ours."""

from dataclasses import dataclass
from typing import Literal

from bladellm_runtime.config import Device, Dtype
from bladellm_runtime.flags import check_fields, flag

Bit = Literal["8", "4"]
Mode = Literal["weight_only_quant", "act_and_weight_quant"]
QuantDtype = Literal["int", "fp8", "fp8_e4m3", "fp8_e5m2"]
AlgorithmName = Literal["minmax", "gptq", "awq", "smoothquant", "smoothquant+", "smoothquant_gptq"]
FormatName = Literal["compressed-tensors", "gptq", "awq"]
BLOCK = 64
"""Group size of BladeLLM's --block_wise_quant."""


@dataclass(frozen=True)
class QuantizeArgs:
    """What to quantize, how, and with which data."""

    model: str = flag(
        "", "Model folder, whole or split, hub id, or modelscope:org/name; floating point.", group="Model"
    )
    output_dir: str = flag("", "Folder for the result; it must not exist, or be empty.", group="Model")
    tensor_parallel_size: int = flag(
        1, "GPUs the result will be served on, each with an equal part; of a split --model its number of ranks.",
        group="Model", low=1, high=1024, names=("-tp",),
    )  # fmt: skip
    experimental_pad: bool = flag(
        False, "Pad the MLP's inner size with zeros until every one of the GPUs gets whole groups.", group="Model"
    )

    bit: Bit = flag("8", "Bits of a weight.", group="Scheme")
    quant_mode: Mode = flag("weight_only_quant", "What is rounded: weights, or their inputs too.", group="Scheme")
    quant_dtype: QuantDtype = flag("int", "Numbers to round to; fp8 is fp8_e4m3.", group="Scheme")
    quant_algo: AlgorithmName = flag("minmax", "How to round; all but minmax need calibration data.", group="Scheme")
    block_wise_quant: bool = flag(False, f"Groups of {BLOCK} inputs share a scale, not whole channels.", group="Scheme")
    group_size: int | None = flag(
        None, "Inputs that share a scale; 128 is usual at 4 bits. Default: a whole channel.",
        group="Scheme", low=8, high=65536,
    )  # fmt: skip
    sym: bool | None = flag(
        None, "Symmetric grid without zero points. Default: true, but false with --format awq.", group="Scheme"
    )
    fallback_ratio: float = flag(
        0.0,
        "Share of the layers, those with the largest output error, that stay in floating point; layers that are "
        "served as one count as one.",
        group="Scheme",
        low=0.0,
        high=1.0,
    )
    ignore: list[str] = flag(
        ["lm_head"], "Modules that stay in floating point; * and ? stand for any text.", group="Scheme"
    )
    kv_scales: bool = flag(False, "Measure and store scales of an fp8 KV cache.", group="Scheme")
    format: FormatName = flag("compressed-tensors", "How to store the result.", group="Scheme")

    desc_act: bool = flag(True, "gptq: round the columns of the strongest inputs first.", group="Algorithm")
    static_groups: bool = flag(
        True, "gptq: find the groups' scales before, so that --desc_act leaves columns in place.", group="Algorithm"
    )
    damp: float = flag(
        0.01, "gptq: share of the mean diagonal added to the Hessian.", group="Algorithm", low=0.0001, high=1.0
    )
    alpha: float | None = flag(
        None, "smoothquant: strength of the smoothing. Default: 0.5; smoothquant+ searches.",
        group="Algorithm", low=0.0, high=1.0,
    )  # fmt: skip

    calib_data: list[str] = flag([], "Calibration texts. Default: a text that is built in.", group="Calibration")
    calib_data_file: str | None = flag(
        None, "Calibration texts: .jsonl, .json, .parquet or .txt, or a data set of the Hugging Face hub.",
        group="Calibration",
    )  # fmt: skip
    max_samples: int = flag(128, "Most windows of text to calibrate with.", group="Calibration", low=1, high=10**6)
    max_length: int = flag(2048, "Tokens of a window.", group="Calibration", low=8, high=2**20)
    seed: int = flag(0, "Seed of the choice of windows.", group="Calibration", low=0, high=2**63 - 1)
    dtype: Dtype = flag(
        "auto", "Type of activations in calibration; auto: the checkpoint's on CUDA, float32 on a CPU.",
        group="Calibration",
    )  # fmt: skip

    device: Device = flag("auto", "Where to work; auto: cuda if there is a GPU.", group="Run")
    num_gpus: int = flag(1, "GPUs that share the windows.", group="Run", low=1, high=64)
    batch_size: int = flag(8, "Windows in one forward pass.", group="Run", low=1, high=4096)
    cpu_offload: bool = flag(False, "Keep activations in host memory instead of the GPU's.", group="Run")
    resume: bool = flag(False, "Go on with an interrupted run into --output_dir.", group="Run")
    report: bool = flag(False, "Afterwards measure perplexity and KL divergence against the float model.", group="Run")
    report_data: str | None = flag(
        None, "Text file of --report: .txt or .jsonl. Default: a chapter that is built in.", group="Run"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def bits(self) -> int:
        """Bits of a weight as a number."""
        return int(self.bit)
