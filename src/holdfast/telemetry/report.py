"""What a run's events tell: its failures, what each cost, and its timeline. Serves real and simulated runs alike."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    CoordinatorLost,
    Detected,
    Evaluated,
    Event,
    EventsMissing,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    Parted,
    Ran,
    Rebuilt,
    Resumed,
    Seated,
    StepOmitted,
    StepOps,
    Timed,
    WorkerReady,
)

__all__ = ["FATAL_KINDS", "AttemptReport", "FailureReport", "RunReport", "SentPerStep", "attempt", "report"]

FATAL_KINDS = ("kill", "hang", "stall", "partition", "kill-node")
"""Kinds of faults after which a worker is lost; others make nobody fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """One failure. All ``_s`` are seconds from the injection, None if it was not injected (or did not come to that).

    Attributes:
        worker: who failed.
        kind: of the fault; ``death`` if it was not injected.
        step: in which it was injected; for a real one the first step that was run again.
        point: of the injected fault; empty otherwise.
        detected_s: until the coordinator held the worker for lost.
        agreed_s: until the state of every survivor was known.
        rebuilt_s: until every survivor was connected anew.
        resumed_s: until the next step was committed.
        recomputed_microbatches: (layer, micro-batch) pairs run again, as far as that is known.
        recomputed_at_most: how many it may have been: what a worker had done between its last heartbeat and its end is
            not known.
        strategy: that answered.
        replaced_by: who computed in its place afterwards: a spare, or a later process of its own name; None if nobody.
        replaced_s: until that worker had done its first step.
    """

    worker: str
    kind: str
    step: int
    point: str
    detected_s: float | None
    agreed_s: float | None
    rebuilt_s: float | None
    resumed_s: float | None
    recomputed_microbatches: int
    strategy: str
    recomputed_at_most: int = 0
    replaced_by: str | None = None
    replaced_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPerStep:
    """Bytes: of ``messages`` from worker to worker, and for ``sums``."""

    messages: int
    sums: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run.

    Attributes:
        commits: (step, time) of every commit, by step; time in seconds of the log's clock.
        final_loss: mean loss of the last committed step; None if that was omitted, or no event tells it.
        no_loss: why there is no final loss; empty if there is one.
        omitted: the committed steps that changed nothing, as their loss or a gradient was not finite.
        steps_per_s: committed steps per second between the first and the last commit; None below two.
        failures: in the order of their detection.
        fired: specs of the scheduled faults that fired.
        resumed_from: the step of the checkpoint that the run went on from; None if it began anew.
        checkpoints: the steps of the checkpoints that it made, ascending.
        coordinator_restarts: how often the coordinator was started again.
        sent_per_step: bytes that all workers together sent for a committed step, on average; None if nobody counted.
        missing: why events are missing; empty as far as the events themselves tell. None of the above is certain then.
        nodes: of each node the workers that it has, or had at the end; a node whose workers were all lost has none.
        evaluations: the newest word of each, by step.
    """

    commits: tuple[tuple[int, float], ...]
    final_loss: float | None
    steps_per_s: float | None
    failures: tuple[FailureReport, ...]
    fired: tuple[str, ...]
    resumed_from: int | None
    checkpoints: tuple[int, ...]
    coordinator_restarts: int = 0
    no_loss: str = ""
    omitted: tuple[int, ...] = ()
    sent_per_step: SentPerStep | None = None
    missing: str = ""
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evaluations: tuple[Evaluated, ...] = ()

    @property
    def omitted_at_end(self) -> int:
        """How many of the last steps were omitted, in a row."""
        last = max((step for step, _ in self.commits), default=-1)
        return next((n for n, step in enumerate(range(last, -1, -1)) if step not in self.omitted), last + 1)

    def tell_omitted(self) -> str:
        """Returns what to say of omitted steps in one line; empty if there were none."""
        if not self.omitted:
            return ""
        what = (
            f"{len(self.omitted)} of {len(self.commits)} steps changed nothing: the loss or a gradient was not finite"
        )
        return f"{what}; the last {self.omitted_at_end} among them" if self.omitted_at_end else what

    def evaluations_json(self) -> list[dict[str, object]]:
        """The evaluations in the form of ``summary.json``."""
        return [
            {
                "step": each.step,
                "scores": dict(each.scores),
                "microbatches": each.microbatches,
                "of": each.of,
                "best": each.best,
            }
            for each in self.evaluations
        ]

    def failures_json(self) -> list[dict[str, object]]:
        """The failures in the form of ``summary.json``."""
        return [dataclasses.asdict(failure) for failure in self.failures]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """One of the attempts that made a run.

    Attributes:
        began: seconds since 1970; None if it never did.
        resumed_from: the step of the checkpoint that it went on from; None if it began anew.
        steps: steps that were committed when it ended, counted from the beginning of the run.
        failures: workers that were lost in it.
        outcome: ``done`` and so on; ``killed`` if it ended without a word, or has not ended.
    """

    began: float | None
    resumed_from: int | None
    steps: int
    failures: int
    outcome: str

    def to_json(self) -> dict[str, object]:
        """Its form in ``summary.json``."""
        return dataclasses.asdict(self)


def attempt(events: Iterable[Timed]) -> AttemptReport:
    """Reads the events of one attempt, in the order of time."""
    timed = list(events)
    told = report(timed)
    ended = [event for _, event in timed if isinstance(event, JobEnded)]
    reached = told.commits[-1][0] + 1 if told.commits else told.resumed_from or 0
    return AttemptReport(
        began=next((event.wall_time for _, event in timed if isinstance(event, JobStarted)), None),
        resumed_from=told.resumed_from,
        steps=reached,
        failures=len(told.failures),
        outcome=ended[-1].outcome if ended else "killed",
    )


def report(events: Iterable[Timed]) -> RunReport:
    """Reads a run's events, in the order of time."""
    timed = list(events)
    commits = _commits(timed)
    steps = sorted(commits.items())
    loss, no_loss = _final_loss(timed, commits)
    return RunReport(
        commits=tuple(steps),
        final_loss=loss,
        no_loss=no_loss,
        omitted=tuple(sorted(_omitted(timed) & set(commits))),
        steps_per_s=_rate([time for _, time in steps]),
        failures=tuple(_failures(timed, commits)),
        fired=tuple(dict.fromkeys(event.spec for _, event in timed if isinstance(event, FaultInjected))),
        resumed_from=next((event.step for _, event in timed if isinstance(event, Resumed)), None),
        checkpoints=tuple(sorted({event.step for _, event in timed if isinstance(event, Checkpointed)})),
        coordinator_restarts=sum(isinstance(event, CoordinatorLost) for _, event in timed),
        sent_per_step=_sent_per_step(timed, commits),
        missing=_missing([event for _, event in timed]),
        nodes=_nodes([event for _, event in timed]),
        evaluations=_evaluations([event for _, event in timed]),
    )


