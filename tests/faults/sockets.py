"""Requests and raw sockets that the fault tests share."""

import json
import socket

LONG = {"model": "demo", "prompt": "A long story", "max_tokens": 3500, "ignore_eos": True, "temperature": 0}
SHORT = {"model": "demo", "prompt": "A short story", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def raw_request(body, path="/v1/completions", extra=""):
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_to_end(connection):
    """Everything until the server closes the connection; a reset ends it too."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def disconnects(server):
    return server.metrics()["blade_llm:client_disconnects_total"]


def unread_stream(server):
    """A stream of fat events to a client with a small buffer, which never reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(raw_request({**LONG, "logprobs": 20, "stream": True}))
    return connection
