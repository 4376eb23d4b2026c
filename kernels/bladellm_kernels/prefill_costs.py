"""What the ways to compute prefill attention cost: a model in microseconds, to choose between them.

Fitted to measurements on an H200 (bfloat16, 32 query heads and 8 KV heads of 128 dimensions); other GPUs keep about the
proportions. It is within some 10 % of: cuDNN's causal squares of 512 (14 µs), 1024 (32), 2048 (82), 8192 (884)
and 32768 (12,835), its rectangles of 2048 × 4096 (212), 2048 × 34816 (1,677) and 64 × 8256 (113), and the Triton
kernel on 512 (16), 1000 (30), 2048 (91), 8192 (1,116), 2048 behind 8192 (625) and 1500 behind 5000 (313).
Of 8 KV heads of 64 dimensions: cuDNN on 2048 (61), 8191 (632) and 2048 behind 2048 (152); of 2, with 14 query heads,
the Triton kernel on 512 (14), 1000 (20), 8191 (348) and 300 behind 777 (21).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bladellm_kernels.prefill_tiles import Span, key_parts

# Scalar operations a µs: of cuDNN at its best, and of the Triton kernel on plain and on quantized memory.
LIBRARY_RATE, KERNEL_RATE, FUSED_RATE = 690e6, 515e6, 188e6
# Dimensions of a head that the rates are of, and the share of the softmax in its time: that takes no less in others.
FITTED_DIM, SOFTMAX = 128, 0.4
# Bytes a µs of a copy, and of one multiprocessor's share of cuDNN's rate; µs a launch.
COPY_RATE = 3.5e6
MULTIPROCESSORS = 132
LAUNCH = 4.0
LIBRARY_CALL, KERNEL_CALL = 5.0, 7.5
# µs an element of q: diagonals, the ends of a launch, and the result's way to memory.
SQUARE_ELEMENT, KERNEL_ELEMENT = 0.0125 / 4096, 0.0085 / 4096
# Queries of a program of cuDNN's, and µs before and after its keys.
PROGRAM_ROWS, PROGRAM = 128, 1.5
# Elements of K and V dequantized at once.
SCRATCH_ELEMENTS = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads and their dimensions; bytes of a number in q, and of a stored one.

    in_place: an operator takes stored rows as they are; quantized: they are codes.
    """

    query: int
    kv: int
    dim: int
    bytes: float = 2.0
    stored_bytes: float = 2.0
    in_place: bool = True
    quantized: bool = False

    @property
    def elements(self) -> int:
        """Numbers of q a token."""
        return self.query * self.dim

    @property
    def timed(self) -> float:
        """The same, as attention takes time for them."""
        return self.query * timed_dim(self.dim)


def timed_dim(dim: int) -> float:
    """The time of heads of `dim`, as dimensions of which FITTED_DIM take the time of theirs. Wider ones, not
    measured: `dim`."""
    return dim + SOFTMAX * max(0, FITTED_DIM - dim)


def square_cost(heads: Heads, length: int) -> float:
    """cuDNN's causal attention of `length` queries to as many keys."""
    work = 4 * heads.timed * length * length / 2
    return LIBRARY_CALL + SQUARE_ELEMENT * length * heads.timed + work / LIBRARY_RATE


