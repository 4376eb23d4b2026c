"""Rows 31 to 34 and 58 of the fault table: names and paths of adapters, folders that are none, slots, admin keys."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from bladellm_runtime.server.auth import Authenticator
from bladellm_runtime.server.errors import ApiError
from tests.faults.asking import COMPLETIONS, ask, assert_error, refused, text_of
from tests.faults.conftest import unharmed, warm_up
from tests.support.fake_adapters import save_fake_adapter
from tests.support.live import LiveServer, OpenStream, fake_command, until

ADMIN_KEY = "key-of-the-admin"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SLOTS = 2
ADAPTERS = [f"good-{number}" for number in range(4)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    for name in ADAPTERS:
        save_fake_adapter(root / "adapters" / name)
    save_fake_adapter(root / "outside")
    (root / "adapters" / "link").symlink_to(root / "outside")
    (root / "adapters" / "loop").symlink_to(root / "adapters" / "loop")
    (root / "adapters" / "file").write_text("x")
    (root / "adapters" / "empty").mkdir()
    (root / "admin").write_text(ADMIN_KEY)
    return root


@pytest.fixture(scope="module")
def adapter_server(root):
    engine = fake_command(step_seconds=0.004, max_loras=SLOTS)
    folders = {"lora_dir": str(root / "adapters"), "admin_api_key_file": str(root / "admin")}
    with LiveServer(engine, enable_lora=True, **folders) as server:
        warm_up(server)
        assert ask(server, COMPLETIONS, model="good-0")[0] == 200
        yield server


@pytest.fixture
def beside_adapters(adapter_server):
    with unharmed(adapter_server) as neighbour:
        yield neighbour


def loads(server):
    return server.metrics()["blade_llm:lora_loads_total"]


UNKNOWN = [
    "gpt-4",
    "good-9",
    "DEMO",
    "file",
    "good-0/adapter_config.json",
    "x" * 300,
    "y/" * 400,
    "z" * 100_000,
    "a\0b",
]
FOREIGN = [
    *("../outside", "good-0/../../outside", "..", ".", "/", "./../outside", "good-0/../good-1", "link", "link/x"),
    *("loop", "~/x", "~root", "http://host/x", "file:///etc", "s3://bucket/x", "\\\\host\\share", "good-0\\..\\x"),
    *("/etc", "/etc/passwd", "//etc", "/proc/self/cwd/etc", "..%2foutside/..", "%2e%2e/../outside"),
]


@pytest.mark.usefixtures("beside_adapters")
def test_row_31_unknown_adapters(adapter_server, root):
    before = loads(adapter_server)
    for name in UNKNOWN:
        error = refused(adapter_server, COMPLETIONS, status=404, model=name)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert loads(adapter_server) == before


@pytest.mark.usefixtures("beside_adapters")
def test_row_32_paths_that_lead_out(adapter_server, root):
    before = loads(adapter_server)
    other_spellings = ["good-0/", "./good-0", "good-0/.", ".//good-0", str(root / "adapters" / "good-0")]
    for name in [*FOREIGN, str(root / "outside"), *other_spellings]:
        status, body = ask(adapter_server, COMPLETIONS, model=name)
        error = body["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model"), name
        assert str(root) not in error["message"].replace(name[:20], "")
    for path in [*FOREIGN, str(root / "outside")]:
        status, body = admin(adapter_server, LOAD, lora_name="new", lora_path=path)
        assert (status, body["error"]["param"]) == (403, "lora_path"), (path, body)
    assert loads(adapter_server) == before
    assert len(adapter_server.json("/v1/models")[1]["data"]) == 1


@pytest.mark.usefixtures("beside_adapters")
def test_row_33_folders_that_are_no_adapter(adapter_server):
    error = refused(adapter_server, COMPLETIONS, model="empty")
    assert (error["code"], error["param"]) == ("adapter_refused", "model")
    assert "adapter_config.json" in error["message"]
    status, body = admin(adapter_server, LOAD, lora_name="new", lora_path="empty")
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "adapter_refused", "lora_path")
    assert text_of(ask(adapter_server, COMPLETIONS, model="good-1"))[1] == "length"


@pytest.mark.usefixtures("beside_adapters")
def test_row_34_more_adapters_than_slots(adapter_server):
    held = [
        OpenStream(adapter_server, {"model": name, "prompt": "long", "max_tokens": 3000, "ignore_eos": True})
        for name in ADAPTERS[:SLOTS]
    ]
    for stream in held:
        stream.read(1)
    with ThreadPoolExecutor(len(ADAPTERS) - SLOTS) as pool:
        others = [pool.submit(ask, adapter_server, COMPLETIONS, model=name) for name in ADAPTERS[SLOTS:]]
        until(lambda: adapter_server.metrics()["blade_llm:num_requests_waiting_for_lora"] == len(others))
        # Those in use are pinned: their requests go on.
        assert [chunk["model"] for stream in held for chunk in stream.read(1)] == ADAPTERS[:SLOTS]
        assert not any(future.done() for future in others)
        held[0].close()
        assert [text_of(future.result())[1] for future in others] == ["length"] * len(others)
    held[1].close()
    until(lambda: adapter_server.metrics()["blade_llm:lora_slots_used"] == 0)


def admin(server, path, key=ADMIN_KEY, **fields):
    return server.json(path, fields, headers={"Authorization": f"Bearer {key}"})


WRONG_KEYS = ["", "Bearer", "Bearer wrong", f"Basic {ADMIN_KEY}", ADMIN_KEY, f"Bearer {ADMIN_KEY}x"]
SPELLINGS = ["{}", "{}%0A", "/{}", "{}/", "/v1/..{}", "/health/..{}"]


@pytest.mark.usefixtures("beside_adapters")
def test_row_58_admin_routes_without_the_admin_key(adapter_server):
    body = {"lora_name": "new", "lora_path": "good-0"}
    for path in (LOAD, UNLOAD):
        assert assert_error(adapter_server.request(path, body), 401)["code"] == "invalid_api_key"
        for key in WRONG_KEYS:
            assert_error(adapter_server.request(path, body, headers={"Authorization": key}), 401)
        for spelling in SPELLINGS:
            assert adapter_server.request(spelling.format(path), body)[0] in (401, 404), spelling
        assert_error(adapter_server.request(path), 405)
    assert [card["id"] for card in adapter_server.json("/v1/models")[1]["data"]] == ["demo"]
    for path in (LOAD, UNLOAD):
        assert admin(adapter_server, path, **body)[0] == 200


def test_row_58_keys_of_clients_are_not_the_admins():
    keys = Authenticator(["client"], ["admin"])
    keys.check("/v1/models", b"Bearer client")
    keys.check("/v1/models", b"Bearer admin")
    keys.check_admin(b"Bearer admin")
    for authenticator, key in ((keys, b"Bearer client"), (Authenticator(["client"]), b"Bearer client")):
        with pytest.raises(ApiError) as caught:
            authenticator.check_admin(key)
        assert caught.value.status == 401
    with pytest.raises(ApiError):
        Authenticator([]).check_admin(None)


def test_row_58_no_admin_routes_by_default(fake_server):
    for path in (LOAD, UNLOAD):
        for headers in ({}, {"Authorization": f"Bearer {ADMIN_KEY}"}, {"Authorization": "Bearer "}):
            assert fake_server.request(path, {"lora_name": "a", "lora_path": "b"}, headers=headers)[0] == 404
    assert not [path for path in json.loads(fake_server.request("/openapi.json")[1])["paths"] if "lora" in path]
