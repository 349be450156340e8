"""How often checkpoints are made where the job does not say: by what they cost, and CheckFreq's or Young's rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.control.messages import ShardWritten
from holdfast.recovery.checkfreq import checkpoint_interval, youngs_interval

__all__ = ["Cadence", "note_step", "note_written", "reconsider"]

LONGER, SHORTER = 1.2, 0.5
"""By which factor the interval must change for all to go over to another; too short a one breaks the bound."""
_SHARE = 0.25
"""What the newest checkpoint counts in what they usually cost: a busy moment is no reason to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """What a checkpoint costs: the longest, in seconds, that a worker waited for copies, and took to write its part."""

    stall_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """What checkpoints cost, as far as the newest of them told.

    Attributes:
        every: steps between two checkpoints, as all workers have it.
        wanted: what the rule says it should be; the same as long as that is not worth a change.
        began: generation, step and time of the first step that was heard of in this generation; None before.
        step_s: seconds of a step since, on average; 0 before the second one.
        of: the step of the newest checkpoint that anything is written of.
        newest: what it cost, as far as is known.
        usual: what checkpoints that are complete usually cost; None before the first one is.
    """

    every: int
    wanted: int
    began: tuple[int, int, float] | None = None
    step_s: float = 0.0
    of: int = 0
    newest: CheckpointCost = CheckpointCost()
    usual: CheckpointCost | None = None


def note_step(cadence: Cadence, generation: int, step: int, now: float) -> Cadence:
    """Returns the cadence once a step is committed; recoveries, which come with a generation, count for no step."""
    began = cadence.began
    if began is None or began[0] != generation or step <= began[1]:
        return replace(cadence, began=(generation, step, now))
    return replace(cadence, step_s=(now - began[2]) / (step - began[1]))


def note_written(cadence: Cadence, written: ShardWritten) -> Cadence:
    """Returns the cadence once a worker has written a layer of a checkpoint."""
    if written.step < cadence.of:
        return cadence
    if written.step > cadence.of:
        cadence = replace(cadence, of=written.step, newest=CheckpointCost())
    before = cadence.newest
    newest = CheckpointCost(stall_s=max(before.stall_s, written.stall_s), write_s=max(before.write_s, written.write_s))
    return replace(cadence, newest=newest)


def reconsider(cadence: Cadence, between_s: float = 0.0) -> Cadence:
    """Returns the cadence once a checkpoint is complete: what the rule makes of its costs is wanted from now on.

    Args:
        cadence: so far.
        between_s: seconds until one is needed, for Young's rule; 0: by CheckFreq's.
    """
    if not cadence.step_s or not cadence.newest.write_s:
        return cadence
    usual = _mixed(cadence.usual, cadence.newest)
    costs = usual.stall_s, usual.write_s, cadence.step_s
    interval = youngs_interval(*costs, between_s) if between_s else checkpoint_interval(*costs)
    kept = SHORTER * cadence.every <= interval <= LONGER * cadence.every
    return replace(cadence, usual=usual, wanted=cadence.every if kept else interval)


def _mixed(usual: CheckpointCost | None, newest: CheckpointCost) -> CheckpointCost:
    if usual is None:
        return newest
    return CheckpointCost(
        stall_s=usual.stall_s + _SHARE * (newest.stall_s - usual.stall_s),
        write_s=usual.write_s + _SHARE * (newest.write_s - usual.write_s),
    )
