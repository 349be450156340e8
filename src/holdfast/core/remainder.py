"""The remainder of an interrupted step: what is left to be done of it, as a plan that begins in the middle.

Sums cannot be taken apart, so whoever ran a whole micro-batch again would count it twice in layers that live. A
remainder is therefore told per layer and micro-batch: each *piece* runs some layers of a micro-batch, takes its input
from a named source, and adds to sums or does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.ids import WorkerId, intervals
from holdfast.core.step_plan import Piece, Resent, Standing, StepPlan, SumPlan

__all__ = ["Remainder", "rest_of_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What is left of a step, for all workers.

    Attributes:
        step: which.
        steps: what each worker does, sorted by worker.
        standing: the reductions that are complete, in the order of :attr:`Reduction.name`'s layers.
        redone: (layer, micro-batch) pairs that were run before, were lost, and are run again.
        regenerated: pairs that are run again only because a message of theirs is missing.
        lasts: how long it takes, in the units of the costs that it was planned with.
        left_out: global numbers of the micro-batches that count in no reduction which does not stand: it is the mean
            of the others.
    """

    step: int
    steps: tuple[StepPlan, ...]
    standing: tuple[Standing, ...] = ()
    redone: tuple[tuple[int, int], ...] = ()
    regenerated: tuple[tuple[int, int], ...] = ()
    lasts: float = 0.0
    left_out: tuple[int, ...] = ()

    def of(self, worker: WorkerId) -> StepPlan | None:
        """Returns what a worker does; None if it has no part in it."""
        return next((each for each in self.steps if each.worker == worker), None)


def rest_of_step(
    whole: StepPlan,
    *,
    pieces: tuple[Piece, ...],
    resent: tuple[Resent, ...] = (),
    standing: tuple[Standing, ...] = (),
    left_out: frozenset[int] = frozenset(),
) -> StepPlan:
    """Returns what one worker does of what is left of a step.

    Args:
        whole: what it does in a whole step of the plan that runs from now on.
        pieces: what it runs, in order.
        resent: what it sends first, out of its log.
        standing: the reductions that are complete.
        left_out: micro-batches that the others do not expect.
    """
    stands = {each.layers for each in standing}
    sums = (each for each in whole.sums if each.reduction.layers not in stands)
    return replace(
        whole,
        pieces=pieces,
        resent=resent,
        sums=tuple(_without(each, left_out) for each in sums),
        standing=standing,
        goes_on=True,
    )


def _without(of: SumPlan, numbers: frozenset[int]) -> SumPlan:
    """A sum that expects nothing of some micro-batches."""
    if not numbers:
        return of
    left = (number for start, stop in of.contributions for number in range(start, stop) if number not in numbers)
    return replace(of, contributions=intervals(left))
