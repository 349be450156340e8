"""How fast a cluster is, and what that makes of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Link
from holdfast.recovery.rates import Rates, first_sum_s, remaining_seconds, step_seconds
from holdfast.sim.replies import writers_of

__all__ = ["PlanTimes", "Speeds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast a cluster is, and how soon it notices a loss.

    Attributes:
        rates: by which actions are priced.
        detect_s: from a machine's loss until the coordinator knows.
        pin: how a worker copies its state in its own memory, for which training waits at a checkpoint.
    """

    rates: Rates
    detect_s: float
    pin: Link

    def checkpoint(self, plan: Plan) -> tuple[float, float]:
        """Return for how long the slowest worker of a plan copies its state, and then writes its part of it."""
        return PlanTimes(plan=plan, speeds=self, ahead=False).checkpoint


@dataclass(frozen=True, kw_only=True)  # without slots: what is asked for all the time is kept
class PlanTimes:
    """What a plan takes; each is computed once.

    Attributes:
        plan: it.
        speeds: of the cluster.
        ahead: whether updates are ahead of the verdict.
        slowed: how many times as long some of its workers take to compute, by worker.
    """

    plan: Plan
    speeds: Speeds
    ahead: bool
    slowed: tuple[tuple[WorkerId, float], ...] = ()

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step that follows upon another one."""
        return step_seconds(self.plan, self.speeds.rates, updates_ahead=self.ahead, slowed=dict(self.slowed))

    def remaining_s(self, lasts_s: float) -> float:
        """Seconds of what is left of a step whose operations would take so long."""
        return remaining_seconds(self.plan, lasts_s, self.speeds.rates, slowed=dict(self.slowed))

    @cached_property
    def first_sum_s(self) -> float:
        """When somebody contributes first to a sum."""
        return first_sum_s(self.plan, self.speeds.rates)

    @cached_property
    def writers(self) -> dict[WorkerId, tuple[int, ...]]:
        """The layers that each worker writes into a checkpoint."""
        return writers_of(self.plan)

    @cached_property
    def checkpoint(self) -> tuple[float, float]:
        """For how long the slowest worker copies its state, and then writes its part of it."""
        placement, rates = self.plan.placement, self.speeds.rates
        most = max(rates.state_bytes(placement.held_layers(worker)) for worker in placement.workers)
        return self.speeds.pin.seconds_of(most), max(map(rates.saving_s, self.writers.values()))
