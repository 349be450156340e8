"""The events that a trace for https://ui.perfetto.dev is made of.

Its form is the trace event format: slices nest within their track, every arrow has one beginning and one end, and
events are in the order of time (`holdfast.testing.traces` checks that). Times are seconds here, microseconds there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["MICROSECONDS", "Json", "Track", "arrow", "counter", "instant", "names", "slice_of", "trace"]

MICROSECONDS = 1e6
"""What a second is in a trace."""

Json = dict[str, Any]


class Track(NamedTuple):
    """A row of the trace: processes are groups of rows, in the order of their numbers, and threads the rows."""

    process: int
    thread: int


def trace(events: Iterable[Json]) -> str:
    """Returns the whole trace.

    Raises:
        ValueError: a number is not finite, which JSON cannot tell.
    """
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


def slice_of(
    name: str,
    kind: str,
    track: Track,
    at: tuple[float, float],
    about: Mapping[str, object],
    *,
    unit: float = MICROSECONDS,
) -> Json:
    """Returns something that takes time.

    Args:
        name: written on it.
        kind: things of one kind can be looked for.
        track: where it is shown.
        at: its start and its end.
        about: shown when it is chosen.
        unit: microseconds of one unit of ``at``.
    """
    start, end = at
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        **_on(track),
        "ts": start * unit,
        "dur": (end - start) * unit,
        "args": dict(about),
    }


def counter(name: str, track: Track, time: float, values: Mapping[str, float]) -> Json:
    """Returns values that hold from a time on, drawn as a curve of their process."""
    return {"ph": "C", "name": name, **_on(track), "ts": time * MICROSECONDS, "args": dict(values)}


def instant(name: str, track: Track, time: float) -> Json:
    """Returns something that takes no time, drawn through all tracks."""
    return {"ph": "i", "s": "g", "name": name, **_on(track), "ts": time * MICROSECONDS}


def arrow(number: int, name: str, source: tuple[Track, float], target: tuple[Track, float]) -> Iterator[Json]:
    """Yields both ends of a message, from the slice that is at the source to the slice that is at the target.

    Args:
        number: no other arrow of the trace has it.
        name: of the message.
        source: track and time of its beginning.
        target: track and time of its end.
    """
    common = {"id": number, "name": name, "cat": "message"}
    yield {"ph": "s", **common, **_on(source[0]), "ts": source[1] * MICROSECONDS}
    encloses = {"bp": "e"}  # it ends in the slice that encloses it, not in the next one
    yield {"ph": "f", **common, **encloses, **_on(target[0]), "ts": target[1] * MICROSECONDS}


def names(track: Track, *, process: str = "", order: int | None = None, thread: str = "") -> Iterator[Json]:
    """Yields what is written beside a track.

    Args:
        track: it.
        process: the name of its process; empty: it is told with another track.
        order: the place of its process among others; None: by its number.
        thread: its own name; empty if it has none.
    """
    if process:
        yield _about(track, "process_name", name=process)
    if order is not None:
        yield _about(track, "process_sort_index", sort_index=order)
    if thread:
        yield _about(track, "thread_name", name=thread)


def _about(track: Track, what: str, **args: object) -> Json:
    return {"ph": "M", "name": what, **_on(track), "args": args}


def _on(track: Track) -> Json:
    return {"pid": track.process, "tid": track.thread}
