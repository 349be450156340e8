"""A schedule as a trace for https://ui.perfetto.dev."""

from __future__ import annotations

from holdfast.core.ids import WorkerId
from holdfast.core.timeline import Timeline
from holdfast.drawing.schedule import OP_NAMES
from holdfast.drawing.trace_events import Json, Track, names, slice_of, trace

__all__ = ["schedule_to_trace"]


def schedule_to_trace(timeline: Timeline, *, microseconds: float = 1.0) -> str:
    """Returns the timeline as trace-event JSON: a process per stage, a thread per worker.

    Args:
        timeline: the times of a plan.
        microseconds: what one unit of time is in the trace.
    """
    events: list[Json] = []
    for worker in sorted({span.worker for span in timeline.spans}):
        events += names(_track(worker), process=f"stage {worker.stage}", thread=f"worker {worker}")
    for span in sorted(timeline.spans, key=lambda each: each.start):
        about = {"microbatch": str(span.op.microbatch), "kind": OP_NAMES[span.op.kind]}
        at, kind = (span.start, span.end), span.op.kind.value
        events.append(slice_of(str(span.op), kind, _track(span.worker), at, about, unit=microseconds))
    return trace(events)


def _track(worker: WorkerId) -> Track:
    return Track(worker.stage, worker.pipeline)
