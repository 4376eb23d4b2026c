"""Tokens a second of 64 concurrent requests, beside transformers' `generate` on one request, in the same run.

    python recipes/benchmarks/concurrent_streams.py [--model recipes/models/demo] [--streams 64] [--tokens 128]

Both run greedily in the same type on the same device, `--rounds` times in turn; medians are printed.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bladellm_runtime import LLM, SamplingParams

DEMO = Path(__file__).parent.parent / "models" / "demo"
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO), help="model folder")
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=128, help="tokens each request generates")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where to run")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="type of both sides")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    return parser.parse_args()


def time_engine(llm: LLM, streams: int, tokens: int) -> float:
    """Tokens a second over `streams` requests whose prompts differ in their first token."""
    ids = llm.tokenizer.encode(PROMPT)
    prompts: list[Any] = [[100 + index, *ids] for index in range(streams)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


@torch.inference_mode()
def time_transformers(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Tokens a second of one request."""
    started = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
    )
    if ids.is_cuda:
        torch.cuda.synchronize()
    return int(output.shape[1] - ids.shape[1]) / (time.perf_counter() - started)


def main() -> None:
    args = arguments()
    from transformers import AutoModelForCausalLM

    engine, reference = [], []
    options = {"max_running_requests": args.streams, "cpu_threads": args.threads}
    with LLM(args.model, device=args.device, dtype=args.dtype, **options) as llm:
        device = llm.ready.device
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device).eval()
        ids = torch.tensor([[100, *llm.tokenizer.encode(PROMPT)]], device=device)
        time_engine(llm, args.streams, 8)
        time_transformers(model, ids, 8)
        for _ in range(args.rounds):
            engine.append(time_engine(llm, args.streams, args.tokens))
            reference.append(time_transformers(model, ids, args.tokens))
    ours, theirs = statistics.median(engine), statistics.median(reference)
    print(f"{args.streams} streams, BladeLLM Open: {ours:10.1f} tokens/s  {[round(rate) for rate in engine]}")
    print(f" 1 stream,  transformers:  {theirs:10.1f} tokens/s  {[round(rate) for rate in reference]}")
    print(f"ratio {ours / theirs:.2f} on {device}, {args.dtype}, {args.threads} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
