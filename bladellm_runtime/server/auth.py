"""Bearer keys. Every route needs one, except those named here by their exact path; admin routes need an admin key."""

import hashlib
import hmac
from collections.abc import Sequence

from bladellm_runtime.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes carry no key. Compared exactly: any other spelling of these paths needs a key, and then finds no route."""


class Authenticator:
    """Checks `Authorization: Bearer KEY` against the server's keys; without keys everyone may enter.

    An admin key opens all routes. Handlers of admin routes ask for it themselves, so that no spelling of their paths
    goes round it.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        # Digests have one length, so comparing them tells nothing about the length of a key.
        self._admin = [_digest(key.encode()) for key in admin_keys]
        self._digests = [_digest(key.encode()) for key in keys] + (self._admin if keys else [])

    @property
    def has_admin(self) -> bool:
        """Whether there are keys of the admin routes, without which these do not exist."""
        return bool(self._admin)

    def check(self, path: str, authorization: bytes | None) -> None:
        """Raise `ApiError` 401 unless the request may enter."""
        if self._digests and path not in OPEN_PATHS:
            _check_key(authorization, self._digests, "A valid key")

    def check_admin(self, authorization: bytes | None) -> None:
        """Raise `ApiError` 401 unless the request has an admin key."""
        _check_key(authorization, self._admin, "The admin key")


def _check_key(authorization: bytes | None, digests: list[bytes], wanted: str) -> None:
    scheme, _, key = (authorization or b"").partition(b" ")
    given = _digest(key.strip())
    # All keys are compared, so that the time does not tell which one came close.
    matches = sum(hmac.compare_digest(given, digest) for digest in digests)
    if scheme.lower() != b"bearer" or not matches:
        raise ApiError(401, f"{wanted} is required: send the header Authorization: Bearer KEY", code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