def rectangle_cost(heads: Heads, rows: int, keys: int) -> float:
    """cuDNN's attention of `rows` queries to `keys` keys, all visible: waves of programs, one a
    multiprocessor."""
    programs = -(-rows // PROGRAM_ROWS) * heads.query
    waves = -(-programs // MULTIPROCESSORS)
    work = 4 * PROGRAM_ROWS * keys * timed_dim(heads.dim)
    return LIBRARY_CALL + waves * (PROGRAM + work * MULTIPROCESSORS / LIBRARY_RATE)


def merge_cost(heads: Heads, rows: int, states: int) -> float:
    """Reading some states and writing one."""
    return LAUNCH + rows * heads.elements * heads.bytes * (states + 1) / COPY_RATE if states > 1 else 0.0


def copy_cost(heads: Heads, rows: int) -> float:
    """A copy of as many rows of q."""
    return LAUNCH + rows * heads.elements * heads.bytes * 2 / COPY_RATE


def dequantize_cost(heads: Heads, keys: int) -> float:
    """Stored rows to plain ones, without the launch."""
    return keys * 2 * heads.kv * heads.dim * (heads.bytes + heads.stored_bytes) / COPY_RATE


def chunk_cost(heads: Heads, span: Span, fused: bool, alone: bool = False) -> float:
    """A chunk's part of a launch of the Triton kernel, on codes (`fused`) or on plain numbers.

    alone: nothing else fills the multiprocessors that its last wave of programs leaves idle.
    """
    prefix, square = span.query_len * span.start, span.query_len * (span.query_len + 1) / 2
    scores = square + prefix * (_idle_factor(heads, span) if alone else 1.0)
    cost = KERNEL_ELEMENT * span.query_len * heads.timed + heads.query * scores * _score_cost(heads, fused)
    # The rates of FITTED_DIM were fitted, and its choices measured, without it.
    return max(cost, _longest_program(heads, span, fused)) if alone and heads.dim < FITTED_DIM else cost


def _score_cost(heads: Heads, fused: bool) -> float:
    """Of a score of one query head, all multiprocessors at work; to make numbers of codes takes time by the
    dimensions."""
    codes = heads.dim * (1 / FUSED_RATE - 1 / KERNEL_RATE) if fused else 0.0
    return 4 * (timed_dim(heads.dim) / KERNEL_RATE + codes)


def _idle_factor(heads: Heads, span: Span) -> float:
    """Multiprocessors × waves of programs, by programs."""
    tiles, parts = _programs(heads, span)
    return -(-tiles * parts // MULTIPROCESSORS) * MULTIPROCESSORS / (tiles * parts)


def _longest_program(heads: Heads, span: Span, fused: bool) -> float:
    """Of the last tile, which sees all keys, or of a part of them."""
    keys = (span.start + span.query_len) / _programs(heads, span)[1]
    return PROGRAM_ROWS * keys * MULTIPROCESSORS * _score_cost(heads, fused)


def _programs(heads: Heads, span: Span) -> tuple[int, int]:
    """Tiles of a chunk, counted over KV heads, and the parts that each one's keys are divided into."""
    tiles = -(-span.query_len * (heads.query // heads.kv) // PROGRAM_ROWS) * heads.kv
    return tiles, key_parts(span.start + span.query_len, tiles)


def fused_is_cheaper(heads: Heads, span: Span) -> bool:
    """Whether a chunk on quantized memory is better attended to on its codes than on numbers made of them, which are
    bounded."""
    if not fits_scratch(heads, span):
        return True
    plain = dequantize_cost(heads, span.start + span.query_len) + chunk_cost(heads, span, fused=False)
    return chunk_cost(heads, span, fused=True) <= plain


def fits_scratch(heads: Heads, span: Span) -> bool:
    """Whether all that a chunk sees may be made numbers at once."""
    return (span.start + span.query_len) * 2 * heads.kv * heads.dim <= SCRATCH_ELEMENTS


def kernel_cost(heads: Heads, spans: Iterable[Span], alone: bool = False) -> float:
    """The Triton kernel on some chunks, by `fused_is_cheaper`; nothing for none. alone: on one, as in `chunk_cost`."""
    fused = plain = 0.0
    for span in spans:
        of_fused, of_plain = launch_shares(heads, span, alone)
        fused, plain = fused + of_fused, plain + of_plain
    return launches_cost(heads, fused, plain)


def launch_shares(heads: Heads, span: Span, alone: bool = False) -> tuple[float, float]:
    """What a chunk adds to the launch of the Triton kernel on codes, and to that on plain numbers: one is 0."""
    if heads.quantized and fused_is_cheaper(heads, span):
        return chunk_cost(heads, span, True, alone), 0.0
    plain = chunk_cost(heads, span, False, alone)
    return 0.0, plain + (dequantize_cost(heads, span.start + span.query_len) if heads.quantized else 0.0)


def launches_cost(heads: Heads, fused: float, plain: float) -> float:
    """The launches with those shares."""
    launch = KERNEL_CALL + (LAUNCH if heads.quantized else 0.0)
    return (fused + KERNEL_CALL if fused else 0.0) + (plain + launch if plain else 0.0)
