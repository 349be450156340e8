"""What the workers have done: steps, and shards of checkpoints."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.checkpoint_ledger import Settled, WriteManifest, note_shard, settle
from holdfast.control.membership.cadence import note_step, note_written
from holdfast.control.membership.ending import end_if_saved, end_preempted, save
from holdfast.control.membership.scoring import tell_scores
from holdfast.control.membership.state import Decision, Membership, Output, Phase, Record, Tell, prefixed, tell_each
from holdfast.control.messages import Obsolete, Progress, Remark, ShardFailed, ShardWritten, StateAt, StepDone
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import CheckpointFailed, Event

__all__ = ["all_finished", "on_finished", "on_settled", "on_shard", "on_step_done"]

MAX_RESTORABLE = 8


def on_step_done(state: Membership, done: StepDone, now: float) -> Decision:
    """A step is committed, which ends every series of failures; the agent shows it."""
    if state.cadence is not None:
        state = replace(state, cadence=note_step(state.cadence, state.generation, done.step, now))
    state = replace(
        state,
        last_step=max(state.last_step, done.step),
        audits=state.audits.committed(done.step),
        doubts=replace(state.doubts, reformations=0),
        forming=replace(state.forming, wait_until=None),
    )
    progress = Progress(
        step=done.step,
        loss=done.loss,
        omitted=done.omitted,
        alive=len(state.alive),
        generation=state.generation,
        checkpoint=state.checkpoints.newest,
    )
    return state, (Tell(to=None, command=progress),)


def on_finished(state: Membership, worker: WorkerId, step: int) -> Decision:
    """A worker has run the last step, the one before ``step``; once all have, what they hold is saved."""
    state = replace(state, reports=replace(state.reports, finished=state.reports.finished | {worker}))
    if step < state.num_steps:
        state = replace(state, running=replace(state.running, ends=step))
    if not all_finished(state):
        return state, ()
    state, told = tell_scores(state, over=True)
    return prefixed(told, save(state, state.num_steps))


def all_finished(state: Membership) -> bool:
    """Whether all who compute have run the last step of the job, and nothing else is under way."""
    return state.phase is Phase.RUNNING and state.reports.finished >= set(state.full)


def on_shard(state: Membership, message: ShardWritten | ShardFailed) -> Decision:
    """What a worker wrote stays written, whatever became of the worker and its generation."""
    ledger, follows = note_shard(state.checkpoints, message, state.grid.baseline.placement.num_layers)
    state = replace(state, checkpoints=ledger)
    if state.cadence is not None and isinstance(message, ShardWritten):
        state = replace(state, cadence=note_written(state.cadence, message))
    if follows is None:
        return state, ()
    if isinstance(follows, WriteManifest):
        return state, (replace(follows, best=state.running.best),)
    last = state.preempted and state.pinned == (message.step, message.generation)
    ends = last and state.phase is not Phase.SAVING
    return prefixed(_told(follows), end_preempted(state, follows.detail) if ends else (state, ()))


def _told(event: Event) -> tuple[Output, ...]:
    """The log has all that became of checkpoints; the user hears of the first that could not be written."""
    if not isinstance(event, CheckpointFailed):
        return (Record(event=event),)
    who = f" by worker {event.worker}" if event.worker else ""
    text = f"checkpoint of step {event.step} could not be written{who}: {event.detail}; training goes on"
    return (Record(event=event), Tell(to=None, command=Remark(worker=None, kind="checkpoint", text=text)))


def on_settled(state: Membership, settled: Settled) -> Decision:
    """A checkpoint is complete, so it can be restored from; or its manifest could not be written."""
    ledger, told = settle(state.checkpoints, settled)
    if not settled.error:
        found = StateAt(url=settled.url, step=settled.step)
        state = replace(state, restoring=state.restoring.with_checkpoint(found, MAX_RESTORABLE))
    state = replace(state, checkpoints=ledger)
    last = state.preempted and state.pinned is not None and settled.step >= state.pinned[0]
    ends = last and state.phase is not Phase.SAVING
    decision = end_preempted(state, settled.error) if ends else end_if_saved(state)
    unneeded = not settled.error and state.rules.logging is not None and state.phase is Phase.RUNNING
    obsolete = tell_each(state.alive, Obsolete(step=settled.step)) if unneeded else ()
    return prefixed((*(output for event in told for output in _told(event)), *obsolete), decision)
