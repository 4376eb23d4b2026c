"""Soak the engine with random requests and see that nothing is lost: `python recipes/benchmarks/soak.py MODEL`.

Conversations that share beginnings, come back with another turn, use different salts, are aborted at random and need
more KV memory than there is: sharing, eviction, swap and preemption all happen at once. At the end every counter must
be zero again and, unless `--check 0`, a sample of the answers must equal those of an engine without any of it. A long
soak may be done in parts, of different seeds: `--add_to FILE` adds what this one found to what earlier ones did. The
table comes last, and meanwhile the file FILE.progress has how far it is.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.wire.messages import AddRequest, Delta, EngineStats, RequestDelta, one_by_one

TELL_SECONDS = 0.5
PEAKS = ("kv_granules_cached", "kv_granules_shared", "kv_granules_swapped")
"""Counters of the moment, of which the most is kept."""
SALTS = ("", "", "", "tenant-a", "tenant-b")


@dataclass(slots=True)
class Job:
    """A request that runs, or ran: its prompt and what it has got so far."""

    prompt: list[int]
    salt: str
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class Traffic:
    """Draws requests: new conversations over a few shared beginnings, and further turns of old ones."""

    def __init__(self, rng: random.Random, vocab: int, max_len: int) -> None:
        self._rng = rng
        self._vocab = vocab
        self._max_len = max_len
        self._beginnings = [self._draw(rng.randint(1, max_len // 2)) for _ in range(6)]
        self._old: list[Job] = []

    def next(self) -> Job:
        """The next request to send."""
        rng = self._rng
        if self._old and rng.random() < 0.4:
            before = rng.choice(self._old)
            prompt, salt = before.prompt + before.tokens, before.salt
        else:
            prompt = rng.choice(self._beginnings)[: rng.randint(0, self._max_len)]
            salt = rng.choice(SALTS)
        prompt = prompt + self._draw(int(rng.paretovariate(0.8)) + 1)
        answer = min(1 + int(rng.expovariate(1 / 60)), self._max_len // 4)
        return Job(prompt[: self._max_len - answer], salt, answer)

    def remember(self, job: Job) -> None:
        """A conversation that may go on."""
        self._old.append(job)
        if len(self._old) > 200:
            self._old.pop(self._rng.randrange(200))

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(min(count, self._max_len))]


class Soak:
    """One engine under random load."""

    def __init__(self, engine: Engine, rng: random.Random, streams: int) -> None:
        self.core = engine.core
        self.finished: list[Job] = []
        self.aborted = 0
        self.most: dict[str, int] = dict.fromkeys(PEAKS, 0)
        self.progress: Path | None = None
        self._told = 0.0
        self._rng = rng
        self._streams = streams
        self._traffic = Traffic(rng, engine.ready.vocab_size, engine.ready.max_model_len)
        self._running: dict[int, Job] = {}
        self._next_id = 0

    def run(self, seconds: float, requests: int) -> None:
        """Send requests for `seconds`, at most `requests`, then let those that run finish."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._next_id < requests:
            while len(self._running) < self._streams and self._rng.random() < 0.5:
                self._send()
            if self._running and self._rng.random() < 0.02:
                self._abort()
            self._read(self.core.step())
            if time.monotonic() - self._told > TELL_SECONDS:
                self._tell(end - time.monotonic())
        while not self.core.idle:
            self._read(self.core.step())

    def _tell(self, left: float) -> None:
        """Note the peaks, and write how far it is where that is asked for."""
        self._told, stats = time.monotonic(), self.core.stats(time.monotonic())
        self.most = {name: max(most, getattr(stats, name)) for name, most in self.most.items()}
        if self.progress is not None:
            so_far = {"seconds_left": round(left), "requests": len(self.finished), "preemptions": stats.preemptions}
            self.progress.write_text(json.dumps(so_far | self.most) + "\n")

    def _send(self) -> None:
        job = self._traffic.next()
        self._next_id += 1
        self._running[self._next_id] = job
        params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
        self._read(self.core.add(AddRequest(self._next_id, job.prompt, params, 0, time.monotonic(), job.salt)))

    def _abort(self) -> None:
        self.aborted += 1
        self._read(self.core.abort([self._rng.choice(list(self._running))]))

    def _read(self, deltas: Iterable[Delta]) -> None:
        for delta in one_by_one(deltas):
            job = self._running[delta.request_id]
            job.tokens += delta.tokens
            if delta.finish is not None:
                job.finish = delta.finish
                del self._running[delta.request_id]
                self._traffic.remember(job)
                if delta.finish is FinishReason.LENGTH:
                    self.finished.append(job)


def leftovers(engine: Engine) -> dict[str, int]:
    """Counters of an idle engine that are not zero though they must be, after its prompt cache is dropped."""
    engine.core.check()
    engine.core.reset_prompt_cache()
    stats = engine.core.stats(time.monotonic())
    names = ("running", "waiting", "kv_granules_used", "kv_granules_cached", "kv_granules_shared", "kv_tokens_unused",
             "kv_granules_swapped")  # fmt: skip
    return {name: getattr(stats, name) for name in names if getattr(stats, name)}


TIE = 1e-4
"""Nats between two tokens that rounding may turn round: float32 sums depend on which requests share a step."""


