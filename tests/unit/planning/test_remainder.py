"""What is left of a step: how it is ordered, what it costs, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.lower import lower_step
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.profile import unit_costs
from holdfast.core.progress import Logged, Part, StepProgress
from holdfast.core.proof import prove_steps
from holdfast.core.schedule import OpKind
from holdfast.errors import InternalError, InvalidSchedule
from holdfast.planning.remainder import logged_bytes, plan_remainder, progress_at
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate

PLAN = regular_plan(3, split_evenly(8, 4), 6)
COSTS = unit_costs(8)
LOST = WorkerId(1, 2)
LEFT = adaptive_plan(PLAN, {LOST})
STEP_S = evaluate(PLAN, COSTS).makespan
NUMBERS = [microbatch.number for microbatch in PLAN.routes.microbatches]


def remainder_at(share):
    return plan_remainder(LEFT, progress_at(PLAN, COSTS, share * STEP_S, 5, {LOST}), costs=COSTS)


def test_what_is_left_of_a_step_that_has_not_begun_is_the_step():
    rest = remainder_at(0.0)
    assert rest.lasts == evaluate(LEFT, COSTS).makespan
    assert [row.worker for row in rest.steps] == list(LEFT.workers)
    ops = {row.worker: {piece.op for piece in row.pieces} for row in rest.steps}
    assert ops == {worker: set(row) for worker, row in LEFT.orders.rows}
    assert (rest.redone, rest.regenerated, rest.standing) == ((), (), ())


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_it_is_shorter_the_later_the_loss_and_never_longer_than_the_step(share):
    whole = evaluate(LEFT, COSTS).makespan
    assert remainder_at(share).lasts < whole
    assert remainder_at(share).lasts <= remainder_at(share - 0.1).lasts


@pytest.mark.parametrize(("share", "longest"), [(0.3, 56), (0.6, 34), (0.8, 18)])
def test_first_comes_what_most_waits_for(share, longest):
    """In the plan's own order, or that of micro-batches, it is longer: 62, 42 and 26."""
    assert remainder_at(share).lasts <= longest


def test_at_the_end_the_share_of_the_lost_is_left_and_its_peers_divide_it():
    rest = remainder_at(1.0)
    share = [microbatch.number for microbatch in PLAN.routes.through(LOST)]
    assert rest.redone == tuple((layer, number) for layer in (4, 5) for number in share)
    busy = {row.worker for row in rest.steps if row.pieces}
    assert busy == {WorkerId(0, 2), WorkerId(2, 2)}
    assert rest.lasts == 3 * 2 * 3, "three micro-batches of F and B over two layers"
    sent = {(row.worker, each.payload) for row in rest.steps for each in row.resent}
    assert sent == {(WorkerId(1, 1), Payload.ACTIVATION), (WorkerId(1, 3), Payload.GRADIENT)}


@pytest.mark.parametrize("message_s", [1, 3])
def test_messages_take_their_time_as_in_the_step(message_s):
    costs = dataclasses.replace(COSTS, comm=(message_s,) * 7)
    whole, step_s = evaluate(LEFT, costs).makespan, evaluate(PLAN, costs).makespan
    begun, ended = (plan_remainder(LEFT, progress_at(PLAN, costs, at, 5, {LOST}), costs=costs) for at in (0, step_s))
    assert evaluate(LEFT, COSTS).makespan < begun.lasts <= whole, "a step that is not begun is one"
    assert ended.lasts == message_s + 3 * 2 * 3, "what is there already is sent first"


def test_what_one_worker_does_has_its_row_and_no_sum_that_stands():
    progress = progress_at(PLAN, COSTS, STEP_S, 5, {LOST})
    done = progress[WorkerId(0, 0)]
    counted = tuple(each for each in done.counted if each[0] != 1)
    progress[WorkerId(0, 0)] = dataclasses.replace(done, complete=((1,),), counted=counted)
    rest = plan_remainder(LEFT, progress, costs=COSTS)
    (standing,) = rest.standing
    assert (standing.layers, standing.holder, standing.takers) == (
        (1,),
        WorkerId(0, 0),
        (WorkerId(1, 0), WorkerId(2, 0)),
    )
    step = rest.of(WorkerId(1, 0))
    assert (step.worker, step.standing, step.updates) == (
        WorkerId(1, 0),
        rest.standing,
        LEFT.placement.layers_of(step.worker),
    )
    assert step.goes_on
    assert rest.of(LOST) is None
    assert {each.divisor for each in step.sums} == {18}
    lowered = lower_step(step)
    assert [str(each) for each in lowered.operations if "SUM" in str(each)] == ["RECV_SUM0.1<0.0"]
    assert [each.layers for each in lowered.reductions] == [(0,)]


