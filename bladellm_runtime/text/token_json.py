"""The texts of single tokens as JSON: most tokens are whole characters, and what they say is looked up."""

from collections.abc import Callable, Container

import orjson


class TokenJson(dict[int, bytes | None]):
    """The text of each token as a JSON string, made when it is first asked for.

    None for a token without a text, and for one whose bytes are not whole characters: what these say depends on the
    tokens around them. `token_bytes` gives the bytes of a token id, empty for an id without any; those of `skipped`
    have no text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: Container[int]) -> None:
        super().__init__()
        self._token_bytes = token_bytes
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes | None:
        data = b"" if token_id in self._skipped else self._token_bytes(token_id)
        if not data:
            return None  # not kept: what is kept stays as small as the vocabulary
        try:
            made = orjson.dumps(data.decode())
        except UnicodeDecodeError:
            made = None
        self[token_id] = made
        return made
