"""Sampling, stopping and log-probabilities through the openai client, against transformers' logits and processors."""

import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from bladellm_runtime.request import LEAST_REPETITION_PENALTY
from tests.conftest import DEMO
from tests.engine import reference
from tests.engine.reference import PROMPTS
from tests.server.openai_support import (
    QUESTIONS,
    chat_prompt,
    close,
    decode,
    encode,
    gather,
    generate,
    greedy,
    tokenizer,
    user,
)
from tests.support.cases import drawn_of

STREAM = pytest.mark.parametrize("stream", [False, True])
GREEDY = {"model": "demo", "temperature": 0}
IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(real_server):
    return real_server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, prompt, tokens=32, **options):
    """The choices of a completion that runs to its last token."""
    extra = {**IGNORE_EOS, **options.pop("extra_body", {})}
    choices, _ = gather(
        client.completions.create(model="demo", prompt=prompt, max_tokens=tokens, extra_body=extra, **options)
    )
    return choices


@STREAM
def test_chat_logprobs_are_transformers(client, stream):
    prompt = chat_prompt(QUESTIONS[3])
    ids = generate(prompt, 64)
    answer = client.chat.completions.create(
        messages=user(QUESTIONS[3]), logprobs=True, top_logprobs=4, stream=stream, **GREEDY
    )
    [choice], _ = gather(answer)
    scores = reference.logprobs(DEMO, prompt + ids)[len(prompt) - 1 : -1]
    assert [entry.token for entry in choice.logprobs] == [tokenizer().decode([token]) for token in ids]
    close([entry.logprob for entry in choice.logprobs], scores[range(len(ids)), ids])
    best = scores.topk(4)
    for place, entry in enumerate(choice.logprobs):
        close([top.logprob for top in entry.top_logprobs], best.values[place])
        assert entry.top_logprobs[0].token == tokenizer().decode([int(best.indices[place, 0])])
    content = b"".join(bytes(entry.bytes) for entry in choice.logprobs[:-1])
    assert content.decode() == choice.text


def test_chat_logprobs_without_alternatives(client):
    answer = client.chat.completions.create(messages=user("Hi"), logprobs=True, max_tokens=3, **GREEDY)
    assert all(entry.top_logprobs == [] and entry.logprob < 0 for entry in answer.choices[0].logprobs.content)
    answer = client.chat.completions.create(messages=user("Hi"), max_tokens=3, **GREEDY)
    assert answer.choices[0].logprobs is None


@STREAM
@pytest.mark.parametrize("tokens", [0, 10])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_prompt_and_answer_as_transformers_does(client, stream, tokens, as_ids):
    prompt = PROMPTS[6]
    ids = encode(prompt) + list(greedy(prompt, 10)[:tokens])
    answer = client.completions.create(
        prompt=encode(prompt) if as_ids else prompt,
        max_tokens=tokens,
        echo=True,
        logprobs=3,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
        **GREEDY,
    )
    [choice], usage = gather(answer)
    assert choice.text == decode(ids)
    assert (choice.finish, usage.completion_tokens) == ("length", tokens)
    assert len(choice.logprobs) == len(ids)
    texts, values, tops, offsets = zip(*choice.logprobs, strict=True)
    assert (values[0], tops[0]) == (None, None)
    scores = reference.logprobs(DEMO, ids)[:-1]
    close(list(values[1:]), scores[range(len(ids) - 1), ids[1:]])
    for place, top in enumerate(tops[1:]):
        close(sorted(top.values(), reverse=True)[:3], scores[place].topk(3).values)
        assert top[texts[place + 1]] == values[place + 1], "the chosen token is among them"
    for text, offset in zip(texts, offsets, strict=True):
        if not text.startswith("bytes:"):
            assert choice.text[offset : offset + len(text)] == text


def test_logprobs_are_the_models_own_whatever_shapes_the_sampling(client):
    [choice] = complete(
        client,
        PROMPTS[4],
        16,
        temperature=1.4,
        presence_penalty=1.0,
        logit_bias={"400": 3},
        logprobs=1,
        seed=5,
        extra_body={"top_k": 40},
    )
    prompt = encode(PROMPTS[4])
    answer = encode_tokens([entry[0] for entry in choice.logprobs])
    scores = reference.logprobs(DEMO, prompt + answer)[len(prompt) - 1 : -1]
    close([entry[1] for entry in choice.logprobs], scores[range(16), answer])


