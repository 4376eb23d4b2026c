"""What a streamed token costs the front ends in CPU, and how many a second they take, with the fake engine.

`python -m tests.support.stream_cost [streams] [tokens] [front-end processes] [seconds a step]`
"""

import asyncio
import json
import sys
import time

import psutil
import uvloop

from tests.support.live import LiveServer, fake_command


async def read_stream(port: int, number: int, tokens: int) -> int:
    """One stream over a bare socket, so that the reader costs little; returns the events it got."""
    body = json.dumps({"prompt": f"Stream {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    events = 0
    tail = b""
    while part := await reader.read(65536):
        events += part.count(b"data: ")
        tail = (tail + part)[-64:]
    writer.close()
    assert b"[DONE]" in tail
    return events


async def read_all(port: int, streams: int, tokens: int) -> int:
    """The events of all streams."""
    return sum(await asyncio.gather(*(read_stream(port, number, tokens) for number in range(streams))))


def cpu_of_streams(server: LiveServer, streams: int, tokens: int) -> tuple[list[float], int]:
    """CPU seconds of each front end for this many streams, and the events that came of them."""
    before = [cpu_seconds(pid) for pid in server.front_end_pids()]
    events = uvloop.run(read_all(server.port, streams, tokens))
    spent = [cpu_seconds(pid) - seconds for pid, seconds in zip(server.front_end_pids(), before, strict=True)]
    return spent, events


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    streams, tokens, front_ends, step_seconds = (
        float(value) for value in sys.argv[1:] + ["256", "400", "1", "0.02"][len(sys.argv) - 1 :]
    )
    count, length = int(streams), int(tokens)
    command = fake_command(step_seconds=step_seconds, kv_tokens=2**22)
    with LiveServer(command, max_running_requests=count, frontend_processes=int(front_ends)) as server:
        cpu_of_streams(server, count, 20)
        short, _ = cpu_of_streams(server, count, length // 8)
        started = time.monotonic()
        long, events = cpu_of_streams(server, count, length)
        rate = count * length / (time.monotonic() - started)
    per_token = (sum(long) - sum(short)) / (count * (length - length // 8))
    per_request = sum(short) / count - per_token * (length // 8)
    print(
        f"{count} streams: {1e6 * per_token:.1f} us of CPU a token, {1e6 * per_request:.0f} us a request, "
        f"{rate:,.0f} tokens a second, {events / count / length:.2f} events a token (fewer than 1: it falls behind), "
        f"CPU seconds of each front end: {', '.join(f'{spent:.1f}' for spent in long)}"
    )


if __name__ == "__main__":
    main()