def compare(jobs: list[Job], options: dict[str, Any]) -> dict[str, int]:
    """How many answers differ from those of an engine without prompt cache, shared memory or pressure: at first by a
    token as likely as that one's, `ties`, or by another, `differing`."""
    engine = build_engine(EngineArgs(**options))
    found = {"compared": len(jobs), "ties": 0, "differing": 0}
    for job in jobs:
        tokens = [token for delta in answer(engine, job.prompt, job.max_tokens) for token in delta.tokens]
        if tokens != job.tokens:
            same = next(index for index, pair in enumerate(zip(tokens, job.tokens, strict=True)) if len(set(pair)) > 1)
            gap = likelihood_gap(engine, job.prompt + tokens[:same], job.tokens[same])
            found["ties" if gap <= TIE else "differing"] += 1
    engine.core.close()
    return found


def answer(engine: Engine, prompt: list[int], max_tokens: int, logprobs: int | None = None) -> list[RequestDelta]:
    """A greedy answer of an engine that has nothing else to do."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    deltas = engine.core.add(AddRequest(0, prompt, params, 0, time.monotonic()))
    while not engine.core.idle:
        deltas += one_by_one(engine.core.step())
    return deltas


def likelihood_gap(engine: Engine, prompt: list[int], token: int) -> float:
    """How much less likely a token is than the likeliest after a prompt, in nats; infinite beyond the first few."""
    (entry,) = [entry for delta in answer(engine, prompt, 1, logprobs=4) for entry in delta.logprobs or []]
    likely = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    return max(likely.values()) - likely.get(token, float("-inf"))


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Soak, drain, count what is left, compare."""
    common: dict[str, Any] = {
        "model": args.model, "device": args.device, "dtype": args.dtype, "load_format": args.load_format,
        "max_model_len": args.max_model_len, "kv_cache_quant": args.kv_cache_quant,
    }  # fmt: skip
    descriptors = len(os.listdir("/proc/self/fd"))
    engine = build_engine(
        EngineArgs(
            **common, attn_cls=args.attn_cls, kv_cache_gib=args.kv_cache_gib, max_running_requests=args.streams,
            prompt_cache_enable_swap=args.swap_gib > 0, prompt_cache_swap_gib=args.swap_gib or 1.0,
        )
    )  # fmt: skip
    soak = Soak(engine, random.Random(args.seed), 2 * args.streams)
    soak.progress = args.add_to and args.add_to.with_name(f"{args.add_to.name}.progress")
    soak.run(args.minutes * 60, args.requests)
    stats: EngineStats = engine.core.stats(time.monotonic())
    found: dict[str, Any] = {
        "requests": len(soak.finished) + soak.aborted, "aborted": soak.aborted, "steps": stats.steps,
        "preemptions": stats.preemptions, "generated_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens, "maps": stats.kv_maps,
        "left": leftovers(engine),
    }  # fmt: skip
    found |= {f"most_{name.removeprefix('kv_granules_')}": most for name, most in soak.most.items()}
    engine.core.close()
    found["descriptors_left"] = max(0, len(os.listdir("/proc/self/fd")) - descriptors)
    if args.check:
        sample = random.Random(args.seed).sample(soak.finished, min(args.check, len(soak.finished)))
        found |= compare(sample, {**common, "disable_prompt_cache": True})
    return found


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of a soak together: sums, of peaks the highest, and what any of them left behind."""
    whole: dict[str, Any] = {"parts": len(parts), "left": {}}
    for part in parts:
        whole["left"] |= part["left"]
        for name, value in part.items():
            if name.startswith("most_"):
                whole[name] = max(whole.get(name, 0), value)
            elif isinstance(value, int | float):
                whole[name] = whole.get(name, 0) + value
    return whole


def table(found: dict[str, Any]) -> str:
    """In Markdown."""
    return "\n".join(["| what | number |", "| --- | ---: |", *(f"| {name} | {found[name]} |" for name in found)])


def together(file: Path | None, found: dict[str, Any]) -> dict[str, Any]:
    """What all parts in the file found with this one, which is written behind them."""
    parts: list[dict[str, Any]] = json.loads(file.read_text()) if file is not None and file.exists() else []
    parts.append(found)
    if file is not None:
        file.write_text(json.dumps(parts, indent=2) + "\n")
    return added(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=10**9, help="stop after so many requests")
    parser.add_argument("--streams", type=int, default=16, help="requests that run at once; as many wait")
    parser.add_argument("--kv_cache_gib", type=float, default=0.25)
    parser.add_argument("--swap_gib", type=float, default=0.1, help="0: no swap")
    parser.add_argument("--check", type=int, default=50, help="answers to compare with a plain engine's")
    parser.add_argument("--seed", type=int, default=0)
    for name, default in (("device", "auto"), ("dtype", "float32"), ("load_format", "auto"),
                          ("attn_cls", "ragged_flash"), ("kv_cache_quant", "no_quant")):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--max_model_len", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add_to", type=Path, help="file of the parts of a soak, made if it is not there")
    args = parser.parse_args()
    started = time.monotonic()
    found = report(args)
    found["seconds"] = round(time.monotonic() - started)
    text = json.dumps(found, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    whole = together(args.add_to, found)
    print(f"\n{table(whole)}")
    sys.exit(bool(whole["left"] or whole.get("differing")))


if __name__ == "__main__":
    main()
