"""What a strategy is: one row, and all that anybody may ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.core.plan import Plan
from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView

__all__ = ["Strategy", "needs_nothing"]


def needs_nothing(job: Any) -> str:
    """Returns an empty text: any job may have the strategy."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy.

    Attributes:
        name: in job files, events and reports.
        answer: from a view of the cluster to what is done about a loss: pure, also of time and chance.
        needs: what a job (:class:`holdfast.config.job.Job`) lacks for it, as an error says it, with the key first;
            empty if nothing.
        healthy: the plan by which the job trains while nothing is lost, made of the one of its grid; None: that one.
        exact: whether the job ends in the bits of the run in which nothing failed.
        keeps_steps: whether an interrupted step is gone on with, where workers keep what they have of it.
        restarts: whether all go back to a checkpoint after any loss.
        logs: whether lost layers may be replayed from logs.
        loops: whether the loop of a user's script can have it: nobody is ever brought back by it.
        makes_pipelines: whether it makes other pipelines of the workers that are left.
        chooses: whether it takes, of what the job can have, what is expected to make the most steps: it needs a profile
            for that, and makes other pipelines only where it has one.
        takes_snapshots: whether workers keep copies of their state in memory.
        sets_interval: whether it sets how often checkpoints are made, where the job does not say.
    """

    name: str
    answer: Callable[[ClusterView], RecoveryPlan]
    needs: Callable[[Any], str] = needs_nothing
    healthy: Callable[[Plan], Plan] | None = None
    exact: bool = True
    keeps_steps: bool = True
    restarts: bool = False
    logs: bool = False
    loops: bool = False
    makes_pipelines: bool = False
    chooses: bool = False
    takes_snapshots: bool = False
    sets_interval: bool = False
