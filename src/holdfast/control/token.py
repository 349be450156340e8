"""The job's token: what every call between the job's processes carries, and how it is checked."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

__all__ = ["REFUSAL", "TOKEN_KEY", "carries"]

TOKEN_KEY = "holdfast-token"
REFUSAL = "wrong or missing job token"


def carries(metadata: Iterable[tuple[str, str | bytes]] | None, token: str) -> bool:
    """Returns whether a call's metadata carries ``token``; compares in constant time.

    Example:
        >>> carries([("holdfast-token", "abc")], "abc"), carries([], "abc")
        (True, False)
    """
    given = next((value for key, value in metadata or () if key == TOKEN_KEY), "")
    given = given.encode() if isinstance(given, str) else given
    return hmac.compare_digest(given, token.encode())
