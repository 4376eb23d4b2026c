"""What the openai client got, gathered from whole and streamed answers alike, and what transformers says it must be."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import DEMO
from tests.engine import reference
from tests.support.live import LiveServer

EOS = [2, 0]
LOGPROB_TOLERANCE = 2e-4
USUAL_TOKENS = 48
"""Of the longest answers that most tests ask for."""
QUESTIONS = (
    "Hello",
    "Tell me a story about the sea.",
    "What is two plus two?",
    "How many apples does Tom have?",
    "A train goes 60 miles in 2 hours. How fast is it?",
)
"""Questions that the demo model's greedy answer to ends by itself, within 64 tokens."""


@dataclass
class Gathered:
    """One choice: its text, its finish reason, and its log-probability entries in the order they came."""

    text: str = ""
    finish: str | None = None
    logprobs: list[Any] = field(default_factory=list)


def gather(answer: Any) -> tuple[list[Gathered], Any]:
    """Choices by index, and the usage, of a whole answer or a stream of chunks."""
    parts = [answer] if hasattr(answer, "choices") else list(answer)
    return gather_parts(parts)


def gather_parts(parts: Iterable[Any]) -> tuple[list[Gathered], Any]:
    """`gather` for the chunks of a stream that was read already."""
    choices: dict[int, Gathered] = {}
    usage = None
    for part in parts:
        usage = part.usage or usage
        for choice in part.choices:
            found = choices.setdefault(choice.index, Gathered())
            assert found.finish is None, "a chunk after the last one of its choice"
            found.text += text_of(choice)
            found.finish = choice.finish_reason
            if choice.logprobs is not None:
                found.logprobs += entries_of(choice.logprobs)
    assert sorted(choices) == list(range(len(choices)))
    return [choices[index] for index in sorted(choices)], usage


def text_of(choice: Any) -> str:
    """The text of a choice in any of the four kinds of answer."""
    if hasattr(choice, "text"):
        return choice.text
    return (choice.delta if hasattr(choice, "delta") else choice.message).content or ""


def entries_of(logprobs: Any) -> list[Any]:
    """One entry a token: chat's objects, or (token, logprob, top, offset) of a completion."""
    if hasattr(logprobs, "content"):
        return list(logprobs.content)
    columns = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    return list(zip(*columns, strict=True))


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def tokenizer() -> Any:
    """transformers' tokenizer of the demo model."""
    return reference.load(DEMO)[1]


def encode(text: str) -> list[int]:
    """Token ids by transformers."""
    return tokenizer().encode(text, add_special_tokens=False)


def decode(ids: Iterable[int]) -> str:
    """Text by transformers, special tokens left out."""
    return tokenizer().decode(list(ids), skip_special_tokens=True)


def chat_prompt(text: str) -> list[int]:
    """The prompt that a question makes, by transformers' own template rendering."""
    return tokenizer().apply_chat_template(user(text), add_generation_prompt=True, return_dict=False)


@cache
def greedy(prompt: str, tokens: int) -> tuple[int, ...]:
    """transformers' greedy continuation of a text, end-of-text ignored; all `reference.PROMPTS` are made at once."""
    if prompt in reference.PROMPTS:
        reference.greedy_all(DEMO, list(map(encode, reference.PROMPTS)), max(tokens, USUAL_TOKENS))
    return tuple(reference.greedy(DEMO, encode(prompt), tokens))


def generate(prompt: list[int], tokens: int, **options: Any) -> list[int]:
    """transformers' greedy continuation with its own stopping and processors; the end-of-text token is included."""
    return list(_plain(tuple(prompt), tokens)) if not options else _generate(prompt, tokens, **options)


@cache
def _plain(prompt: tuple[int, ...], tokens: int) -> list[int]:
    return _generate(list(prompt), tokens)


@torch.inference_mode()
def _generate(prompt: list[int], tokens: int, **options: Any) -> list[int]:
    model, _ = reference.load(DEMO)
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": EOS, "pad_token_id": 3, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def close(found: list[float], wanted: torch.Tensor) -> None:
    """Assert log-probabilities equal within the tolerance."""
    torch.testing.assert_close(torch.tensor(found), wanted, atol=LOGPROB_TOLERANCE, rtol=0)


def counters(server: LiveServer) -> dict[str, float]:
    """Counters of `/metrics` by short name; those with a reason as `name:reason`."""
    status, text, _ = server.request("/metrics")
    assert status == 200
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason") or sample.labels.get("reason")
            name = sample.name.removeprefix("blade_llm:").removesuffix("_total")
            if "le" not in sample.labels:
                values[f"{name}:{reason}" if reason else name] = sample.value
    return values
