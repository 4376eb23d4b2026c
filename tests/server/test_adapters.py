"""Adapters in the OpenAI-compatible server, beside the fake engine, whose answers depend on the adapter's content."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import random
import threading
import time
import uuid

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.lora.names import AdapterNames
from bladellm_runtime.server.adapters import Adapters, make_adapters
from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.named_adapters import NamedAdapter, NamedAdapters
from tests.support.fake_adapters import checksum, save_fake_adapter
from tests.support.live import LiveServer, OpenStream, completion_text, fake_answer, fake_command, until

ADMIN = "the admin's key"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def start(root, *modules, front_ends=1, **settings):
    """A server of adapters below `root / "adapters"`, with an admin key."""
    key = root / "key"
    key.write_text(f"{ADMIN}\n")
    return LiveServer(
        fake_command(**{"step_seconds": 0.004, "max_loras": 2, **settings}),
        enable_lora=True,
        lora_dir=str(root / "adapters"),
        lora_modules=list(modules),
        admin_api_key_file=str(key),
        frontend_processes=front_ends,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of adapters: one and team/two below the root, given outside of it."""
    root = tmp_path_factory.mktemp("lora")
    for name in ("adapters/one", "adapters/team/two", "given"):
        save_fake_adapter(root / name, uuid.uuid4().hex)
    return root


@pytest.fixture(scope="module")
def server(root):
    with start(root, f"tuned={root / 'given'}", front_ends=2) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def admin(server, path, **fields):
    """Status and answer of an admin route."""
    return server.json(path, fields, headers={"Authorization": f"Bearer {ADMIN}"})


