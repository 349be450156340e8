"""Global checkpointing: all go back to the last checkpoint, with new processes in the lost places."""

from __future__ import annotations

from typing import Any

from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import restart
from holdfast.strategies.strategy import Strategy

__all__ = ["CHECKPOINT_RESTART", "checkpoint_restart"]


def checkpoint_restart(view: ClusterView) -> RecoveryPlan:
    """Global checkpointing: all stop, new processes take the lost places, and all go on from the last checkpoint.

    A baseline. The processes that live stay, which a restart of the whole job would not grant. When the grid is not
    whole in time, or nothing can be loaded, see ``answers.fall_back``.

    Source: SWIFT, sections 2.1 and 7.1 ("global checkpointing").
    """
    return restart(view, "checkpoint-restart")


def needs_checkpoints(job: Any) -> str:
    """Returns what a job lacks that is to go back to checkpoints after any loss."""
    strategy = job.resilience.strategy
    if not job.checkpoint_every:
        return f"checkpoint.every: strategy {strategy} goes back to checkpoints; expected more than 0, got 0"
    if not job.resilience.wait_for_replacement:
        return (
            f"resilience.wait_for_replacement: strategy {strategy} waits for new workers; expected the most seconds to "
            "wait, more than 0, got 0"
        )
    return ""


CHECKPOINT_RESTART = Strategy(
    name="checkpoint-restart", answer=checkpoint_restart, needs=needs_checkpoints, keeps_steps=False, restarts=True
)