def test_reports_of_unlike_steps_are_our_bug():
    progress = progress_at(PLAN, COSTS, STEP_S / 2, 5, {LOST})
    progress[WorkerId(0, 0)] = StepProgress(step=6)
    with pytest.raises(InternalError, match=r"reports are of steps \[5, 6\]"):
        plan_remainder(LEFT, progress)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda p: {"counted": (*p.counted[:-1], (p.counted[-1][0], ()))}, "no pass"),
        (lambda p: {"contexts": (Part(0, LayerRange(2, 4)),)}, "counts 2 times"),
    ],
    ids=["a pair in nobody's sum", "a pair twice"],
)
def test_reports_that_contradict_each_other_are_refused_or_made_up_for(change, rule):
    progress = progress_at(PLAN, COSTS, STEP_S, 5, {LOST})
    told = progress[WorkerId(0, 1)]
    progress[WorkerId(0, 1)] = dataclasses.replace(told, **change(told))
    rest = plan_remainder(LEFT, progress, costs=COSTS)
    again = {(layer, m) for layer, m in rest.redone}
    if rule == "no pass":
        assert {(3, number) for number in range(6)} <= again
    else:
        assert not any(layer in (2, 3) for layer, _ in again), "a pass of what is counted is not gone over"


def lowered(rest):
    return [lower_step(each) for each in rest.steps]


def test_what_is_not_proved_is_refused():
    progress = progress_at(PLAN, COSTS, STEP_S, 5, {LOST})
    rest = plan_remainder(LEFT, progress, costs=COSTS)
    prove_steps(lowered(rest), progress)
    nobody = [dataclasses.replace(row, resent=()) for row in rest.steps]
    lacking = dataclasses.replace(rest, steps=tuple(nobody))
    with pytest.raises(InvalidSchedule, match="wait for one another"):
        prove_steps(lowered(lacking), progress)
    silent = {worker: dataclasses.replace(each, logged=()) for worker, each in progress.items()}
    with pytest.raises(InvalidSchedule, match="is not in the log"):
        prove_steps(lowered(rest), silent)
    forgetful = {worker: dataclasses.replace(each, counted=()) for worker, each in progress.items()}
    with pytest.raises(InvalidSchedule, match="counts 0 times for layer"):
        prove_steps(lowered(rest), forgetful)


def test_no_more_is_gone_back_over_than_was_run_forward():
    progress = progress_at(PLAN, COSTS, STEP_S, 5, {LOST})
    rest = plan_remainder(LEFT, progress, costs=COSTS)
    row = next(row for row in rest.steps if any(piece.op.kind is OpKind.B for piece in row.pieces))
    at = next(at for at, piece in enumerate(row.pieces) if piece.op.kind is OpKind.B)
    assert row.pieces[at].layers == LayerRange(4, 6)
    other = dataclasses.replace(row.pieces[at], layers=LayerRange(3, 6))
    wrong = dataclasses.replace(row, pieces=(*row.pieces[:at], other, *row.pieces[at + 1 :]))
    forged = dataclasses.replace(rest, steps=tuple(wrong if each is row else each for each in rest.steps))
    with pytest.raises(InvalidSchedule, match="of which there is nothing to go back over"):
        prove_steps(lowered(forged), progress)


def test_a_message_that_nobody_has_is_made_again_from_the_nearest_one():
    progress = progress_at(PLAN, COSTS, STEP_S, 5, {LOST})
    without = progress[WorkerId(1, 1)]
    progress[WorkerId(1, 1)] = dataclasses.replace(
        without, logged=tuple(each for each in without.logged if each.payload is not Payload.ACTIVATION)
    )
    rest = plan_remainder(LEFT, progress, costs=COSTS)
    share = [microbatch.number for microbatch in PLAN.routes.through(LOST)]
    assert set(rest.regenerated) == {(layer, number) for layer in (2, 3) for number in share}
    again = [piece for row in rest.steps for piece in row.pieces if not piece.adds]
    assert {piece.op.kind for piece in again} == {OpKind.F}
    assert {row.worker for row in rest.steps for piece in row.pieces if not piece.adds} == {WorkerId(1, 1)}


def test_what_a_worker_keeps_is_what_it_hands_on():
    sizes = tuple(range(10, 90, 10))
    kept = logged_bytes(PLAN, sizes)
    assert kept[WorkerId(0, 0)] == 6 * 20, "activations behind layer 1"
    assert kept[WorkerId(0, 1)] == 6 * (20 + 40)
    assert kept[WorkerId(0, 3)] == 6 * 60, "gradients alone"
    assert logged_bytes(PLAN, sizes, staggered=True)[WorkerId(0, 1)] == 2 * kept[WorkerId(0, 1)]


def test_logged_is_sorted_and_says_whose():
    progress = progress_at(PLAN, COSTS, STEP_S, 5)
    assert progress[WorkerId(0, 0)].logged == (Logged(Payload.ACTIVATION, 2, (0, 1, 2, 3, 4, 5)),)
