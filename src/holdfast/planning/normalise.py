"""Normalisation: to which stages failures are moved, so that they cost least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from heapq import heapify, heapreplace
from math import inf

from holdfast.core.ids import WorkerId
from holdfast.errors import InfeasiblePlan
from holdfast.planning.costed_grid import CostedGrid
from holdfast.schedule.bounds import BoundRules, StageBounds

__all__ = [
    "Move",
    "Normalisation",
    "StageCost",
    "assigned",
    "bound_cost",
    "bubble_cost",
    "min_max",
    "min_sum",
    "moves",
    "normalised",
    "per_stage",
    "place",
]

StageCost = Callable[[int, int], float]
"""What it costs that so many workers of a stage have failed: ``cost(stage, failures)``; infinite if nobody is left."""


class Normalisation(StrEnum):
    """By which rule failures are assigned to stages."""

    MIN_MAX = "min-max"
    """The worst stage's bound on the period is least: :func:`min_max` of :func:`bound_cost`."""
    PAPER = "paper"
    """The sum of the stages' extra bubbles is least, as SlipStream does it: :func:`min_sum` of :func:`bubble_cost`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A living worker takes the place of a failed one and leaves its own to it.

    Attributes:
        worker: the living worker.
        takes: the failed worker whose place it takes.
        copied_bytes: the state that it has to get from the owners of its new layers; None where it is not known.
    """

    worker: WorkerId
    takes: WorkerId
    copied_bytes: int | None


def bound_cost(grid: CostedGrid, rules: BoundRules | None = None) -> StageCost:
    """Returns the analytic cost: the period's bound with so many failures on this one stage.

    The bound of an assignment is the greatest of its stages' costs, as each part of it is about one stage's load.
    """
    stages, pipelines = StageBounds(grid.each, grid.comm, rules), grid.pipelines

    def cost(stage: int, failures: int) -> float:
        return inf if failures >= pipelines else stages.of(stage, load(grid, failures)).period

    return cost


def bubble_cost(grid: CostedGrid) -> StageCost:
    """Returns the paper's cost: the extra time that a worker needs which runs the extra micro-batches, too.

    One worker of the stage is simulated alone, in 1F1B with I as the backward: I arrive in the rhythm of the healthy
    pipeline, W fill gaps that are long enough while the memory lasts, and the rest of W comes at the end.

    Source:
        SlipStream, section 4.2.1. The paper gives the idea in words; this is our reading of it.
    """

    def cost(stage: int, failures: int) -> float:
        if failures >= grid.pipelines:
            return inf
        return _alone(grid, stage, load(grid, failures)) - _alone(grid, stage, grid.microbatches)

    return cache(cost)


