"""What `one_pass_prefill_hopper` is compiled for and given, and what its functions hand to each other."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


class OnePassTile(NamedTuple):
    """What the kernel is compiled for. dim: of a head; pack: heads in a tile; stages: blocks of keys, and as many of
    values, that are there or on their way."""

    dim: int
    pack: int
    stages: int


class Written(NamedTuple):
    """Outputs [T, heads, dim], and their elements from a token to the next and from a head to the next."""

    data: gl.tensor
    token_stride: gl.tensor
    head_stride: gl.tensor


class Results(NamedTuple):
    """Outputs as the copy engine has them, in tiles, and as they are, for tiles that hold more than a chunk's end."""

    tiles: tma.tensor_descriptor
    rows: Written


class Stored(NamedTuple):
    """A layer's rows, and their elements: from a row to the next, from a key to its value, from a KV head to the next,
    and from the first one to behind the last."""

    data: gl.tensor
    row_stride: gl.tensor
    kv_stride: gl.tensor
    head_stride: gl.tensor
    columns: gl.tensor


class Place(NamedTuple):
    """A tile: its first token and its first head, its blocks, and those of them that some row does not see whole."""

    token: gl.tensor
    head: gl.tensor
    blocks: gl.tensor
    masked: gl.tensor


class Work(NamedTuple):
    """A program's entry. Of its chunk the first token in the batch, the number of queries and the position of the
    first; the program's place among those that share the chunk, and how many they are; heads, those that share a KV
    head, and the columns of the stored rows from a KV head to the next, and from a key to its value."""

    first: gl.tensor
    queries: gl.tensor
    start: gl.tensor
    place: gl.tensor
    programs: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    head_stride: gl.tensor
    kv_stride: gl.tensor


class Ring(NamedTuple):
    """Blocks, and for each barriers that say that it is full, and that both groups have read it."""

    blocks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Sources(NamedTuple):
    """What a group's steps on a tile read: its queries, the rings of keys and of values, the positions of its rows; and
    what scores are multiplied with, log2 e in it."""

    rows: gl.shared_memory_descriptor
    key_ring: Ring
    value_ring: Ring
    position: gl.tensor
    qk_scale: gl.tensor
