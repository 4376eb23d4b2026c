"""A vocabulary as llguidance's tokenizer."""

import llguidance

from bladellm_runtime.guided.vocabulary import Vocabulary


def tokenizer_of(vocabulary: Vocabulary, slices: list[str]) -> llguidance.LLTokenizer:
    """slices: parts of the vocabulary, as expressions, that the library allows as a whole where it can."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Pieces(vocabulary)),
        n_vocab=len(vocabulary.pieces),
        eos_token=list(vocabulary.end_ids),
        slices=slices,
    )


class _Pieces:
    """The vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.pieces
        self.eos_token_id = vocabulary.end_ids[0]
        # Not the others without bytes: the library would look at each special token for every row.
        self.special_token_ids = list(vocabulary.end_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokenizer's own tokens of a text, which the library allows where the text is forced."""
        return self._encode(text if isinstance(text, str) else text.decode()) if self._encode else []
