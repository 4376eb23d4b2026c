"""The vocabulary as a trie in arrays, and the walk of an automaton over it: state -> allowed tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bladellm_runtime.guided.fsm.automaton import Automaton
from bladellm_runtime.guided.vocabulary import Row, Vocabulary, packed

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Level:
    """The nodes of one depth: each a distinct beginning of pieces, in order of its bytes.

    `byte` [nodes] is the last byte; the children in the next level are `first_child` .. `+ children`; the tokens that
    end here are `tokens[first_token : first_token + ends]` of the trie. All int32 but `byte` (uint8).
    """

    byte: npt.NDArray[np.uint8]
    first_child: Ints
    children: Ints
    first_token: Ints
    ends: Ints


class Trie:
    """All pieces of a vocabulary. Level 0 is the nodes of the first byte."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = len(vocabulary.pieces)
        order = sorted(
            (token for token in range(self.size) if vocabulary.pieces[token]), key=vocabulary.pieces.__getitem__
        )
        self.tokens = np.array(order, np.int32)
        self.levels = _levels([vocabulary.pieces[token] for token in order])

    def allowed(self, machine: Automaton, state: int) -> Row:
        """[words] int32: the tokens whose bytes the automaton takes from `state` on; end tokens are not among them."""
        chosen = np.zeros(self.size, np.bool_)
        nodes = np.arange(len(self.levels[0].byte) if self.levels else 0, dtype=np.int32)
        states = np.full(len(nodes), state, np.int16)
        for level in self.levels:
            states = machine.table[states, level.byte[nodes]]
            alive = np.flatnonzero(states >= 0)
            nodes, states = nodes[alive], states[alive]
            chosen[self.tokens[_spread(level.first_token[nodes], level.ends[nodes])]] = True
            counts = level.children[nodes]
            nodes, states = _spread(level.first_child[nodes], counts), np.repeat(states, counts)
            if not len(nodes):
                break
        return packed(chosen)


def _spread(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... (counts[0] of them), starts[1], ..."""
    before = np.cumsum(counts) - counts
    places = np.arange(int(counts.sum()), dtype=np.int32) + np.repeat(starts - before, counts)
    return np.asarray(places, np.int32)


def _levels(pieces: list[bytes]) -> list[Level]:
    """From sorted pieces, level by level: neighbours with the same beginning share a node."""
    lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
    flat = np.frombuffer(b"".join(pieces), np.uint8)
    offsets = np.cumsum(lengths) - lengths
    at, parents = np.arange(len(pieces), dtype=np.int32), np.zeros(len(pieces), np.int32)
    found: list[Level] = []
    first_child, children = np.zeros(1, np.int32), np.zeros(1, np.int32)
    for depth in range(int(lengths.max(initial=0))):
        bytes_here = flat[offsets[at] + depth]
        new = np.ones(len(at), np.bool_)
        new[1:] = (parents[1:] != parents[:-1]) | (bytes_here[1:] != bytes_here[:-1])
        node = (np.cumsum(new) - 1).astype(np.int32)
        heads = np.flatnonzero(new)
        if found:
            np.add.at(children, parents[heads], 1)
            first_child[:] = np.cumsum(children) - children
        count = len(heads)
        ends = np.bincount(node[lengths[at] == depth + 1], minlength=count).astype(np.int32)
        first_child, children = np.zeros(count, np.int32), np.zeros(count, np.int32)
        found.append(Level(bytes_here[heads], first_child, children, at[heads].astype(np.int32), ends))
        longer = lengths[at] > depth + 1
        at, parents = at[longer], node[longer]
    return found
