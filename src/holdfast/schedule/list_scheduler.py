"""By which rules operations of a problem are started: those of 1F1B, or the most urgent one first."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from holdfast.schedule.engine import Schedule, StartRules, ranked, simulate
from holdfast.schedule.problem import Problem

__all__ = ["Alternation", "list_schedule", "plain_urgency", "precedence"]


_BEHIND = 1 << 40
"""More moments than any step has."""


class Alternation(Enum):
    """1F1B's rule: a free worker starts an F after a B, and a B after an F; the other one where that cannot be.

    Of several B that are ready comes the one that was ready first, then the more urgent one.
    """

    READY = auto()
    """Of several F comes the one that was ready first, then the more urgent one."""
    GUESTS = auto()
    """Of several F come those of other pipelines' micro-batches before all others; of these as with READY."""
    IN_ORDER = auto()
    """Of several F comes the most urgent one; and room is kept for the first that a worker has yet to run."""


def precedence(problem: Problem, ahead: int) -> list[int]:
    """Returns all visits in the order of their micro-batches: by index and then by pipeline.

    Micro-batches that leave their pipeline somewhere meet there those of another one. If they come last, they wait in
    that pipeline's queues up to the end of the step, and all wait for them.

    Args:
        problem: the problem.
        ahead: those that leave their pipeline go before all others whose index is less by no more than this; 0: they do
            not go ahead.
    """
    if not ahead:
        return list(range(problem.num_visits))
    pipeline_of = [worker.pipeline for worker in problem.workers]
    turns = [
        (microbatch.index - ahead * leaves, not leaves, journey.start)
        for microbatch, journey in zip(problem.microbatches, problem.journeys, strict=True)
        for leaves in (any(pipeline_of[problem.worker_of[visit]] != microbatch.pipeline for visit in journey),)
    ]
    order = sorted(range(len(turns)), key=turns.__getitem__)
    return [visit for number in order for visit in problem.journeys[number]]


def plain_urgency(problem: Problem, ahead: int = 0, *, forward_first: bool = False) -> list[int]:
    """Returns all operations, most urgent first: I before F before W, each by :func:`precedence`.

    Args:
        problem: the problem.
        ahead: see :func:`precedence`.
        forward_first: F before I before W: of two operations that are ready, F has the longer way before it. Memory, or
            a limit, is what keeps F from running far ahead then.

    Source:
        SlipStream's heuristic: backwards for the input as soon as possible, W where nothing else can run.
    """
    visits, forward = problem.num_visits, precedence(problem, ahead)
    back, weight = ([visit + kind * visits for visit in forward] for kind in (1, 2))
    return [*forward, *back, *weight] if forward_first else [*back, *forward, *weight]


def list_schedule(
    problem: Problem,
    urgency: Sequence[int],
    *,
    patience: float = 0.0,
    limits: Sequence[int] | None = None,
    turns: Alternation | None = None,
) -> Schedule:
    """Returns the schedule in which every free worker starts the most urgent operation that is ready.

    F starts only if memory allows, so the limit is never exceeded. Where every worker comes at the same depth on all
    routes, it cannot deadlock: the last stage can always drain what it holds; hence it takes any forward in the end,
    and so do the stages before it. Elsewhere workers may wait for one another's room for ever: then what they wait with
    is not in the schedule.

    Args:
        problem: the problem.
        urgency: all operations, most urgent first.
        patience: a worker stays idle for an I that arrives within this fraction of what it would start instead; if an F
            is the most urgent of all, only instead of W.
        limits: micro-batches that a worker of group 0, 1, ... may hold between F and I or B; default: memory alone.
        turns: whether F and B take turns, where the backward is coupled.

    Cost: a few microseconds per operation.
    """
    visits, order = problem.num_visits, list(urgency)
    rank = ranked(order)
    if turns is Alternation.GUESTS:
        for microbatch, journey in zip(problem.microbatches, problem.journeys, strict=True):
            for visit in journey:
                at_home = problem.workers[problem.worker_of[visit]].pipeline == microbatch.pipeline
                rank[visit] += _BEHIND * len(order) * at_home
    rules = StartRules(
        urgency=order,
        rank=rank,
        places=[limits[group] if limits else visits for group in problem.group_of],
        patience=patience,
        patient=(order[0] >= visits, False, True),
        turns=turns is not None,
        first_come=turns is not Alternation.IN_ORDER,
        keeps_room=turns is Alternation.IN_ORDER,
    )
    return simulate(problem.operations, rules)
