"""Quantized checkpoints of tiny models, and transformers' float model of the very weights they stand for."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from bladellm_runtime.fields import Fields
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.registry import FORMATS, read_quantization
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight
from tests.models.harness import Sequences, random_prompt, reference_logits, save_tiny

FILE = "model.safetensors"
SIZES = {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 104}
"""Divisible by groups of 16 and by the 8 codes of a word."""
SCHEMES = {
    "w4 g16": Scheme(4, group_size=16),
    "w4 g16 asymmetric": Scheme(4, group_size=16, symmetric=False),
    "w4 channel": Scheme(4),
    "w8 g16": Scheme(8, group_size=16),
    "w8 channel asymmetric": Scheme(8, symmetric=False),
    "w8a8 dynamic": Scheme(8, activations="dynamic"),
    "w8a8 static": Scheme(8, activations="static"),
    "fp8 weights": Scheme(8, "fp8"),
    "fp8 dynamic": Scheme(8, "fp8", activations="dynamic"),
    "fp8 static": Scheme(8, "fp8", activations="static"),
}
STORED = [
    (method, name)
    for method, kind in FORMATS.items()
    for name, scheme in SCHEMES.items()
    if kind.refusal(scheme) is None
]
"""Every format with every scheme it holds."""


def round_weight(
    weight: torch.Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    order: torch.Tensor | None = None,
    input_scale: float | None = None,
) -> QuantizedWeight:
    """Nearest codes of weight, float32 [N, K], group by group; zero points stay above 0, which every format holds."""
    if order is not None:
        weight = weight[:, order]
    groups = weight.view(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    largest = torch.maximum(high, -low)
    if scheme.kind == "fp8":
        scales = (largest / 448).to(scale_dtype)
        codes = (groups / scales.float().unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return QuantizedWeight(scheme, codes.view(weight.shape), scales, None, order, input_scale)
    steps = (high - low) / (scheme.levels - 1) if not scheme.symmetric else largest / (scheme.middle - 0.5)
    scales = steps.to(scale_dtype)
    zeros = (-low / scales.float()).round().clamp(1, scheme.levels - 1)
    middle = torch.full_like(zeros, scheme.middle) if scheme.symmetric else zeros
    codes = (groups / scales.float().unsqueeze(2)).round() + middle.unsqueeze(2)
    codes = codes.clamp(0, scheme.levels - 1).to(torch.uint8).view(weight.shape)
    return QuantizedWeight(scheme, codes, scales, None if scheme.symmetric else zeros.byte(), order, input_scale)


def fake_round(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """An input [..., K] as a scheme with quantized activations sees it."""
    if weight.scheme.activations == "none":
        return x
    low, high = (-448.0, 448.0) if weight.scheme.kind == "fp8" else (-128.0, 127.0)
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / high
    if weight.input_scale is not None:
        scale = torch.tensor(weight.input_scale)
    steps = (wide / scale).clamp(low, high)
    return ((steps.to(torch.float8_e4m3fn).float() if weight.scheme.kind == "fp8" else steps.round()) * scale).to(
        x.dtype
    )


class Tiny:
    """A tiny model saved to `folder` with the linear layers quantized that its `quantization_config` names.

    `reference`: transformers' float model that computes the same. `weights`: by module. `scrambled`: modules whose
    columns get a random order; `input_scales`: static scales of single modules, where 0.05 is not right. `head`: the
    head is quantized although the config leaves that to the tensors (AWQ).
    """

    def __init__(
        self,
        folder: Path,
        config: dict,
        family: str = "llama",
        *,
        scrambled: tuple[str, ...] = (),
        input_scales: dict[str, float] | None = None,
        head: bool = False,
        **options,
    ) -> None:
        self.folder = folder
        self.reference = save_tiny(folder, family, **{**SIZES, **options})
        self.format = parse(config)
        self.weights: dict[str, QuantizedWeight] = {}
        for name, module in self.reference.named_modules():
            tied = name == "lm_head" and self.reference.config.tie_word_embeddings
            keys = ("lm_head.qweight",) if head else ()
            scheme = self.format.scheme_of(name, keys) if isinstance(module, torch.nn.Linear) and not tied else None
            if scheme is not None:
                input_scale = (input_scales or {}).get(name, 0.05) if scheme.activations == "static" else None
                self._quantize(name, module, scheme, any(part in name for part in scrambled), input_scale)
        self._save(config)

    def _quantize(
        self, name: str, module: torch.nn.Linear, scheme: Scheme, scrambled: bool, input_scale: float | None
    ) -> None:
        order = None
        if scrambled:  # sorted within a group, which is all that g_idx can say
            order = torch.randperm(module.in_features).view(scheme.groups(module.in_features), -1)
            order = order.sort(1).values.flatten()
        dtype = self.format.scale_dtype(torch.float32)
        weight = round_weight(module.weight.detach(), scheme, dtype, order, input_scale)
        module.weight.data = weight.dequantize()
        module.register_forward_pre_hook(lambda _, args: (fake_round(args[0], weight),))
        self.weights[name] = weight

    def _save(self, config: dict) -> None:
        tensors = load_file(self.folder / FILE)
        for name, weight in self.weights.items():
            del tensors[f"{name}.weight"]
            packed = self.format.pack(weight)
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
        save_file(tensors, self.folder / FILE, metadata={"format": "pt"})
        edit_config(self.folder, quantization_config=config)


def assert_agrees(tiny: Tiny, model: Decoder, reference: transformers.PreTrainedModel | None = None) -> None:
    """Nine prompts in one step give the reference's logits.

    Where inputs are rounded, at least three must: a value near the middle of two steps may be rounded either
    way as the sums before it differ in the last bit, which later roundings amplify, and no other prompt notices.
    """
    prompts = [random_prompt(length) for length in range(5, 14)]
    found = Sequences(model, slots=len(prompts)).step(list(enumerate(prompts)))
    wanted = [reference_logits(reference or tiny.reference, prompt) for prompt in prompts]
    errors = sorted(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
    if any(weight.scheme.activations != "none" for weight in tiny.weights.values()):
        assert errors[2] <= 1e-4, errors
    elif model.device.type == "cpu" and any(map(_is_bfloat16, tiny.weights.values())):
        assert errors[-1] <= 0.1, errors
        assert sum(errors) > 0
    else:
        assert errors[-1] <= 1e-4, errors


def _is_bfloat16(weight: QuantizedWeight) -> bool:
    """Whether the CPU's int4 kernel takes the layer: it knows groups of 32 and more, and computes in bfloat16."""
    size = weight.columns // weight.scales.shape[1]
    return weight.scheme.bits == 4 and size % 32 == 0


def plan(method: str, scheme: Scheme, ignore: tuple[str, ...] = ("lm_head",), **options) -> dict:
    """The `quantization_config` of a new checkpoint."""
    return FORMATS[method].plan(scheme, ignore, **options).config()


def parse(config: dict) -> CheckpointFormat:
    return read_quantization(Fields(Path("config.json"), config, "quantization_config."))


def edit_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    (folder / "config.json").write_text(json.dumps(values))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def shard(folder: Path, count: int) -> None:
    """Spread the tensors over `count` files, those of one layer over several."""
    tensors = load_file(folder / FILE)
    names = {key: f"model-{number % count + 1:05}-of-{count:05}.safetensors" for number, key in enumerate(tensors)}
    for name in set(names.values()):
        save_file({key: tensors[key] for key in names if names[key] == name}, folder / name)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / FILE).unlink()


def load_with_transformers(folder: Path) -> transformers.PreTrainedModel:
    """transformers' own reading of a quantized folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
