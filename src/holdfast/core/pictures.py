"""Draws a timeline as SVG, as papers do, and as a trace for the Perfetto UI; round times for axes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from holdfast.core.evaluate import Span, Timeline, memory_held
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.schedule import Op, OpKind
from holdfast.core.work_costs import WorkCosts

__all__ = ["render_svg", "render_trace", "ticks"]

_COLOURS = {OpKind.F: "#9ec5e8", OpKind.I: "#f2c48d", OpKind.W: "#b5d99c", OpKind.B: "#e9a6a6"}
_NAMES = {OpKind.F: "forward", OpKind.I: "backward, input", OpKind.W: "backward, weights", OpKind.B: "backward"}
_ROW, _STRIP, _LEFT, _TOP, _BETWEEN, _AXIS = 22, 10, 52, 30, 8, 56
_LEAST, _MOST, _LEGIBLE = 960, 4000, 22
"""Pixels: the width of a picture, at least and at most, and of an operation in which its micro-batch can be read."""


def render_svg(
    plan: Plan, costs: Costs, timeline: Timeline, *, failed: Iterable[WorkerId] = (), width: int | None = None
) -> str:
    """Returns a picture: a row per worker by stage, colours for kinds of operation, memory in a strip below each row.

    A micro-batch's index stands in its operations where there is room; a strip is full at the memory's limit.
    Micro-batches of other pipelines have a thick frame and stand as pipeline.index; failed workers are hatched. Below
    is the axis of time, in the units of the costs, with the borders of the step.

    Args:
        plan: the plan.
        costs: costs per layer, for the memory.
        timeline: the times of the plan.
        failed: workers that are gone, drawn as empty rows.
        width: pixels of the picture; default: as many as make most operations legible, within reason.
    """
    gone = frozenset(failed)
    rows = sorted({*plan.workers, *gone}, key=lambda worker: (worker.stage, worker.pipeline))
    origin = min((span.start for span in timeline.spans), default=0)
    width = width or _width(timeline)
    scale = (width - _LEFT - 10) / (timeline.makespan or 1)
    work = WorkCosts(plan.placement, plan.routes, costs)
    spans: defaultdict[WorkerId, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.worker].append(span)
    stages = sorted({worker.stage for worker in rows})
    bottom = _TOP + len(rows) * (_ROW + _STRIP + 4) + len(stages) * _BETWEEN
    height = bottom + _AXIS
    body = [*_legend(), *_axis(timeline, scale, bottom)]
    for number, worker in enumerate(rows):
        top = _TOP + number * (_ROW + _STRIP + 4) + stages.index(worker.stage) * _BETWEEN
        body.append(f'<text x="{_LEFT - 6}" y="{top + 15}" text-anchor="end">{worker}</text>')
        if worker in gone:
            length = timeline.makespan * scale
            body.append(f'<rect x="{_LEFT}" y="{top}" width="{length:.2f}" height="{_ROW}" fill="url(#gone)"/>')
            continue
        for span in sorted(spans[worker], key=_is_guest):
            body += _box(span, _LEFT + (span.start - origin) * scale, (span.end - span.start) * scale, top)
        body += _memory(plan.orders.of(worker), worker, work, spans[worker], (origin, scale), top + _ROW + 1)
    body += _borders(timeline, scale, bottom)
    body.append(
        f'<text x="{_LEFT}" y="{height - 8}">time in the units of the costs: period {timeline.period:g}, '
        f"makespan {timeline.makespan:g}; grey: memory held</text>"
    )
    return _HEAD.format(width=width, height=height) + "\n".join(body) + "\n</svg>\n"


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" \
font-family="sans-serif" font-size="11">
<defs><pattern id="gone" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect width="6" height="6" fill="#f4f4f4"/><line x1="0" y1="0" x2="0" y2="6" stroke="#999" stroke-width="2"/>\
</pattern></defs>
<rect width="100%" height="100%" fill="white"/>
"""


def _legend() -> Iterator[str]:
    left = _LEFT
    for kind, name in _NAMES.items():
        frame = f'fill="{_COLOURS[kind]}" stroke="#555" stroke-width="0.5"'
        yield f'<rect x="{left}" y="8" width="12" height="12" {frame}/>'
        yield f'<text x="{left + 16}" y="18">{escape(name)}</text>'
        left += 34 + 6 * len(name)
    yield f'<rect x="{left}" y="8" width="12" height="12" fill="none" stroke="black" stroke-width="2"/>'
    yield f'<text x="{left + 16}" y="18">re-routed</text>'


