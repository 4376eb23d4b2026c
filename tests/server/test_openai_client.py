"""The whole server with its real engine, through the official openai client; transformers says what is right."""

import asyncio
import random

import openai
import pytest

from tests.engine.reference import PROMPTS
from tests.server.openai_support import (
    QUESTIONS,
    chat_prompt,
    counters,
    decode,
    encode,
    gather,
    gather_parts,
    generate,
    greedy,
    text_of,
    tokenizer,
    user,
)
from tests.support.live import until

STREAM = pytest.mark.parametrize("stream", [False, True])
GREEDY = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def server(real_server):
    return real_server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@STREAM
def test_completions_are_transformers_greedy_text(client, stream):
    for prompt in PROMPTS[:3]:
        answer = client.completions.create(
            prompt=prompt, max_tokens=48, stream=stream, extra_body={"ignore_eos": True}, **GREEDY
        )
        [choice], _ = gather(answer)
        assert choice.text == decode(greedy(prompt, 48)), prompt
        assert choice.finish == "length"


@STREAM
def test_chat_is_transformers_greedy_answer_up_to_its_end(client, stream):
    for question in QUESTIONS:
        prompt = chat_prompt(question)
        wanted = generate(prompt, 80)
        assert wanted[-1] == 2, "the reference ends by itself"
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.chat.completions.create(messages=user(question), stream=stream, **options, **GREEDY)
        [choice], usage = gather(answer)
        assert choice.text == decode(wanted)
        assert choice.finish == "stop"
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(wanted))
        assert usage.total_tokens == len(prompt) + len(wanted)


def test_a_conversation_with_several_turns_and_a_system_message(client):
    messages = [
        {"role": "system", "content": "You count things."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Five."},
        {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
    ]
    plain = [*messages[:3], {"role": "user", "content": "And then?"}]
    prompt = tokenizer().apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    answer = client.chat.completions.create(messages=messages, max_completion_tokens=24, **GREEDY)
    assert answer.choices[0].message.content == decode(generate(prompt, 24))
    assert answer.usage.prompt_tokens == len(prompt)


@STREAM
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_answers_have_the_protocols_fields(client, kind, stream):
    if kind == "chat":
        answer = client.chat.completions.create(messages=user("Hi"), max_tokens=5, stream=stream, model="alias")
        objects = ("chat.completion", "chat.completion.chunk")
    else:
        answer = client.completions.create(prompt="Hi", max_tokens=5, stream=stream, model="alias")
        objects = ("text_completion", "text_completion")
    parts = list(answer) if stream else [answer]
    assert len({(part.id, part.created) for part in parts}) == 1
    assert {(part.model, part.object) for part in parts} == {("alias", objects[stream])}
    if stream:
        assert all(part.usage is None for part in parts), "nobody asked for usage"
    if kind == "chat":
        first = parts[0].choices[0]
        assert (first.delta if stream else first.message).role == "assistant"


@STREAM
def test_usage_counts_each_prompt_once_and_every_choice(client, stream):
    prompts = [random.choice(PROMPTS), "Two", PROMPTS[3]]
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(
        model="demo", prompt=prompts, n=3, max_tokens=7, stream=stream, extra_body={"ignore_eos": True}, **options
    )
    parts = list(answer) if stream else [answer]
    choices, usage = gather_parts(parts)
    assert len(choices) == 9
    assert usage.prompt_tokens == sum(len(encode(prompt)) for prompt in prompts)
    assert usage.completion_tokens == 9 * 7
    if stream:
        assert parts[-1].choices == []
        assert all(part.usage is None for part in parts[:-1])


def test_continuous_usage_counts_up_token_by_token(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(prompt=PROMPTS[0], max_tokens=20, stream=True, stream_options=options, **GREEDY)
    usages = [part.usage for part in stream]
    assert all(usage.prompt_tokens == len(encode(PROMPTS[0])) for usage in usages)
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-2:] == [20, 20]
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)


@pytest.mark.parametrize(("given", "tokens"), [({}, 16), ({"max_tokens": 1}, 1), ({"max_tokens": 33}, 33)])
def test_max_tokens_of_completions(client, given, tokens):
    answer = client.completions.create(prompt=PROMPTS[1], **given, **GREEDY)
    assert answer.choices[0].text == decode(greedy(PROMPTS[1], 33)[:tokens])
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", tokens)


def test_max_tokens_beyond_the_context_ends_where_the_context_does(client):
    prompt = [random.randrange(300, 8000) for _ in range(4096 - 9)]
    answer = client.completions.create(prompt=prompt, max_tokens=100, extra_body={"ignore_eos": True}, **GREEDY)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4096 - 9, 9)
    assert answer.choices[0].finish_reason == "length"


