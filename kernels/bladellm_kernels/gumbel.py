"""Gumbel-max draws whose noise is a pure function of (seed, choice, position, token), the same on every device.

Gumbel-max: arg-max of `logits + noise` follows softmax(logits) when the noise is standard Gumbel (Maddison, Tarlow and
Minka 2014, "A* sampling"). The noise comes from a counter-based hash, so a draw depends neither on the batch nor on
the order of draws. All integers below are unsigned, modulo 2^32; `>>` is a logical shift:

    mix(x):      x ^= x >> 16;  x *= M1;  x ^= x >> 15;  x *= M2;  x ^= x >> 16
    stream[j] =  mix(mix(mix(SALTS[j] ^ seed_low) + seed_high) + choice)          j = 0, 1; once a request
    key[j]    =  mix(stream[j] + position * STEPS[j])                             once a row
    bits      =  mix of (token * TOKEN_STEP + key[0]), with key[1] added after the first product
    uniform   =  min(float32(bits mod 2^31) * 2^-31 + 2^-32, 1 - 2^-24)           in float32
    noise     = -log(-log1p(-uniform))

`mix` is lowbias32 of https://github.com/skeeto/hash-prospector. The largest noise, which decides the draw, comes from
the smallest uniforms: there float32 keeps all 31 bits, while uniforms near 1 would come in steps of 2^-24.
Tensors hold the 32-bit words as int32, whose products wrap.
"""

import torch
from torch import Tensor

M1 = 0x7FEB352D
M2 = 0x846CA68B
SALTS = (0x243F6A88, 0x85A308D3)
STEPS = (0x9E3779B1, 0x85EBCA77)
TOKEN_STEP = 0xC2B2AE3D
UNIFORM_MAX = 1 - 2.0**-24

_WORD = 0xFFFFFFFF


def stream_key(seed: int, choice: int) -> tuple[int, int]:
    """The two words of a request's random stream, as signed 32-bit integers. `seed` is any int64, `choice` >= 0."""
    words = []
    for salt in SALTS:
        word = _mix_word(salt ^ (seed & _WORD))
        word = _mix_word((word + (seed >> 32)) & _WORD)
        words.append(_signed(_mix_word((word + choice) & _WORD)))
    return words[0], words[1]


def row_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """Keys of the draws at `positions` (integers [R]) in `streams` (int32 [R, 2]): int32 [R, 2]."""
    steps = [_signed(step) for step in STEPS]
    position = positions.to(torch.int32)
    # Two products by a number rather than one by a tensor: a tensor made here would be a blocking copy on CUDA.
    offsets = torch.stack([position * steps[0], position * steps[1]], dim=-1)
    return _mix_(offsets.add_(streams))


def uniform(keys: Tensor, tokens: Tensor) -> Tensor:
    """Uniforms in (0, 1), both ends excluded: float32 [R, N] for keys int32 [R, 2] and tokens [N] or [R, N]."""
    return _negative_uniform(keys, tokens).neg_()


def gumbel_argmax(logits: Tensor, keys: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Draw one token a row from softmax(logits): int64 [R].

    logits: float32 [R, N], -inf where a token is excluded. keys: int32 [R, 2]. tokens: int64 [R, N], the vocabulary
    ids of the columns, all different in a row; without it column n is token n. Equal scores give the lowest id.
    The result does not depend on the order of the columns, nor on excluded ones being there.
    """
    if logits.dim() != 2 or keys.shape != (logits.shape[0], 2):
        raise ValueError(f"logits {tuple(logits.shape)} and keys {tuple(keys.shape)} must be [R, N] and [R, 2]")
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) if tokens is None else tokens
    exponential = _negative_uniform(keys, ids).log1p_().neg_()
    scores = torch.sub(logits, exponential.log_(), out=exponential)
    if tokens is None:
        return scores.argmax(dim=-1)
    best = scores.amax(dim=-1, keepdim=True)
    # NaN rows match nowhere; their token is any valid id and the caller drops it.
    lowest = torch.where(scores == best, tokens, torch.iinfo(torch.int64).max).amin(dim=-1)
    return torch.minimum(lowest, tokens.amax(dim=-1))


def reference_uniform(seed: int, choice: int, position: int, token: int) -> float:
    """One uniform in plain integers, straight from the definition."""
    streams = stream_key(seed, choice)
    key = [_mix_word((stream + position * step) & _WORD) for stream, step in zip(streams, STEPS, strict=True)]
    word = (token * TOKEN_STEP + key[0]) & _WORD
    word = (word ^ word >> 16) * M1 + key[1] & _WORD
    word = (word ^ word >> 15) * M2 & _WORD
    bits = (word ^ word >> 16) & 0x7FFFFFFF
    return min(_float32(_float32(bits) * 2.0**-31 + 2.0**-32), UNIFORM_MAX)


def _negative_uniform(keys: Tensor, tokens: Tensor) -> Tensor:
    """-uniform: what log1p wants, so that the large path needs no extra pass over memory."""
    words = tokens.to(torch.int32) * _signed(TOKEN_STEP) + keys[:, :1]
    scratch = torch.empty_like(words)
    _xor_shift_(words, 16, scratch).mul_(_signed(M1)).add_(keys[:, 1:])
    _xor_shift_(words, 15, scratch).mul_(_signed(M2))
    bits = _xor_shift_(words, 16, scratch).bitwise_and_(0x7FFFFFFF)
    return bits.to(torch.float32).mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=-UNIFORM_MAX)


def _mix_(words: Tensor) -> Tensor:
    scratch = torch.empty_like(words)
    _xor_shift_(words, 16, scratch).mul_(_signed(M1))
    _xor_shift_(words, 15, scratch).mul_(_signed(M2))
    return _xor_shift_(words, 16, scratch)


def _xor_shift_(words: Tensor, shift: int, scratch: Tensor) -> Tensor:
    torch.bitwise_right_shift(words, shift, out=scratch)
    # int32 shifts copy the sign in; the mask makes the shift logical.
    return words.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


def _mix_word(word: int) -> int:
    word = (word ^ word >> 16) * M1 & _WORD
    word = (word ^ word >> 15) * M2 & _WORD
    return word ^ word >> 16


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
