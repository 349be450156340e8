"""Who replays what: everybody then holds what it is to hold, and no input is missing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.instructions import Compute, Payload, Recall, Reduce
from holdfast.core.lower import lower_step
from holdfast.core.placement import LayerRange, group_into_nodes, home_placement, split_evenly
from holdfast.core.replay import replayed_step
from holdfast.core.routes import Visit
from holdfast.core.validate import validate
from holdfast.errors import InfeasiblePlan
from holdfast.planning.replays import Logging, grouped, logged_boundaries, plan_replays
from holdfast.planning.takeover import takeover_plan
from holdfast.planning.training import rerouted
from holdfast.schedule.builders import assigned_plan, home_plan, regular_plan

STAGES = 6


def pipeline(stages=STAGES, layers=12, microbatches=4):
    return regular_plan(1, split_evenly(layers, stages), microbatches)


def held(plan, lost):
    return {each: plan.placement.held_layers(each) for each in plan.workers if each not in lost}


@given(st.sets(st.integers(0, STAGES - 1), min_size=1, max_size=STAGES - 1), st.integers(1, 3), st.integers(0, 3))
def test_all_hold_what_they_are_to_hold_and_inputs_are_logged(gone, per_node, helpers):
    plan = pipeline()
    lost = {WorkerId(0, stage) for stage in gone}
    nodes = group_into_nodes(plan.workers, per_node)
    logged = logged_boundaries(plan, Logging(nodes=nodes))
    replays = plan_replays(
        plan.placement, held(plan, lost), plan.routes.microbatches, logged, helpers=helpers, start=2, stop=5
    )
    for worker in lost:
        replayed = {layer for each in replays if worker in each.workers for layer in each.layers.indices}
        assert replayed >= set(plan.placement.held_layers(worker))
    for each in replays:
        assert {each.layers.start, each.layers.stop} <= {0, 12, *logged}
        shares = [microbatch for worker in each.workers for microbatch in each.share(worker)]
        assert sorted(shares) == sorted(plan.routes.microbatches)
        assert len(each.workers) <= len(lost) + helpers
    assert all(one.layers.stop < other.layers.start for one, other in pairwise(replays))


def test_a_group_of_nodes_is_replayed_together_and_nothing_is_logged_within():
    plan = pipeline()
    nodes = grouped(group_into_nodes(plan.workers, 1), [[1, 2], [4, 5]])
    logged = logged_boundaries(plan, Logging(nodes=nodes))
    assert logged == {2, 6, 8}
    lost = {WorkerId(0, 2)}
    (replay,) = plan_replays(plan.placement, held(plan, lost), plan.routes.microbatches, logged, start=0, stop=3)
    assert (replay.layers.start, replay.layers.stop) == (2, 6)
    assert replay.workers == (WorkerId(0, 2),)


def test_each_micro_batch_counts_once_and_each_layer_is_summed_as_soon_as_it_is_complete():
    plan = pipeline()
    lost = {WorkerId(0, 2)}
    (replay,) = plan_replays(
        plan.placement, held(plan, lost), plan.routes.microbatches, {2, 4, 6, 8, 10}, helpers=1, start=0, stop=3
    )
    assert replay.workers == (WorkerId(0, 0), WorkerId(0, 2))
    programs = [lower_step(replayed_step(replay, worker, 12)) for worker in replay.workers]
    ran = [
        each.op.microbatch.number
        for program in programs
        for each in program.operations
        if isinstance(each, Compute) and each.last
    ]
    assert sorted(ran) == [0, 0, 1, 1, 2, 2, 3, 3], "forward and backward"
    for program, worker in zip(programs, replay.workers, strict=True):
        assert [type(each) for each in program.operations[-4:]] == [Compute, Reduce, Compute, Reduce]
        sums = [each for each in program.operations if isinstance(each, Reduce)]
        assert [each.reduction.layers for each in sums] == [(5,), (4,)]
        recalled = {(e.payload, e.boundary) for e in program.operations if isinstance(e, Recall)}
        assert recalled == {(Payload.ACTIVATION, 4), (Payload.GRADIENT, 6)}
        assert {number for _, _, number in lower_step(replayed_step(replay, worker, 12)).recalled} == {
            m.number for m in replay.share(worker)
        }


def test_a_weight_tied_to_layers_that_live_is_taken_from_logs():
    plan = pipeline()
    lost = {WorkerId(0, 0)}
    (replay,) = plan_replays(
        plan.placement, held(plan, lost), plan.routes.microbatches, {2, 4, 6, 8, 10}, start=0, stop=3
    )
    with_twin = lower_step(replayed_step(replay, WorkerId(0, 0), 12, ((0, 11),)))
    assert (Payload.SUM, 0, 0) in with_twin.recalled
    assert (0, 11) not in [each.layers for each in with_twin.reductions]
    within = lower_step(replayed_step(replay, WorkerId(0, 0), 12, ((0, 1),)))
    assert (0, 1) in [each.layers for each in within.reductions]


def replays_of(plan, lost, target=None, **options):
    target = plan.placement if target is None else target
    logged = {2, 4, 6, 8, 10}
    return plan_replays(target, held(plan, lost), plan.routes.microbatches, logged, start=0, stop=3, **options)


def test_where_all_layers_that_share_a_weight_are_lost_their_replays_come_first_and_sum_together():
    plan, tie = pipeline(), (0, 11)
    first, between, last = lost = [WorkerId(0, stage) for stage in (0, 2, 5)]
    found = replays_of(plan, set(lost), ties=(tie,), helpers=1)
    assert [str(each.layers) for each in found] == ["0:2", "10:12", "4:6"]
    assert [one in each.workers for one, each in zip((first, last, between), found, strict=True)] == [True] * 3
    everybody = tuple(sorted({*found[0].workers, *found[1].workers}))
    assert [each.shared for each in found] == [((tie, everybody),), ((tie, everybody),), ()]
    for replay in found[:2]:
        program = lower_step(replayed_step(replay, replay.workers[0], 12, (tie,)))
        assert (Payload.SUM, 0, 0) not in program.recalled
        assert [each.workers for each in program.reductions if each.layers == tie] == [everybody]


def test_who_is_to_replay_both_ends_would_wait_for_itself():
    plan = pipeline(stages=3)
    lost = {WorkerId(0, 0), WorkerId(0, 2)}
    target = takeover_plan(plan, [WorkerId(0, 1)], max_layers=12).placement
    found = replays_of(plan, lost, target, ties=((0, 11),))
    assert [each.workers for each in found] == [(WorkerId(0, 1),)] * 2
    assert not any(each.shared for each in found)


def test_a_weight_of_which_one_end_lives_is_not_summed_anew():
    plan = pipeline()
    assert not any(each.shared for each in replays_of(plan, {WorkerId(0, 0), WorkerId(0, 2)}, ties=((0, 11),)))


def test_neighbours_take_half_each_and_nobody_gives_anything_up():
    plan = pipeline()
    left = [worker for worker in plan.workers if worker.stage not in (2, 3)]
    found = takeover_plan(plan, left, max_layers=4)
    validate(found)
    assert [str(layers) for _, layers in found.placement.ranges] == ["0:2", "2:6", "6:10", "10:12"]
    for worker in left:
        assert set(found.placement.held_layers(worker)) >= set(plan.placement.held_layers(worker))


@pytest.mark.parametrize("left", [[0], []])
def test_nobody_takes_more_than_is_known_to_fit(left):
    plan = pipeline()
    with pytest.raises(InfeasiblePlan):
        takeover_plan(plan, [WorkerId(0, stage) for stage in left], max_layers=4)


def lost_of(plan, *names):
    return frozenset(plan.workers).difference(map(WorkerId.parse, names))


def held_of(plan):
    return {str(worker): str(layers) for worker, layers in plan.placement.ranges}


def test_in_each_pipeline_the_neighbours_take_what_nobody_holds_and_other_lost_ones_keep_their_places():
    plan = regular_plan(3, split_evenly(8, 4), 2)
    found = takeover_plan(plan, lost_of(plan, "0.1", "1.1", "2.1", "1.3"), max_layers=4)
    one = {"0.0": "0:3", "0.2": "3:6", "0.3": "6:8"}
    assert held_of(found) == {**one, **{f"{p}{name[1:]}": layers for p in (1, 2) for name, layers in one.items()}}
    assert found.routes.microbatches == plan.routes.microbatches
    assert {route.workers[0].pipeline for route in found.routes.routes if route.microbatch.pipeline == 1} == {1}
    validate(found)
    left = lost_of(plan, "1.3").intersection(found.workers)
    validate(rerouted(found, frozenset(found.workers) - left, None).plan)


def test_a_pipeline_in_which_nobody_can_take_them_stays_as_it_is():
    plan = regular_plan(2, split_evenly(8, 4), 2)
    found = takeover_plan(plan, lost_of(plan, "0.1", "1.1", "1.0", "1.2"), max_layers=4)
    assert held_of(found) == {
        "0.0": "0:3",
        "0.2": "3:6",
        "0.3": "6:8",
        **{f"1.{s}": f"{2 * s}:{2 * s + 2}" for s in range(4)},
    }
    one_beside = takeover_plan(plan, lost_of(plan, "0.1", "1.1", "0.2"), max_layers=4)
    assert held_of(one_beside)["0.0"] == "0:4"
    assert held_of(one_beside)["0.2"] == "4:6", "a place, as 1.2 holds its layers"
    with pytest.raises(InfeasiblePlan, match="beside layer"):
        takeover_plan(plan, lost_of(plan, "0.1", "1.1", "0.0", "0.2", "1.0", "1.2"), max_layers=4)
    with pytest.raises(InfeasiblePlan, match="at most 2 altogether"):
        takeover_plan(plan, lost_of(plan, "0.1", "1.1"), max_layers=2)


def test_a_place_never_comes_to_have_two_ranges():
    """The one who is lost has four layers, of which somebody else holds the outer ones."""

    def row(*cuts):
        return [Visit(WorkerId(len(cuts), at), LayerRange(*cut)) for at, cut in enumerate(pairwise(cuts))]

    microbatches = regular_plan(2, split_evenly(8, 1), 2).routes.microbatches
    plan = assigned_plan([row(0, 2, 6, 8), row(0, 3, 5, 6, 8)], microbatches, [2, 2])
    found = takeover_plan(plan, lost_of(plan, "4.1", "5.1"), max_layers=5)
    assert held_of(found) == {"4.0": "0:2", "4.1": "2:6", "4.2": "6:8", "5.0": "0:4", "5.2": "4:6", "5.3": "6:8"}


def test_layers_are_not_taken_over_where_stages_have_lanes():
    row = [LayerRange(0, 3), LayerRange(0, 3), LayerRange(3, 6)]
    laned = home_plan(home_placement([row]), Batch((2,)))
    with pytest.raises(InfeasiblePlan, match="one worker each"):
        takeover_plan(laned, laned.workers[2:], max_layers=6)
