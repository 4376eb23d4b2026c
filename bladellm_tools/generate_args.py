"""The flags of `blade_llm generate` beyond the engine's: files, and one flag a field of `SamplingParams`."""

from dataclasses import dataclass
from typing import Literal

from bladellm_runtime.flags import flag
from bladellm_runtime.request import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKENS

INPUT, SAMPLING = "Input and output", "Sampling"
MOST = 2**31


@dataclass(frozen=True)
class GenerateArgs:
    """Files and sampling. The ranges are those of `SamplingParams`, which has the last word on every field."""

    input: str = flag("-", "Prompts: .jsonl (text, or an object with `prompt`) or one a line; - is stdin.", group=INPUT)
    output: str = flag("-", "File for the answers, one JSON object a line; - is stdout.", group=INPUT)
    input_format: Literal["auto", "jsonl", "txt"] = flag(
        "auto", "auto: by the name of the file; stdin is txt.", group=INPUT
    )
    n: int = flag(1, "Answers a prompt.", group=SAMPLING, low=1, high=MAX_CHOICES)
    max_tokens: int | None = flag(16, "Most tokens of an answer.", group=SAMPLING, low=0, high=MOST)
    min_tokens: int = flag(0, "Least tokens of an answer.", group=SAMPLING, low=0, high=MOST)
    temperature: float = flag(
        1.0, "0 takes the most likely token; higher is more varied.", group=SAMPLING, low=0, high=2
    )
    top_k: int = flag(
        0, "Draw from the k most likely tokens; 0 and -1 draw from all.", group=SAMPLING, low=-1, high=MOST
    )
    top_p: float = flag(
        1.0, "Draw from the most likely tokens of this total probability, above 0 and up to 1.", group=SAMPLING
    )
    min_p: float = flag(
        0.0, "Leave out tokens below this share of the likeliest one's probability.", group=SAMPLING, low=0, high=1
    )
    repetition_penalty: float = flag(
        1.0, "Above 1 makes tokens already seen less likely; above 0 and up to 100.", group=SAMPLING
    )
    presence_penalty: float = flag(
        0.0, "Taken off the logit of every token already generated.", group=SAMPLING, low=-2, high=2
    )
    frequency_penalty: float = flag(0.0, "The same, times how often.", group=SAMPLING, low=-2, high=2)
    seed: int | None = flag(None, "Repeat the same random numbers.", group=SAMPLING)
    stop: list[str] = flag([], f"Texts that end an answer, at most {MAX_STOP_STRINGS}.", group=SAMPLING)
    stop_token_ids: list[int] = flag([], f"Token ids that end an answer, at most {MAX_STOP_TOKENS}.", group=SAMPLING)
    include_stop_str_in_output: bool = flag(False, "Keep the text that ended the answer.", group=SAMPLING)
    ignore_eos: bool = flag(False, "Go on after the end-of-text token.", group=SAMPLING)
    skip_special_tokens: bool = flag(True, "Leave special tokens out of the text.", group=SAMPLING)
    logprobs: int | None = flag(
        None,
        "Log-probabilities of the token and of this many likeliest ones.",
        group=SAMPLING,
        low=0,
        high=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = flag(
        None, "The same for the prompt's tokens.", group=SAMPLING, low=0, high=MAX_LOGPROBS
    )
