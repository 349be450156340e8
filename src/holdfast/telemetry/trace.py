"""A run beside its plan, as a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from holdfast.core.evaluate import evaluate
from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.schedule import Op, OpKind
from holdfast.telemetry.events import Event, StepOps
from holdfast.telemetry.timeline import RunTimeline, run_timeline

__all__ = ["measured_costs", "render_run_trace"]

_MICROSECONDS = 1e6
_PLANNED = 1000
"""Added to a stage's number for the process that shows its plan: Perfetto sorts by it."""

Timed = tuple[float, Event]


def render_run_trace(timed: list[Timed], plans: Mapping[int, Plan], costs: Costs | None = None) -> str:
    """Returns trace-event JSON: of every stage what its workers ran, and beside it what their plan says.

    A planned step begins where the measured one did, so what shows is how the step went, not how delays add up.

    Args:
        timed: the events of a run, in the order of time.
        plans: the plan of every generation; a generation without one is shown as measured only.
        costs: in seconds, what the plan is timed with; None: the medians of what was measured in its generation.
    """
    start = timed[0][0] if timed else 0.0
    steps = _by_step(timed)
    workers = {worker for ran in steps.values() for worker in ran}
    events = [event for worker in sorted(workers) for event in _names(worker)]
    for (generation, step), ran in sorted(steps.items()):
        begin = min((ops[0][3] for ops in ran.values() if ops), default=start)
        for worker, ops in sorted(ran.items()):
            for kind, pipeline, index, since, until in ops:
                op = Op(OpKind(kind), MicroBatch(pipeline, index))
                events.append(_span(worker, op, step, since - start, until - since, planned=False))
        if generation in plans:
            plan = plans[generation]
            known = costs or measured_costs(plan, [each for (at, _), each in steps.items() if at == generation])
            events += _planned(plan, known, step, begin - start)
    events += _marks(run_timeline(timed)) if timed else []
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


_Ran = dict[WorkerId, tuple[tuple[str, int, int, float, float], ...]]


def _by_step(timed: Iterable[Timed]) -> dict[tuple[int, int], _Ran]:
    found: dict[tuple[int, int], _Ran] = defaultdict(dict)
    for _, event in timed:
        if isinstance(event, StepOps):
            found[event.generation, event.step][WorkerId.parse(event.worker)] = event.ops
    return found


def measured_costs(plan: Plan, steps: Iterable[_Ran]) -> Costs:
    """Returns costs per layer, in seconds, from the medians of what workers took: a worker's, shared by its layers.

    Messages and the optimizer are not measured, and cost nothing here.
    """
    taken: dict[tuple[WorkerId, str], list[float]] = defaultdict(list)
    for ran in steps:
        for worker, ops in ran.items():
            for kind, _, _, since, until in ops:
                taken[worker, kind].append(until - since)
    owners = [plan.placement.owners(layer) for layer in range(plan.placement.num_layers)]

    def row(kinds: str) -> tuple[float, ...]:
        return tuple(max((_share(plan, taken, worker, kinds) for worker in each), default=0.0) for each in owners)

    zeros, ones = (0.0,) * len(owners), (1.0,) * len(owners)
    return Costs(
        forward=row("F"),
        input=row("IB"),
        weight=row("W"),
        optimizer=zeros,
        comm=zeros[1:],
        takes=ones,
        gives_input=zeros,
        gives_weight=ones,
    )


def _share(plan: Plan, taken: Mapping[tuple[WorkerId, str], list[float]], worker: WorkerId, kinds: str) -> float:
    """What one layer of a worker takes of the first of these kinds that it ran."""
    layers = plan.placement.layers_of(worker)
    return next((median(taken[worker, k]) / len(layers.indices) for k in kinds if (worker, k) in taken), 0.0)


def _planned(plan: Plan, costs: Costs, step: int, begin: float) -> Iterator[dict[str, object]]:
    for span in evaluate(plan, costs).spans:
        yield _span(span.worker, span.op, step, begin + span.start, span.end - span.start, planned=True)


def _span(worker: WorkerId, op: Op, step: int, start: float, length: float, *, planned: bool) -> dict[str, object]:
    return {
        "ph": "X",
        "name": str(op),
        "cat": op.kind.value,
        "pid": worker.stage + _PLANNED * planned,
        "tid": worker.pipeline,
        "ts": start * _MICROSECONDS,
        "dur": length * _MICROSECONDS,
        "args": {"step": step, "microbatch": str(op.microbatch)},
    }


def _names(worker: WorkerId) -> Iterator[dict[str, object]]:
    for added, how in ((0, "measured"), (_PLANNED, "planned")):
        place = {"ph": "M", "pid": worker.stage + added, "tid": worker.pipeline}
        yield {**place, "name": "process_name", "args": {"name": f"workers *.{worker.stage}, {how}"}}
        yield {**place, "name": "process_sort_index", "args": {"sort_index": 2 * worker.stage + bool(added)}}
        yield {**place, "name": "thread_name", "args": {"name": f"worker {worker}"}}


def _marks(timeline: RunTimeline) -> Iterator[dict[str, object]]:
    """What befell the workers and when generations began, across all rows."""
    told = [(mark.time, f"{mark.kind} {mark.worker}") for mark in timeline.marks]
    told += [(each.time, f"generation {each.number}") for each in timeline.generations]
    for time, name in sorted(told):
        yield {"ph": "i", "s": "g", "name": name, "pid": 0, "tid": 0, "ts": time * _MICROSECONDS}
