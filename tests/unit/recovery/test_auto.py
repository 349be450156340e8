"""What `auto` takes, of all that can be done where layers have no owner: by prices, and by when the next loss comes."""

import math
from dataclasses import replace
from functools import partial

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import LayerProfile, Link, Profile, costs_from_profile
from holdfast.planning.course import Course
from holdfast.planning.maker import PROVING
from holdfast.planning.replays import Logging
from holdfast.planning.reshaping import Shapes, regrouped
from holdfast.planning.templates.stages import stage_table
from holdfast.recovery.actions import Await, LoadState, Rejoin, ReplaceGrid, ReplayLayers
from holdfast.recovery.rates import Rates, step_seconds
from holdfast.recovery.rules import JobRules
from holdfast.recovery.view import ClusterView
from holdfast.schedule.builders import regular_plan
from holdfast.strategies.adaptive import adaptive
from holdfast.strategies.answers import pipelines_of
from holdfast.strategies.auto import auto, course_of

LAYERS, HOUR = 12, 3600.0
PROFILE = Profile(
    link=Link(latency_s=0.0, bytes_per_s=1e9),
    layers=tuple(
        LayerProfile(
            name=f"layer {index}",
            forward_s=0.02,
            backward_input_s=0.02,
            backward_weight_s=0.02,
            held_after_forward_bytes=8,
            held_after_input_bytes=4,
            boundary_bytes=1000,
            parameter_bytes=100_000_000,
            optimizer_bytes=200_000_000,
            optimizer_s=0.005,
        )
        for index in range(LAYERS)
    ),
)
RATES = Rates(
    profile=PROFILE,
    message_s=0.001,
    control_s=0.001,
    connect_s=0.01,
    start_s=60.0,
    copy=Link(latency_s=0.0, bytes_per_s=1e9),
    load=Link(latency_s=1.0, bytes_per_s=1e9),
    save=Link(latency_s=0.0, bytes_per_s=1e9),
)
SHAPES = Shapes(
    costs=costs_from_profile(PROFILE),
    minimum=4,
    smallest=2,
    state=tuple(layer.state_bytes for layer in PROFILE.layers),
    table=stage_table(PROFILE, 1),
)
LINE = regular_plan(1, split_evenly(LAYERS, 4), 8)
W01 = WorkerId(0, 1)


def seen(*, lost=(W01,), baseline=LINE, steps_behind=10, logs=False, wait_s=0.0, shapes=None, rates=RATES, **options):
    nodes = tuple((worker,) for worker in baseline.workers)
    rules = JobRules(
        steps=10**6, rates=rates, shapes=shapes, wait_s=wait_s, logging=Logging(nodes=nodes) if logs else None
    )
    options = {"expected_s": 6 * HOUR, "checkpoint": 100 - steps_behind, "plan": baseline, **options}
    return ClusterView(rules=rules, baseline=baseline, lost=frozenset(lost), step=100, logs=logs, **options)


def kinds(recovery):
    return {type(action) for action in recovery.actions}


def test_a_course_makes_what_time_allows():
    course = Course(still_s=10.0, period_s=2.0, change_s=20.0, later_s=1.0)
    assert [course.within(seconds) for seconds in (5.0, 10.0, 20.0, 30.0, 50.0)] == [0.0, 0.0, 5.0, 10.0, 30.0]
    forever = Course(still_s=10.0, period_s=2.0)
    assert forever.within(1000.0) == 495.0


def test_its_mean_is_that_of_failures_which_come_at_random():
    """By hand: the integral of the probability that none has come yet, over the period."""
    course, mean_s = Course(still_s=10.0, period_s=2.0, change_s=20.0, later_s=1.0), 40.0
    ticks = 400_000
    times = [(number + 0.5) * 1000.0 / ticks for number in range(ticks)]
    density = (course.within(at) * math.exp(-at / mean_s) / mean_s * 1000.0 / ticks for at in times)
    assert course.steps(mean_s) == pytest.approx(math.fsum(density), rel=1e-3)
    assert course.steps(1e12) == pytest.approx(course.within(1e12), rel=1e-6)


def test_where_every_layer_has_an_owner_it_is_as_adaptive():
    two = regular_plan(2, split_evenly(LAYERS, 4), 4)
    view = seen(baseline=two, shapes=SHAPES)
    assert auto(view) == adaptive(view)


