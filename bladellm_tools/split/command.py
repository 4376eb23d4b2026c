"""`blade_llm_split`: split a model, or prove a split one, and say what came of it."""

from pathlib import Path

from bladellm_runtime.distributed.manifest import rank_folder
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.hub import resolve_model
from bladellm_tools.console import gib
from bladellm_tools.split.args import SplitArgs
from bladellm_tools.split.splitting import Split, split_model
from bladellm_tools.split.verify import verify


def run(args: SplitArgs) -> int:
    """Split or prove; returns 0. Raises `UserError`."""
    if args.verify is not None:
        return prove(args, Path(args.verify).expanduser().absolute())
    if not args.model:
        raise ConfigError("--model is missing; give a model folder or a hub id")
    if not args.output_dir:
        raise ConfigError("--output_dir is missing; give a folder for the ranks")
    output = Path(args.output_dir).expanduser().absolute()
    degrees = (args.tensor_parallel_size, args.pipeline_parallel_size)
    print("\n".join(result_lines(split_model(resolve_model(args.model), output, degrees))))
    return 0


def prove(args: SplitArgs, folder: Path) -> int:
    """Do what --verify asks for; returns 0. Raises `UserError` naming what differs."""
    if args.output_dir:
        raise ConfigError("--output_dir does not go with --verify, which writes nothing; leave it out")
    model = resolve_model(args.model) if args.model else None
    proof = verify(folder, model)
    source = "the model it was split from" if model is None else str(model)
    print(
        f"{folder}: {proof.tensors} tensors ({gib(proof.bytes)}) of {proof.ranks} ranks are, byte for byte, "
        f"those of {source}; {proof.files} files are as they were written"
    )
    return 0


def result_lines(split: Split) -> list[str]:
    """What was written: every rank's share, stage by stage."""
    plan = split.plan
    lines = [f"{split.output}: {gib(split.bytes_before)} in {gib(split.bytes_after)} of ranks"]
    for stage, layers in enumerate(plan.stages):
        for rank, cut in enumerate(plan.ranks):
            lines.append(
                f"  {rank_folder(stage, rank)}  layers {_shown(layers)}, query heads {_shown(cut.queries)}, KV heads "
                f"{_shown(cut.kv_heads)}, {len(cut.mlp)} inner channels, {len(cut.vocab)} vocabulary rows"
            )
    lines.append(f"the largest rank holds {gib(split.largest)}; prove them: blade_llm_split --verify {split.output}")
    return lines


def _shown(part: range) -> str:
    return f"{part.start}-{part.stop - 1}" if len(part) > 1 else str(part.start)
