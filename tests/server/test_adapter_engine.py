"""Adapters through the whole server and the real engine: log-probabilities against transformers with merged weights."""

import concurrent.futures
import contextlib
import random
import re
import shutil
import uuid

import psutil
import pytest
import torch

from tests.conftest import DEMO
from tests.engine import reference
from tests.lora import folders
from tests.server.openai_support import LOGPROB_TOLERANCE, encode
from tests.support.live import LiveServer, OpenStream, until

TARGETS = [folders.MODULES, ("q_proj", "v_proj"), ("gate_proj", "down_proj"), ("k_proj", "o_proj", "up_proj")]
NAMES = [f"adapter-{number}" for number in range(len(TARGETS))]
SLOTS = 2
ADMIN = {"Authorization": "Bearer admin"}
PROMPTS = ("Once upon a time there was a", "The ship had left the harbour when", "Two and two is four, and")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Merged models by the names of their adapters, whose folders lie in `root`; "demo" is the base."""
    root = tmp_path_factory.mktemp("lora")
    base = reference.load(DEMO)[0]
    found = {"demo": base}
    for name, targets in zip(NAMES, TARGETS, strict=True):
        folder = folders.save_adapter(root / "adapters" / name, base, rank=random.randint(1, 16), targets=targets)
        found[name] = folders.merged(base, folder)
    return root, found


@pytest.fixture(scope="module")
def server(models, device):
    root, _ = models
    (root / "admin").write_text("admin")
    flags = {"max_loras": SLOTS, "max_cpu_loras": SLOTS + 1, "max_lora_rank": 16, "kv_cache_gib": 0.0625}
    files = {"lora_dir": str(root / "adapters"), "admin_api_key_file": str(root / "admin")}
    modules = [f"given={root / 'adapters' / NAMES[0]}"]
    with LiveServer("real", enable_lora=True, lora_modules=modules, device=device, **flags, **files) as server:
        yield server


def scored(server, model, prompt):
    """The log-probabilities of a prompt's tokens from the second on."""
    body = {"model": model, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    status, answer = server.json("/v1/completions", body)
    assert (status, answer.get("model")) == (200, model), answer
    return torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"][1:])


@torch.inference_mode()
def expected(model, prompt):
    """The same by transformers."""
    ids = torch.tensor([encode(prompt)])
    logprobs = model(ids).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


def test_adapters_and_the_base_side_by_side_score_as_merged_models(server, models):
    merged = models[1]
    asked = [(name, prompt) for prompt in PROMPTS for name in ("demo", *NAMES)] + [("given", PROMPTS[0])]
    random.shuffle(asked)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda item: scored(server, *item), asked))
    for (name, prompt), scores in zip(asked, found, strict=True):
        wanted = expected(merged[NAMES[0] if name == "given" else name], prompt)
        torch.testing.assert_close(scores, wanted, atol=LOGPROB_TOLERANCE, rtol=0, msg=lambda text: f"{name}: {text}")  # noqa: B023
        if name != "demo":
            assert (wanted - expected(merged["demo"], prompt)).abs().max() > 50 * LOGPROB_TOLERANCE
    values = server.metrics()
    assert values["blade_llm:lora_slots"] == SLOTS
    assert values["blade_llm:lora_loads_total"] >= len(NAMES)
    assert values["blade_llm:lora_evictions_total"] >= len(NAMES) - SLOTS
    until(lambda: server.metrics()["blade_llm:lora_slots_used"] == 0)


def admin(server, path, **fields):
    return server.json(path, fields, headers=ADMIN)


def asked(server, model, prompt, **fields):
    """A choice of an answer, and how many tokens of the prompt the cache had."""
    status, answer = server.json("/v1/completions", {"model": model, "prompt": prompt, "temperature": 0, **fields})
    assert status == 200, answer
    return answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_adapters_share_no_cached_prompts(server):
    prompt = " ".join([uuid.uuid4().hex, *(f"{random.choice(PROMPTS)} {number}." for number in range(60))])
    found = {}
    for model in ("demo", *NAMES[:2]):
        first, cached = asked(server, model, prompt, max_tokens=1, logprobs=5)
        assert cached == 0
        again, cached = asked(server, model, prompt, max_tokens=1, logprobs=5)
        assert cached > 0
        found[model], reused = (
            torch.tensor(sorted(choice["logprobs"]["top_logprobs"][0].values())) for choice in (first, again)
        )
        torch.testing.assert_close(reused, found[model], atol=LOGPROB_TOLERANCE, rtol=0)
    assert all((found[name] - found["demo"]).abs().max() > 50 * LOGPROB_TOLERANCE for name in NAMES[:2])


def test_an_adapter_under_a_constraint(server):
    pattern = "[0-9]{3}-[a-f]{2}(x|yz)"
    for model in ("demo", *NAMES):
        choice, _ = asked(server, model, "The number is", guided_regex=pattern, max_tokens=40)
        assert re.fullmatch(pattern, choice["text"]), choice


