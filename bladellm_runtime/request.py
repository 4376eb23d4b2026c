"""What a request asks for and how it can end. Imports no torch: front end, wire and scheduler share it."""

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from bladellm_runtime.errors import ParameterError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CACHE_SALT_CHARS = 256
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32 without changing the arg-max."""
LEAST_REPETITION_PENALTY = 1e-20
"""Logits are divided by it; by less they could leave the range of float32."""
_CACHE_SALT = re.compile(rf"[!-~]{{1,{MAX_CACHE_SALT_CHARS}}}")


class ConstraintKind(StrEnum):
    """The language a constraint is written in."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must satisfy. `source` is canonical text: equal constraints have equal `kind` and `source`.

    JSON: the schema, compact, its keys in the order written (which is the order of the answer's keys). CHOICE: a JSON
    array of strings. REGEX and GRAMMAR (Lark): the text itself. `field` is the request field that errors name.
    """

    kind: ConstraintKind
    source: str
    field: str


class FinishReason(StrEnum):
    """Why a request ended; the values of the OpenAI protocol, plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick each next token, and when to stop.

    Every value is checked when the object is made; `ParameterError.param` names the offending field.
    `max_tokens=None` means as many as the model length allows. `top_k` 0 or -1 switches the filter off.
    `logprobs=k` returns the chosen token's log-probability and the k most likely ones, taken from the
    model's own distribution, before bias, penalties and temperature.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_int("min_tokens", self.min_tokens, 0, 2**31)
        _check_int("top_k", self.top_k, -1, 2**31)
        if self.max_tokens is not None:
            # 0 is useful with echo: score the prompt, generate nothing. The server refuses it elsewhere.
            _check_int("max_tokens", self.max_tokens, 0, 2**31)
            if self.min_tokens > self.max_tokens:
                raise ParameterError(
                    f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
                )
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise ParameterError(f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ParameterError(f"stop_token_ids takes at most {MAX_STOP_TOKENS} ids", "stop_token_ids")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries", "logit_bias")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, 2**31)
            _check_float("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """True when the arg-max is taken and no random number is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """True when the tokens seen so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def check_cache_salt(salt: object) -> str:
    """`salt`, if it can keep the cached prompts of one tenant apart: a text that is the same in every encoding.

    Raises `ParameterError`. An empty one is refused: it would share cached prompts with everyone who has none.
    """
    if not isinstance(salt, str) or not _CACHE_SALT.fullmatch(salt):
        raise ParameterError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_CHARS} printable ASCII characters without spaces",
            "cache_salt",
        )
    return salt


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be an integer, got {_shown(value)}", name)
    if not low <= value <= high:
        raise ParameterError(f"{name} must be between {low} and {high}, got {_shown(value)}", name)


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(f"{name} must be a number, got {_shown(value)}", name)
    # Finiteness is its own test: NaN passes both "<" and ">". A huge int cannot become a float to be tested.
    finite = isinstance(value, int) or math.isfinite(value)
    if not finite or value < low or value > high or (open_low and value == low):
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        raise ParameterError(f"{name} must be {bounds}, got {_shown(value)}", name)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a very large integer"
    return text if len(text) <= 40 else text[:37] + "..."
