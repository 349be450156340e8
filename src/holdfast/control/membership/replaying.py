"""Who replays layers that nobody holds, and up to which step."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.forming import check_distance, lowest, settled
from holdfast.control.membership.roster import without
from holdfast.control.membership.state import Decision, Membership, Record, Tell
from holdfast.control.messages import ReplayOrder, StateAt
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.replay import Replay
from holdfast.errors import RecoveryError
from holdfast.planning.replays import logged_boundaries, plan_replays
from holdfast.telemetry.events import Replaying

__all__ = ["TooLittle", "order_replays"]


class TooLittle(RecoveryError):
    """What is known of the past does not suffice for a replay; the message says what is missing."""


def order_replays(state: Membership, plan: Plan) -> Decision:
    """Tells whoever lacks layers that ``plan`` gives it to replay them; it then says again what it holds.

    Raises:
        TooLittle: nobody has the state of any layer, the checkpoint is newer than that, or nobody knows a verdict.
    """
    logging, statuses = state.rules.logging, state.reports.statuses
    held = {worker: tuple(layer for layer, _ in each.layer_steps) for worker, each in statuses.items()}
    if logging is None or not any(held.values()):
        raise TooLittle("nobody holds the state of any layer")
    step, _ = settled(state, lowest(state))
    check_distance(state, step)
    checkpoint = state.restoring.restorable[0]
    if checkpoint.step > step:
        raise TooLittle(f"the checkpoint is of step {checkpoint.step}, and the others go on from step {step}")
    former = state.grid.baseline
    known = state.restoring.logged
    replays = plan_replays(
        plan.placement,
        held,
        former.routes.microbatches,
        logged_boundaries(former, logging) if known is None else known[1],
        helpers=logging.helpers,
        ties=state.rules.ties,
        start=checkpoint.step,
        stop=step,
    )
    state = replace(state, forming=replace(state.forming, resume_step=step))
    return _ordered(state, replays, checkpoint, _verdict(state, step) if step > checkpoint.step else None)


def _verdict(state: Membership, step: int) -> bytes:
    """The verdict that led to a step: no log has it that is sure to be read."""
    votes = (vote for status in state.reports.statuses.values() for vote in status.votes)
    known = next((vote.value for vote in votes if vote.step == step - 1 and vote.complete), None)
    if known is None:
        raise TooLittle(f"nobody knows the verdict over step {step - 1}")
    return known


def _ordered(state: Membership, replays: tuple[Replay, ...], checkpoint: StateAt, vote: bytes | None) -> Decision:
    parts: dict[WorkerId, tuple[Replay, ...]] = {}
    for replay in replays:
        for worker in replay.workers:
            parts[worker] = (*parts.get(worker, ()), replay)
    num_layers = state.grid.baseline.placement.num_layers
    told = tuple(
        Tell(
            to=worker,
            command=ReplayOrder(
                generation=state.generation, state=checkpoint, num_layers=num_layers, parts=ours, vote=vote
            ),
        )
        for worker, ours in sorted(parts.items())
    )
    state = replace(state, reports=replace(state.reports, statuses=without(state.reports.statuses, *parts)))
    return state, (*(_event(state, each) for each in replays), *told)


def _event(state: Membership, replay: Replay) -> Record:
    event = Replaying(
        generation=state.generation,
        layers=(replay.layers.start, replay.layers.stop),
        workers=tuple(map(str, replay.workers)),
        start=replay.start,
        stop=replay.stop,
    )
    return Record(event=event)
