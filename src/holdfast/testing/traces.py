"""An oracle: whether a text keeps the rules of the trace event format that viewers rely on."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

__all__ = ["trace_faults"]

_PHASES = frozenset("XMCisf")
_SLACK_US = 1e-3
"""Times are seconds as floats, made microseconds: the last bits of an end may be beyond those of what encloses it."""


def trace_faults(text: str) -> list[str]:
    """Returns what is wrong with a trace, a line each; empty if nothing is.

    Checked: it is JSON without NaN; every event has a phase, a process and a thread, and but for metadata a time of 0
    or more, in order; slices of a thread nest; every flow begins once and ends once, later, each time in a slice of its
    thread, to which an end binds; counters hold finite numbers.
    """
    try:
        events = json.loads(text, parse_constant=_refuse)["traceEvents"]
    except (ValueError, KeyError) as error:
        return [f"is no trace: {error}"]
    wrong = [f"{event}: {what}" for event in events if (what := _wrong_alone(event))]
    if wrong:
        return wrong
    timed = [event for event in events if event["ph"] != "M"]
    late = [f"{b}: comes after {a['ts']}" for a, b in pairwise(timed) if b["ts"] < a["ts"]]
    slices = _by_thread(timed)
    return [*late, *(fault for each in slices.values() for fault in _not_nested(each)), *_bad_flows(timed, slices)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _wrong_alone(event: dict[str, Any]) -> str:
    if event.get("ph") not in _PHASES:
        return "unknown phase"
    if not all(isinstance(event.get(key), int) for key in ("pid", "tid")) or not isinstance(event.get("name"), str):
        return "no process, thread or name"
    if event["ph"] != "M" and not _is_time(event.get("ts")):
        return "no time"
    if event["ph"] == "X" and not _is_time(event.get("dur")):
        return "no length"
    if event["ph"] == "C" and not (event.get("args") and all(map(_is_number, event["args"].values()))):
        return "no values"
    if event["ph"] == "f" and event.get("bp") != "e":
        return "an end that binds to the next slice, not to its own"
    return "no id" if event["ph"] in "sf" and not isinstance(event.get("id"), int) else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: object) -> bool:
    return _is_number(value) and float(str(value)) >= 0


def _by_thread(events: Iterable[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def _not_nested(slices: list[dict[str, Any]]) -> Iterator[str]:
    """Each slice must lie within those of its thread that are still open, longer ones first."""
    open_until: list[float] = []
    for event in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        while open_until and open_until[-1] <= event["ts"] + _SLACK_US:
            open_until.pop()
        end = event["ts"] + event["dur"]
        if open_until and end > open_until[-1] + _SLACK_US:
            yield f"{event}: ends after the slice that it began in, at {open_until[-1]}"
        open_until.append(end)


def _bad_flows(events: Iterable[dict[str, Any]], slices: dict[tuple[int, int], list[dict[str, Any]]]) -> Iterator[str]:
    ends: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: {"s": [], "f": []})
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]].append(event)
            if not any(_holds(each, event["ts"]) for each in slices.get((event["pid"], event["tid"]), ())):
                yield f"{event}: lies in no slice of its thread"
    for number, found in ends.items():
        if len(found["s"]) != 1 or len(found["f"]) != 1:
            yield f"flow {number} begins {len(found['s'])} times and ends {len(found['f'])} times"
        elif found["s"][0]["ts"] > found["f"][0]["ts"]:
            yield f"flow {number} ends before it begins"


def _holds(event: dict[str, Any], time: float) -> bool:
    return bool(event["ts"] - _SLACK_US <= time <= event["ts"] + event["dur"] + _SLACK_US)
