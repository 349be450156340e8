"""How much is run again after a loss: what is known of it, and what it is at most.

Survivors tell what they have run. A worker that is lost has told, in its last heartbeat, what it had run by then; what
others have of it may tell more. Since then it may have run whatever of its own it had the input for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from holdfast.control.membership.agreement import LostWork, Pair
from holdfast.control.membership.state import Membership, Phase
from holdfast.control.messages import Heartbeat
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.progress import StepProgress
from holdfast.core.remainder import Remainder
from holdfast.core.schedule import Op, OpKind

__all__ = ["Again", "again_behind", "again_of", "again_whole", "begun", "work_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """How many (layer, micro-batch) pairs are run again.

    Attributes:
        known: at least so many.
        at_most: so many, if the lost had run all that they may have run.
    """

    known: int = 0
    at_most: int = 0

    def __add__(self, other: Again) -> Again:
        return Again(known=self.known + other.known, at_most=self.at_most + other.at_most)


def begun(state: Membership, step: int) -> frozenset[Pair]:
    """Returns the pairs of a step that the lost had surely run forward."""
    return frozenset(pair for each in state.forming.lost_work for pair in each.known(step))


def work_of(state: Membership, worker: WorkerId) -> LostWork | None:
    """Returns what a worker that is about to be lost had run; None if it computes nothing.

    One whose last heartbeat said that it is stuck has run nothing since; nor has one that has told what it keeps of a
    step that was interrupted before.
    """
    plan, status = state.running.plan, state.reports.statuses.get(worker)
    if state.phase is Phase.FORMING and status is not None and status.progress:
        last = max(status.progress, key=lambda each: each.step)
        return LostWork(step=last.step, ran=tuple(sorted(set(_ran(last)))), exact=True)
    if plan is None or worker not in state.full or worker not in plan.workers:
        return None
    order = [(op, _pairs(op, plan.routes.of(op.microbatch).visit(worker).layers)) for op in plan.orders.of(worker)]
    beat = _last_beat(state, worker)
    at, ops = (-1, 0) if beat is None else (beat.step, beat.op)
    exact = beat is not None and beat.busy_s > state.watch.limit_s
    work = LostWork(step=at, ran=_forward(order[:ops]), of_plan=_forward(order), exact=exact)
    return work if state.forming.rest is None else _with_rest(work, state.forming.rest, worker, ops)


def _with_rest(work: LostWork, rest: Remainder, worker: WorkerId, ops: int) -> LostWork:
    """What it had run of a step that all had gone on with, too: before it was interrupted, and since."""
    anew = set(_anew(rest))
    before = tuple(pair for pair in work.of_plan if pair not in anew)
    told = rest.of(worker)
    pieces = [] if told is None else [(piece.op, _pairs(piece.op, piece.layers)) for piece in told.pieces]
    since = pieces[:ops] if work.step == rest.step else pieces if work.step > rest.step else []
    return replace(
        work,
        ran=() if work.step == rest.step else work.ran,
        rest=rest.step,
        ran_of_rest=(*before, *_forward(since)),
        of_rest=(*before, *_forward(pieces)),
    )


def _last_beat(state: Membership, worker: WorkerId) -> Heartbeat | None:
    """What it said last in this generation, by whose orders operations are counted."""
    vital = state.watch.vitals.get(worker)
    beat = None if vital is None else vital.beat
    return beat if beat is not None and beat.generation == state.generation else None


def _pairs(op: Op, layers: LayerRange) -> list[Pair]:
    return [(layer, op.microbatch.number) for layer in layers.indices]


def _missing(rest: Remainder) -> set[Pair]:
    """The pairs that are in no sum: whoever has ended the step had run all of these."""
    pieces = [piece for each in rest.steps for piece in each.pieces if piece.adds and piece.op.kind is not OpKind.F]
    return {(layer, piece.op.microbatch.number) for piece in pieces for layer in piece.layers.indices}


def _forward(rows: Iterable[tuple[Op, list[Pair]]]) -> tuple[Pair, ...]:
    return tuple(pair for op, pairs in rows if op.kind is OpKind.F for pair in pairs)


def _anew(rest: Remainder) -> Iterator[Pair]:
    """The pairs that are run forward, other than for a message alone."""
    for each in rest.steps:
        for piece in each.pieces:
            if piece.op.kind is OpKind.F and piece.adds:
                yield from ((layer, piece.op.microbatch.number) for layer in piece.layers.indices)


def again_of(state: Membership, rest: Remainder) -> Again:
    """Returns what is run again of a step that is gone on with, and of the one behind it, which some had begun."""
    known = {*rest.redone, *rest.regenerated}
    anew = {*_anew(rest)}
    possible = _possible(state, rest.step, kept=True)
    count = len(rest.redone) + len(rest.regenerated)
    sure = count - len(known & _waiting(state, rest.step))
    here = Again(known=sure, at_most=count + len(anew & possible - known))
    return here + again_behind(state, rest.step, ended=_missing(rest) <= possible | known)


def _waiting(state: Membership, step: int) -> frozenset[Pair]:
    """The pairs that were counted when this step was gone on with before, and of which nobody has told a run since."""
    rest = state.forming.rest
    if rest is None or rest.step != step:
        return frozenset()
    return frozenset({*rest.redone, *rest.regenerated} - begun(state, step))


def again_behind(state: Membership, step: int, *, ended: bool) -> Again:
    """Returns what is run again of the step behind one that others have not ended.

    Args:
        state: all have said what they hold.
        step: the one that not all have ended.
        ended: whether the lost may have.
    """
    return _partly(state, step + 1, perhaps=ended or state.running.staggered, kept=True)


def again_whole(state: Membership, step: int) -> Again:
    """Returns what is run again of all steps from ``step`` on: of those that were over, everything."""
    plan = state.running.plan or state.grid.baseline
    whole = plan.placement.num_layers * len(plan.routes.microbatches)
    ran = [dict(each.executed) for each in state.reports.statuses.values()]
    reached = [max(each) for each in ran if any(each.values())]  # who was interrupted twice may tell a step of naught
    reached += [each.step for each in state.forming.lost_work if each.ran]
    front = max(step, *reached) if reached else step
    over = max(step, front - state.running.staggered)
    found = Again(known=whole * (over - step), at_most=whole * (over - step))
    for at in range(over, front + 1):
        part = _partly(state, at)
        found += Again(known=min(whole, part.known), at_most=min(whole, part.at_most))
    if state.running.staggered or _partly(state, front).at_most >= whole:  # the lost may have been one step ahead
        found += _partly(state, front + 1)
    return found


def _partly(state: Membership, step: int, *, perhaps: bool = True, kept: bool = False) -> Again:
    """What was run of a step; ``perhaps``: whether the lost may have come to it without our hearing of it."""
    told = sum(dict(each.executed).get(step, 0) for each in state.reports.statuses.values())
    sure = begun(state, step)
    possible = _possible(state, step, kept=kept) if perhaps else frozenset()
    return Again(known=told + len(sure), at_most=told + len(sure | possible))


def _possible(state: Membership, step: int, *, kept: bool) -> frozenset[Pair]:
    """The pairs that the lost may have run: their own ones; where the others keep what they did, those with input."""
    own = {pair for each in state.forming.lost_work for pair in each.possible(step)}
    if not kept:
        return frozenset(own)
    told = [progress for status in state.reports.statuses.values() for progress in status.progress]
    ran = {pair for progress in told if progress.step == step for pair in _ran(progress)}
    over = {layer for progress in told if progress.step == step for layers in progress.complete for layer in layers}
    return frozenset(pair for pair in own if _has_input(pair, own, ran, over))


def _ran(progress: StepProgress) -> Iterator[Pair]:
    """The pairs that a worker has run forward, as far as something is left of that."""
    for part in (*progress.contexts, *progress.halves):
        yield from ((layer, part.number) for layer in part.layers.indices)
    yield from ((layer, number) for layer, numbers in progress.counted for number in numbers)
    yield from ((each.boundary - 1, number) for each in progress.logged for number in each.numbers)


def _has_input(pair: Pair, own: set[Pair], ran: set[Pair], over: set[int]) -> bool:
    """Whether a pair's layers before it may have been run by the lost, too, down to what another has run."""
    layer, number = pair
    while layer > 0 and layer - 1 not in over and (layer - 1, number) not in ran:
        layer -= 1
        if (layer, number) not in own:
            return False
    return True
