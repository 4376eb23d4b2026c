"""Constrained answers of the real engine on random weights, which want anything but JSON, keep to the constraint."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from tests.conftest import DEMO, ROOT
from tests.guided.answers import check_answer
from tests.guided.samples import IPV4, PROFILE
from tests.server.openai_support import gather, user
from tests.support.live import LiveServer

QWEN2 = ROOT.parent / "shared" / "tokenizers" / "qwen2"
SAMPLE = {"temperature": 0, "top_p": 0.5, "top_k": 10, "max_tokens": 200}
"""How BladeLLM's documented client asks."""
ASKED = ({"guided_json": json.dumps(PROFILE)}, {"guided_regex": IPV4})
COLOURS = {"type": "json_schema", "json_schema": {"name": "colours", "strict": True, "schema": {
    "type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3}}}  # fmt: skip


def random_model(folder: Path, vocab_size: int, end_ids: list[int]) -> Path:
    """A model folder for random weights: one small layer."""
    config = json.loads((DEMO / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    other = {"num_hidden_layers": 1, "vocab_size": vocab_size, "eos_token_id": end_ids, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config | sizes | other))
    return folder


@pytest.fixture(scope="module", params=["demo", pytest.param("qwen2", marks=pytest.mark.slow)])
def tokenizer_folder(request) -> Path:
    if request.param == "qwen2" and not QWEN2.is_dir():
        pytest.skip("needs ../shared/tokenizers/qwen2")
    return {"demo": DEMO, "qwen2": QWEN2}[request.param]


@pytest.fixture(scope="module")
def server(tokenizer_folder, tmp_path_factory, device) -> Iterator[LiveServer]:
    size, ends = (8192, [2, 0]) if tokenizer_folder == DEMO else (151_936, [151_645, 151_643])
    model = random_model(tmp_path_factory.mktemp("random"), size, ends)
    with LiveServer(
        "real",
        model=str(model),
        tokenizer_dir=str(tokenizer_folder),
        load_format="dummy",
        dummy_seed=random.randrange(2**60),
        dtype="float32",
        device=device,
        kv_cache_gib=0.06,
        max_model_len=1024,
    ) as live:
        yield live


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def check_all(fields: dict, answer: object, choices: int = 1) -> list[str]:
    """The texts of an answer's choices, each of which keeps to the constraint."""
    found, _ = gather(answer)
    assert len(found) == choices
    for choice in found:
        check_answer(fields, choice.text, choice.finish)
    return [choice.text for choice in found]


@pytest.mark.turns
@pytest.mark.parametrize("fields", ASKED, ids=["json", "regex"])
def test_the_sample_client(server, fields):
    body = {"model": "demo", "prompt": "An employee:", **SAMPLE, **fields}
    chunks = server.stream("/v1/completions", body)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert not any(reasons[:-1])
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    check_answer(fields, text, reasons[-1])
    whole = server.json("/v1/completions", body)[1]["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, reasons[-1])


@pytest.mark.parametrize("fields", ASKED, ids=["json", "regex"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client(client, fields, stream):
    sampling = {"model": "demo", "temperature": 1, "max_tokens": 100, "stream": stream}
    check_all(fields, client.completions.create(prompt="An employee:", extra_body=fields, **sampling))
    check_all(fields, client.chat.completions.create(messages=user("An employee"), extra_body=fields, **sampling))


@pytest.mark.parametrize("stream", [False, True])
def test_openais_response_format(client, stream):
    for wanted in ({"type": "json_object"}, COLOURS):
        answer = client.chat.completions.create(
            model="demo", messages=user("Colours?"), max_tokens=40, response_format=wanted, stream=stream
        )
        check_all({"response_format": wanted}, answer)


class Paint(pydantic.BaseModel):
    wet: bool
    colour: Literal["red", "green"]
    coats: Literal[1, 2]


def test_openais_parsed_answers(client, tokenizer_folder):
    """Without tokens of spaces alone, which could be very many, the answer has an end."""
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    spaces = [token for token in range(backend.get_vocab_size()) if not backend.decode([token]).strip(" \n\t\r")]
    answer = client.chat.completions.parse(
        model="demo",
        messages=user("Paint?"),
        max_tokens=300,
        response_format=Paint,
        logit_bias={str(token): -100 for token in spaces[:1000]},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Paint)


def test_constraints_beside_other_fields(client):
    fields = {"guided_regex": "(ab|cd|ef){4,9}x"}
    body = {"model": "demo", "prompt": ["Letters:", "More:"], "max_tokens": 40, "n": 3, "logprobs": 2, "seed": 7}
    extra = {**fields, "min_tokens": 5, "ignore_eos": True, "repetition_penalty": 1.5, "min_p": 0.01}
    answers = [
        client.completions.create(**body, presence_penalty=1, frequency_penalty=-1, extra_body=extra) for _ in range(2)
    ]
    texts = check_all(fields, answers[0], 6)
    assert texts == check_all(fields, answers[1], 6), "the seed repeats the answers"
    assert len(set(texts)) > 1
    for choice in answers[0].choices:
        assert "".join(choice.logprobs.tokens).startswith(choice.text)
    [echoed] = client.completions.create(
        model="demo", prompt="Letters:", echo=True, max_tokens=40, extra_body=fields
    ).choices
    check_answer(fields, echoed.text.removeprefix("Letters:"), echoed.finish_reason)


def test_one_text_that_is_allowed_is_the_answer(client):
    for fields in ({"guided_choice": ["Ünï: 日本語 😀"]}, {"guided_grammar": 'start: "a" x\nx: "bc" | "d" x'}):
        answer = client.completions.create(prompt="Say", model="demo", max_tokens=100, extra_body=fields)
        if "guided_choice" in fields:
            assert check_all(fields, answer) == fields["guided_choice"]
        else:
            assert answer.choices[0].text.strip("ad") == "bc"


def test_metrics_count_constraints(server, client):
    before = server.metrics()
    pattern = f"[ab]{{3}}{random.randrange(10**9)}"
    for _ in range(2):
        answer = client.completions.create(
            prompt="x", model="demo", max_tokens=30, extra_body={"guided_regex": pattern}
        )
        check_all({"guided_regex": pattern}, answer)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt="x", model="demo", extra_body={"guided_regex": f"(?={pattern})"})
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after if name.startswith("blade_llm:guided_")}
    assert grown["blade_llm:guided_hits_total"] == 1
    assert grown["blade_llm:guided_misses_total"] == 2
    assert grown["blade_llm:guided_refused_total"] == 1
    assert grown["blade_llm:guided_masks_total"] >= 2 * 4
    for name in ("compile_seconds_total", "mask_seconds_total", "cache_bytes"):
        assert grown[f"blade_llm:guided_{name}"] > 0
