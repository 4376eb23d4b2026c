"""Slots for adapters as the flags ask for them, and what fills them."""

import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.device import DTYPES
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.lora.loader import AdapterLoader
from bladellm_runtime.lora.peft_folder import AdapterReader
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.lora_layout import LoraShape


def lora_shape(args: EngineArgs, dtype: torch.dtype) -> LoraShape | None:
    """What a model of type `dtype` is to have slots for; None without --enable_lora."""
    if not args.enable_lora:
        return None
    held = dtype if args.lora_dtype == "auto" else DTYPES[args.lora_dtype]
    return LoraShape(args.max_loras, args.max_lora_rank, held)


def adapter_loader(whole: ModelSpec, runner: ModelRunner, model: Decoder) -> AdapterLoader | None:
    """What brings adapters to the slots of a rank's `model`, beside the steps of `runner`; None where there are none.

    whole: the spec of the whole model, which adapters are for.
    """
    if model.lora is None:
        return None
    reader = AdapterReader(whole, model.lora.layout)
    return AdapterLoader(model.lora, reader, None if runner.on_gpu else runner.steps_done)
