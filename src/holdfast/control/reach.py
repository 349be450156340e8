"""How the coordinators of a job are reached."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.config.job import Tls

__all__ = ["Reach"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How the coordinators of a job are reached.

    Attributes:
        addresses: ``host:port``; several, joined by commas, are tried in turn.
        token: the job's.
        tls: certificates; None: connections are in the clear.
        read: whether this was read where whoever leads may be yet to say so: who refuses the token may be a stranger,
            who was given the port of a coordinator that is gone.
    """

    addresses: str
    token: str = field(repr=False)
    tls: Tls | None = None
    read: bool = False
