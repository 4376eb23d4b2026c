"""What the host does for a decode step, in microseconds, with replays that do nothing: `host_step.py [MODEL]`.

The model only has to load; its work is captured and never repeated, so that planning, packing, uploading and reading
are all that is left, one step at a time. Medians: `launch` includes `inputs`; `collect` is reading the result and, on a
CPU, waiting for the thread that launches; `step` is all of it but `stats` and `encode`, what the server does beside it.
`--pause_ms` sleeps before every step: beside a GPU a step comes every 4 to 12 ms, and finds less of what it needs in
the processor's caches. `--spread`, of a granule, has sequences need their next one at different steps, as under load;
`mean` is of plan, launch and complete together.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from step_timing import finish, start_decoding, watch_steps

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.cuda_capture import Work
from bladellm_runtime.wire import transport
from bladellm_runtime.wire.messages import StepOutput

DEMO = Path(__file__).parents[1] / "models" / "demo"
PARTS = ("plan", "inputs", "launch", "collect", "complete", "step", "stats", "encode")


def null_capture(work: Work) -> Work:
    """Do the work once, and nothing at every replay."""
    work()
    return lambda: None


def build(args: argparse.Namespace) -> Engine:
    return build_engine(
        EngineArgs(
            model=args.model, device="cpu", kv_cache_gib=args.kv_cache_gib, max_running_requests=max(args.batches),
            disable_overlap=True, cuda_graph_prefill_tokens=[0],
            cuda_graph_batch_sizes=sorted(args.batches), kv_cache_quant=args.kv_cache_quant, attn_cls=args.attn_cls,
        ),
        null_capture,
    )  # fmt: skip


def serve_step(core: EngineCore) -> None:
    """A step as the engine's loop does it, up to the message for the front end."""
    deltas = core.step()
    transport.encode(StepOutput(deltas, core.stats(time.monotonic())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(DEMO))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--spread", type=int, default=1)
    parser.add_argument("--pause_ms", type=float, default=0.0)
    parser.add_argument("--kv_cache_gib", type=float, default=0.5)
    parser.add_argument("--kv_cache_quant", default="no_quant")
    parser.add_argument("--attn_cls", default="ragged_flash")
    args = parser.parse_args()
    engine = build(args)
    clocks = watch_steps(engine.core)
    clocks.watch(engine.core, "step", "step")
    clocks.watch(engine.core, "stats", "stats")
    clocks.watch(transport, "encode", "encode")
    print(f"| batch | {' | '.join(PARTS)} | mean |\n|{' --- |' * (len(PARTS) + 2)}")
    for batch in args.batches:
        start_decoding(engine, batch, 8, args.steps + 50 + args.spread, seed=0, spread=args.spread)
        clocks.reset()
        for _ in range(args.steps):
            time.sleep(1e-3 * args.pause_ms)
            serve_step(engine.core)
        medians = " | ".join(f"{clocks.microseconds(part):.0f}" for part in PARTS)
        mean = sum(1e6 * float(np.mean(clocks.seconds[part])) for part in ("plan", "launch", "complete"))
        print(f"| {batch} | {medians} | {mean:.0f} |")
        finish(engine.core, batch)
    engine.core.close()


if __name__ == "__main__":
    main()
