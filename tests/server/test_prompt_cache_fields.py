"""What requests say to the prompt cache and what answers and metrics say of it: salts, cached tokens, granules."""

import random
import re
from types import SimpleNamespace

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.errors import ParameterError
from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.limits import Admission
from bladellm_runtime.server.metrics import Metrics, MetricsPage
from bladellm_runtime.wire.messages import EngineStats
from tests.server.calls import BOTH, chat, completion
from tests.support.fake_tokens import DEMO_MODEL, GRANULE_TOKENS, tokenizer
from tests.support.live import LiveServer, fake_command

STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def fake_server():
    with LiveServer(fake_command(step_seconds=0.001)) as live:
        yield live


@pytest.fixture(scope="module", params=["fake", "real"])
def client(request):
    server = request.getfixturevalue(f"{request.param}_server")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as one:
        yield SimpleNamespace(openai=one, server=server, fake=request.param == "fake")


def fresh_prompt(tokens: int) -> list[int]:
    """Token ids that no prompt before had."""
    return [random.randrange(300, 8000) for _ in range(tokens)]


def usage_of(answer):
    """The usage of a whole answer, or the last one of a stream."""
    return answer.usage if hasattr(answer, "choices") else list(answer)[-1].usage


def ask(client, prompt, *, stream=False, salt=None, n=1, **fields):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    extra = {} if salt is None else {"cache_salt": salt}
    return usage_of(
        client.openai.completions.create(
            model="demo", prompt=prompt, max_tokens=3, stream=stream, n=n, extra_body=extra, **options, **fields
        )
    )


def known(tokens: int) -> int:
    """What the fake engine knows of a prompt it has seen: whole granules, not the last token."""
    return (tokens - 1) // GRANULE_TOKENS * GRANULE_TOKENS


# Requests


@BOTH
@pytest.mark.parametrize("salt", ["a", "~" * 256, "tenant-7:Zm9v+/=="])
def test_a_salt_arrives(parse, salt):
    assert parse(cache_salt=salt).cache_salt == salt


@BOTH
def test_without_a_salt_there_is_none_whatever_the_cache_key(parse):
    assert parse().cache_salt == ""
    call = parse(prompt_cache_key="key", prompt_cache_retention="24h", user="me")
    assert (call.cache_salt, call.ignored_fields) == ("", ())


@given(st.text(max_size=5) | st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7F), max_size=300))
def test_salts_are_short_and_printable(salt):
    fine = 0 < len(salt) <= 256 and all(0x21 <= ord(character) <= 0x7E for character in salt)
    for parse in (completion, chat):
        if fine:
            assert parse(cache_salt=salt).cache_salt == salt
        else:
            with pytest.raises(ApiError) as caught:
                parse(cache_salt=salt)
            assert (caught.value.status, caught.value.param) == (400, "cache_salt")


# Answers


@pytest.mark.turns
@STREAM
def test_usage_says_how_much_of_the_prompt_was_cached(client, stream):
    prompt = fresh_prompt(45)
    first, second = ask(client, prompt, stream=stream), ask(client, prompt, stream=stream)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 0 <= second.prompt_tokens_details.cached_tokens < second.prompt_tokens == 45
    if client.fake:
        assert second.prompt_tokens_details.cached_tokens == known(45)
        longer = ask(client, prompt[:33] + fresh_prompt(40), stream=stream)
        assert longer.prompt_tokens_details.cached_tokens == 32
    assert second.total_tokens == second.prompt_tokens + second.completion_tokens


@STREAM
def test_chat_usage_says_it_too(client, stream):
    question = " ".join(random.choices(["red", "green", "blue", "sea", "sky"], k=60))
    options = {"stream_options": {"include_usage": True}} if stream else {}

    def cached(**extra):
        answer = client.openai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], max_tokens=2, stream=stream,
            extra_body=extra, **options,
        )  # fmt: skip
        usage = usage_of(answer)
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    tokens, _ = cached(cache_salt=f"salt{random.random()}")
    salted = cached(cache_salt=(salt := f"salt{random.random()}")), cached(cache_salt=salt)
    assert salted[0] == (tokens, 0)
    if client.fake:
        assert salted[1] == (tokens, known(tokens))


def test_salts_keep_prompts_apart(client):
    prompt = fresh_prompt(70)
    salts = [None, "alice", "bob", "Alice"]
    random.shuffle(salts)
    for salt in salts:
        assert ask(client, prompt, salt=salt).prompt_tokens_details.cached_tokens == 0
    for salt in salts if client.fake else []:
        assert ask(client, prompt, salt=salt).prompt_tokens_details.cached_tokens == known(70)