def load(grid: CostedGrid, failures: int) -> int:
    """Returns the micro-batches of the busiest worker of a stage on which so many of its peers failed."""
    return -(-grid.pipelines * grid.microbatches // (grid.pipelines - failures))


def min_max(num_stages: int, failures: int, cost: StageCost) -> tuple[tuple[int, ...], ...]:
    """Returns for 0, 1, ... failures how many each stage takes, so that the greatest cost of a stage is least.

    A greedy is exact, as costs do not fall with failures: the next failure goes to the stage where it costs least.
    Assignments are nested: each contains those for fewer failures. Among equals comes the stage with fewer failures,
    then the later one, which came nearest to its bound wherever it was tried.

    Raises:
        InfeasiblePlan: so many failures leave no worker on some stage.

    Cost: O((N + F) log N) and as many calls of the cost.
    """
    heap = [(cost(stage, 1), 1, -stage) for stage in range(num_stages)]
    heapify(heap)
    counts = [0] * num_stages
    found = [tuple(counts)]
    for number in range(failures):
        price, count, stage = heap[0]
        if price == inf:
            raise InfeasiblePlan(f"{failures} failures: the grid survives at most {number}, one worker per stage stays")
        counts[-stage] = count
        found.append(tuple(counts))
        heapreplace(heap, (cost(-stage, count + 1), count + 1, stage))
    return tuple(found)


def min_sum(num_stages: int, failures: int, most: int, cost: StageCost) -> tuple[int, ...]:
    """Returns how many failures each stage takes, so that the sum of the costs is least.

    Args:
        num_stages: stages of a pipeline.
        failures: all failures.
        most: the most failures of one stage: one fewer than pipelines.
        cost: what failures cost a stage.

    Raises:
        InfeasiblePlan: more than ``num_stages * most`` failures.

    Cost: O(N F DP), and O(N DP) calls of the cost.

    Source:
        SlipStream, algorithm 1. Line 8 is meant as C[0][f] = cost(0, f), and cost(i, x) is infinite for x >= DP.
        Back-pointers take the place of its lists.
    """
    if failures > num_stages * most:
        raise InfeasiblePlan(f"{failures} failures: the grid survives at most {num_stages * most}")
    best: list[float] = [0.0, *[inf] * failures]
    taken: list[list[int]] = []
    for stage in range(num_stages):
        prices = [cost(stage, x) for x in range(min(most, failures) + 1)]
        row = [_cheapest(best, prices, f) for f in range(failures + 1)]
        best = [best[f - x] + prices[x] for f, x in enumerate(row)]
        taken.append(row)
    counts: list[int] = []
    left = failures
    for row in reversed(taken):
        counts.append(row[left])
        left -= row[left]
    return tuple(reversed(counts))


def place(counts: Sequence[int], pipelines: int) -> tuple[WorkerId, ...]:
    """Returns which workers fail if each stage loses so many: those of its last pipelines, sorted."""
    return tuple(sorted(WorkerId(pipelines - 1 - k, stage) for stage, count in enumerate(counts) for k in range(count)))


def per_stage(failed: Iterable[WorkerId], num_stages: int) -> tuple[int, ...]:
    """Returns how many workers of stage 0, 1, ... have failed."""
    lost = Counter(worker.stage for worker in failed)
    return tuple(lost[stage] for stage in range(num_stages))


def assigned(grid: CostedGrid, failures: int, rules: BoundRules, how: Normalisation) -> tuple[int, ...]:
    """Returns how many of the failures each stage takes, by a rule.

    Raises:
        InfeasiblePlan: so many failures leave no worker on some stage, or memory holds too little for the paper's
            simulation of one worker.
    """
    if how is Normalisation.PAPER:
        return min_sum(len(grid.stages), failures, grid.pipelines - 1, bubble_cost(grid))
    return min_max(len(grid.stages), failures, bound_cost(grid, rules))[failures]


def normalised(
    grid: CostedGrid, failures: int, rules: BoundRules, how: Normalisation = Normalisation.MIN_MAX
) -> tuple[WorkerId, ...]:
    """Returns which workers fail if so many failures are at the places where they cost least.

    Raises:
        InfeasiblePlan: so many failures leave no worker on some stage.
    """
    return place(assigned(grid, failures, rules, how), grid.pipelines)


def moves(
    grid: CostedGrid, failed: Iterable[WorkerId], counts: Sequence[int], state_bytes: Sequence[int] | None = None
) -> tuple[tuple[Move, ...], tuple[WorkerId, ...]]:
    """Returns who takes whose place so that each stage has lost ``counts``, and the places that are empty then.

    As few workers move as possible. A stage with more failures than its count gets a living worker of a stage with
    fewer, its own place then counts as failed.

    Args:
        grid: the grid.
        failed: the workers that are gone.
        counts: failures per stage; together as many as have failed.
        state_bytes: parameters and optimizer state of one stage, per stage; None: not known.

    Raises:
        InfeasiblePlan: ``counts`` is about another number of failures.
    """
    gone = sorted(set(failed))
    if sum(counts) != len(gone):
        raise InfeasiblePlan(f"{sum(counts)} failures were assigned to stages, but {len(gone)} workers have failed")
    lost = [[worker for worker in gone if worker.stage == stage] for stage in range(len(counts))]
    excess = [worker for stage, workers in enumerate(lost) for worker in workers[counts[stage] :]]
    alive = [
        [WorkerId(p, stage) for p in reversed(range(grid.pipelines)) if WorkerId(p, stage) not in workers]
        for stage, workers in enumerate(lost)
    ]
    migrating = [
        worker for stage in range(len(counts)) for worker in alive[stage][: max(0, counts[stage] - len(lost[stage]))]
    ]
    found = tuple(
        Move(worker=worker, takes=place, copied_bytes=None if state_bytes is None else state_bytes[place.stage])
        for worker, place in zip(migrating, excess, strict=True)
    )
    return found, tuple(sorted((set(gone) - set(excess)) | set(migrating)))


def _cheapest(best: Sequence[float], prices: Sequence[float], failures: int) -> int:
    """Returns how many of the failures the next stage takes."""
    return min(range(min(failures, len(prices) - 1) + 1), key=lambda x: best[failures - x] + prices[x])


def _alone(grid: CostedGrid, stage: int, visits: int) -> float:
    each, comm = grid.each, grid.comm
    costs = each[stage]
    trip = sum(each[s].forward + each[s].input_apart + 2 * comm[s - 1] for s in range(stage + 1, len(each)))
    room = inf if costs.room is None else costs.room
    kept = costs.takes - costs.gives_input - costs.gives_weight
    now, held, weights = 0.0, 0.0, 0
    returns: list[float] = []
    backwards = forwards = 0
    while backwards < visits:
        can_forward = forwards < visits and held + costs.takes <= room * (1 + 1e-12)
        due = returns[backwards] if backwards < forwards else inf
        if due <= now:
            now, backwards, weights, held = (
                now + costs.input_apart,
                backwards + 1,
                weights + 1,
                held - costs.gives_input,
            )
        elif can_forward and not (weights and now + costs.forward > due > now + costs.weight):
            now, forwards, held = now + costs.forward, forwards + 1, held + costs.takes
            returns.append(max(now + trip, returns[-1] + costs.forward + costs.input_apart if returns else 0))
        elif weights and (now + costs.weight <= due or (forwards < visits and not can_forward)):
            now, weights, held = now + costs.weight, weights - 1, held - costs.gives_weight
        elif due < inf:
            now = due
        else:
            raise InfeasiblePlan(f"stage {stage} has too little memory for {visits} micro-batches: {kept} of each stay")
    return now + weights * costs.weight