def encode_tokens(texts):
    """Ids of tokens from their names in a completion's logprobs."""
    ids = {tokenizer().decode([token]): token for token in range(8191, -1, -1)}
    return [ids[text] for text in texts]


@STREAM
def test_choices_are_equal_when_greedy_and_distinct_when_drawn(client, stream):
    texts = [choice.text for choice in complete(client, PROMPTS[0], 24, n=3, temperature=0, stream=stream)]
    assert texts == [decode(greedy(PROMPTS[0], 24))] * 3
    texts = [choice.text for choice in complete(client, PROMPTS[0], 24, n=5, temperature=1.0, stream=stream)]
    assert len(set(texts)) == 5


@STREAM
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_exactly(client, stream, include):
    for prompt in random.sample(PROMPTS, 2):
        ids = greedy(prompt, 48)
        text = decode(ids)
        start = random.randrange(len(text) - 12)
        stops = [text[start : start + random.randint(1, 12)], "never to be seen"]
        answer = client.completions.create(
            prompt=prompt,
            max_tokens=48,
            stop=stops,
            stream=stream,
            stream_options={"include_usage": True} if stream else None,
            extra_body={"include_stop_str_in_output": include, **IGNORE_EOS},
            **GREEDY,
        )
        [choice], usage = gather(answer)
        assert choice.text == text[: text.index(stops[0]) + include * len(stops[0])], stops
        assert choice.finish == "stop"
        used = next(count for count in range(49) if stops[0] in decode(ids[:count]))
        assert usage.completion_tokens == used


@STREAM
@pytest.mark.parametrize("field", ["stop_token_ids", "stop_tokens"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_answer(client, stream, field, include):
    ids = greedy(PROMPTS[4], 48)
    stop = ids[random.randrange(48)]
    place = ids.index(stop)
    extra = {field: [stop], "include_stop_str_in_output": include}
    [choice] = complete(client, PROMPTS[4], 48, temperature=0, stream=stream, extra_body=extra)
    assert choice.text == decode(ids[: place + include])
    assert choice.finish == "stop"


def test_one_stop_string_may_be_given_as_a_string(client):
    text = decode(greedy(PROMPTS[0], 32))
    [choice] = complete(client, PROMPTS[0], 32, temperature=0, stop="world")
    assert choice.text == text[: text.index("world")]


def test_min_tokens_holds_the_end_back_as_transformers_does(client):
    prompt = chat_prompt(QUESTIONS[0])
    free = generate(prompt, 90)
    held = generate(prompt, 90, min_new_tokens=len(free) + 10)
    answer = client.chat.completions.create(
        messages=user(QUESTIONS[0]), max_tokens=90, extra_body={"min_tokens": len(free) + 10}, **GREEDY
    )
    assert answer.choices[0].message.content == decode(held)
    assert answer.usage.completion_tokens == len(held) > len(free)


def test_ignore_eos_goes_on_behind_the_end(client):
    prompt = chat_prompt(QUESTIONS[1])
    wanted = generate(prompt, 60, eos_token_id=None)
    assert 2 in wanted[:-1]
    for skip in (True, False):
        answer = client.chat.completions.create(
            messages=user(QUESTIONS[1]), max_tokens=60, extra_body={**IGNORE_EOS, "skip_special_tokens": skip}, **GREEDY
        )
        assert answer.choices[0].message.content == tokenizer().decode(wanted, skip_special_tokens=skip)
        assert answer.choices[0].finish_reason == "length"


def test_logit_bias_forces_and_forbids(client):
    token = random.randrange(300, 8000)
    [choice] = complete(client, PROMPTS[1], 5, temperature=1.0, logit_bias={str(token): 100})
    assert choice.text == decode([token] * 5)
    banned = generate(encode(PROMPTS[1]), 20, eos_token_id=None, bad_words_ids=[[greedy(PROMPTS[1], 1)[0]]])
    [choice] = complete(client, PROMPTS[1], 20, temperature=0, logit_bias={str(greedy(PROMPTS[1], 1)[0]): -100})
    assert choice.text == decode(banned) != decode(greedy(PROMPTS[1], 20))


def test_extreme_repetition_penalties_generate(client):
    for penalty in (LEAST_REPETITION_PENALTY, 100):
        [choice] = complete(client, PROMPTS[1], 5, temperature=2e-5, extra_body={"repetition_penalty": penalty})
        assert choice.finish in ("stop", "length")


@pytest.mark.parametrize("prompt", drawn_of(PROMPTS[:3], 1))
def test_repetition_penalty_is_transformers(client, prompt):
    wanted = generate(encode(prompt), 48, eos_token_id=None, repetition_penalty=1.3)
    [choice] = complete(client, prompt, 48, temperature=0, extra_body={"repetition_penalty": 1.3})
    assert choice.text == decode(wanted) != decode(greedy(prompt, 48))


class OutputPenalties(LogitsProcessor):
    """OpenAI's formula: each token generated so far costs `presence` once and `frequency` every time."""

    def __init__(self, prompt_len, presence, frequency):
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores)
        answer = input_ids[:, self.prompt_len :]
        counts.scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-0.5, 0.9)])
