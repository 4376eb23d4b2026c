"""The demo: quantize the small model of this repository, serve the result, ask it two questions, and stop it.

    make demo        or        python recipes/demo.py

Everything is what a user would do: the commands, the OpenAI protocol, server-sent events, SIGTERM. Exits 0 when all of
it worked.
"""

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS, STOP_SECONDS = 120.0, 30.0
CHAT = {
    "messages": [{"role": "user", "content": "Tom has 12 apples and buys 7 more. How many apples does he have now?"}],
    "max_tokens": 96,
    "temperature": 0,
}
COMPLETION = {"prompt": "Once upon a time there was", "max_tokens": 96, "temperature": 0.7, "top_p": 0.9, "seed": 3}
METRICS = ("generation_tokens_total", "time_to_first_token_seconds_count", "num_requests_running")


@dataclass
class Timing:
    """When an answer's pieces came, in seconds after its request was sent, and how many tokens they were."""

    moments: list[float] = field(default_factory=list)
    tokens: int = 0

    def line(self) -> str:
        """TTFT, TBT and the speed of one answer."""
        first, last = self.moments[0], self.moments[-1]
        gaps = [later - earlier for earlier, later in pairwise(self.moments)]
        parts = [f"TTFT {1000 * first:.1f} ms"]
        if gaps:
            mean = (last - first) / max(self.tokens - 1, 1)
            parts.append(f"TBT mean {1000 * mean:.2f} ms, p99 {1000 * percentile(gaps, 0.99):.2f} ms")
        return ", ".join([*parts, f"{self.tokens} tokens, {self.tokens / last:.0f} tokens/s"])


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def quantize(output: Path) -> None:
    """Quantize the demo model to 4 bits with GPTQ into `output`."""
    flags = ["--config", recipe("quantize_demo"), "--output_dir", str(output)]
    process = await asyncio.create_subprocess_exec(*command("quantize", flags), cwd=ROOT)
    if await process.wait() != 0:
        raise RuntimeError("the model could not be quantized")


def recipe(name: str) -> str:
    """The path of a recipe of this repository."""
    return str(ROOT / "recipes" / f"{name}.yaml")


def command(name: str, flags: list[str]) -> list[str]:
    """A command line of `blade_llm`."""
    return [sys.executable, "-m", "bladellm_tools.cli", name, *flags]


async def start_server(model: Path, flags: list[str]) -> tuple[asyncio.subprocess.Process, str]:
    """Start the server on a free port and return it with its address, which its banner names."""
    line = command("serve", ["--config", recipe("serve_demo"), "--model", str(model), "--port", "0", *flags])
    process = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        async with asyncio.timeout(START_SECONDS):
            return process, await read_banner(process)
    except BaseException:
        await stop_server(process)
        raise


async def read_banner(process: asyncio.subprocess.Process) -> str:
    """Show the server's banner and return the address in it."""
    assert process.stdout is not None
    url = ""
    while line := (await process.stdout.readline()).decode():
        print(line, end="", flush=True)
        found = re.search(r"serving at (http://\S+)", line)
        url = found[1] if found else url
        if line.startswith("curl "):
            return url
    raise RuntimeError("the server ended before it was ready")


async def stop_server(process: asyncio.subprocess.Process) -> int:
    """Ask the server to stop, as a supervisor would; returns its exit code."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_SECONDS):
            return await process.wait()
    except TimeoutError:
        process.kill()
        return await process.wait()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    async for raw in response.content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event
    raise RuntimeError("the stream ended without [DONE]")


async def ask(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Timing:
    """Stream one answer to the terminal."""
    timing, started = Timing(), time.perf_counter()
    request = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}, **body}
    async with session.post(path, json=request) as response:
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {await response.text()}")
        async for event in events(response):
            if event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                if text:
                    timing.moments.append(time.perf_counter() - started)
                    print(text, end="", flush=True)
    print()
    return timing


async def converse(url: str) -> None:
    """Check the health, ask both questions, and show a few metrics."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        async with session.get("/health") as response:
            response.raise_for_status()
        print("\nThe demo model has 3 million parameters: expect grammar, not sense.")
        print(f"\n> {CHAT['messages'][0]['content']}")  # type: ignore[index]
        print(f"[{(await ask(session, '/v1/chat/completions', CHAT)).line()}]")
        print(f"\n> {COMPLETION['prompt']} ...")
        print(f"[{(await ask(session, '/v1/completions', COMPLETION)).line()}]")
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
    print("\n/metrics:")
    print("\n".join(line for line in lines if line.startswith(tuple(f"blade_llm:{name}" for name in METRICS))))


async def demo(folder: Path, flags: list[str]) -> int:
    """The whole demo, with `folder` for the quantized model; returns the exit code."""
    await quantize(folder / "demo-w4a16")
    print()
    process, url = await start_server(folder / "demo-w4a16", flags)
    try:
        await converse(url)
    finally:
        code = await stop_server(process)
    print(f"\nserver stopped with exit code {code}")
    return 0 if code == 0 else 1


def main() -> int:
    """Run the demo; unknown flags go to the server."""
    parser = argparse.ArgumentParser(description="Quantize the demo model, serve it and ask it two questions.")
    _, flags = parser.parse_known_args()
    try:
        with tempfile.TemporaryDirectory(prefix="bladellm-demo-") as folder:
            return asyncio.run(demo(Path(folder), flags))
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