def test_a_changed_folder_is_read_at_the_next_load(server, models):
    root, merged = models
    folder = root / "adapters" / "changing"
    shutil.copytree(root / "adapters" / NAMES[0], folder)
    for source in (NAMES[0], NAMES[1]):
        for name in (folders.CONFIG, folders.TENSORS):
            shutil.copy(root / "adapters" / source / name, folder / name)
        assert admin(server, "/v1/load_lora_adapter", lora_name="changing-one", lora_path="changing")[0] == 200
        scores = scored(server, "changing-one", PROMPTS[0])
        torch.testing.assert_close(scores, expected(merged[source], PROMPTS[0]), atol=LOGPROB_TOLERANCE, rtol=0)
        until(lambda: admin(server, "/v1/unload_lora_adapter", lora_name="changing-one")[0] == 200)


@contextlib.contextmanager
def broken(root, models, name):
    """A folder that is a good adapter, to be spoiled."""
    folder = root / "adapters" / name
    shutil.copytree(root / "adapters" / NAMES[0], folder)
    yield folder
    shutil.rmtree(folder)


def without_config(folder):
    (folder / folders.CONFIG).unlink()


def rank_above(folder):
    folders.edit_config(folder, r=17)


def pickled(folder):
    (folder / folders.TENSORS).rename(folder / "adapter_model.bin")


def shape_of_another_model(folder):
    folders.edit_tensors(folder, **{f"{folders.PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(3, 7)})


def not_a_number(folder):
    tensors = folders.load_file(folder / folders.TENSORS)
    name = random.choice(sorted(tensors))
    tensor = tensors[name].clone()
    tensor.view(-1)[random.randrange(tensor.numel())] = random.choice([float("nan"), float("inf")])
    folders.edit_tensors(folder, **{name: tensor})


def unknown_module(folder):
    folders.edit_tensors(folder, **{f"{folders.PREFIX}lm_head.lora_A.weight": torch.ones(4, 4)})


SPOILERS = {
    without_config: folders.CONFIG,
    rank_above: "--max_lora_rank",
    pickled: folders.TENSORS,
    shape_of_another_model: "q_proj",
    not_a_number: "finite",
    unknown_module: "lm_head",
}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_row_33_folders_that_are_no_adapter(server, models, spoil):
    root, merged = models
    stream = OpenStream(server, {"model": "demo", "prompt": "Once", "max_tokens": 400, "ignore_eos": True})
    stream.read(1)
    with broken(root, models, spoil.__name__) as folder:
        spoil(folder)
        for path, body in (
            ("/v1/completions", {"model": spoil.__name__, "prompt": "Once"}),
            ("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": spoil.__name__}),
        ):
            status, answer = server.json(path, body, headers=ADMIN)
            error = answer["error"]
            assert (status, error["code"], error["type"]) == (400, "adapter_refused", "invalid_request_error")
            assert error["param"] == ("model" if "model" in body else "lora_path")
            assert SPOILERS[spoil] in error["message"]
            assert str(root) not in error["message"]
    assert stream.read(1)[0]["choices"][0]["finish_reason"] is None
    stream.close()
    scores = scored(server, NAMES[1], PROMPTS[1])
    torch.testing.assert_close(scores, expected(merged[NAMES[1]], PROMPTS[1]), atol=LOGPROB_TOLERANCE, rtol=0)


def test_row_34_more_adapters_than_slots_wait_for_those_in_use(server):
    held = [
        OpenStream(server, {"model": name, "prompt": "Once", "max_tokens": 3500, "ignore_eos": True})
        for name in NAMES[:SLOTS]
    ]
    for stream in held:
        stream.read(1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(scored, server, name, PROMPTS[0]) for name in NAMES[SLOTS:]]
        until(lambda: server.metrics()["blade_llm:num_requests_waiting_for_lora"] == len(others))
        status, body = admin(server, "/v1/unload_lora_adapter", lora_name="given")
        assert (status, body["error"]["code"]) == (409, "adapter_in_use")
        assert [len(stream.read(2)) for stream in held] == [2] * SLOTS
        assert not any(future.done() for future in others)
        for stream in held:
            stream.close()
        assert all(len(future.result()) for future in others)
    until(lambda: server.metrics()["blade_llm:lora_slots_used"] == 0)


@pytest.mark.slow
def test_200_adapters_under_load_cost_no_request_and_no_memory(server, models):
    root, merged = models
    names = [f"many/{number}" for number in range(200)]
    for name in names:
        targets = tuple(random.sample(folders.MODULES, 2))
        folders.save_adapter(root / "adapters" / name, merged["demo"], rank=random.randint(1, 16), targets=targets)

    def ask_all(_: int) -> dict[str, torch.Tensor]:
        return {name: scored(server, name, PROMPTS[2]) for name in random.sample(names, len(names))}

    memory = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            rounds = list(pool.map(ask_all, range(4)))
            memory.append(psutil.Process(server.engine_pid).memory_info().rss)
            for name in names:
                for other in rounds[1:]:
                    torch.testing.assert_close(rounds[0][name], other[name], atol=LOGPROB_TOLERANCE, rtol=0)
    for name in random.sample(names, 20):
        wanted = expected(folders.merged(merged["demo"], root / "adapters" / name), PROMPTS[2])
        torch.testing.assert_close(rounds[0][name], wanted, atol=LOGPROB_TOLERANCE, rtol=0)
    assert memory[2] - memory[0] < 32 * 2**20
    until(lambda: server.metrics()["blade_llm:lora_slots_used"] == 0)
    shutil.rmtree(root / "adapters" / "many")