def answer(server, model, prompt="Once", tokens=12):
    """The text of a streamed completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return completion_text(server.stream("/v1/completions", body))


def test_the_model_of_a_request_is_its_adapter(client, root):
    folders = {
        "tuned": root / "given",
        "one": root / "adapters" / "one",
        "team/two": root / "adapters" / "team" / "two",
    }
    for model, folder in folders.items():
        expected = fake_answer("Once", 9, adapter=checksum(folder))
        assert expected != fake_answer("Once", 9)
        found = client.completions.create(model=model, prompt="Once", max_tokens=9, extra_body={"ignore_eos": True})
        assert (found.choices[0].text, found.model) == (expected, model)
        chat = [{"role": "user", "content": "Once"}]
        parts = list(client.chat.completions.create(model=model, messages=chat, max_tokens=5, stream=True))
        assert {part.model for part in parts} == {model}
    base = client.completions.create(model="demo", prompt="Once", max_tokens=9, extra_body={"ignore_eos": True})
    assert (base.choices[0].text, base.model) == (fake_answer("Once", 9), "demo")


def test_models_with_a_name_are_listed_under_the_base(client, root):
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["demo", "tuned"]
    assert (cards["tuned"].parent, cards["tuned"].root, cards["tuned"].owned_by) == ("demo", "given", "bladellm")
    assert client.models.retrieve("tuned") == cards["tuned"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("one")


def test_unknown_names_are_refused_by_tokenize_too(server):
    messages = [{"role": "user", "content": "Hi"}]
    assert server.json("/tokenize", {"model": "one", "messages": messages})[0] == 200
    status, body = server.json("/tokenize", {"model": "nothing", "messages": messages})
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_loading_gives_a_name_and_unloading_takes_it(server, client, root):
    folder = save_fake_adapter(root / "adapters" / "fresh", "first")
    assert answer(server, "fresh") == fake_answer("Once", 12, adapter=checksum(folder))
    assert admin(server, LOAD, lora_name="new", lora_path="fresh")[0] == 200
    assert client.models.retrieve("new").root == "fresh"
    save_fake_adapter(folder, "second")
    status, body = admin(server, LOAD, lora_name="new", lora_path="fresh")
    assert (status, body["error"]["code"]) == (409, "name_taken")
    assert admin(server, UNLOAD, lora_name="new")[0] == 200
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("new")
    assert server.json("/v1/completions", {"model": "new", "prompt": "Once"})[0] == 404
    assert admin(server, LOAD, lora_name="new", lora_path=str(folder))[0] == 200
    assert answer(server, "new") == fake_answer("Once", 12, adapter=checksum(folder))
    assert admin(server, UNLOAD, lora_name="new")[0] == 200
    status, body = admin(server, UNLOAD, lora_name="new")
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "adapter_not_found", "lora_name")


def test_loading_reads_files_anew_that_requests_have_left_on_the_device(server, root):
    folder = save_fake_adapter(root / "adapters" / "changing", "old")
    answer(server, "changing")
    save_fake_adapter(folder, "new")
    assert admin(server, LOAD, lora_name="changed", lora_path="changing")[0] == 200
    assert answer(server, "changed") == fake_answer("Once", 12, adapter=checksum(folder))
    assert admin(server, UNLOAD, lora_name="changed")[0] == 200


def test_an_adapter_in_use_is_not_unloaded(server, root):
    save_fake_adapter(root / "adapters" / "busy")
    assert admin(server, LOAD, lora_name="busy-one", lora_path="busy")[0] == 200
    stream = OpenStream(server, {"model": "busy-one", "prompt": "long", "max_tokens": 3000, "ignore_eos": True})
    stream.read(1)
    status, body = admin(server, UNLOAD, lora_name="busy-one")
    assert (status, body["error"]["code"]) == (409, "adapter_in_use")
    assert str(root) not in body["error"]["message"]
    assert stream.read(1)[0]["model"] == "busy-one"
    stream.close()
    until(lambda: admin(server, UNLOAD, lora_name="busy-one")[0] == 200)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x" * 257, "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": 5, "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "demo", "lora_path": "one"}, 409, "lora_name"),
        ({"lora_name": "tuned", "lora_path": "one"}, 409, "lora_name"),
        ({"lora_name": "x", "lora_path": "one", "load_inplace": True}, 400, "load_inplace"),
        ({"lora_name": "x", "lora_path": "missing"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "../given"}, 403, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "lora_path"),
        ({"lora_name": "x", "lora_path": "http://host/x"}, 403, "lora_path"),
        ({"lora_name": "x", "lora_path": "team"}, 400, "lora_path"),
    ],
)
def test_bad_loads_are_refused(server, fields, status, param):
    found, body = admin(server, LOAD, **fields)
    assert (found, body["error"]["param"]) == (status, param), body
    assert [card["id"] for card in server.json("/v1/models")[1]["data"]] == ["demo", "tuned"]


def test_the_metrics_name_the_adapters_of_open_requests(server, root):
    before = server.metrics()
    streams = [
        OpenStream(server, {"model": model, "prompt": "long", "max_tokens": 3000, "ignore_eos": True})
        for model in ("tuned", "one")
    ]
    for stream in streams:
        stream.read(1)
    waiting = OpenStream(server, {"model": "team/two", "prompt": "long", "max_tokens": 5})
    until(lambda: server.metrics()["blade_llm:num_requests_waiting_for_lora"] == 1)
    until(lambda: lora_info(server) == ("2", "one,tuned", "team/two"))
    now = server.metrics()
    assert (now["blade_llm:lora_slots"], now["blade_llm:lora_slots_used"]) == (2, 2)
    for stream in streams:
        stream.close()
    assert waiting.rest()[-1]["choices"][0]["finish_reason"] == "length"
    until(lambda: server.metrics()["blade_llm:lora_slots_used"] == 0)
    after = server.metrics()
    assert after["blade_llm:lora_evictions_total"] > before["blade_llm:lora_evictions_total"]
    assert after["blade_llm:lora_loads_total"] > before["blade_llm:lora_loads_total"]
    until(lambda: lora_info(server) == ("2", "", ""))


def lora_info(server):
    """Slots, running and waiting adapters, by the labels of the gauge for routers."""
    text = server.request("/metrics")[1].decode()
    (family,) = [item for item in text_string_to_metric_families(text) if item.name == "blade_llm:lora_requests_info"]
    (sample,) = family.samples
    return tuple(sample.labels[name] for name in ("max_lora", "running_lora_adapters", "waiting_lora_adapters"))


@contextlib.contextmanager
def connections(server):
    """Connections that are open side by side; every front end holds some of them."""
    opened = []
    while not opened or not all(established(pid) for pid in server.front_end_pids()):
        opened.append(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30))
        opened[-1].connect()
        assert len(opened) < 200, "one process takes all connections"
        time.sleep(0.02)
    yield opened
    for connection in opened:
        connection.close()


def statuses(opened, path, body=None):
    """How a request is answered on each of the connections."""
    found = set()
    for connection in opened:
        method = "GET" if body is None else "POST"
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        found.add(response.status)
    return found


def established(pid):
    """Whether a process has connections of clients."""
    return any(item.status == psutil.CONN_ESTABLISHED for item in psutil.Process(pid).net_connections("tcp"))


def test_names_hold_in_every_front_end(server, root):
    save_fake_adapter(root / "adapters" / "shared")
    with connections(server) as opened:
        for name in ("first", "second"):
            assert statuses(opened, f"/v1/models/{name}") == {404}
            assert admin(server, LOAD, lora_name=name, lora_path="shared")[0] == 200
            assert statuses(opened, f"/v1/models/{name}") == {200}
            body = {"model": name, "prompt": "x", "max_tokens": 1}
            assert statuses(opened, "/v1/completions", body) == {200}
        for name in ("first", "second"):
            until(lambda: admin(server, UNLOAD, lora_name=name)[0] == 200)  # noqa: B023
            assert statuses(opened, f"/v1/models/{name}") == {404}


def test_whoever_comes_later_knows_what_was_named_before(tmp_path):
    modules = {"given": NamedAdapter("given", "/given", 1)}
    log = tmp_path / "log"
    parts = [NamedAdapters(modules, log) for _ in range(4)]
    names = [f"n{number}" for number in range(40)]

    def change(part: NamedAdapters) -> int:
        added = [name for name in names if part.add(NamedAdapter(name, "/folder", 2))]
        return len(added) + 100 * part.remove("given")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(change, parts))
    assert sum(counts) == len(names) + 100, "each name is given once, and taken once"
    with log.open("ab") as file:
        file.write(b'{"name": "half a line of one that died')
    late = NamedAdapters(modules, log)
    for part in (*parts, late):
        assert sorted(part.current()) == sorted(names)
    assert late.remove("n0")
    assert not late.remove("n0")
    assert all("n0" not in part.current() for part in parts)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_adapters_come_and_go_under_load_and_no_request_is_lost(tmp_path, count):
    root = tmp_path
    folders = [save_fake_adapter(root / "adapters" / f"a{number}", uuid.uuid4().hex) for number in range(count)]
    sums = [checksum(folder) for folder in folders]
    front_ends = 1 if count == 10 else 2
    with start(root, front_ends=front_ends, step_seconds=0.001, max_loras=3, lora_load_seconds=0.002) as server:
        done = threading.Event()

        def ask(seed: int) -> int:
            source, answers = random.Random(seed), 0
            while not done.is_set() or answers < 10:
                number = source.randrange(count)
                model = source.choice([f"a{number}", f"a{number}", "demo"])
                adapter = sums[number] if model != "demo" else 0
                prompt = f"{seed} {answers}"
                assert answer(server, model, prompt, 5) == fake_answer(prompt, 5, adapter=adapter)
                answers += 1
            return answers

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            asking = [pool.submit(ask, seed) for seed in range(6)]
            try:
                for number in range(count):
                    name = f"named-{number}"
                    until(lambda: admin(server, LOAD, lora_name=name, lora_path=f"a{number}")[0] == 200, 30.0)  # noqa: B023
                    assert answer(server, name, "x", 3) == fake_answer("x", 3, adapter=sums[number])
                    until(lambda: admin(server, UNLOAD, lora_name=name)[0] == 200, 30.0)  # noqa: B023
            finally:
                done.set()
            assert all(future.result() >= 10 for future in asking)
        until(lambda: server.gauges() == (0, 0, 0), 5.0, "an idle engine")
        assert server.metrics()["blade_llm:lora_slots_used"] == 0
        assert [card["id"] for card in server.json("/v1/models")[1]["data"]] == ["demo"]


def test_a_file_system_that_hangs_holds_up_only_those_who_name_new_paths(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    answers = threading.Event()
    named = NamedAdapters({"named": NamedAdapter("named", "/folder", 1)}, None)
    adapters = Adapters(["m"], named, tmp_path)

    async def check() -> None:
        assert (await adapters.find("one")).folder == tmp_path / "one"
        monkeypatch.setattr(AdapterNames, "find", lambda *_: answers.wait(60))
        monkeypatch.setattr("bladellm_runtime.server.adapters.LOOK_SECONDS", 0.05)
        for _ in range(5):
            with pytest.raises(ApiError) as caught:
                await adapters.find("two")
            assert (caught.value.status, caught.value.code) == (503, "adapter_folder_stuck")
        assert await adapters.find("m") is None
        assert (await adapters.find("named")).key == "/folder"

    asyncio.run(check())
    answers.set()
    adapters.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora_dir": "x"}, "--enable_lora"),
        ({"lora_modules": ["a=b"]}, "--enable_lora"),
        ({"admin_api_key_file": "x"}, "--enable_lora"),
        ({"enable_lora": True, "admin_api_key_file": "x"}, "--lora_dir"),
    ],
)
def test_flags_that_need_others(flags, words):
    with pytest.raises(ConfigError, match=words):
        make_adapters(ServingArgs(model="m", **flags), ["m"], None)


def test_folders_and_names_are_checked_at_the_start(tmp_path):
    save_fake_adapter(tmp_path / "one", "")
    for flags, words in (
        ({"lora_dir": str(tmp_path / "none")}, "--lora_dir"),
        ({"lora_modules": [f"m={tmp_path / 'one'}"]}, "the model's name"),
        ({"lora_modules": [f"a={tmp_path / 'none'}"]}, "is not a folder"),
        ({"lora_modules": [f"a={tmp_path}"]}, "has no adapter_config.json in it"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_adapters(ServingArgs(model="m", enable_lora=True, **flags), ["m"], None)
