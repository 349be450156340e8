"""What was decided is not known any more: whoever is left says where it stands, what lives is saved, the job ends.

A coordinator that is started again goes by its store. One that is empty, damaged or another job's cannot be gone by:
who is a member, what each holds and which plan all run would be guesses. Workers know what they hold, so that can be
saved. Nothing of it is stored: a further coordinator finds out the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.control.membership.reattaching import conclude_return
from holdfast.control.membership.recovering import recover
from holdfast.control.membership.state import Decision, Membership, Output, Phase, Record, Tell
from holdfast.control.messages import Exited, Hello, Remark
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Detected, Event, Notice, Parted, WorkerReady

__all__ = ["forgotten", "gone_before", "knows_more", "note_exits", "on_survivor", "untold"]


def knows_more(state: Membership, hello: Hello) -> bool:
    """Whether somebody was told of a generation, and we know of none: it was stored before it was told."""
    return not state.past_lost and not state.generation and hello.generation > 0


def forgotten(state: Membership) -> Decision:
    """Begins to gather whoever is left; whoever attached before had been told nothing of the past."""
    why = "the store of decisions is empty, though some were made"
    state = replace(
        state,
        past_lost=why,
        phase=Phase.REATTACHING,
        roster=replace(state.roster, arriving=frozenset(state.roster.processes) - state.roster.spares),
        vacancies=replace(state.vacancies, offers=()),
    )
    told = Remark(worker=None, kind="store", text=f"{why}: what lives is saved, and the job ends")
    return state, (Record(event=Notice(worker="coordinator", text=why)), Tell(to=None, command=told))


def on_survivor(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    """A worker says where it stands; whoever is new, has no state yet, or one that is not sound, saves nothing."""
    broken = hello.raised is not None and not hello.raised.sound
    empty = hello.generation == 0 or not hello.has_state or broken
    if worker in state.grid.baseline.workers:
        state = state.attached(worker, hello.process, arriving=empty)
    else:
        state = state.with_spare(worker, hello.process)
        if empty:
            return state, ()
    state = replace(state, contact=state.contact.back(worker, hello))
    return conclude_return(state) if state.phase is Phase.REATTACHING else recover(state)


def gone_before(events: Iterable[Event]) -> frozenset[str]:
    """Returns the nonces of processes that a log tells to be lost, or to have left; each place may have had several."""
    nonces: dict[str, str] = {}
    gone: set[str] = set()
    for event in events:
        match event:
            case WorkerReady(worker=worker, nonce=nonce):
                nonces[worker] = nonce
            case Detected(worker=worker) | Parted(worker=worker) if worker in nonces:
                gone.add(nonces[worker])
    return frozenset(gone)


def untold(state: Membership, exited: Exited, outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    """Returns ``outputs`` without the news of a loss that was told before the decisions were lost."""
    if exited.process.nonce not in state.contact.told_gone:
        return outputs
    return tuple(each for each in outputs if not (isinstance(each, Record) and isinstance(each.event, Detected)))


def note_exits(state: Membership, hello: Hello) -> Membership:
    """Whose processes they were that have ended; a later process of the same worker may be alive."""
    processes = {**{exit_.worker: exit_.process for exit_ in hello.exits}, **state.roster.processes}
    return replace(
        state,
        roster=replace(state.roster, processes=processes),
        vacancies=replace(state.vacancies, offers=()),
    )
