"""Draws a schedule as SVG, as papers do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.schedule import OpKind
from holdfast.core.timeline import Span, Timeline, activation_memory
from holdfast.core.work_costs import WorkCosts
from holdfast.drawing.axis import TimeAxis
from holdfast.drawing.svg import canvas, element, legend, rect, text, title, upright

__all__ = ["COLOURS", "OP_NAMES", "schedule_to_svg"]

OP_NAMES = MappingProxyType(
    {OpKind.F: "forward", OpKind.I: "backward, input", OpKind.W: "backward, weights", OpKind.B: "backward"}
)
"""What the kinds of operations are, in the order of the legend."""
COLOURS = {OpKind.F: "#9ec5e8", OpKind.I: "#f2c48d", OpKind.W: "#b5d99c", OpKind.B: "#e9a6a6"}
_THIN, _THICK = {"stroke": "#555", "stroke_width": "0.5"}, {"stroke": "black", "stroke_width": "1.6"}
_HATCHES = element("rect", width=6, height=6, fill="#f4f4f4") + element(
    "line", x1=0, y1=0, x2=0, y2=6, stroke="#999", stroke_width=2
)
_GONE = element(
    "pattern", _HATCHES, id="gone", width=6, height=6, patternUnits="userSpaceOnUse", patternTransform="rotate(45)"
)
_ROW, _STRIP, _LEFT, _TOP, _BETWEEN, _AXIS = 22, 10, 52, 30, 8, 56
_LEAST, _MOST, _LEGIBLE = 960, 4000, 22
"""Pixels: the width of a picture, at least and at most, and of an operation in which its micro-batch can be read."""


def schedule_to_svg(
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
    width = width or _width(timeline)
    begin = min((span.start for span in timeline.spans), default=0)
    axis = TimeAxis(left=_LEFT, width=width - _LEFT - 10, duration=timeline.makespan, begin=begin)
    work = WorkCosts(plan.placement, plan.routes, costs)
    spans: defaultdict[WorkerId, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.worker].append(span)
    stages = sorted({worker.stage for worker in rows})
    bottom = _TOP + len(rows) * (_ROW + _STRIP + 4) + len(stages) * _BETWEEN
    body = [*_legend(), *axis.ticks(_TOP - 4, bottom + 4, stroke="#ddd")]
    for number, worker in enumerate(rows):
        top = _TOP + number * (_ROW + _STRIP + 4) + stages.index(worker.stage) * _BETWEEN
        body.append(text(_LEFT - 6, top + 15, str(worker), text_anchor="end"))
        if worker in gone:
            body.append(rect(_LEFT, top, axis.length(timeline.makespan), _ROW, fill="url(#gone)"))
            continue
        for span in sorted(spans[worker], key=_is_guest):
            body += _box(span, axis, top)
        held = activation_memory(plan.orders.of(worker), worker, work)
        body += _memory(spans[worker], held, work.whole[worker].capacity, axis, top + _ROW + 1)
    body += _borders(timeline, axis, bottom)
    body.append(text(_LEFT, bottom + _AXIS - 8, _sum_up(timeline)))
    defined = element("defs", _GONE)
    return canvas(width, bottom + _AXIS, defined, body, font_family="sans-serif", font_size=11)


def _legend() -> Iterator[str]:
    entries = {name: {"fill": COLOURS[kind], **_THIN} for kind, name in OP_NAMES.items()}
    return legend(_LEFT, 8, {**entries, "re-routed": {"fill": "none", "stroke": "black", "stroke_width": "2"}})


def _sum_up(timeline: Timeline) -> str:
    return (
        f"time in the units of the costs: period {timeline.period:g}, makespan {timeline.makespan:g}; grey: memory held"
    )


def _borders(timeline: Timeline, axis: TimeAxis, bottom: int) -> Iterator[str]:
    """Where the step begins, and where the next one does: one period later."""
    for after, label, anchor in ((0.0, "the step begins", "start"), (timeline.period, "the next step begins", "end")):
        x = axis.at(axis.begin + after)
        yield upright(x, _TOP - 4, bottom + 20, class_="border", stroke="#444", stroke_dasharray="4 3")
        yield text(x, bottom + 32, label, class_="border", text_anchor=anchor)


def _box(span: Span, axis: TimeAxis, top: int) -> Iterator[str]:
    left, length, guest = axis.at(span.start), axis.length(span.end - span.start), _is_guest(span)
    frame = _THICK if guest else _THIN
    about = title(f"{span.op} {span.start:g} to {span.end:g}")
    yield rect(left, top, length, _ROW, about, fill=COLOURS[span.op.kind], **frame)
    words = str(span.op.microbatch) if guest else str(span.op.microbatch.index)
    size = next((size for size in (11, 9, 7) if length >= 0.62 * size * len(words) + 2), None)
    if size:
        yield text(left + length / 2, top + 15, words, font_size=size, text_anchor="middle")


def _is_guest(span: Span) -> bool:
    """Whether a worker runs it for another pipeline; these are drawn last, so that nothing covers their frames."""
    return span.op.microbatch.pipeline != span.worker.pipeline


def _width(timeline: Timeline) -> int:
    """Returns the pixels at which half of the operations are legible."""
    lengths = sorted(span.end - span.start for span in timeline.spans if span.end > span.start)
    wanted = _LEGIBLE * timeline.makespan / lengths[len(lengths) // 2] if lengths else 0
    return min(_MOST, max(_LEAST, _LEFT + 10 + int(wanted)))


def _memory(
    spans: Sequence[Span], held: Sequence[float], capacity: float | None, axis: TimeAxis, top: int
) -> Iterator[str]:
    most = capacity or max(held, default=0)
    if not spans or not most:
        return
    floor = top + _STRIP
    points = [f"{axis.at(spans[0].start):.2f},{floor}"]
    for span, amount in zip(spans, held, strict=True):
        level = floor - _STRIP * amount / most
        points += [f"{axis.at(time):.2f},{level:.2f}" for time in (span.start, span.end)]
    points.append(f"{axis.at(spans[-1].end):.2f},{floor}")
    yield element("polygon", points=" ".join(points), fill="#bbb")
