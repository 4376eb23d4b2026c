"""Bearer keys. Every route needs one, except those named here, by their exact path."""

import hashlib
import hmac
from collections.abc import Sequence

from bladellm_runtime.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes carry no key. Compared exactly: any other spelling of these paths needs a key, and then finds no route."""


class Authenticator:
    """Checks `Authorization: Bearer KEY` against the server's keys; without keys everyone may enter."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so comparing them tells nothing about the length of a key.
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: bytes | None) -> None:
        """Raise `ApiError` 401 unless the request may enter."""
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        # All keys are compared, so that the time does not tell which one came close.
        matches = sum(hmac.compare_digest(given, digest) for digest in self._digests)
        if scheme.lower() != b"bearer" or not matches:
            raise ApiError(
                401, "A valid key is required: send the header Authorization: Bearer KEY", code="invalid_api_key"
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