def _evaluations(events: list[Event]) -> tuple[Evaluated, ...]:
    newest = {event.step: event for event in events if isinstance(event, Evaluated)}
    return tuple(newest[step] for step in sorted(newest))


def _missing(events: list[Event]) -> str:
    if not any(isinstance(event, JobStarted) for event in events):
        return "the events of the beginning are gone"
    gaps = [event for event in events if isinstance(event, EventsMissing)]
    return f"{sum(gap.count for gap in gaps)} events could not be written: {gaps[-1].why}" if gaps else ""


def _nodes(events: list[Event]) -> dict[str, tuple[str, ...]]:
    where: dict[str, str] = {}
    nodes: dict[str, None] = {}
    for event in events:
        match event:
            case WorkerReady(worker=worker, node=node) if node:
                where[worker] = node
                nodes[node] = None
            case Detected(worker=worker) | Parted(worker=worker):
                where.pop(worker, None)
    return {node: tuple(sorted(worker for worker, its in where.items() if its == node)) for node in nodes}


def _commits(timed: list[Timed]) -> dict[int, float]:
    """When each step was committed: the last worker of a generation swapped.

    A step that not all workers of its generation swapped counts if a later generation went on after it, as when a
    worker died behind its own swap; what a later generation took back counts when it is done again.
    """
    members: dict[int, int] = {}
    agreed: dict[int, int] = {}
    ran: list[tuple[float, Ran]] = []
    swapped: dict[tuple[int, int], list[float]] = defaultdict(list)
    for time, event in timed:
        if isinstance(event, Installed):
            members[event.generation] = len(event.workers)
        elif isinstance(event, Agreed):
            agreed[event.generation] = event.step + event.concluded
        elif isinstance(event, StepOps):
            swapped[event.step, event.generation].append(time)
        elif isinstance(event, Ran):
            ran.append((time, event))
    commits: dict[int, float] = {}
    for (step, generation), times in sorted(swapped.items()):
        after = [at for later, at in agreed.items() if later > generation]
        if min(after, default=step + (len(times) == members.get(generation))) > step:
            commits[step] = max(times)
    for time, event in ran:
        kept = min((at for later, at in agreed.items() if later > event.generation), default=event.stop)
        for step in range(event.first, min(event.stop, kept)):
            commits[step] = event.committed(step, time)
    return commits


