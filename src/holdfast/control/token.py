"""The job's token: what every call between the job's processes carries, and how it is checked.

The token itself is known to agents and the coordinator alone. What people hand to agents of other machines is good for
asking what the job is, and each attempt at it has a token made of that. A worker has a share that is good for its own
name only: whoever was expelled cannot speak as somebody else.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

from holdfast.core.ids import WorkerId

__all__ = ["REFUSAL", "TOKEN_KEY", "bearer", "carries", "is_token", "of_attempt", "pair_key", "share"]

TOKEN_KEY = "holdfast-token"
REFUSAL = "wrong or missing job token"


def carries(metadata: Iterable[tuple[str, str | bytes]] | None, token: str) -> bool:
    """Returns whether a call's metadata carries ``token``; compares in constant time.

    Example:
        >>> carries([("holdfast-token", "abc")], "abc"), carries([], "abc")
        (True, False)
    """
    return hmac.compare_digest(_given(metadata), token.encode())


def is_token(text: str) -> bool:
    """Returns whether this can be a token that people hand to agents: 16 to 200 letters, digits, '-' or '_'."""
    return re.fullmatch(r"[A-Za-z0-9_-]{16,200}", text, re.ASCII) is not None


def of_attempt(token: str, job_id: str) -> str:
    """Returns the token of one attempt at a job: whoever is left of another one is none of its processes."""
    return hmac.digest(token.encode(), f"attempt:{job_id}".encode(), "sha256").hex()


def share(token: str, name: str) -> str:
    """Returns what proves that its bearer goes by this name; neither ``token`` nor another share follows from it."""
    return f"{name}:{hmac.digest(token.encode(), name.encode(), 'sha256').hex()}"


def pair_key(token: str, one: tuple[WorkerId, bytes], other: tuple[WorkerId, bytes]) -> bytes:
    """Returns what two workers' processes prove to each other that they are, the same whoever is named first.

    Args:
        token: of the job.
        one, other: a worker, and the nonce of its process.
    """
    ends = sorted(f"{worker}:{nonce.hex()}" for worker, nonce in (one, other))
    return hmac.digest(token.encode(), f"pair:{' '.join(ends)}".encode(), "sha256")


def bearer(metadata: Iterable[tuple[str, str | bytes]] | None, token: str) -> str | None:
    """Returns the name for which a call's metadata carries a share of ``token``.

    Empty if it carries the token itself, which is good for any name; None if it carries neither.

    Example:
        >>> [bearer([("holdfast-token", given)], "abc") for given in ("abc", share("abc", "1.2"), share("x", "1.2"))]
        ['', '1.2', None]
    """
    given = _given(metadata)
    if hmac.compare_digest(given, token.encode()):
        return ""
    name = given.partition(b":")[0].decode("ascii", "replace")
    return name if hmac.compare_digest(given, share(token, name).encode()) else None


def _given(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    given = next((value for key, value in metadata or () if key == TOKEN_KEY), "")
    return given.encode() if isinstance(given, str) else given
