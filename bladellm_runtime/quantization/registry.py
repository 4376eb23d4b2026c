"""The checkpoint formats by the `quant_method` a config.json names."""

from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.awq import Awq
from bladellm_runtime.quantization.compressed_tensors import CompressedTensors
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.gptq import Gptq

FORMATS: dict[str, type[CheckpointFormat]] = {
    CompressedTensors.name: CompressedTensors,
    Gptq.name: Gptq,
    Awq.name: Awq,
}


def read_quantization(fields: Fields) -> CheckpointFormat:
    """The format of a checkpoint, from its `quantization_config`.

    Raises `CheckpointError` naming file and field, and what is supported.
    """
    method = fields.text("quant_method").lower().replace("_", "-")
    if method not in FORMATS:
        supported = ", ".join(FORMATS)
        raise fields.error("quant_method", f"{method!r:.60} is not supported; it must be one of {supported}")
    return FORMATS[method].parse(fields)
