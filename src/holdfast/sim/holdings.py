"""What workers hold, and what they have of the step that was interrupted, while a loss is answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs
from holdfast.core.progress import StepProgress
from holdfast.planning.remainder import progress_at

__all__ = ["Holdings"]


class Holdings:
    """Since the last plan was given up.

    Attributes:
        held: the layers of each who held some then, and lives; and those that were replayed since.
    """

    def __init__(self) -> None:
        self.held: dict[WorkerId, tuple[int, ...]] = {}
        self._interrupted: tuple[Plan, float] | None = None
        self._keeps_all: dict[WorkerId, bool] = {}

    def give_up(self, plan: Plan, here: Iterable[WorkerId], elapsed_s: float | None) -> None:
        """A plan is given up; ``elapsed_s``: how long its step has been run; None: none was, since the last one was."""
        alive = frozenset(here)
        self.held = {worker: plan.placement.held_layers(worker) for worker in plan.workers if worker in alive}
        if elapsed_s is not None:
            self._interrupted, self._keeps_all = (plan, elapsed_s), dict.fromkeys(self.held, True)

    def drop(self) -> None:
        """Nothing is kept of the step any more: it is gone on with, or all load another state."""
        self._interrupted = None

    def lose(self, worker: WorkerId) -> None:
        """A worker is gone, with what it had."""
        self.held.pop(worker, None)
        self._keeps_all.pop(worker, None)

    def take_up(self, worker: WorkerId, layers: tuple[int, ...]) -> None:
        """A worker holds these layers; if some are new to it, it keeps of the step only what it has sent."""
        before, self.held[worker] = self.held.get(worker, ()), layers
        if worker in self._keeps_all and before != layers:
            self._keeps_all[worker] = False

    def progress(self, number: int, costs: Costs) -> dict[WorkerId, StepProgress]:
        """Return what workers have of the interrupted step, whose number this is, as far as it came by its plan."""
        if self._interrupted is None:
            return {}
        plan, elapsed_s = self._interrupted
        lost = frozenset(plan.workers) - self._keeps_all.keys()
        return {
            worker: each if self._keeps_all[worker] else replace(each, contexts=(), halves=(), counted=())
            for worker, each in progress_at(plan, costs, elapsed_s, number, lost).items()
        }
