"""Templates: after a loss the workers that are left become other pipelines."""

from __future__ import annotations

from typing import Any

from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import give_up, reroute
from holdfast.strategies.strategy import Strategy

__all__ = ["TEMPLATES", "memory_needs", "pipelines_need", "templates"]


def templates(view: ClusterView) -> RecoveryPlan:
    """Re-routes as ``adaptive``, so that nobody waits for state; then the others become other pipelines.

    To which, :mod:`holdfast.planning.reshaping` says once the loss is answered; nothing is run again for it. Where too
    few are left for the pipelines that the next failures take, what lives is saved and training ends.

    Source: Oobleck, section 5, where training stands still while pipelines are made anew and states are copied, and
    section 4.1.1 for how many nodes are enough.
    """
    left = len(frozenset(view.baseline.workers) - (view.lost - view.entering)) + view.spares
    fewest = view.rules.fewest
    if left < fewest:
        why = f"{left} workers are left, and {fewest} are needed to tolerate as many failures as the job is to"
        return give_up("templates", view.baseline.placement.unowned_layers(view.lost - view.entering), why)
    return reroute(view, "templates")


def pipelines_need(job: Any) -> str:
    """Returns what a job lacks of which other pipelines are to be made."""
    if job.most_lanes > 1:
        return (
            "resilience.strategy: templates makes pipelines whose stages are one worker each, and the stages of this "
            "grid have several GPUs; expected adaptive, or one GPU for each stage"
        )
    if job.fewest_shards < job.most_shards:
        return (
            "resilience.strategy: with numerics fast a stage of several GPUs is sharded over them; expected adaptive, "
            "or equally many GPUs for each stage"
        )
    return memory_needs(job)


def memory_needs(job: Any) -> str:
    """Returns what a job lacks whose workers have so much memory."""
    if job.resilience.worker_memory and job.train.profile is None:
        return "resilience.worker_memory: what layers take is not known; expected train.profile with it"
    return ""


TEMPLATES = Strategy(name="templates", answer=templates, needs=pipelines_need, makes_pipelines=True)
