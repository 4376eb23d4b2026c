"""Give a small model the activation outliers of large ones, without changing what it computes.

    python recipes/quantize/make_outliers.py MODEL OUTPUT [--channels 8] [--factor 64] [--seed 0] [--places norms]

In large language models a few channels of the hidden states are tens of times above the rest, the same ones in every
layer (Dettmers et al., LLM.int8(), 2022): one int8 scale a token then has no steps left for the others. Here such
channels are made by multiplying where an input is produced and dividing the columns that read it:

    norms   weights of both norms of a layer up, columns of q, k, v and of gate, up down
    values  rows of v up, columns of o down, in every query head that reads the value head
    inner   rows of up up, columns of down down

The factor is a power of two, so 16-bit floats stay exact: logits are the same bit for bit.
"""

import argparse
import fnmatch
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from script import exit_code

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.folder import file_in, read_json

PLACES = ("norms", "values", "inner")
WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class Rescaling:
    """Multiply a tensor's rows by `rows` [out] or its columns by `columns` [in]; other tensors stay as they are."""

    pattern: str
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            tensor = tensor * self.rows.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
        if self.columns is not None:
            tensor = tensor * self.columns.to(tensor.dtype)
        return tensor.contiguous()


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("output", type=Path, help="folder for the variant; it must not exist")
    parser.add_argument("--channels", type=int, default=8, help="outlier channels of each input")
    parser.add_argument("--factor", type=int, default=64, help="how far they are raised: a power of two")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of channels")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=["norms"], help="where outliers are made")
    return parser.parse_args(given)


def factors(width: int, channels: int, factor: int, seed: int) -> torch.Tensor:
    """float32 [width]: `factor` in channels chosen at random, 1 in the others."""
    if not 1 <= channels <= width:
        raise ConfigError(f"--channels {channels} must be from 1 to {width}, the width of the inputs")
    if factor < 2 or factor & (factor - 1) or factor > 2**14:
        raise ConfigError(f"--factor {factor} must be a power of two from 2 to {2**14}")
    scale = torch.ones(width)
    scale[torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:channels]] = float(factor)
    return scale


def rescalings(spec: ModelSpec, places: list[str], channels: int, factor: int, seed: int) -> list[Rescaling]:
    """What to do to which tensors, the same in every layer. Biases of a raised layer are raised with its rows."""
    layer = "model.layers.*."
    made: list[Rescaling] = []
    if "norms" in places:
        for norm, readers in (
            ("input_layernorm", "self_attn.[qkv]_proj"),
            ("post_attention_layernorm", "mlp.[gu]*_proj"),
        ):
            raised = factors(spec.hidden_size, channels, factor, seed)
            made += [Rescaling(f"{layer}{norm}.weight", rows=raised)]
            made += [Rescaling(f"{layer}{readers}.weight", columns=1 / raised)]
    if "values" in places:
        raised = factors(spec.kv_heads * spec.head_dim, channels, factor, seed)
        by_query_head = raised.view(spec.kv_heads, -1).repeat_interleave(spec.heads // spec.kv_heads, 0).flatten()
        made += [Rescaling(f"{layer}self_attn.v_proj.*", rows=raised)]
        made += [Rescaling(f"{layer}self_attn.o_proj.weight", columns=1 / by_query_head)]
    if "inner" in places:
        raised = factors(spec.intermediate_size, channels, factor, seed)
        made += [Rescaling(f"{layer}mlp.up_proj.*", rows=raised)]
        made += [Rescaling(f"{layer}mlp.down_proj.weight", columns=1 / raised)]
    return made


def rescale_file(source: Path, target: Path, made: list[Rescaling]) -> None:
    """Copy a safetensors file, rescaling what the patterns name."""
    tensors = {}
    with safe_open(source, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            tensors[key] = file.get_tensor(key)
            for rescaling in made:
                if fnmatch.fnmatchcase(key, rescaling.pattern):
                    tensors[key] = rescaling(tensors[key])
        save_file(tensors, target, file.metadata())


def make_outliers(model: Path, output: Path, made: list[Rescaling]) -> None:
    """Write the variant: rescaled shards, everything else copied."""
    if output.exists():
        raise ConfigError(f"{output} exists; give a folder that does not")
    output.mkdir(parents=True)
    for source in sorted(path for path in model.iterdir() if path.is_file()):
        target = output / source.name
        if fnmatch.fnmatchcase(source.name, WEIGHTS):
            rescale_file(source, target, made)
        else:
            shutil.copyfile(source, target)


def run(given: list[str]) -> None:
    args = arguments(given)
    if "quantization_config" in read_json(file_in(args.model, "config.json")):
        raise ConfigError(f"{args.model} is quantized; give the float model")
    made = rescalings(read_model_spec(args.model), args.places, args.channels, args.factor, args.seed)
    make_outliers(args.model, args.output, made)
    print(f"{args.output}: {args.channels} channels × {args.factor} in {', '.join(args.places)}")


def main() -> int:
    return exit_code(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