def test_presence_and_frequency_penalties_follow_the_formula(client, presence, frequency):
    ids = encode(PROMPTS[0])
    processors = LogitsProcessorList([OutputPenalties(len(ids), presence, frequency)])
    wanted = generate(ids, 48, eos_token_id=None, logits_processor=processors)
    [choice] = complete(client, PROMPTS[0], 48, temperature=0, presence_penalty=presence, frequency_penalty=frequency)
    assert choice.text == decode(wanted) != decode(greedy(PROMPTS[0], 48))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_filters_that_leave_one_token_are_greedy(client, filters):
    [choice] = complete(client, PROMPTS[2], 32, temperature=1.7, extra_body=filters)
    assert choice.text == decode(greedy(PROMPTS[2], 32))


def test_top_k_leaves_the_k_most_likely(client):
    [choice] = complete(client, PROMPTS[3], 48, temperature=2.0, extra_body={"top_k": 3}, logprobs=3)
    likely = [sorted(top.values(), reverse=True) for _, _, top, _ in choice.logprobs]
    places = [values.index(entry[1]) for values, entry in zip(likely, choice.logprobs, strict=True)]
    assert set(places) == {0, 1, 2}


def test_a_seed_repeats_alone_and_under_load(client):
    seed = random.getrandbits(62)

    def ask(seed, stream=False):
        return [choice.text for choice in complete(client, PROMPTS[0], 32, seed=seed, n=2, top_p=0.95, stream=stream)]

    alone = ask(seed)
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda i: ask(seed if i % 3 == 0 else seed + i, stream=i % 2 == 0), range(18)))
    assert all(texts == alone for texts in crowd[::3])
    others = [texts[0] for i, texts in enumerate(crowd) if i % 3]
    assert len({*others, alone[0]}) == len(others) + 1, "another seed, another text"


def test_without_a_seed_answers_differ(client):
    assert len({complete(client, PROMPTS[0], 24)[0].text for _ in range(4)}) == 4


@pytest.mark.turns
@pytest.mark.parametrize("seeds", [2, pytest.param(8, marks=pytest.mark.slow)])
@STREAM
def test_characters_split_over_tokens_come_whole(client, stream, seeds):
    """Bytes drawn from a handful make valid, cut and stray sequences; Python's own decoder says what they spell."""
    pieces = {token for text in ("🙂", "漢", "ö", "é", "“", "…", "👩") for token in encode(text)} | {encode("a")[0]}
    bias = {str(token): 100 for token in pieces}
    split = 0
    for seed in range(seeds):
        answer = client.chat.completions.create(
            model="demo", messages=user("Hi"), max_tokens=120, seed=seed, temperature=2.0, logit_bias=bias,
            logprobs=True, stream=stream, extra_body=IGNORE_EOS,
        )  # fmt: skip
        parts = list(answer) if stream else [answer]
        [choice], _ = gather(iter(parts))
        raw = b"".join(bytes(entry.bytes) for entry in choice.logprobs)
        split += sum(len(entry.bytes) == 1 and entry.bytes[0] > 127 for entry in choice.logprobs)
        assert choice.text == raw.decode("utf-8", "replace")
    assert split, "no character was split"


def test_resume_response_continues_the_given_beginning(client):
    start = "There are 7 days in"
    text = tokenizer().apply_chat_template(user(QUESTIONS[2]), add_generation_prompt=True, tokenize=False) + start
    wanted = generate(encode(text), 20)
    answer = client.chat.completions.create(
        messages=user(QUESTIONS[2]), max_tokens=20, extra_body={"resume_response": start}, **GREEDY
    )
    assert answer.choices[0].message.content == decode(wanted)
    assert answer.usage.prompt_tokens == len(encode(text))


