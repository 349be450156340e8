"""Draws one step of a run as SVG: what every worker ran of it and when, also of one that was interrupted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.schedule import OpKind
from holdfast.drawing.axis import TimeAxis
from holdfast.drawing.run import LOST, LOST_HEIGHT
from holdfast.drawing.schedule import COLOURS, OP_NAMES
from holdfast.drawing.svg import canvas, element, legend, rect, text, title, upright
from holdfast.errors import ConfigError
from holdfast.telemetry.events import Agreed, Detected, FaultInjected, StepOps, Timed
from holdfast.telemetry.report import FATAL_KINDS

__all__ = ["step_to_svg"]

_LEFT, _TOP, _PITCH, _ROW, _AXIS, _WIDTH = 52, 56, 28, 22, 44, 1200
_THIN, _LATE = {"stroke": "#555", "stroke_width": "0.5"}, {"stroke": "black", "stroke_width": "1.6"}
_STYLE = "text { font: 11px sans-serif; fill: #222 } .mark { fill: #b2182b }"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    worker: str
    kind: OpKind
    name: tuple[int, int]
    start: float
    end: float
    late: bool


def step_to_svg(timed: Sequence[Timed], step: int) -> str:
    """Returns a picture: a row per worker, a box per operation, a red bar from where somebody was struck, lines where
    somebody was found to be lost and where all had agreed how to go on. What was run of a step that all went on with
    has a thick frame from then on; of one that was run again whole, what had been run before is told nowhere.

    Args:
        timed: the events of a run.
        step: which of its steps, 0-based.

    Raises:
        ConfigError: nobody finished that step.
    """
    done = [(at, event) for at, event in timed if isinstance(event, StepOps) and event.step == step]
    if not done:
        raise ConfigError(f"no worker finished step {step}: nothing of it can be drawn")
    last = {event.worker: (at, event) for at, event in done}
    end = max(at for at, _ in last.values())
    before = [at for at, event in timed if isinstance(event, StepOps) and event.step == step - 1 and at < end]
    boxes = list(_boxes(timed, [event for _, event in last.values()], step))
    begin = min((max(before, default=end), *(box.start for box in boxes)))
    axis = TimeAxis(left=_LEFT, width=_WIDTH - _LEFT - 20, duration=end - begin, begin=begin)
    lost = _lost(timed, begin, end)
    workers = sorted({*last, *lost})
    bottom = _TOP + _PITCH * len(workers)
    places = {worker: _TOP + _PITCH * index for index, worker in enumerate(workers)}
    parts = [
        *_legend(boxes, lost=bool(lost)),
        *axis.ticks(_TOP - 4, bottom + 4, " s", stroke="#ddd"),
        *(text(_LEFT - 6, y + 15, worker, text_anchor="end") for worker, y in places.items()),
        *(part for box in sorted(boxes, key=lambda box: box.late) for part in _drawn(box, places[box.worker], axis)),
        *(_gone(places[worker], axis.at(since), axis.length(end - since)) for worker, since in lost.items()),
        *_marks(timed, begin, end, axis, bottom),
    ]
    return canvas(_WIDTH, bottom + _AXIS, element("style", _STYLE), parts)


def _boxes(timed: Iterable[Timed], done: list[StepOps], step: int) -> Iterator[_Box]:
    """The operations; of a step that all went on with, those since then are late."""
    agreed = (at for at, event in timed if isinstance(event, Agreed) and event.step == step and event.goes_on)
    since = max(agreed, default=math.inf)
    for event in done:
        for kind, pipeline, index, start, end in event.ops:
            late, name = start >= since, (pipeline, index)
            yield _Box(worker=event.worker, kind=OpKind(kind), name=name, start=start, end=end, late=late)


def _lost(timed: Iterable[Timed], begin: float, end: float) -> dict[str, float]:
    """Who was found to be lost, and from when on: from the fault, where that was injected in this time."""
    lost: dict[str, float] = {}
    struck: dict[str, float] = {}
    for at, event in timed:
        if begin <= at <= end and isinstance(event, FaultInjected) and event.kind in FATAL_KINDS:
            struck[event.worker] = at
        elif begin <= at <= end and isinstance(event, Detected):
            lost[event.worker] = struck.get(event.worker, at)
    return lost


def _gone(top: int, left: float, length: float) -> str:
    return rect(left, top + (_ROW - LOST_HEIGHT) // 2, length, LOST_HEIGHT, fill=LOST, class_="lost")


def _legend(boxes: list[_Box], *, lost: bool) -> Iterator[str]:
    kinds = {box.kind for box in boxes}
    entries = {name: {"fill": COLOURS[kind], **_THIN} for kind, name in OP_NAMES.items() if kind in kinds}
    late = {"since the loss": {"fill": "none", **_LATE}} if any(box.late for box in boxes) else {}
    gone = {"lost": {"fill": LOST, **_THIN}} if lost else {}
    return legend(_LEFT, 8, {**entries, **late, **gone})


def _drawn(box: _Box, top: int, axis: TimeAxis) -> Iterator[str]:
    left, length = axis.at(box.start), axis.length(box.end - box.start)
    words = f"{box.name[0]}.{box.name[1]}"
    about = title(f"{box.kind.value}{words}, {1000 * (box.end - box.start):.1f} ms")
    yield rect(left, top, length, _ROW, about, fill=COLOURS[box.kind], **(_LATE if box.late else _THIN))
    if length >= 24:
        yield text(left + length / 2, top + 15, words, text_anchor="middle")


def _marks(timed: Iterable[Timed], begin: float, end: float, axis: TimeAxis, bottom: int) -> Iterator[str]:
    for at, event in timed:
        words = ""
        if begin <= at <= end and isinstance(event, Detected):
            words = f"{event.worker} is found to be lost"
        elif begin <= at <= end and isinstance(event, Agreed):
            words = "all go on with it" if event.goes_on else f"all run from step {event.step}"
        if words:
            x, y = axis.at(at), _TOP - 8 if isinstance(event, Agreed) else _TOP - 20
            anchor = "end" if x > _WIDTH / 2 else "start"
            yield upright(x, _TOP - 4, bottom, stroke="#b2182b", stroke_dasharray="4 3")
            yield text(x, y, words, class_="mark", text_anchor=anchor)
        if words and isinstance(event, Agreed) and not event.goes_on and axis.length(at - begin) > 200:
            middle, given_up = axis.at((begin + at) / 2), "what was run until here is given up"
            yield text(middle, (_TOP + bottom) / 2, given_up, class_="mark", text_anchor="middle")
