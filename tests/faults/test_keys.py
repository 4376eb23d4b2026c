"""API keys. Each test is named after its row of the fault table."""

import json

import pytest

from tests.faults.sockets import SHORT
from tests.support.live import (
    LiveServer,
    fake_answer,
    fake_command,
)

# Row 57: keys.


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("second-key\n\nthird-key\n")
    with LiveServer(fake_command(), api_key=["first-key"], api_key_file=str(keys)) as server:
        yield server


PATHS = ["/", "/v1/models", "/v1/models/demo", "/metrics", "/metric", "/version", "/openapi.json", "/nowhere"]
ODD_PATHS = ["//v1/models", "/v1/../v1/models", "/V1/MODELS", "/v1/models/", "/%761/models", "/health/../v1/models"]
ODD_PROBES = ["//health", "/HEALTH", "/health/", "/ready/../v1/models", "/health%2f..%2fmetrics", "/v1/../health"]


@pytest.mark.parametrize("path", PATHS + ODD_PATHS + ODD_PROBES)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
def test_row_57_no_key(locked_server, path, method):
    status, body, _ = locked_server.request(path, method=method)
    assert status == 401
    if method != "HEAD":
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_row_57_no_key_with_a_body(locked_server, path):
    assert locked_server.json(path, SHORT)[0] == 401


WRONG_KEYS = [
    *("", "Bearer", "Bearer ", "Bearer wrong", "first-key", "Basic first-key", "Bearer first-key2", "Bearer first-ke"),
    *("Bearer FIRST-KEY", "Bearer first-key second-key", "Bearer " + "x" * 5000, "Bearer first-key,second-key"),
]


@pytest.mark.parametrize("value", WRONG_KEYS)
def test_row_57_wrong_key(locked_server, value):
    assert locked_server.json("/v1/completions", SHORT, headers={"Authorization": value})[0] == 401


@pytest.mark.parametrize("value", ["Bearer first-key", "bearer second-key", "Bearer  third-key"])
def test_row_57_right_key(locked_server, value):
    status, body = locked_server.json("/v1/completions", SHORT, headers={"Authorization": value})
    assert (status, body["choices"][0]["text"]) == (200, fake_answer(SHORT["prompt"], 4))


def test_row_57_probes_need_no_key(locked_server):
    assert locked_server.request("/health")[0] == 200
    assert locked_server.request("/ready")[0] == 200


def test_row_57_refused_clients_harm_nobody(server, beside):
    for path in ODD_PATHS + ODD_PROBES:
        assert server.request(path)[0] in (404, 405, 200)
    for header in ("Bearer " + "x" * 9000, "\xff\xfe"):
        assert server.request("/v1/models", headers={"Authorization": header})[0] == 200
