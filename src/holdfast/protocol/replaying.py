"""A worker replays layers that nobody holds any more, in an engine of their own beside the one that it has.

What comes in was logged by others, so no step waits for anything but the disk, and the sums of those who share it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.control.messages import ReplayOrder
from holdfast.core.faults import Point
from holdfast.core.instructions import Payload
from holdfast.core.lower import lower_step
from holdfast.core.program import Wanted, WorkerProgram, groups
from holdfast.core.replay import Replay, place_of, replayed_step
from holdfast.errors import LogGap
from holdfast.protocol.effects import Build, Consult, Consulted, Load, WorkerEffect
from holdfast.protocol.executor import Execution, Keep, Reach, Verdict
from holdfast.protocol.step_log import StepLog

if TYPE_CHECKING:
    from holdfast.protocol.worker import Engine, WorkerProtocol

__all__ = ["put_back", "replay"]

Script = Generator[WorkerEffect, Any, None]
_Step = Mapping[Wanted, Any]
_VERDICT: Wanted = (Payload.VOTE, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """A replay on this worker: what it runs in every step, with which engine, and from which step on."""

    part: Replay
    program: WorkerProgram
    engine: Engine
    at: int


def replay(protocol: WorkerProtocol, order: ReplayOrder) -> Script:
    """Yields what a worker does to replay layers; their engines are then among ``protocol.replayed``.

    What was replayed before, and was interrupted, is gone on with where nobody else takes part in it.

    Raises:
        StorageError: the checkpoint cannot be read; or what was logged is missing (LogGap) or damaged (CorruptBlob).
        ReplicaDiverged: what comes out is not what was logged when these steps were first run.
        ClusterError: who shares the work is gone, or a newer generation has begun.
    """
    parts = [part for part in order.parts if protocol.worker in part.workers]
    protocol.agreed = max(part.stop for part in parts), () if order.vote is None else (order.vote,)
    courses = []
    for part in parts:
        engine, at = yield from _engine(protocol, order, part)
        program = lower_step(replayed_step(part, protocol.worker, order.num_layers, protocol.rules.ties))
        courses.append(_Course(part=part, program=program, engine=engine, at=at))
    yield from _connect(order, courses)
    for course in courses:
        yield from _replay_part(protocol, order, course)
    if order.vote is not None:
        _note(protocol, order, parts)


def _note(protocol: WorkerProtocol, order: ReplayOrder, parts: list[Replay]) -> None:
    """Remembers the verdict over the last of these steps, unless we know it."""
    step = max(part.stop for part in parts) - 1
    if order.vote is not None and all(known.step != step for known in protocol.verdicts):
        vote = protocol.stage.unpack_vote(order.vote)
        protocol.verdicts = (*protocol.verdicts[-1:], Verdict(step=step, vote=vote, complete=True))


def put_back(protocol: WorkerProtocol) -> None:
    """Brings our own engine back after an interruption; what was replayed so far is kept."""
    if protocol.aside is not None:
        engine, protocol.stage, protocol.aside = protocol.stage, protocol.aside, None
        engine.discard()
        protocol.replayed[engine.layers] = engine


def _connect(order: ReplayOrder, courses: list[_Course]) -> Script:
    """With those who replay the same layers; two programs of ours may sum the same layers, over others."""
    shared = [
        (reduction, course.engine.message_size(reduction.layers))
        for course in courses
        for reduction in course.program.reductions
        if len(reduction.workers) > 1
    ]
    yield Build(order.generation, groups(course.program for course in courses), sums=tuple(shared))


def _replay_part(protocol: WorkerProtocol, order: ReplayOrder, course: _Course) -> Script:
    part, at = course.part, course.at
    protocol.aside, protocol.stage = protocol.stage, course.engine
    ends = course.program.step.ends
    if at < part.stop:
        yield Consult(order.generation, course.program.recalled, ends, at, part.stop)
    before: bytes | None = None
    for step in range(at, part.stop):
        yield Reach(Point.REPLAY, step)
        logged = yield from _logged(step)
        vote = logged.get(_VERDICT, order.vote if step == part.stop - 1 else None)
        if vote is None:
            raise LogGap(f"nobody has logged the verdict over step {step}")
        if before is not None:
            yield Keep(Payload.VOTE, step, 0, 0, before)
        for (payload, tie, number), value in logged.items():
            if payload is Payload.SUM:  # for whoever replays the layers that it was read from
                yield Keep(payload, step, tie, number, value)
        yield from _run(protocol, course, ends, logged, step, vote)
        before = vote
    put_back(protocol)


def _engine(
    protocol: WorkerProtocol, order: ReplayOrder, part: Replay
) -> Generator[WorkerEffect, Any, tuple[Engine, int]]:
    """The engine that replays these layers, and the step that it is at.

    Whoever shares the work begins where all of them can: with the checkpoint.
    """
    known = protocol.replayed.pop(tuple(part.layers.indices), None)
    if known is not None and len(part.workers) == 1 and not part.shared:
        steps = set(known.layer_steps().values())
        if len(steps) == 1 and part.start <= (at := steps.pop()) <= part.stop:
            return known, at
    engine = yield Load(place_of(part, order.num_layers), order.state, beside=True)
    return engine, part.start


def _logged(step: int) -> Generator[WorkerEffect, Any, _Step]:
    found: _Step | None = None
    while found is None:
        found = yield Consulted(step)
    return found


def _run(
    protocol: WorkerProtocol,
    course: _Course,
    ends: frozenset[tuple[Payload, int]],
    logged: _Step,
    step: int,
    vote: Any,
) -> Script:
    log = StepLog(most_bytes=0)
    for (payload, boundary, number), value in logged.items():
        if payload is not Payload.VOTE:
            log.keep(step, payload, boundary, number, value, always=True)
    execution = Execution(
        program=course.program,
        stage=course.engine,
        step=step,
        log=log,
        begun=True,
        logged=ends,
        ties={tie: protocol.rules.ties.index(tie) for tie, _ in course.part.shared},
        decided=course.engine.unpack_vote(vote),
    )
    yield from execution.run()
