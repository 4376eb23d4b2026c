"""What a streamed token costs the front end in CPU: `python -m tests.support.stream_cost [streams] [tokens]`."""

import asyncio
import json
import sys

import psutil
import uvloop

from tests.support.live import LiveServer, fake_command


async def read_stream(port: int, number: int, tokens: int) -> int:
    """One stream over a bare socket, so that the reader costs little; returns the bytes it got."""
    body = json.dumps({"prompt": f"Stream {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    size = 0
    tail = b""
    while part := await reader.read(65536):
        size += len(part)
        tail = (tail + part)[-64:]
    writer.close()
    assert b"[DONE]" in tail
    return size


async def read_all(port: int, streams: int, tokens: int) -> None:
    await asyncio.gather(*(read_stream(port, number, tokens) for number in range(streams)))


def cpu_of_streams(server: LiveServer, streams: int, tokens: int) -> float:
    """CPU seconds of the server process for this many streams."""
    process = psutil.Process(server.pid)
    before = process.cpu_times()
    uvloop.run(read_all(server.port, streams, tokens))
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


def main() -> None:
    streams, tokens = (int(value) for value in (sys.argv[1:] + ["256", "400"][len(sys.argv) - 1 :]))
    with LiveServer(fake_command(step_seconds=0.02), max_running_requests=streams) as server:
        cpu_of_streams(server, streams, 20)
        short, long = cpu_of_streams(server, streams, tokens // 8), cpu_of_streams(server, streams, tokens)
    per_token = (long - short) / (streams * (tokens - tokens // 8))
    per_request = short / streams - per_token * (tokens // 8)
    print(f"{streams} streams: {1e6 * per_token:.1f} us of CPU a token, {1e6 * per_request:.0f} us a request")


if __name__ == "__main__":
    main()
