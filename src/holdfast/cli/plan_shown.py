"""How ``holdfast plan`` shows a plan: as a table, JSON, a picture or a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from holdfast.cli.ways_shown import tell_way_in_full
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.routes import Visit
from holdfast.core.timeline import Timeline
from holdfast.drawing.schedule import schedule_to_svg
from holdfast.drawing.schedule_text import schedule_to_text
from holdfast.drawing.schedule_trace import schedule_to_trace
from holdfast.planning.normalise import Move
from holdfast.schedule.bounds import Bound
from holdfast.telemetry.events import Chosen

__all__ = ["FORMATS", "Shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A plan, and what there is to say of it.

    Attributes:
        plan: it.
        timeline: its times.
        costs: costs per layer, in the units of the times.
        failed: the workers that are gone.
        solve_s: how long it took to make.
        bound: what no plan can beat; None where that is not known.
        optimal: whether the plan reaches the bound.
        failures_per_stage: of a regular grid.
        moves: who takes whose place.
        note: what a person should know; empty if nothing.
        step_log: bytes of a step that each worker keeps, in case it is interrupted; None where sizes are not known.
        recovery: how the job recovers from the loss of a node; None where that is not known.
    """

    plan: Plan
    timeline: Timeline
    costs: Costs
    failed: Iterable[WorkerId]
    solve_s: float
    bound: Bound | None = None
    optimal: bool = False
    failures_per_stage: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    note: str = ""
    step_log: Mapping[WorkerId, int] | None = None
    recovery: Chosen | None = None


def _to_json(shown: Shown) -> str:
    timeline, bound = shown.timeline, shown.bound
    orders: dict[str, list[list[object]]] = {str(worker): [] for worker, _ in timeline.peak_memory}
    for span in timeline.spans:
        microbatch = span.op.microbatch
        orders[str(span.worker)].append(
            [span.op.kind.value, microbatch.pipeline, microbatch.index, span.start, span.end]
        )
    found = {
        "period": timeline.period,
        "makespan": timeline.makespan,
        "bound": None if bound is None else {"period": bound.period, "makespan": bound.makespan},
        "optimal": shown.optimal,
        "failures_per_stage": list(shown.failures_per_stage),
        "moves": [asdict(move) | {"worker": str(move.worker), "takes": str(move.takes)} for move in shown.moves],
        "peak_memory": {str(worker): peak for worker, peak in timeline.peak_memory},
        **({} if shown.step_log is None else {"step_log_bytes": {str(w): size for w, size in shown.step_log.items()}}),
        **({} if shown.recovery is None else {"recovery": shown.recovery.figures()}),
        "solve_s": shown.solve_s,
        "note": shown.note,
        "parts": [[str(visit.worker), str(visit.layers), names] for visit, names in _parts(shown.plan)],
        "orders": orders,
    }
    return json.dumps(found) + "\n"


def _to_table(shown: Shown) -> str:
    lines = [schedule_to_text(shown.timeline).rstrip("\n")]
    if (bound := shown.bound) is not None:
        reached = " (reached: optimal)" if shown.optimal else ""
        lines.append(f"bound     period {bound.period:g}, makespan {bound.makespan:g}{reached}")
    if shown.failures_per_stage:
        lines.append(f"failures  {' '.join(map(str, shown.failures_per_stage))} per stage")
    lines += [f"moves     {_told(move)}" for move in shown.moves]
    lines += [
        f"parts     {visit.worker} runs layers {visit.layers} of what it holds for {' '.join(names)}"
        for visit, names in _parts(shown.plan)
    ]
    if shown.step_log:
        worker, size = max(shown.step_log.items(), key=lambda each: each[1])
        lines.append(f"step log  at most {size:,} bytes per worker, on {worker}: kept in case the step is interrupted")
    if shown.recovery is not None:
        first, *rest = tell_way_in_full(shown.recovery)
        lines += [f"recovery  {first}", *(f"          {line}" for line in rest)]
    lines.append(f"solved    in {shown.solve_s * 1e3:.1f} ms")
    lines += [f"note      {shown.note}"] if shown.note else []
    return "\n".join(lines) + "\n"


def _parts(plan: Plan) -> list[tuple[Visit, list[str]]]:
    """The visits to a part of what a worker holds, which its operations do not tell, and the micro-batches."""
    whole = plan.placement.single_ranges
    parts: dict[Visit, list[str]] = {}
    for route in plan.routes.routes:
        for visit in route.visits:
            if visit.layers != whole.get(visit.worker):
                parts.setdefault(visit, []).append(str(route.microbatch))
    return sorted(parts.items())


def _told(move: Move) -> str:
    size = "the state of its layers" if move.copied_bytes is None else f"{move.copied_bytes:,} bytes"
    return f"{move.worker} takes the place of {move.takes}, copies {size}"


def _to_svg(shown: Shown) -> str:
    return schedule_to_svg(shown.plan, shown.costs, shown.timeline, failed=shown.failed)


def _to_perfetto(shown: Shown) -> str:
    return schedule_to_trace(shown.timeline)


FORMATS: Mapping[str, Callable[[Shown], str]] = MappingProxyType(
    {"json": _to_json, "perfetto": _to_perfetto, "svg": _to_svg, "table": _to_table}
)
"""The name of every form, and what makes it."""
