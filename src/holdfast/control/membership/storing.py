"""What a coordinator that is started again must know: when it changes, as it is stored, and back."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.membership.cadence import Cadence
from holdfast.control.membership.state import Membership, Phase, Upcoming
from holdfast.control.store import StoredDecision, StoredUpcoming

__all__ = ["counted", "restore", "to_store"]


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
    members = (state.lost, state.arriving, state.entering, state.synced, state.leaving, state.expected, state.pids)
    layers = (state.baseline, state.target, state.former, state.restorable, state.loading)
    exceptions = (state.raised, state.kept, state.losses_by_exception, state.blame)
    return (
        state.generation,
        state.generations,
        state.plan,
        state.upcoming,
        *members,
        *layers,
        *exceptions,
        _intervals(state),
        state.ended,
    )


def _intervals(state: Membership) -> tuple[int, int]:
    """Steps between two checkpoints: as all workers have it, and as it should be; 0 if the job says that."""
    return (state.cadence.every, state.cadence.wanted) if state.cadence is not None else (0, 0)


def to_store(before: Membership, after: Membership) -> StoredDecision | None:
    """Returns what must be durable before anybody hears of it; None if ``after`` decided nothing of that kind.

    Nor is anything that follows upon a past which is not known: it would pass for one that is.
    """
    if after.revision == before.revision or after.past_lost:
        return None
    every, wanted = _intervals(after)
    return StoredDecision(
        job=after.job,
        revision=after.revision,
        generation=after.generation,
        baseline=after.baseline,
        target=after.target,
        former=after.former,
        plan=after.plan,
        period=after.period,
        restorable=after.restorable,
        loading=after.loading,
        lost=tuple(sorted(after.lost)),
        generations=after.generations,
        lost_layers=after.lost_layers,
        lost_work=after.lost_work,
        last_step=after.last_step,
        upcoming=_stored_upcoming(after.upcoming),
        arriving=tuple(sorted(after.arriving)),
        entering=tuple(sorted(after.entering)),
        synced=tuple(sorted(after.synced)),
        leaving=tuple(sorted(after.leaving)),
        expected=tuple(sorted(after.expected)),
        pids=tuple(sorted(after.pids.items())),
        staggered=after.staggered,
        checkpoint_every=every,
        checkpoint_wanted=wanted,
        refusals=after.refusals,
        raised=after.raised,
        kept=tuple(sorted(after.kept)),
        losses_by_exception=after.losses_by_exception,
        blame=after.blame,
        ended=after.ended,
    )


def restore(state: Membership, stored: StoredDecision, *, reattach_until: float) -> Membership:
    """Returns the membership of a coordinator that was started again.

    Args:
        state: of a job that has not begun.
        stored: the newest decision.
        reattach_until: when workers that are not back are given up, in seconds of the coordinator's clock.
    """
    return replace(
        state,
        phase=Phase.REATTACHING if stored.ended is None else Phase.ENDED,
        revision=stored.revision,
        generation=stored.generation,
        generations=stored.generations,
        baseline=stored.baseline,
        target=stored.target,
        former=stored.former,
        plan=stored.plan,
        period=stored.period,
        restorable=stored.restorable,
        loading=stored.loading,
        lost=frozenset(stored.lost),
        lost_layers=stored.lost_layers,
        lost_work=stored.lost_work,
        last_step=stored.last_step,
        upcoming=_restored_upcoming(stored.upcoming),
        arriving=frozenset(stored.arriving),
        entering=frozenset(stored.entering),
        synced=frozenset(stored.synced),
        leaving=frozenset(stored.leaving),
        expected=frozenset(stored.expected),
        pids=dict(stored.pids),
        staggered=stored.staggered,
        cadence=_restored_cadence(state.cadence, stored),
        refusals=stored.refusals,
        raised=stored.raised,
        kept=frozenset(stored.kept),
        losses_by_exception=stored.losses_by_exception,
        blame=stored.blame,
        reattach_until=reattach_until,
        agent_away=True,
        ended=stored.ended,
    )


def _restored_cadence(begun: Cadence | None, stored: StoredDecision) -> Cadence | None:
    """What checkpoints cost is measured anew; how often they are made is what all workers go by."""
    return begun and replace(begun, every=stored.checkpoint_every, wanted=stored.checkpoint_wanted)


def _stored_upcoming(upcoming: Upcoming | None) -> StoredUpcoming | None:
    if upcoming is None:
        return None
    return StoredUpcoming(
        generation=upcoming.generation,
        plan=upcoming.plan,
        entering=tuple(sorted(upcoming.entering)),
        period=upcoming.period,
        baseline=upcoming.baseline,
        pins=upcoming.pins,
        checkpoint_every=upcoming.checkpoint_every,
    )


def _restored_upcoming(stored: StoredUpcoming | None) -> Upcoming | None:
    if stored is None:
        return None
    return Upcoming(
        generation=stored.generation,
        plan=stored.plan,
        entering=frozenset(stored.entering),
        period=stored.period,
        baseline=stored.baseline,
        pins=stored.pins,
        checkpoint_every=stored.checkpoint_every,
    )
