"""What a job is evaluated by: micro-batches of other data, run forward between two steps on the routes of its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd

from holdfast.core.ids import WorkerId, evaluated
from holdfast.core.lower import lower_step
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.program import WorkerProgram
from holdfast.core.schedule import Op, OpKind
from holdfast.core.step_plan import Piece, StepPlan

__all__ = ["Best", "Evaluating", "evaluation"]

_GOLDEN = 0.618
"""Multiples of it, without what is before their point, are spread evenly however few there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The state before ``step``, which had the best score so far."""

    step: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """When a job is evaluated, by how much, and what is best.

    Attributes:
        every: before each step whose number is a multiple of it but 0, and behind the last one.
        microbatches: how many, at least 1.
        best: the score by which the best state is told; empty: by none.
        higher: whether more of it is better.
        patience: where so many evaluations in a row were not the best so far, the job ends, where the next one is due;
            0: not by them. Nobody goes beyond a state that is evaluated before the one before is told.
    """

    every: int
    microbatches: int
    best: str = ""
    higher: bool = False
    patience: int = 0

    def is_better(self, score: float, than: float) -> bool:
        """Whether a score is better than another one; equal ones are not."""
        return score > than if self.higher else score < than

    def ends(self, evaluated: int, best: int) -> int | None:
        """Returns the step before which the job ends, as far as the states before these steps tell; None if at its end.

        Args:
            evaluated: the newest that was evaluated.
            best: the best of them; 0 if there is none.
        """
        since = evaluated // self.every - best // self.every
        return (evaluated // self.every + 1) * self.every if 0 < self.patience <= since else None

    def awaited(self, step: int, steps: int) -> int:
        """Returns the step whose evaluation has to be told before this one is run; 0 if none has."""
        return step - self.every if self.patience and self.due(step, steps) and step % self.every == 0 else 0

    def due(self, step: int, steps: int) -> bool:
        """Whether the state before ``step`` is evaluated, of so many."""
        return 0 < step <= steps and (step % self.every == 0 or step == steps)


def evaluation(plan: Plan, worker: WorkerId, numbers: Iterable[int]) -> WorkerProgram:
    """Returns what a worker runs of an evaluation; an excerpt of the plan suffices.

    Each micro-batch takes the route of one of a step, these by turns, so that few of them are spread over pipelines,
    too. All workers run them in one order, and forward only, so nobody waits for ever.

    Args:
        plan: by which steps are run.
        worker: whose part.
        numbers: of the micro-batches, ascending.
    """
    num_layers = plan.placement.num_layers
    return lower_step(
        StepPlan(
            worker=worker,
            num_layers=num_layers,
            span=LayerRange(0, num_layers),
            pieces=tuple(_pieces(plan, worker, numbers)),
            sums=(),
        )
    )


def _pieces(plan: Plan, worker: WorkerId, numbers: Iterable[int]) -> Iterator[Piece]:
    in_step = [number for start, stop in plan.routes.counted for number in range(start, stop)]
    turn = next(each for each in range(max(1, round(_GOLDEN * len(in_step))), 0, -1) if gcd(each, len(in_step)) == 1)
    routes = {route.microbatch.number: route for route in plan.routes.routes if worker in route.workers}
    for number in numbers:
        route = routes.get(in_step[number * turn % len(in_step)])
        if route is None:
            continue
        at = route.workers.index(worker)
        yield Piece(
            op=Op(OpKind.F, evaluated(number)),
            layers=route.visits[at].layers,
            adds=False,
            source=route.workers[at - 1] if at else None,
            targets=route.workers[at + 1 : at + 2],
        )
