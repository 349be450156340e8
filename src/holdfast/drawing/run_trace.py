"""A run beside its plan, as a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.drawing.trace_events import MICROSECONDS, Json, Track, arrow, counter, instant, names, slice_of, trace
from holdfast.schedule.evaluate import evaluate
from holdfast.telemetry.events import Agreed, Installed, Rebuilt, StepOps, Timed
from holdfast.telemetry.measured import Ran, measured_costs, ran_by_step
from holdfast.telemetry.report import report
from holdfast.telemetry.timeline import BOUNDARY, Mode, RunTimeline, run_timeline

__all__ = ["run_to_trace"]

_PLANNED = 1000
"""Added to a stage's number for the process that shows its plan: Perfetto sorts by it."""
_LANE = 1000
"""Added to a pipeline's number for each further thread of a worker."""
_JOB = Track(2000, 0)
"""The track that shows what concerns the whole job: its recoveries and its loss."""


def run_to_trace(timed: list[Timed], plans: Mapping[int, Plan], costs: Costs | None = None) -> str:
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
    steps, whole = ran_by_step(timed), ran_by_step(timed, whole=True)
    workers = {worker for ran in steps.values() for worker in ran}
    named = [event for worker in sorted(workers) for event in _names(worker)]
    numbers = count(1)
    events: list[Json] = []
    lanes = _Lanes()
    for (generation, step), ran in sorted(steps.items()):
        begin = min((ops[0][3] for ops in ran.values() if ops), default=start)
        for worker, ops in sorted(ran.items()):
            for kind, pipeline, index, since, until in ops:
                at = (since - start, until - start)
                events.append(_span(worker, kind, f"{pipeline}.{index}", step, at, planned=False))
        if generation in plans and (generation, step) in whole:
            plan = plans[generation]
            known = costs or measured_costs(plan, [each for (at, _), each in whole.items() if at == generation])
            events += lanes.placed(_planned(plan, known, step, begin - start))
            events += _messages(plan, ran, start, numbers)
    if timed:
        timeline = run_timeline(timed)
        told = [*_besides(timed), *_recoveries(timed)]
        named += names(_JOB, process="the job", order=-1, thread="recoveries")
        named += lanes.names()
        events += [*told, *_given_up(timeline, [*events, *told]), *_counters(timed), *_marks(timeline)]
    events.sort(key=lambda event: event["ts"])
    return trace([*named, *events])


def _planned(plan: Plan, costs: Costs, step: int, begin: float) -> Iterator[Json]:
    for span in evaluate(plan, costs).spans:
        kind, name = span.op.kind.value, str(span.op.microbatch)
        yield _span(span.worker, kind, name, step, (begin + span.start, begin + span.end), planned=True)


@dataclass(slots=True)
class _Lanes:
    """Threads side by side for planned steps that overlap: a plan may take longer than the step that was measured."""

    _ends: dict[Track, list[float]] = field(default_factory=dict)

    def placed(self, slices: Iterable[Json]) -> Iterator[Json]:
        """Yields the slices of one step, each worker's in the first lane that is free from its first one on."""
        by_track: dict[Track, list[Json]] = defaultdict(list)
        for each in slices:
            by_track[Track(each["pid"], each["tid"])].append(each)
        for track, spans in by_track.items():
            begin = min(span["ts"] for span in spans)
            ends = self._ends.setdefault(track, [])
            lane = next((lane for lane, end in enumerate(ends) if end <= begin), len(ends))
            ends[lane : lane + 1] = [max(span["ts"] + span["dur"] for span in spans)]
            yield from ({**span, "tid": track.thread + _LANE * lane} for span in spans)

    def names(self) -> Iterator[Json]:
        """Names the threads of all lanes but the first."""
        for track, ends in self._ends.items():
            name = f"worker {WorkerId(track.thread, track.process - _PLANNED)}, overlapping steps"
            for lane in range(1, len(ends)):
                yield from names(Track(track.process, track.thread + _LANE * lane), thread=name)


def _track(worker: WorkerId, *, planned: bool = False) -> Track:
    return Track(worker.stage + _PLANNED * planned, worker.pipeline)


def _span(worker: WorkerId, kind: str, microbatch: str, step: int, at: tuple[float, float], *, planned: bool) -> Json:
    about = {"step": step, "microbatch": microbatch}
    return slice_of(f"{kind}{microbatch}", kind, _track(worker, planned=planned), at, about)


def _messages(plan: Plan, ran: Ran, start: float, numbers: Iterator[int]) -> Iterator[Json]:
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
                    yield from arrow(next(numbers), name, (_track(source), made[1]), (_track(target), took[0]))


def _besides(timed: list[Timed]) -> Iterator[Json]:
    """What workers did in their steps besides computing."""
    start = timed[0][0]
    for _, event in timed:
        if not isinstance(event, StepOps):
            continue
        worker = WorkerId.parse(event.worker)
        for kind, layers, since, until in event.besides:
            name = " ".join([kind, "+".join(map(str, layers))]).strip()
            about = {"step": event.step, "layers": list(layers)} if layers else {"step": event.step}
            yield slice_of(name, kind, _track(worker), (since - start, until - start), about)


def _given_up(timeline: RunTimeline, slices: Iterable[Json]) -> Iterator[Json]:
    """From a worker's last finished step before a loss until it computes again."""
    begins: dict[Track, list[float]] = defaultdict(list)
    for each in slices:
        if each["ph"] == "X":
            begins[Track(each["pid"], each["tid"])].append(each["ts"] / MICROSECONDS)
    for row in timeline.rows:
        stretches = [stretch for stretch in row.stretches if stretch.mode is Mode.RECOVERING]
        for stretch in stretches:
            track = _track(WorkerId.parse(row.worker))
            end = min([at for at in begins[track] if at > stretch.start] + [stretch.end])
            yield slice_of("step given up, recovering", "recovery", track, (stretch.start, end), {})


def _recoveries(timed: list[Timed]) -> Iterator[Json]:
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
        at = (begin - start, limit - start)
        yield slice_of(f"recovery, generation {event.generation}", "recovery", _JOB, at, about)
        for name, (since, until) in zip(("agree", "connect", "run the step again"), pairwise(ends), strict=True):
            if until > since:
                yield slice_of(name, "recovery", _JOB, (since - start, until - start), about)


def _counters(timed: list[Timed]) -> Iterator[Json]:
    """The loss of every step, once, and every worker's memory."""
    start, told = timed[0][0], set()
    for time, event in timed:
        if not isinstance(event, StepOps):
            continue
        if event.loss is not None and math.isfinite(event.loss) and (event.generation, event.step) not in told:
            told.add((event.generation, event.step))
            yield counter("loss", _JOB, time - start, {"loss": event.loss})
        if event.memory:
            worker = WorkerId.parse(event.worker)
            yield counter(f"memory of {worker}", Track(worker.stage, 0), time - start, {"MB": event.memory / 1e6})


def _names(worker: WorkerId) -> Iterator[Json]:
    for planned, how in ((False, "measured"), (True, "planned")):
        process, track = f"workers *.{worker.stage}, {how}", _track(worker, planned=planned)
        yield from names(track, process=process, order=2 * worker.stage + planned, thread=f"worker {worker}")


def _marks(timeline: RunTimeline) -> Iterator[Json]:
    """What befell the workers and when generations began, across all rows."""
    told = [(mark.time, f"{mark.kind} {mark.worker}") for mark in timeline.marks]
    told += [(each.time, f"generation {each.number}") for each in timeline.generations]
    for time, name in sorted(told):
        yield instant(name, _JOB, time)
