"""What runs wrote down meanwhile: shown where a test fails, as its folder is gone with the machine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

_LONG = ("step", "judged")
_OFTEN = 12
_LINES = 60
_WIDTH = 300


def logs_since(folder: Path, since: float) -> list[Path]:
    """The logs of runs below a folder that were written to since then, in seconds of the wall clock."""
    return sorted(path for path in folder.rglob("events.jsonl") if path.stat().st_mtime >= since)


def happened(log: Path) -> str:
    """The last events of a log, without what comes often, as steps do."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line]
    kinds = [_kind(line) for line in lines]
    often = {kind: count for kind, count in Counter(kinds).items() if count > _OFTEN or kind in _LONG}
    shown = [line[:_WIDTH] for line, kind in zip(lines, kinds, strict=True) if kind not in often][-_LINES:]
    return "\n".join([*shown, *(f"and {count} of {kind}" for kind, count in often.items())])


def _kind(line: str) -> str:
    try:
        return str(json.loads(line)["data"]["event"])
    except (ValueError, KeyError, TypeError):
        return "what cannot be read"