def ticks(end: float) -> list[float]:
    """Returns about eight round numbers from 0 to ``end``."""
    if end <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(end / 8))
    step = next(unit * factor for factor in (1, 2, 5, 10) if end / (unit * factor) <= 10)
    return [number * step for number in range(int(end / step) + 1)]


def _axis(timeline: Timeline, scale: float, bottom: float) -> Iterator[str]:
    """Round times, each with a faint line through all rows."""
    for time in ticks(timeline.makespan):
        x = f"{_LEFT + time * scale:.2f}"
        yield f'<line class="tick" x1="{x}" x2="{x}" y1="{_TOP - 4}" y2="{bottom + 4}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{time:g}</text>'


def _borders(timeline: Timeline, scale: float, bottom: float) -> Iterator[str]:
    """Where the step begins, and where the next one does: one period later."""
    for time, label, anchor in ((0.0, "the step begins", "start"), (timeline.period, "the next step begins", "end")):
        x = f"{_LEFT + time * scale:.2f}"
        yield (
            f'<line class="border" x1="{x}" x2="{x}" y1="{_TOP - 4}" y2="{bottom + 20}" stroke="#444" '
            'stroke-dasharray="4 3"/>'
        )
        yield f'<text class="border" x="{x}" y="{bottom + 32}" text-anchor="{anchor}">{label}</text>'


def _box(span: Span, left: float, length: float, top: float) -> Iterator[str]:
    microbatch = span.op.microbatch
    guest = _is_guest(span)
    frame = 'stroke="black" stroke-width="1.6"' if guest else 'stroke="#555" stroke-width="0.5"'
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{length:.2f}" height="{_ROW}" '
        f'fill="{_COLOURS[span.op.kind]}" {frame}><title>{span.op} {span.start:g} to {span.end:g}</title></rect>'
    )
    text = str(microbatch) if guest else str(microbatch.index)
    size = next((size for size in (11, 9, 7) if length >= 0.62 * size * len(text) + 2), None)
    if size:
        yield f'<text x="{left + length / 2:.2f}" y="{top + 15}" font-size="{size}" text-anchor="middle">{text}</text>'


def _is_guest(span: Span) -> bool:
    """Whether a worker runs it for another pipeline; these are drawn last, so that nothing covers their frames."""
    return span.op.microbatch.pipeline != span.worker.pipeline


def _width(timeline: Timeline) -> int:
    """Returns the pixels at which half of the operations are legible."""
    lengths = sorted(span.end - span.start for span in timeline.spans if span.end > span.start)
    wanted = _LEGIBLE * timeline.makespan / lengths[len(lengths) // 2] if lengths else 0
    return min(_MOST, max(_LEAST, _LEFT + 10 + int(wanted)))


def _memory(
    row: tuple[Op, ...], worker: WorkerId, work: WorkCosts, spans: list[Span], axis: tuple[float, float], top: float
) -> Iterator[str]:
    (origin, scale), held = axis, memory_held(row, worker, work)
    most = work.whole[worker].capacity or max(held, default=0)
    if not spans or not most:
        return
    points = [f"{_LEFT + (spans[0].start - origin) * scale:.2f},{top + _STRIP}"]
    for span, amount in zip(spans, held, strict=True):
        level = top + _STRIP * (1 - amount / most)
        points += [f"{_LEFT + (time - origin) * scale:.2f},{level:.2f}" for time in (span.start, span.end)]
    points.append(f"{_LEFT + (spans[-1].end - origin) * scale:.2f},{top + _STRIP}")
    yield f'<polygon points="{" ".join(points)}" fill="#bbb"/>'


def render_trace(timeline: Timeline, *, microseconds: float = 1.0) -> str:
    """Returns the timeline as trace-event JSON, which https://ui.perfetto.dev opens: one process per stage.

    Args:
        timeline: the times of a plan.
        microseconds: what one unit of time is in the trace.
    """
    events: list[dict[str, object]] = []
    for worker in sorted({span.worker for span in timeline.spans}):
        place = {"pid": worker.stage, "tid": worker.pipeline}
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": f"stage {worker.stage}"}})
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"worker {worker}"}})
    for span in sorted(timeline.spans, key=lambda each: each.start):
        events.append(
            {
                "ph": "X",
                "name": str(span.op),
                "cat": span.op.kind.value,
                "pid": span.worker.stage,
                "tid": span.worker.pipeline,
                "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds,
                "args": {"microbatch": str(span.op.microbatch), "kind": _NAMES[span.op.kind]},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
