"""Draws a schedule as text for a terminal."""

from __future__ import annotations

from collections import defaultdict

from holdfast.core.ids import WorkerId
from holdfast.core.timeline import Span, Timeline

__all__ = ["schedule_to_text"]


def schedule_to_text(timeline: Timeline, *, width: int = 400) -> str:
    """Returns one row per worker and, below, the numbers that sum the timeline up.

    If all times are integers, a column is one unit of time, an operation stands in its first unit and ``=`` goes on.
    If they are not, or the table would be wider than ``width``, a row is a strip of letters in proportion to time.
    Nothing to do is ``.`` in both.

    Args:
        timeline: what to draw.
        width: the most characters that the columns may take.
    """
    rows: defaultdict[WorkerId, list[Span]] = defaultdict(list)
    for worker, _ in timeline.peak_memory:
        rows[worker] = []
    for span in timeline.spans:
        rows[span.worker].append(span)
    cell = 1 + max((len(str(span.op)) for span in timeline.spans), default=0)
    slotted = _is_integral(timeline) and timeline.makespan * cell <= width
    margin = max((len(str(worker)) for worker in rows), default=0)
    lines = [_ruler(timeline, margin, cell)] if slotted else []
    for worker, spans in sorted(rows.items()):
        picture = _slots(spans, timeline, cell) if slotted else _strip(spans, timeline, min(width, 100))
        lines.append(f"{worker!s:>{margin}}  {picture}".rstrip())
    return "\n".join([*lines, "", *_summary(timeline)]) + "\n"


def _is_integral(timeline: Timeline) -> bool:
    return all(float(time).is_integer() for span in timeline.spans for time in (span.start, span.end))


def _start(timeline: Timeline) -> float:
    return min((span.start for span in timeline.spans), default=0)


def _ruler(timeline: Timeline, margin: int, cell: int) -> str:
    return (" " * margin + "  " + "".join(f"{slot:<{cell}}" for slot in range(int(timeline.makespan)))).rstrip()


def _slots(spans: list[Span], timeline: Timeline, cell: int) -> str:
    cells = ["."] * int(timeline.makespan)
    origin = _start(timeline)
    for span in spans:
        first, stop = int(span.start - origin), int(span.end - origin)
        cells[first:stop] = [str(span.op), *"=" * (stop - first - 1)][: stop - first]
    return "".join(text.ljust(cell) for text in cells)


def _strip(spans: list[Span], timeline: Timeline, width: int) -> str:
    letters = ["."] * width
    scale = width / timeline.makespan if timeline.makespan else 0
    origin = _start(timeline)
    for span in spans:
        first, stop = round((span.start - origin) * scale), round((span.end - origin) * scale)
        letters[first:stop] = span.op.kind.value * (stop - first)
    return "".join(letters)


def _summary(timeline: Timeline) -> list[str]:
    workers = len(timeline.peak_memory)
    busy = sum(span.end - span.start for span in timeline.spans)
    idle = 1 - busy / (workers * timeline.makespan) if workers and timeline.makespan else 0
    peaks = " ".join(f"{worker}:{_number(peak)}" for worker, peak in timeline.peak_memory)
    return [
        f"period    {_number(timeline.period)}",
        f"makespan  {_number(timeline.makespan)}",
        f"idle      {idle:.1%}",
        f"memory    {peaks}",
    ]


def _number(value: float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