def _final_loss(timed: list[Timed], commits: dict[int, float]) -> tuple[float | None, str]:
    """The loss of the last committed step, or why there is none to tell."""
    if not commits:
        return None, "no step was committed"
    last = max(commits)
    ran = [event for _, event in timed if isinstance(event, StepOps) and event.step == last]
    told = [event for event in ran if event.knows_loss or event.loss is not None]
    if not told:
        return None, f"no event tells the loss of step {last}"
    newest = max(told, key=lambda event: event.generation)
    if not newest.omitted and newest.loss is not None:
        return newest.loss, ""
    why = (
        "its loss was not finite" if newest.loss is None else f"a gradient was not finite; its loss was {newest.loss!r}"
    )
    return None, f"step {last}, the last one, was omitted: {why}"


def _sent_per_step(timed: list[Timed], commits: dict[int, float]) -> SentPerStep | None:
    """What was sent for the steps that count; of one that was run again, what that took."""
    newest: dict[tuple[int, str], StepOps] = {}
    for _, event in timed:
        if isinstance(event, StepOps) and event.step in commits:
            newest[event.step, event.worker] = event
    messages = sum(event.sent_messages for event in newest.values())
    sums = sum(event.sent_sums for event in newest.values())
    if not messages + sums:
        return None
    return SentPerStep(messages=round(messages / len(commits)), sums=round(sums / len(commits)))


def _omitted(timed: list[Timed]) -> set[int]:
    """The steps of which the newest word is that they were omitted: some are run again by a later generation."""
    told = [event for _, event in timed if isinstance(event, StepOps | StepOmitted)]
    newest = {
        event.step: isinstance(event, StepOmitted) or event.omitted
        for event in sorted(told, key=lambda event: event.generation)
    }
    return {step for step, omitted in newest.items() if omitted}


def _rate(times: list[float]) -> float | None:
    if len(times) < 2 or max(times) == min(times):
        return None
    return (len(times) - 1) / (max(times) - min(times))


def _failures(timed: list[Timed], commits: dict[int, float]) -> Iterable[FailureReport]:
    injected = [
        (time, event) for time, event in timed if isinstance(event, FaultInjected) and event.kind in FATAL_KINDS
    ]
    strategies = {event.generation: event.strategy for _, event in timed if isinstance(event, Installed)}
    for index, (detected, event) in enumerate(timed):
        if not isinstance(event, Detected):
            continue
        later = () if event.spare else timed  # nobody recovers from the loss of a spare
        agreed = next(((t, e) for t, e in later if isinstance(e, Agreed) and e.generation > event.generation), None)
        generation = agreed[1].generation if agreed else None
        rebuilt = next((t for t, e in timed if isinstance(e, Rebuilt) and e.generation == generation), None)
        resumed = min((t for t in commits.values() if agreed and t > agreed[0]), default=None)
        before = [(time, fault) for time, fault in injected if fault.worker == event.worker and time <= detected]
        at, fault = before[-1] if before else (None, None)
        replaced_at, replaced_by = _replacement(event, timed[index:])
        step = fault.step if fault else (agreed[1].step if agreed else -1)
        yield FailureReport(
            worker=event.worker,
            kind=fault.kind if fault else "death",
            step=step,
            point=fault.point if fault else "",
            detected_s=_since(at, detected),
            agreed_s=_since(at, agreed[0] if agreed else None),
            rebuilt_s=_since(at, rebuilt),
            resumed_s=_since(at, resumed),
            recomputed_microbatches=agreed[1].recomputed_microbatches if agreed else 0,
            recomputed_at_most=_at_most(agreed[1]) if agreed else 0,
            strategy=strategies.get(generation or 0, ""),
            replaced_by=replaced_by,
            replaced_s=_since(at, replaced_at),
        )


def _at_most(agreed: Agreed) -> int:
    known = agreed.recomputed_microbatches
    return known if agreed.recomputed_at_most is None else agreed.recomputed_at_most


def _replacement(lost: Detected, after: Iterable[Timed]) -> tuple[float | None, str | None]:
    """When somebody had first computed in the place of a worker that was lost, and who; None if nobody did."""
    name = lost.worker
    for time, event in after:
        match event:
            case Seated(worker=worker, place=place) if place == name:
                name = worker
            case StepOps(worker=worker, ops=ops, generation=generation):
                if worker == name and ops and generation > lost.generation:
                    return time, name
            case Ran(workers=workers, generation=generation) if name in workers and generation > lost.generation:
                return event.committed(event.first, time), name
    return None, None


def _since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
