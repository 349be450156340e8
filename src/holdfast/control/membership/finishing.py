"""An interrupted step: what all that is kept of it comes to, and what is left to be done."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from holdfast.control.membership.counting import again_behind, again_of, begun
from holdfast.control.membership.forming import check_distance, lowest, settled
from holdfast.control.membership.scoring import begun_from, unevaluated
from holdfast.control.membership.state import Decision, Membership, Phase, Record, Tell, prefixed
from holdfast.control.messages import CommitVote, Resume, Status
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.progress import StepProgress
from holdfast.core.remainder import Remainder
from holdfast.errors import InfeasiblePlan, InvalidSchedule
from holdfast.schedule.evaluate import measured
from holdfast.telemetry.events import Agreed, Notice

__all__ = ["contradicted", "finish_step"]


def finish_step(state: Membership, left_out: Container[int] = (), *, repeats: bool = False) -> Decision:
    """All go on with the step that was interrupted: only what the lost alone had done of it is run again.

    Where somebody knows the verdict over it, and whoever has not updated with it has all sums for that, only these
    updates are made.

    Args:
        state: all have said what they keep.
        left_out: micro-batches that are not to count where they do not count yet, but for those of which a survivor has
            something in a sum.
        repeats: whether all micro-batches are run once more in the step behind, unless all sums are there.

    Returns:
        Still forming if it is to be run again whole: somebody cannot return bitwise to the state before it, or is to
        get layers; the step before is given up or was refused; more would be held in memory than by the plan, or it is
        no faster; or it is audited, which only a whole step is.
    """
    plan, step, statuses = state.running.plan, lowest(state), tuple(state.reports.statuses.values())
    if plan is None or step >= state.num_steps or not all(_goes_on(each, plan) for each in statuses):
        return state, ()
    check_distance(state, step)
    verdict = _verdict(statuses, step)
    evaluated = not unevaluated(state, step)  # else its state is needed once more
    if verdict is not None and evaluated and all(_has_sums(state, each, step) for each in statuses):
        return _concluded(state, step, verdict)
    if _is_audited(state, plan, step):
        return state, ()
    before, votes = settled(state, step)
    kept = {each.worker: _kept(each, step) for each in statuses}
    progress = {worker: each for worker, each in kept.items() if each is not None}
    if before != step or len(progress) < len(kept):
        return state, ()
    everything = (each.number for each in plan.routes.microbatches)
    return _with_remainder(
        state, plan, progress, votes, frozenset(m for m in everything if m in left_out), repeats=repeats
    )


def _is_audited(state: Membership, plan: Plan, step: int) -> bool:
    """Whether something of a step is, or was, computed a second time; or with weights that are known to be wrong."""
    if state.audits.weigh:
        return True
    sampling, placement = state.rules.sampling, plan.placement
    found = None if sampling is None else sampling.of(step, plan)
    if found is None or step == state.audits.disputed:
        return found is not None
    return found.layer not in state.audits.unsteady and len(placement.owners(found.layer)) > 1


def _goes_on(status: Status, plan: Plan) -> bool:
    """Whether a worker holds just what it is to hold, and knows of nothing that speaks against its step."""
    held = tuple(layer for layer, _ in status.layer_steps)
    return held == plan.placement.layers_of(status.worker) and not status.follows and not status.refuses


def _verdict(statuses: Iterable[Status], step: int) -> CommitVote | None:
    """The verdict over a step, if anybody knows it."""
    return next((vote for each in statuses for vote in each.votes if vote.step == step and vote.complete), None)


def _has_sums(state: Membership, status: Status, step: int) -> bool:
    """Whether a worker has made all updates of a step, or has all sums that they need."""
    behind = {layer for layer, at in status.layer_steps if at == step}
    needed = {(layer,) for layer in behind} | {tie for tie in state.rules.ties if not behind.isdisjoint(tie)}
    kept = next((each for each in status.progress if each.step == step), StepProgress(step=step))
    return needed <= set(kept.complete)


def _kept(status: Status, step: int) -> StepProgress | None:
    """What a worker keeps of a step: nothing if it has not begun it, or is beyond it; None if it cannot return."""
    if not status.returns and any(at > step for _, at in status.layer_steps):
        return None
    return next((each for each in status.progress if each.step == step), StepProgress(step=step))


def _concluded(state: Membership, step: int, verdict: CommitVote) -> Decision:
    again = again_behind(state, step, ended=True)
    agreed = Agreed(
        generation=state.generation,
        step=step,
        recomputed_microbatches=again.known,
        recomputed_at_most=again.at_most,
        goes_on=True,
        concluded=True,
        dropped=_dropped(state, step),
    )
    state, scored = begun_from(state, step + 1)
    resume = Resume(
        generation=state.generation,
        step=step,
        concluded=verdict.value,
        repeated=state.running.repeated,
        ends=state.running.ends,
        evaluates=unevaluated(state, step + 1),
        scored=state.running.evaluated,
    )
    return prefixed(scored, _resumed(state, step + 1, agreed, dict.fromkeys(state.alive, resume)))


def _with_remainder(
    state: Membership,
    plan: Plan,
    progress: Mapping[WorkerId, StepProgress],
    votes: tuple[bytes, ...],
    left_out: frozenset[int],
    *,
    repeats: bool,
) -> Decision:
    costs = state.rules.keeping
    assert costs is not None, "only a job that keeps steps is asked for what is left of one"
    try:
        rest = state.maker.remainder(
            plan, progress, ties=state.rules.ties, costs=costs, begun=begun(state, lowest(state)), left_out=left_out
        )
    except InfeasiblePlan:
        return state, ()
    except InvalidSchedule as error:
        return contradicted(state, error)
    if not left_out and rest.lasts >= measured(plan, costs).makespan:
        return state, ()
    if repeats and not _is_over(state, rest.step):
        state = replace(state, running=state.running.repeating(rest.step))
    state, scored = begun_from(state, rest.step)
    resumes = {
        worker: Resume(
            generation=state.generation,
            step=rest.step,
            votes=votes,
            rest=rest.of(worker),
            repeated=state.running.repeated,
            ends=state.running.ends,
            evaluates=unevaluated(state, rest.step),
            scored=state.running.evaluated,
        )
        for worker in state.alive
    }
    return prefixed(scored, _resumed(state, rest.step, _told(state, rest), resumes, rest))


def contradicted(state: Membership, error: InvalidSchedule) -> Decision:
    """Reports that cannot all be true: nothing is built on them, and the step is run again whole."""
    text = f"what workers tell of step {lowest(state)} cannot be, so it is run again whole: {error.rule}"
    return state, (Record(event=Notice(worker="coordinator", text=text)),)


def _is_over(state: Membership, step: int) -> bool:
    """Whether somebody has ended a step: then all sums are there, and nothing of it was lost."""
    return any(at > step for each in state.reports.statuses.values() for _, at in each.layer_steps)


def _told(state: Membership, rest: Remainder) -> Agreed:
    again = again_of(state, rest)
    return Agreed(
        generation=state.generation,
        step=rest.step,
        recomputed_microbatches=again.known,
        recomputed_at_most=again.at_most,
        goes_on=True,
        redone=rest.redone,
        regenerated=rest.regenerated,
        dropped=_dropped(state, rest.step),
        left_out=rest.left_out,
    )


def _dropped(state: Membership, step: int) -> int:
    """How many pairs of the step behind were begun by who goes back from it."""
    return sum(dict(status.executed).get(step + 1, 0) for status in state.reports.statuses.values())


def _resumed(
    state: Membership, step: int, agreed: Agreed, resumes: Mapping[WorkerId, Resume], rest: Remainder | None = None
) -> Decision:
    state = replace(
        state,
        phase=Phase.RUNNING,
        grid=replace(state.grid, former=None),
        forming=replace(state.forming, resume_step=step, votes=(), lost_work=(), rest=rest, left_out=frozenset()),
        restoring=state.restoring.over(),
        last_step=step - 1,
    )
    return state, (Record(event=agreed), *(Tell(to=worker, command=each) for worker, each in resumes.items()))
