"""A run beside its plan, as a trace for https://ui.perfetto.dev.

Its form is the trace event format: slices nest within their thread, every flow has one beginning and one end, and
events are in the order of time (`holdfast.testing.traces` checks that).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise
from statistics import median
from typing import Any

from holdfast.core.evaluate import evaluate
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.telemetry.events import Agreed, Event, Installed, Rebuilt, StepOps
from holdfast.telemetry.report import report
from holdfast.telemetry.timeline import BOUNDARY, Mode, RunTimeline, run_timeline

__all__ = ["measured_costs", "render_run_trace"]

_MICROSECONDS = 1e6
_PLANNED = 1000
"""Added to a stage's number for the process that shows its plan: Perfetto sorts by it."""
_LANE = 1000
"""Added to a pipeline's number for each further thread of a worker."""
_JOB = 2000
"""The process that shows what concerns the whole job: its recoveries and its loss."""

Timed = tuple[float, Event]
_Json = dict[str, Any]


def render_run_trace(timed: list[Timed], plans: Mapping[int, Plan], costs: Costs | None = None) -> str:
    """Returns trace-event JSON: of every stage what its workers ran, and beside it what their plan says.

    A planned step begins where the measured one did, so what shows is how the step went, not how delays add up. Workers
    also show their waits for sums, their updates, the steps that they gave up, and their memory; an arrow is a message
    from stage to stage; the job shows its recoveries and its loss.

    Args:
        timed: the events of a run, in the order of time.
        plans: the plan of every generation; a generation without one is shown as measured only, without messages.
        costs: in seconds, what the plan is timed with; None: the medians of what was measured in its generation.
    """
    start = timed[0][0] if timed else 0.0
    steps = _by_step(timed)
    workers = {worker for ran in steps.values() for worker in ran}
    named = [event for worker in sorted(workers) for event in _names(worker)]
    numbers = count(1)
    events: list[_Json] = []
    lanes = _Lanes()
    for (generation, step), ran in sorted(steps.items()):
        begin = min((ops[0][3] for ops in ran.values() if ops), default=start)
        for worker, ops in sorted(ran.items()):
            for kind, pipeline, index, since, until in ops:
                at = (since - start, until - start)
                events.append(_span(worker, kind, f"{pipeline}.{index}", step, at, planned=False))
        if generation in plans:
            plan = plans[generation]
            known = costs or measured_costs(plan, [each for (at, _), each in steps.items() if at == generation])
            events += lanes.placed(_planned(plan, known, step, begin - start))
            events += _messages(plan, ran, start, numbers)
    if timed:
        timeline = run_timeline(timed)
        told = [*_besides(timed), *_recoveries(timed)]
        named += _job_names()
        named += lanes.names()
        events += [*told, *_given_up(timeline, [*events, *told]), *_counters(timed), *_marks(timeline)]
    events.sort(key=lambda event: event["ts"])
    return json.dumps({"traceEvents": [*named, *events], "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


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
    layers = {
        (visit.worker, str(route.microbatch)): len(visit.layers.indices)
        for route in plan.routes.routes
        for visit in route.visits
    }
    taken: dict[tuple[WorkerId, str], list[float]] = defaultdict(list)
    for ran in steps:
        for worker, ops in ran.items():
            for kind, pipeline, index, since, until in ops:
                taken[worker, kind].append((until - since) / layers[worker, f"{pipeline}.{index}"])
    owners = [plan.placement.owners(layer) for layer in range(plan.placement.num_layers)]

    def row(kinds: str) -> tuple[float, ...]:
        return tuple(max((_share(taken, worker, kinds) for worker in each), default=0.0) for each in owners)

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


def _share(taken: Mapping[tuple[WorkerId, str], list[float]], worker: WorkerId, kinds: str) -> float:
    """What one layer of a worker takes of the first of these kinds that it ran."""
    return next((median(taken[worker, k]) for k in kinds if (worker, k) in taken), 0.0)


def _planned(plan: Plan, costs: Costs, step: int, begin: float) -> Iterator[_Json]:
    for span in evaluate(plan, costs).spans:
        kind, name = span.op.kind.value, str(span.op.microbatch)
        yield _span(span.worker, kind, name, step, (begin + span.start, begin + span.end), planned=True)


@dataclass(slots=True)
class _Lanes:
    """Threads side by side for planned steps that overlap: a plan may take longer than the step that was measured."""

    _ends: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def placed(self, slices: Iterable[_Json]) -> Iterator[_Json]:
        """Yields the slices of one step, each worker's in the first lane that is free from its first one on."""
        by_worker: dict[tuple[int, int], list[_Json]] = defaultdict(list)
        for each in slices:
            by_worker[each["pid"], each["tid"]].append(each)
        for worker, spans in by_worker.items():
            begin = min(span["ts"] for span in spans)
            ends = self._ends.setdefault(worker, [])
            lane = next((lane for lane, end in enumerate(ends) if end <= begin), len(ends))
            ends[lane : lane + 1] = [max(span["ts"] + span["dur"] for span in spans)]
            yield from ({**span, "tid": worker[1] + _LANE * lane} for span in spans)

    def names(self) -> Iterator[_Json]:
        """Names the threads of all lanes but the first."""
        for (process, thread), ends in self._ends.items():
            for lane in range(1, len(ends)):
                name = f"worker {WorkerId(thread, process - _PLANNED)}, overlapping steps"
                place = {"ph": "M", "pid": process, "tid": thread + _LANE * lane}
                yield {**place, "name": "thread_name", "args": {"name": name}}


def _span(worker: WorkerId, kind: str, microbatch: str, step: int, at: tuple[float, float], *, planned: bool) -> _Json:
    place = (worker.stage + _PLANNED * planned, worker.pipeline)
    return _slice(f"{kind}{microbatch}", kind, place, *at, {"step": step, "microbatch": microbatch})


def _slice(
    name: str, kind: str, place: tuple[int, int], start: float, end: float, about: Mapping[str, object]
) -> _Json:
    """Seconds in, microseconds out; ``place`` is process and thread."""
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": place[0],
        "tid": place[1],
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": dict(about),
    }


def _messages(plan: Plan, ran: _Ran, start: float, numbers: Iterator[int]) -> Iterator[_Json]:
    """An arrow for every activation and every gradient, from the end of what made it to the start of what took it."""
    at = {
        (worker, kind == "F", f"{pipeline}.{index}"): (since - start, until - start)
        for worker, ops in ran.items()
        for kind, pipeline, index, since, until in ops
        if kind in "FIB"
    }
    for route in plan.routes.routes:
        for earlier, later in pairwise(route.workers):
            for name, source, target in (("activation", earlier, later), ("gradient", later, earlier)):
                made = at.get((source, name == "activation", str(route.microbatch)))
                took = at.get((target, name == "activation", str(route.microbatch)))
                if made is not None and took is not None:
                    yield from _arrow(next(numbers), name, (source, made[1]), (target, took[0]))


def _arrow(number: int, name: str, source: tuple[WorkerId, float], target: tuple[WorkerId, float]) -> Iterator[_Json]:
    for phase, (worker, time) in (("s", source), ("f", target)):
        flow: _Json = {"ph": phase, "id": number, "name": name, "cat": "message", "pid": worker.stage}
        if phase == "f":
            flow["bp"] = "e"  # it ends in the slice that encloses it, not in the next one
        yield {**flow, "tid": worker.pipeline, "ts": time * _MICROSECONDS}


def _besides(timed: list[Timed]) -> Iterator[_Json]:
    """What workers did in their steps besides computing."""
    start = timed[0][0]
    for _, event in timed:
        if not isinstance(event, StepOps):
            continue
        worker = WorkerId.parse(event.worker)
        for kind, layers, since, until in event.besides:
            name = " ".join([kind, "+".join(map(str, layers))]).strip()
            about = {"step": event.step, "layers": list(layers)} if layers else {"step": event.step}
            yield _slice(name, kind, (worker.stage, worker.pipeline), since - start, until - start, about)


def _given_up(timeline: RunTimeline, slices: Iterable[_Json]) -> Iterator[_Json]:
    """From a worker's last finished step before a loss until it computes again."""
    begins: dict[tuple[int, int], list[float]] = defaultdict(list)
    for each in slices:
        if each["ph"] == "X":
            begins[each["pid"], each["tid"]].append(each["ts"] / _MICROSECONDS)
    for row in timeline.rows:
        stretches = [stretch for stretch in row.stretches if stretch.mode is Mode.RECOVERING]
        for stretch in stretches:
            worker = WorkerId.parse(row.worker)
            place = (worker.stage, worker.pipeline)
            end = min([at for at in begins[place] if at > stretch.start] + [stretch.end])
            yield _slice("step given up, recovering", "recovery", place, stretch.start, end, {})


def _recoveries(timed: list[Timed]) -> Iterator[_Json]:
    """One slice per generation that answered a loss, in which its parts lie; one that was overtaken ends there."""
    start, commits = timed[0][0], sorted(time for _, time in report(timed).commits)
    answers = [(t, e) for t, e in timed if isinstance(e, Installed) and e.generation > 1 and e.strategy != BOUNDARY]
    for number, (begin, event) in enumerate(answers):
        agreed = next((t for t, e in timed if isinstance(e, Agreed) and e.generation == event.generation), None)
        rebuilt = next((t for t, e in timed if isinstance(e, Rebuilt) and e.generation == event.generation), None)
        done = next((t for t in commits if rebuilt is not None and t >= rebuilt), timed[-1][0])
        limit = min([done, *(t for t, _ in answers[number + 1 : number + 2])])
        reached = [begin, *(limit if at is None else min(at, limit) for at in (agreed, rebuilt)), limit]
        ends = [max(reached[: place + 1]) for place in range(len(reached))]
        about = {"generation": event.generation, "strategy": event.strategy}
        yield _slice(
            f"recovery, generation {event.generation}", "recovery", (_JOB, 0), begin - start, limit - start, about
        )
        for name, (since, until) in zip(("agree", "connect", "run the step again"), pairwise(ends), strict=True):
            if until > since:
                yield _slice(name, "recovery", (_JOB, 0), since - start, until - start, about)


def _counters(timed: list[Timed]) -> Iterator[_Json]:
    """The loss of every step, once, and every worker's memory."""
    start, told = timed[0][0], set()
    for time, event in timed:
        if not isinstance(event, StepOps):
            continue
        if event.loss is not None and math.isfinite(event.loss) and (event.generation, event.step) not in told:
            told.add((event.generation, event.step))
            yield _count("loss", _JOB, time - start, {"loss": event.loss})
        if event.memory:
            worker = WorkerId.parse(event.worker)
            yield _count(f"memory of {worker}", worker.stage, time - start, {"MB": event.memory / 1e6})


def _count(name: str, process: int, time: float, values: Mapping[str, float]) -> _Json:
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": time * _MICROSECONDS, "args": dict(values)}


def _names(worker: WorkerId) -> Iterator[_Json]:
    for added, how in ((0, "measured"), (_PLANNED, "planned")):
        place = {"ph": "M", "pid": worker.stage + added, "tid": worker.pipeline}
        yield {**place, "name": "process_name", "args": {"name": f"workers *.{worker.stage}, {how}"}}
        yield {**place, "name": "process_sort_index", "args": {"sort_index": 2 * worker.stage + bool(added)}}
        yield {**place, "name": "thread_name", "args": {"name": f"worker {worker}"}}


def _job_names() -> Iterator[_Json]:
    place = {"ph": "M", "pid": _JOB, "tid": 0}
    yield {**place, "name": "process_name", "args": {"name": "the job"}}
    yield {**place, "name": "process_sort_index", "args": {"sort_index": -1}}
    yield {**place, "name": "thread_name", "args": {"name": "recoveries"}}


def _marks(timeline: RunTimeline) -> Iterator[_Json]:
    """What befell the workers and when generations began, across all rows."""
    told = [(mark.time, f"{mark.kind} {mark.worker}") for mark in timeline.marks]
    told += [(each.time, f"generation {each.number}") for each in timeline.generations]
    for time, name in sorted(told):
        yield {"ph": "i", "s": "g", "name": name, "pid": _JOB, "tid": 0, "ts": time * _MICROSECONDS}