def test_continue_final_message_leaves_the_last_message_open(client):
    messages = [*user(QUESTIONS[2]), {"role": "assistant", "content": "There are 7 days in"}]
    prompt = tokenizer().apply_chat_template(messages, continue_final_message=True, return_dict=False)
    extra = {"continue_final_message": True}
    answer = client.chat.completions.create(messages=messages, max_tokens=20, extra_body=extra, **GREEDY)
    assert answer.choices[0].message.content == decode(generate(prompt, 20))


def random_request():
    """A completion request with a random combination of everything that shapes an answer."""
    some = random.choice
    text = decode(greedy(PROMPTS[0], 48))
    start = random.randrange(len(text) - 4)
    fields = {
        "prompt": some([PROMPTS[0], encode(PROMPTS[8]), [PROMPTS[1], PROMPTS[4]]]),
        "max_tokens": random.randint(1, 40),
        "seed": random.getrandbits(40),
        "n": some([1, 1, 2, 3]),
        "temperature": some([0, 0.3, 1.0, 2.0]),
        "top_p": some([1.0, 0.9, 0.5]),
        "presence_penalty": some([0.0, 1.2]),
        "frequency_penalty": some([0.0, 0.4, -0.2]),
        "echo": some([False, True]),
        "logprobs": some([None, 0, 2]),
        "stop": some([None, [text[start : start + random.randint(1, 4)]], ["\n", "the", " a"]]),
        "logit_bias": some([None, {"2": 6}, {str(random.randrange(8192)): 9 for _ in range(20)}]),
    }
    extra = {
        "top_k": some([-1, 5, 100]),
        "min_p": some([0.0, 0.05]),
        "repetition_penalty": some([1.0, 1.2]),
        "min_tokens": random.randint(0, fields["max_tokens"]),
        "stop_token_ids": some([[], [some(greedy(PROMPTS[0], 48))]]),
        "include_stop_str_in_output": some([False, True]),
        "skip_special_tokens": some([False, True]),
        "ignore_eos": some([False, True]),
    }
    return {"model": "demo", **fields, "extra_body": extra}


@pytest.mark.parametrize("cases", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_streamed_whole_alone_and_crowded_answers_are_the_same(client, cases):
    requests = [random_request() for _ in range(cases)]

    def whole(request):
        return gather(client.completions.create(**request))

    def streamed(request):
        options = {"include_usage": True, "continuous_usage_stats": bool(request["seed"] % 2)}
        return gather(client.completions.create(stream=True, stream_options=options, **request))

    alone = [whole(request) for request in requests]
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(lambda job: job[0](job[1]), [(way, r) for r in requests for way in (streamed, whole)]))
    for place, request in enumerate(requests):
        for choices, usage in (alone[place], crowd[2 * place], crowd[2 * place + 1]):
            first, first_usage = alone[place]
            assert [(c.text, c.finish) for c in choices] == [(c.text, c.finish) for c in first], request
            counted = usage.model_copy(update={"prompt_tokens_details": first_usage.prompt_tokens_details})
            assert counted == first_usage, request
            for found, wanted in zip(choices, first, strict=True):
                assert_same_scores(found.logprobs, wanted.logprobs)
        assert_consistent(request, *alone[place])


def assert_same_scores(found, wanted):
    """The same tokens at the same places; values may differ in the last bits, as the batch shapes the sums."""
    assert [(entry[0], entry[3]) for entry in found] == [(entry[0], entry[3]) for entry in wanted]
    close([entry[1] or 0.0 for entry in found], torch.tensor([entry[1] or 0.0 for entry in wanted]))


def assert_consistent(request, choices, usage):
    """Counts add up, and log-probabilities have one entry a token."""
    prompts = request["prompt"]
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    lengths = [len(encode(prompt)) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    assert usage.prompt_tokens == sum(lengths)
    assert len(choices) == len(prompts) * request["n"]
    assert len(choices) <= usage.completion_tokens <= len(choices) * request["max_tokens"]
    assert all(choice.finish in ("stop", "length") for choice in choices)
    if request["logprobs"] is not None:
        echoed = sum(lengths) * request["n"] if request["echo"] else 0
        assert sum(len(choice.logprobs) for choice in choices) == usage.completion_tokens + echoed