def test_where_nothing_is_known_of_times_it_is_as_adaptive():
    for logs in (False, True):
        view = seen(rates=None, logs=logs)
        assert auto(view) == adaptive(view)


def test_the_nearer_the_checkpoint_the_less_is_a_replay_worth():
    """Its neighbours hold twice as many layers afterwards, for good; a grid of three is even at once."""
    near, far = auto(seen(steps_behind=1, logs=True)), auto(seen(steps_behind=5000, logs=True))
    assert LoadState in kinds(near)
    assert kinds(near) & {ReplayLayers, Rejoin} == set()
    assert ReplayLayers in kinds(far)
    assert [name for name, _ in near.weighed] == [name for name, _ in far.weighed]
    assert {near.chosen, far.chosen} <= {name for name, _ in near.weighed}
    assert adaptive(seen(steps_behind=1, logs=True)).actions[1:] != near.actions[1:]


def test_what_is_slower_for_good_is_worth_the_less_the_later_the_next_loss():
    soon = auto(seen(steps_behind=200, logs=True, expected_s=120.0))
    late = auto(seen(steps_behind=200, logs=True, expected_s=48 * HOUR))
    assert ReplayLayers in kinds(soon)
    assert LoadState in kinds(late)


def test_where_pipelines_can_be_made_anew_a_replay_is_worth_more():
    """The layers are evened out behind it, so what it is slower at first hardly counts."""
    alone, remade = (dict(auto(seen(steps_behind=200, logs=True, shapes=each)).weighed) for each in (None, SHAPES))
    assert remade["replay, by neighbours"] > alone["replay, by neighbours"]
    assert ReplayLayers in kinds(auto(seen(steps_behind=200, logs=True, shapes=SHAPES)))


def test_nobody_is_waited_for_who_is_not_on_the_way_where_the_grid_can_grow_again():
    view = seen(wait_s=600.0, shapes=SHAPES)
    assert adaptive(view).actions[-1] == Await(limit_s=600.0)
    assert Await not in kinds(auto(view))
    assert "wait" not in dict(auto(view).weighed)
    assert "wait" in dict(auto(replace(view, coming=True)).weighed)
    assert "wait" in dict(auto(seen(wait_s=600.0)).weighed), "a grid that does not grow stays small"


def test_what_must_be_waited_for_counts_with_what_comes_then():
    view = seen(wait_s=600.0, coming=True)
    waits = next(each for each in (adaptive(view),) if isinstance(each.actions[-1], Await))
    course = course_of(waits, view, RATES, partial(pipelines_of, view))
    step_s, load_s = step_seconds(LINE, RATES), max(RATES.loading_s(LINE.placement.layers_of(w)) for w in LINE.workers)
    assert course.period_s == pytest.approx(step_s)
    assert course.still_s == pytest.approx(RATES.start_s + load_s + 10 * step_s, abs=2 * step_s)


def test_of_grids_the_fastest_is_taken_whatever_its_pipelines_are():
    """Five workers: alike pipelines are one of five, or two of two and nothing for the fifth."""
    two = regular_plan(2, split_evenly(LAYERS, 4), 8)
    view = seen(baseline=two, lost=[WorkerId(0, 3), WorkerId(1, 3), WorkerId(1, 2)], shapes=replace(SHAPES, minimum=2))
    taken, alike = (
        next(action.plan for action in each.actions if isinstance(action, ReplaceGrid))
        for each in (auto(view), adaptive(view))
    )
    assert {len(row) for row in {route.workers for route in taken.routes.routes}} == {2, 3}
    assert step_seconds(taken, RATES) < step_seconds(alike, RATES)


def test_who_loads_is_grouped_as_is_fastest():
    baseline = regular_plan(2, split_evenly(LAYERS, 4), 4)
    for count in range(2, 8):
        workers = baseline.workers[:count]
        plan = regrouped(baseline, workers, SHAPES, maker=PROVING)
        assert plan is not None
        assert set(plan.workers) == set(workers), "all take part"
        assert plan.routes.microbatches == baseline.routes.microbatches
    assert regrouped(baseline, baseline.workers[:1], SHAPES, maker=PROVING) is None, "one cannot hold all"
