"""How a job recovers from the loss of a node, and is scheduled, as shown at start, by ``inspect`` and by ``plan``."""

from __future__ import annotations

from holdfast.recovery.choice import headline
from holdfast.telemetry.events import Chosen

__all__ = ["tell_technique", "tell_way", "tell_way_in_full"]


def tell_technique(technique: str, why: str) -> str:
    """Returns by which technique steps are scheduled, and what decided."""
    return f"steps are scheduled by {technique}: {why}"


def tell_way(chosen: Chosen) -> str:
    """Returns the way and what decided, in one line."""
    return f"for the loss of a node: {headline(chosen.way, chosen.advised, chosen.why)}"


def tell_way_in_full(chosen: Chosen) -> list[str]:
    """Returns the way in one line, and each reason in one more."""
    first = f"for the loss of a node: {chosen.way}" if chosen.way == chosen.advised else tell_way(chosen)
    return [first, *(f"  {reason}" for reason in chosen.reasons)]