@STREAM
def test_prompts_as_lists_and_token_ids_are_the_same_prompts(client, stream):
    texts = [PROMPTS[1], PROMPTS[5], PROMPTS[8]]
    ids = [encode(text) for text in texts]
    for prompts in (texts, ids):
        answer = client.completions.create(prompt=prompts, max_tokens=12, stream=stream, **GREEDY)
        choices, _ = gather(answer)
        assert [choice.text for choice in choices] == [decode(greedy(text, 12)) for text in texts]
    [choice], _ = gather(client.completions.create(prompt=ids[1], max_tokens=12, stream=stream, **GREEDY))
    assert choice.text == decode(greedy(texts[1], 12))


def test_choices_of_a_stream_are_interleaved(client):
    stream = client.completions.create(
        model="demo", prompt=PROMPTS[8], n=4, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [choice for part in stream for choice in part.choices]
    started = max(min(place for place, chunk in enumerate(chunks) if chunk.index == index) for index in range(4))
    ended = min(place for place, chunk in enumerate(chunks) if chunk.finish_reason)
    assert started < ended, "every choice begins before any ends"
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 4


@pytest.mark.parametrize("streams", [64])
def test_many_concurrent_streams_are_all_right(server, streams):
    lengths = [random.randint(1, 48) for _ in range(streams)]

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            prompt=PROMPTS[number % 10],
            max_tokens=lengths[number],
            stream=True,
            extra_body={"ignore_eos": True},
            **GREEDY,
        )
        return "".join([text_of(choice) async for part in stream for choice in part.choices])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(streams)))

    for number, text in enumerate(asyncio.run(all_of_them())):
        ids = greedy(PROMPTS[number % 10], 48)[: lengths[number]]
        assert text == decode(ids), (PROMPTS[number % 10], lengths[number])


def test_a_client_that_leaves_frees_its_slots(server, client):
    before = counters(server)
    stream = client.completions.create(
        model="demo", prompt=PROMPTS[0], n=2, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    for _, part in zip(range(4), stream, strict=False):
        assert part.choices
    assert server.gauges()[0] == 2
    stream.close()
    until(lambda: server.gauges() == (0, 0, 0), 2.0, "an idle engine without KV in use")
    after = counters(server)
    assert after["client_disconnects"] == before["client_disconnects"] + 1
    assert after["request_success:abort"] == before.get("request_success:abort", 0) + 2


def test_a_client_that_gives_up_waiting_frees_its_slots(server, client):
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model="demo", prompt=PROMPTS[0], n=3, max_tokens=3000, timeout=0.2, extra_body={"ignore_eos": True}
        )
    until(lambda: server.gauges() == (0, 0, 0), 2.0, "an idle engine without KV in use")


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert client.models.retrieve("demo").owned_by == "bladellm"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        client.models.retrieve("gpt-4")


def test_headers(client):
    raw = client.completions.with_raw_response.create(
        prompt="Hi", max_tokens=1, extra_headers={"X-Request-Id": "my-id.7"}, extra_body={"no_such": 1}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "my-id.7"
    assert raw.headers["x-ignored-fields"] == "no_such"
    assert raw.parse().choices[0].text == decode(greedy("Hi", 1))
    raw = client.completions.with_raw_response.create(prompt="Hi", max_tokens=1, stream=True, **GREEDY)
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.headers["x-request-id"]
    assert "x-ignored-fields" not in raw.headers
    assert len(list(raw.parse())) == 1


def test_tokenize_and_detokenize(server):
    text = "".join(random.choice("abc XYZ 12,.\n\t äß漢字🙂👩‍👩‍👧") for _ in range(200))
    status, answer = server.json("/tokenize", {"model": "demo", "prompt": text})
    assert (status, answer["tokens"], answer["count"]) == (200, encode(text), len(encode(text)))
    assert answer["max_model_len"] == 4096
    assert server.json("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})
    assert server.json("/tokenize", {"messages": user(text)})[1]["tokens"] == chat_prompt(text)


def test_probes(server):
    assert server.json("/health") == (200, {"status": "ok"})
    assert server.json("/ready") == (200, {"status": "ok"})
    assert set(server.json("/version")[1]) == {"version"}


def test_counters_agree_with_the_usage_of_the_answers(server, client):
    before = counters(server)
    one = client.chat.completions.create(messages=user(QUESTIONS[0]), **GREEDY)
    two = client.completions.create(prompt=[PROMPTS[0], PROMPTS[1]], max_tokens=9, **GREEDY)
    stream = client.completions.create(
        prompt=PROMPTS[2], max_tokens=30, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    _, three = gather(stream)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt="Hi", max_tokens=0, model="demo")
    after = counters(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    usages = [one.usage, two.usage, three]
    assert grown["prompt_tokens"] == grown["request_prompt_tokens_sum"] == sum(u.prompt_tokens for u in usages)
    tokens = sum(u.completion_tokens for u in usages)
    assert grown["generation_tokens"] == grown["request_generation_tokens_sum"] == tokens
    assert grown["inter_token_latency_seconds_count"] == tokens - 4
    assert (grown["request_success:stop"], grown["request_success:length"]) == (1, 3)
    assert (grown["requests_rejected:400"], grown["client_disconnects"]) == (1, 0)
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 4
    assert 0 < grown["request_decode_time_seconds_sum"] < grown["e2e_request_latency_seconds_sum"]
