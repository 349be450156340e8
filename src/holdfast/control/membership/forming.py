"""A generation that takes effect at once: all connect anew, agree on a step, and go on from it."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_struct

from holdfast.control.detection import interrupted
from holdfast.control.membership.counting import again_whole
from holdfast.control.membership.ending import end_job
from holdfast.control.membership.roster import without
from holdfast.control.membership.running import Reports
from holdfast.control.membership.state import (
    Decision,
    Membership,
    Phase,
    Record,
    held_for_lost,
    prefixed,
    tell_each,
)
from holdfast.control.messages import Blob, Install
from holdfast.core.plan import Plan
from holdfast.errors import InternalError
from holdfast.telemetry.events import Agreed, Installed, Notice

__all__ = [
    "abort",
    "agreed",
    "all_told",
    "check_distance",
    "install",
    "installed",
    "leave_behind",
    "lowest",
    "newest_snapshot",
    "relay",
    "settled",
]


def abort(state: Membership) -> Decision:
    """Begins the next generation: whatever runs is given up, and nobody has been told of a plan yet."""
    state = replace(
        state,
        phase=Phase.FORMING,
        generation=state.generation + 1,
        running=state.running.of(None, None),
        reports=Reports(),
        forming=replace(state.forming, lost_layers=(), too_few=""),
        doubts=state.doubts.dispelled(),
        contact=replace(state.contact, returned={}),
        watch=interrupted(state.watch),
    )
    return state, ()


def install(state: Membership, plan: Plan | None, *, keeps: bool = False) -> Decision:
    """Tells everyone of the generation that has begun; they then say what they hold. No plan: nothing is trained.

    ``keeps``: whatever they have of the interrupted step is kept, to go on with it.

    Where all load their state, whoever has come takes part at once, and nobody is waited for any more.
    """
    loading = state.restoring.loading if plan is not None else None  # else whatever comes next says what to load
    if plan is not None and loading is not None:
        forming = replace(state.forming, wait_for_all=False)
        state = replace(state, roster=state.roster.let_in(plan.workers), forming=forming)
    if not state.alive:
        nothing = "every worker is lost; nothing could be saved"
        return end_job(state, "program" if state.exceptions.blame else "lost", state.exceptions.blame or nothing, "")
    state = replace(
        state,
        running=state.running.of(plan, state.forming.period, state.forming.dormant),
        generations=state.generations + (plan is not None),
        restoring=replace(state.restoring, loading=loading),
        cadence=state.cadence and replace(state.cadence, every=state.interval),
    )
    order = Install(
        generation=state.generation,
        plan=plan,
        load=state.restoring.loading,
        staggered=state.running.staggered,
        repeated=state.running.repeated,
        checkpoint_every=state.interval,
        keeps=keeps,
        audits=state.audits.order if state.rules.sampling is not None else None,
    )
    state, alone = _note_alone(state, plan)
    bare = state.roster.entering if plan is None else frozenset()
    told = tell_each((worker for worker in state.alive if worker not in bare), order)
    told += tell_each(sorted(bare), replace_struct(order, stateless=True))
    return state, (*alone, installed(state, state.forming.strategy), *told)


def _note_alone(state: Membership, plan: Plan | None) -> Decision:
    """Layers that nobody can audit, as they have one owner: said once of each."""
    samples = state.rules.sampling is not None and state.rules.sampling.layers
    owned = enumerate(plan.placement.owners_by_layer) if plan is not None and samples else ()
    alone = {layer for layer, owners in owned if len(owners) == 1}.difference(state.audits.alone)
    if not alone:
        return state, ()
    text = f"no audit of layer(s) {', '.join(map(str, sorted(alone)))}: each has one owner, whom nobody can contradict"
    state = replace(state, audits=replace(state.audits, alone=tuple(sorted({*state.audits.alone, *alone}))))
    return state, (Record(event=Notice(worker="coordinator", text=text)),)


def installed(state: Membership, strategy: str) -> Record:
    """Returns what tells of the generation that begins; ``strategy`` says what it answers, and how."""
    workers = tuple(str(worker) for worker in state.alive)
    owners = state.fewest_owners
    return Record(event=Installed(generation=state.generation, workers=workers, strategy=strategy, owners=owners))


def relay(state: Membership, blob: Blob) -> Decision:
    """Passes on, unread, what a worker tells its peers."""
    return state, tell_each((peer for peer in blob.to if peer not in state.roster.lost), blob)


def all_told(state: Membership) -> bool:
    """Whether all members of this generation have said what they hold."""
    return state.has_all(state.reports.statuses)


def agreed(state: Membership, step: int) -> Decision:
    """All go on from the state before ``step``, or from the one before that where nobody can settle what led to it."""
    step, votes = settled(state, step)
    check_distance(state, step)
    again = again_whole(state, step)
    event = Agreed(
        generation=state.generation,
        step=step,
        recomputed_microbatches=again.known,
        recomputed_at_most=again.at_most,
    )
    forming = replace(state.forming, resume_step=step, votes=votes)
    return replace(state, forming=forming), (Record(event=event),)


def leave_behind(state: Membership) -> Decision:
    """Before what lives is saved: a worker that has stopped may be at another step than those who went on since."""
    held = {worker: dict(status.layer_steps) for worker, status in state.reports.statuses.items()}
    layers = {layer for steps in held.values() for layer in steps}
    step = min((max(steps[layer] for steps in held.values() if layer in steps) for layer in layers), default=0)
    stopped = {each.worker for each in state.exceptions.raised} & held.keys()
    astray = frozenset(worker for worker in stopped if not {step, step + 1} >= set(held[worker].values()))
    how = f"had stopped at another step than {step}, which is saved"
    told = tuple(output for worker in sorted(astray) for output in held_for_lost(state, worker, how))
    state = state.departed(astray)
    lost = state.grid.baseline.placement.unowned_layers(state.absent)
    state = replace(
        state,
        reports=replace(state.reports, statuses=without(state.reports.statuses, *astray)),
        forming=replace(state.forming, lost_layers=lost),
    )
    return prefixed(
        told, (state, ()) if state.reports.statuses else end_job(state, "program", state.exceptions.blame, "")
    )


def lowest(state: Membership) -> int:
    """The lowest step of any layer."""
    return min(at for status in state.reports.statuses.values() for _, at in status.layer_steps)


def newest_snapshot(state: Membership) -> int:
    """The newest snapshot that all hold; where there is none, the lowest step of any layer."""
    common = frozenset.intersection(*(frozenset(status.snapshots) for status in state.reports.statuses.values()))
    return max(common) if common else lowest(state)


def settled(state: Membership, step: int) -> tuple[int, tuple[bytes, ...]]:
    """Returns the step to go back to, and the votes that settle the one before it.

    There are such if some have updated ahead of its verdict. A complete vote is enough; so are those of owners of all
    layers. Without either, that step is given up as well: then nobody has gone further, since that takes its verdict.
    """
    last = step - 1
    votes = [vote for status in state.reports.statuses.values() for vote in status.votes if vote.step == last]
    if complete := [vote.value for vote in votes if vote.complete]:
        return step, (complete[0],)
    if all(status.unsettled != last for status in state.reports.statuses.values()):
        return step, ()
    return (step, tuple(vote.value for vote in votes)) if state.running.plan is not None else (last, ())


def check_distance(state: Membership, step: int) -> None:
    """Raises InternalError if a layer is further ahead of a step than can be taken back."""
    for status in state.reports.statuses.values():
        for layer, at in status.layer_steps:
            if at > step + 1 and step not in status.snapshots:
                raise InternalError(
                    f"worker {status.worker} holds layer {layer} at step {at}, another worker is at {step}: "
                    "more than one step apart cannot be taken back"
                )
