"""The numbers that the papers print, and their authors have published beside them."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["facts"]


@cache
def facts(paper: str) -> dict[str, Any]:
    """Return what is known of a paper, by its keys, and as ``sources`` where from; not to be changed.

    Args:
        paper: ``slipstream``, ``oobleck``, ``swift`` or ``nicolae``.
    """
    text = files("holdfast.reproduce").joinpath("facts", f"{paper}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
