"""CheckFreq: as global checkpointing, from checkpoints as often as their cost allows."""

from __future__ import annotations

from typing import Any

from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import restart
from holdfast.strategies.checkpoint_restart import needs_checkpoints
from holdfast.strategies.strategy import Strategy

__all__ = ["CHECKFREQ", "checkfreq"]


def checkfreq(view: ClusterView) -> RecoveryPlan:
    """CheckFreq: recovers as ``checkpoint-restart``, from checkpoints that are written while training goes on.

    Source: CheckFreq, FAST '21, as described by SWIFT, section 2.2; how often, see :mod:`holdfast.recovery.checkfreq`.
    """
    return restart(view, "checkfreq")


def _needs(job: Any) -> str:
    if lacking := needs_checkpoints(job):
        return lacking
    if job.checkpoint.synchronous:
        return "checkpoint.synchronous: strategy checkfreq writes while training goes on; expected false, got true"
    return ""


CHECKFREQ = Strategy(
    name="checkfreq", answer=checkfreq, needs=_needs, keeps_steps=False, restarts=True, sets_interval=True
)
