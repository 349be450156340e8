"""Workers are gone: who hears of it, and whom it concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.control.membership.ending import end_job
from holdfast.control.membership.reattaching import conclude_return, on_parted
from holdfast.control.membership.recovering import bereft, recover
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    Record,
    expulsion,
    notice,
    prefixed,
)
from holdfast.control.membership.vacancies import answer_offers
from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import Detected

__all__ = ["on_exited", "on_lost"]


def on_exited(state: Membership, worker: WorkerId, pid: int, status: int) -> Decision:
    """A process has ended: in order, early, or it is a loss."""
    if state.pids.get(worker, pid) != pid:
        return _on_exited_early(state, worker)
    if worker in state.leaving and status == 0:  # it went in order, and has told or will tell so, if anybody is there
        return on_parted(state, worker) if state.phase is Phase.REATTACHING else (state, ())
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return on_lost(state, {worker: "process ended: " + how})


def _on_exited_early(state: Membership, worker: WorkerId) -> Decision:
    """An earlier process of this worker, whose loss is known; or one that was to come, and never attached."""
    if worker not in state.expected:
        return state, ()
    text = "was started to come into the running job and ended before it had attached"
    state = replace(state, expected=state.expected - {worker})
    return prefixed((notice(worker, text),), recover(state) if state.wait_for_all else (state, ()))


def on_lost(state: Membership, how: Mapping[WorkerId, str]) -> Decision:
    """Workers are gone, in one event: the survivors form a new generation, or what lives is saved."""
    state = replace(state, kept=state.kept - frozenset(how))
    news = {worker: text for worker, text in how.items() if worker in state.present}
    if not news:
        return state, ()
    noted = tuple(output for worker, text in news.items() for output in _expel(state, worker, text))
    gone = frozenset(news)
    touched = _in_generation(state) & gone
    state = bereft(state, gone)
    if state.phase is Phase.REATTACHING:
        return prefixed(noted, conclude_return(state))
    if state.phase is Phase.GATHERING:
        worker, text = next(iter(news.items()))
        detail = f"worker {worker} died while starting ({text})"
        return prefixed(noted, end_job(state, "error", detail, state.directory))
    state, outputs = recover(state) if touched else (state, ())
    return prefixed((*noted, *outputs), answer_offers(state))


def _in_generation(state: Membership) -> frozenset[WorkerId]:
    """Whose loss concerns this generation, or the one that is prepared or waited for."""
    prepared = state.upcoming.plan.workers if state.upcoming is not None else ()
    awaited = state.arriving if state.wait_for_all else ()
    return frozenset((*state.alive, *prepared, *awaited))


def _expel(state: Membership, worker: WorkerId, how: str) -> tuple[Output, ...]:
    """What ends a lost worker for good: should it live it must not act, and its place is free only when it is gone."""
    detected = Record(event=Detected(worker=str(worker), how=how, generation=state.generation))
    return (detected, *expulsion(state, worker, f"held for lost: {how}"))
