"""What a coordinator that is started again must know: when it changes, as it is stored, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from holdfast.control.membership.agreement import LostWork, Restoring
from holdfast.control.membership.audits import AuditState
from holdfast.control.membership.blame import Exceptions
from holdfast.control.membership.cadence import Cadence
from holdfast.control.membership.grid import GridState
from holdfast.control.membership.roster import Roster
from holdfast.control.membership.running import Running
from holdfast.control.membership.state import Membership, Output, Phase, Record
from holdfast.control.messages import Ended
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.core.plan import Plan
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import Event

__all__ = ["StoredDecision", "counted", "restore", "to_store"]


class StoredDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a coordinator which is started again must know, as it was after one decision.

    The values are those of :class:`holdfast.control.membership.Membership`. ``revision`` counts decisions; ``recorded``
    are the events that it is told by; ``processes`` and ``where`` are those of the roster, which has none here;
    ``committing`` are of the checkpoints; ``checkpoint_every`` and ``checkpoint_wanted`` are of the cadence, 0 without
    one.
    """

    revision: int
    recorded: tuple[Event, ...] = ()
    generation: int
    job: str = ""
    generations: int = 0
    grid: GridState
    roster: Roster = Roster()
    processes: tuple[tuple[WorkerId, Process], ...] = ()
    where: tuple[tuple[WorkerId, NodeId], ...] = ()
    running: Running = Running()
    restoring: Restoring = Restoring()
    exceptions: Exceptions = Exceptions()
    audits: AuditState = AuditState()
    lost_layers: tuple[int, ...] = ()
    lost_work: tuple[LostWork, ...] = ()
    last_step: int = -1
    committing: tuple[tuple[int, tuple[Shard, ...]], ...] = ()
    checkpoint_every: int = 0
    checkpoint_wanted: int = 0
    ended: Ended | None = None

    @property
    def plans(self) -> dict[int, Plan]:
        """The plans that it tells, by their generation."""
        now, then = self.running.plan, self.running.upcoming
        known = {} if now is None else {self.generation: now}
        return known if then is None else known | {then.generation: then.plan}


def counted(before: Membership, after: Membership) -> Membership:
    """Returns ``after`` with one revision more if it must be stored.

    Before the first generation there is nothing to remember: everyone attaches anew.
    """
    unborn = after.generation == 0 and after.ended is None
    if unborn or _durable(before) == _durable(after):
        return after
    return replace(after, revision=before.revision + 1)


def _durable(state: Membership) -> tuple[object, ...]:
    """Whatever of these changes must be stored before anybody hears of it."""
    return (
        state.generation,
        state.generations,
        state.grid,
        state.roster,
        state.running,
        state.restoring,
        state.exceptions,
        state.audits.durable,
        state.checkpoints.committing,
        _intervals(state),
        state.ended,
    )


def _intervals(state: Membership) -> tuple[int, int]:
    """Steps between two checkpoints: as all workers have it, and as it should be; 0 if the job says that."""
    return (state.cadence.every, state.cadence.wanted) if state.cadence is not None else (0, 0)


def to_store(before: Membership, after: Membership, outputs: Sequence[Output] = ()) -> StoredDecision | None:
    """Returns what must be durable before anybody hears of it; None if ``after`` decided nothing of that kind.

    ``outputs``: what is to be sent and recorded then; what is recorded is stored with it, as whoever stores it may die
    before that.

    Nor is anything that follows upon a past which is not known: it would pass for one that is.
    """
    if after.revision == before.revision or after.past_lost:
        return None
    every, wanted = _intervals(after)
    return StoredDecision(
        revision=after.revision,
        recorded=tuple(each.event for each in outputs if isinstance(each, Record)),
        generation=after.generation,
        job=after.rules.job,
        generations=after.generations,
        grid=after.grid,
        roster=replace(after.roster, processes={}, where={}),  # JSON has no keys but texts
        processes=tuple(sorted(after.roster.processes.items())),
        where=tuple(sorted(after.roster.where.items())),
        running=after.running,
        restoring=after.restoring,
        exceptions=after.exceptions,
        audits=after.audits.durable,
        lost_layers=after.forming.lost_layers,
        lost_work=after.forming.lost_work,
        last_step=after.last_step,
        committing=tuple(sorted(after.checkpoints.committing.items())),
        checkpoint_every=every,
        checkpoint_wanted=wanted,
        ended=after.ended,
    )


def restore(state: Membership, stored: StoredDecision, *, reattach_until: float) -> Membership:
    """Returns the membership of a coordinator that was started again.

    Args:
        state: of a job that has not begun.
        stored: the newest decision.
        reattach_until: when workers that are not back are given up, in seconds of the coordinator's clock.
    """
    roster = replace(stored.roster, processes=dict(stored.processes), where=dict(stored.where))
    return replace(
        state,
        phase=Phase.REATTACHING if stored.ended is None else Phase.ENDED,
        revision=stored.revision,
        generation=stored.generation,
        generations=stored.generations,
        grid=stored.grid,
        roster=roster,
        contact=replace(
            state.contact,
            detached=dict.fromkeys(sorted(stored.roster.spares), reattach_until),
            reattach_until=reattach_until,
            agents=dict.fromkeys(roster.nodes, reattach_until),
        ),
        running=stored.running,
        forming=replace(state.forming, lost_layers=stored.lost_layers, lost_work=stored.lost_work),
        restoring=stored.restoring,
        exceptions=stored.exceptions,
        audits=stored.audits,
        last_step=stored.last_step,
        checkpoints=replace(state.checkpoints, committing=dict(stored.committing)),
        cadence=_restored_cadence(state.cadence, stored),
        ended=stored.ended,
    )


def _restored_cadence(begun: Cadence | None, stored: StoredDecision) -> Cadence | None:
    """What checkpoints cost is measured anew; how often they are made is what all workers go by."""
    return begun and replace(begun, every=stored.checkpoint_every, wanted=stored.checkpoint_wanted)
