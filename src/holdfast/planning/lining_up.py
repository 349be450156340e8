"""Lining failures up: the workers of a stage hold the same layers, so any of them may do what any other was to do.

Failures that are scattered over pipelines break each of these. In a schedule for as many failures on every stage, but
in as few pipelines as possible, fewer micro-batches leave theirs; the workers of a stage then change names, and no
state moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from holdfast.core.ids import WorkerId
from holdfast.planning.normalise import per_stage
from holdfast.schedule.engine import Schedule
from holdfast.schedule.problem import Problem

__all__ = ["exchanges", "lined_up", "with_failed"]


def lined_up(failed: Iterable[WorkerId], num_stages: int) -> frozenset[WorkerId]:
    """Returns as many workers of every stage in as few pipelines: those that lost the most, the first of equals."""
    gone = frozenset(failed)
    broken = Counter(worker.pipeline for worker in gone)
    order = sorted(broken, key=lambda pipeline: (-broken[pipeline], pipeline))
    counts = per_stage(gone, num_stages)
    return frozenset(WorkerId(pipeline, stage) for stage, count in enumerate(counts) for pipeline in order[:count])


def exchanges(gone: Iterable[WorkerId], alive: Iterable[WorkerId]) -> list[tuple[WorkerId, WorkerId]]:
    """Returns who must change places so that those who are alive sit where others are gone, on the same stages.

    Args:
        gone: places of workers that have failed.
        alive: as many places of every stage, of workers that live.
    """
    by_stage = (sorted(each, key=lambda place: (place.stage, place.pipeline)) for each in (gone, alive))
    return list(zip(*by_stage, strict=True))


def with_failed(problem: Problem, schedule: Schedule, failed: Iterable[WorkerId]) -> tuple[Problem, Schedule]:
    """Returns the problem and its schedule once others of the same stages have failed.

    Who lives in the place of one that has failed does what that one did.

    Args:
        problem: a problem.
        schedule: a schedule of it.
        failed: as many workers of every stage as have failed in the problem.
    """
    gone, old = frozenset(failed), problem.failed
    number = {worker: n for n, worker in enumerate(problem.workers)}
    takes = list(range(problem.num_workers))
    for pair in exchanges(gone - old, old - gone):
        first, second = (number[worker] for worker in pair)
        takes[first], takes[second] = second, first
    rows = [schedule.rows[worker] for worker in takes]
    worker_of = tuple(takes[worker] for worker in problem.worker_of)
    return replace(problem, failed=gone, worker_of=worker_of), replace(schedule, rows=rows)
