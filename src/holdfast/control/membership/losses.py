"""Workers are gone: who hears of it, and whom it concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.control.membership.ending import end_job
from holdfast.control.membership.reattaching import conclude_return, on_parted
from holdfast.control.membership.recovering import recover
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Output,
    Phase,
    Record,
    Tell,
    departed,
    notice,
    prefixed,
)
from holdfast.control.membership.vacancies import answer_offers
from holdfast.control.messages import Expel, Fence
from holdfast.core.ids import WorkerId
from holdfast.core.schedule import OpKind
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
    news = {worker: text for worker, text in how.items() if worker in state.present}
    if not news:
        return state, ()
    noted = tuple(output for worker, text in news.items() for output in _expel(state, worker, text))
    lost_work = state.lost_work + tuple(work for worker in news for work in _pairs_run(state, worker))
    gone = frozenset(news)
    touched = _in_generation(state) & gone
    abandoned = (state.abandoned | gone) - frozenset(state.full)
    losses = state.losses + (state.began is not None)
    state = replace(departed(state, gone), abandoned=abandoned, lost_work=lost_work, losses=losses)
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
    return (
        Record(event=Detected(worker=str(worker), how=how, generation=state.generation)),
        Tell(to=worker, pid=state.pids.get(worker), command=Expel(reason=f"held for lost: {how}")),
        Tell(to=None, command=Fence(worker=worker, pid=state.pids.get(worker, 0))),
    )


def _pairs_run(state: Membership, worker: WorkerId) -> tuple[tuple[int, int], ...]:
    """The step that a worker was at when it was lost, and the pairs of it that it had run."""
    vital = state.watch.vitals.get(worker)
    beat = None if vital is None else vital.beat
    if beat is None or worker not in state.full or state.plan is None or beat.generation != state.generation:
        return ()
    forwards = sum(op.kind is OpKind.F for op in state.plan.orders.of(worker)[: beat.op])
    return ((beat.step, forwards * len(state.plan.placement.layers_of(worker).indices)),)
