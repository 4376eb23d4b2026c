"""The model families that can be served."""

from bladellm_runtime.fields import Fields
from bladellm_runtime.models import llama, mistral, qwen2, qwen3
from bladellm_runtime.models.family import Family

FAMILIES = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def find_family(fields: Fields) -> Family:
    """The family of a config.json: by `architectures`, or by `model_type` where that is missing.

    Raises `CheckpointError` naming the field and the families there are.
    """
    name = "architectures" if fields.has("architectures") else "model_type"
    value = fields.values.get(name)
    asked = value if isinstance(value, list) else [value]
    for family in FAMILIES:
        if asked == [family.architecture if name == "architectures" else family.model_type]:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise fields.error(name, f"{value!r:.80} is not supported; use a model of {known}")