@STREAM
def test_choices_of_a_prompt_do_not_count_each_other(client, stream):
    new, old = fresh_prompt(40), fresh_prompt(50)
    ask(client, old)
    usage = ask(client, [new, old], n=3, stream=stream)
    assert usage.prompt_tokens == 90
    assert 0 <= usage.prompt_tokens_details.cached_tokens < 50
    if client.fake:
        assert usage.prompt_tokens_details.cached_tokens == known(50)


def test_continuous_usage_has_it_on_every_chunk(client):
    prompt = fresh_prompt(40)
    ask(client, prompt)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.openai.completions.create(
        model="demo", prompt=prompt, max_tokens=5, stream=True, stream_options=options
    )
    cached = {part.usage.prompt_tokens_details.cached_tokens for part in stream}
    assert len(cached) == 1
    if client.fake:
        assert cached == {known(40)}


def test_the_counter_agrees_with_usage(client):
    before = client.server.metrics()
    prompt = fresh_prompt(60)
    usages = [ask(client, prompt) for _ in range(3)]
    after = client.server.metrics()
    grown = {name: after[f"blade_llm:{name}_total"] - before[f"blade_llm:{name}_total"]
             for name in ("prompt_tokens", "prompt_tokens_cached")}  # fmt: skip
    assert grown["prompt_tokens_cached"] == sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert grown["prompt_tokens"] == 180


# Metrics

READINGS = {
    "kv_granules": "kv_granules",
    "kv_granules_used": "kv_granules_used",
    "kv_granules_cached": "kv_granules_cached",
    "kv_granules_shared": "kv_granules_shared",
    "kv_granules_swapped": "kv_granules_swapped",
    "kv_tokens_unused": "kv_tokens_unused",
    "kv_map_seconds_p99": "kv_map_p99",
    "prompt_tokens_total": "prompt_tokens",
    "prompt_tokens_cached_total": "cached_tokens",
    "kv_maps_total": "kv_maps",
    "kv_map_wait_seconds_total": "kv_map_wait",
    "kernel_compiles_after_ready_total": "kernel_compiles_after_ready",
}
"""Sample names and the readings they show."""


def page(stats: EngineStats) -> str:
    client = SimpleNamespace(stats=stats, failure=None, heartbeat_age=lambda: 0.0)
    return MetricsPage(Metrics(), client, Admission(5), "m").text().decode()


def test_every_reading_has_its_metric():
    values = {name: random.randrange(1, 10**6) for name in EngineStats.__struct_fields__}
    values |= {name: random.uniform(0.001, 9) for name in ("kv_map_p99", "kv_map_wait", "step_seconds", "time")}
    text = page(msgspec.convert(list(values.values()), EngineStats))
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    for name, reading in READINGS.items():
        assert samples["blade_llm:" + name] == values[reading], name
        kind = "counter" if name.endswith("_total") else "gauge"
        # A counter's family is printed with its suffix.
        assert f"# TYPE blade_llm:{name} {kind}\n" in text
        assert re.search(rf"^# HELP blade_llm:{name} [A-Z9].*\.$", text, re.M)


# In Python


@pytest.fixture(scope="module")
def llm():
    with LLM(str(DEMO_MODEL), device="cpu", dtype="float32", kv_cache_gib=0.02) as one:
        yield one


@pytest.fixture
def engine(llm, monkeypatch):
    """The engine of `llm`, saying of request after request that 100, 101, ... tokens were cached."""
    core, seen = llm._engine.core, []
    add, step = core.add, core.step

    def marked(deltas):
        for delta in deltas:
            if delta.scheduled_at is not None:
                delta.cached_tokens = 100 + [request.request_id for request in seen].index(delta.request_id)
        return deltas

    monkeypatch.setattr(core, "add", lambda request: (seen.append(request), marked(add(request)))[1])
    monkeypatch.setattr(core, "step", lambda: marked(step()))
    return seen


def test_outputs_of_llm_have_the_cached_tokens_of_their_prompt(llm, engine):
    params = [SamplingParams(n=2, max_tokens=2), SamplingParams(n=1, max_tokens=2), SamplingParams(n=3, max_tokens=1)]
    outputs = llm.generate(["One", "Two", "Three"], params, cache_salt="mine")
    assert [output.cached_tokens for output in outputs] == [100, 102, 103]
    assert {request.cache_salt for request in engine} == {"mine"}


def test_llm_without_salt(llm, engine):
    [output] = llm.generate([tokenizer().encode("Hello").ids], SamplingParams(max_tokens=1))
    assert (output.cached_tokens, engine[0].cache_salt) == (100, "")
    for salt in ("", "a b", "\ud800", 5):
        with pytest.raises(ParameterError, match="cache_salt"):
            llm.generate(["One"], cache_salt=salt)


def test_an_engine_that_does_not_say_counts_as_none_cached(llm):
    [output] = llm.generate([fresh_prompt(30)], SamplingParams(max_tokens=1))
    assert output.cached_tokens == 0
