"""The planner's plans for jobs in training."""

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import Costs, parse_costs, unit_costs
from holdfast.core.schedule import OpKind
from holdfast.core.slots import renamed
from holdfast.core.timeline import peak_memory
from holdfast.core.validate import validate
from holdfast.core.work_costs import WorkCosts
from holdfast.errors import ConfigError, StateUnavailable
from holdfast.planning import search
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.library import PlanLibrary
from holdfast.planning.normalise import normalised, per_stage
from holdfast.planning.planner import Technique, make_plan
from holdfast.planning.shrink import shrunken_plan
from holdfast.planning.training import (
    Terms,
    looked_up,
    planned_grid,
    regular_grid,
    replanned,
    rerouted,
    within_limit,
)
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.schedule.list_scheduler import list_schedule

STAGES = split_evenly(4, 4)
BOTH = [Technique.DECOUPLED, Technique.STAGGERED]
UNEVEN = Costs(
    forward=(3.0, 2.0, 4.0, 1.0),
    input=(2.0, 3.0, 2.0, 5.0),
    weight=(1.0, 2.0, 3.0, 2.0),
    optimizer=(1.0, 0.5, 0.0, 2.0),
    comm=(0.5, 0.25, 1.0),
    takes=(5.0, 3.0, 4.0, 2.0),
    gives_input=(2.0, 1.0, 2.0, 1.0),
    gives_weight=(3.0, 2.0, 2.0, 1.0),
)


def terms(technique=Technique.STAGGERED, costs=None, in_flight=8, ties=((0, 3),)):
    return Terms(technique=technique, costs=costs or unit_costs(4), in_flight=in_flight, ties=ties)


def example(which):
    return planned_grid(regular_grid(3, STAGES, 6, which), (), which, at_once=False).plan


def period(plan, which):
    costs = within_limit(which)
    return evaluate(plan, costs, staggered=which.technique is Technique.STAGGERED, ties=which.ties).period


@pytest.mark.parametrize(("technique", "healthy", "without"), [(BOTH[0], 21, 28), (BOTH[1], 19, 27)])
def test_the_running_example_is_as_fast_as_nothing_can_beat(technique, healthy, without):
    which = terms(technique, ties=())
    plan = example(which)
    assert period(plan, which) == healthy
    found = rerouted(plan, [WorkerId(1, 1)], which)
    assert period(found.plan, which) == without
    assert any(op.kind is OpKind.I for _, row in found.plan.orders.rows for op in row)


@pytest.mark.parametrize("technique", BOTH)
@pytest.mark.parametrize("in_flight", [1, 2, 5, 8])
def test_no_worker_holds_more_micro_batches_than_it_may(technique, in_flight):
    which = terms(technique, UNEVEN, in_flight)
    plan = example(which)
    for lost in [(), (WorkerId(0, 0),), (WorkerId(0, 1), WorkerId(2, 3))]:
        left = rerouted(plan, lost, which).plan
        for worker, layers in left.placement.ranges:
            stage, work = UNEVEN.of(layers), WorkCosts(left.placement, left.routes, UNEVEN)
            assert peak_memory(left.orders.of(worker), worker, work) <= in_flight * stage.takes * (1 + 1e-9)


@pytest.mark.parametrize("technique", BOTH)
def test_every_loss_of_up_to_two_has_a_proved_plan_that_is_equal_whenever_it_is_made(technique):
    which = terms(technique, UNEVEN)
    plan = planned_grid(regular_grid(2, STAGES, 3, which), (), which, at_once=False).plan
    assert plan == planned_grid(regular_grid(2, STAGES, 3, which), (), which, at_once=False).plan
    for lost in (*combinations(plan.workers, 1), *combinations(plan.workers, 2)):
        if len({worker.stage for worker in lost}) < len(lost):
            with pytest.raises(StateUnavailable):
                rerouted(plan, lost, which)
            continue
        found = rerouted(plan, lost, which)
        assert found == rerouted(plan, reversed(lost), which)
        assert set(found.plan.workers) == set(plan.workers) - set(lost)
        validate(found.plan, ties=which.ties, costs=within_limit(which))


def test_if_nobody_is_lost_the_plan_stays():
    which = terms()
    plan = example(which)
    assert rerouted(plan, [], which).plan is plan


@pytest.mark.parametrize("technique", BOTH)
def test_it_is_about_places_not_names(technique):
    which = terms(technique)
    plan, names = example(which), {WorkerId(0, 0): WorkerId(2, 3), WorkerId(2, 3): WorkerId(0, 0)}
    swapped = renamed(plan, names)
    by_name = rerouted(swapped, [WorkerId(2, 3)], which).plan
    assert by_name == renamed(rerouted(plan, [WorkerId(0, 0)], which).plan, names)


def test_a_smaller_grid_is_planned_too():
    which = terms(Technique.DECOUPLED)
    plan = planned_grid(regular_grid(2, STAGES, 6, which), (), which, at_once=False).plan
    smaller = shrunken_plan(plan.workers[2:], plan.routes.microbatches, 4, max_layers=2)
    found = replanned(smaller, which)
    assert found.placement == smaller.placement
    assert period(found, which) < period(smaller, which)
    lost = rerouted(found, found.workers[:1], which)
    validate(lost.plan)


@pytest.mark.parametrize("technique", BOTH)
def test_a_grid_that_is_not_regular_is_planned_too(technique):
    which = terms(technique, costs=unit_costs(5), ties=())
    plan = regular_plan(3, split_evenly(5, 4), 2)
    uneven = shrunken_plan(plan.workers, plan.routes.microbatches[:5], 5, max_layers=2)
    assert period(replanned(uneven, which), which) <= period(uneven, which)
    found = rerouted(uneven, uneven.workers[:1], which)
    assert found == rerouted(uneven, uneven.workers[:1], which)
    by_rules = adaptive_plan(uneven, uneven.workers[:1], within_limit(which))
    assert found.plan.routes == by_rules.routes
    assert period(found.plan, which) <= found.period < period(by_rules, which)


def test_a_worker_that_is_not_in_the_grid():
    which = terms()
    with pytest.raises(ConfigError, match=r"9\.9"):
        rerouted(example(which), [WorkerId(9, 9)], which)


def test_more_tries_are_never_worse_and_one_is_enough():
    costs = replace(UNEVEN, capacity=(40.0, 24.0, 32.0, 16.0))
    grid = CostedGrid(pipelines=3, stages=STAGES, microbatches=6, costs=costs)
    found = [
        make_plan(grid, [WorkerId(1, 1)], Technique.STAGGERED, time_limit_s=inf, tries=tries).found.period
        for tries in (1, 5, 40, 120)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def filled(folder, which, failures, pipelines=3, microbatches=6):
    library = PlanLibrary(folder)
    grid = regular_grid(pipelines, STAGES, microbatches, which)
    while library.step(grid, failures, which.technique, time_limit_s=0.05) is not None:
        pass
    return library, grid


@pytest.mark.parametrize("technique", BOTH)
def test_a_library_serves_whoever_is_lost_on_its_stages(tmp_path, technique):
    which = terms(technique, UNEVEN)
    plan = example(which)
    library, grid = filled(tmp_path, which, 2)
    served = {place.stage for place in normalised(grid, 1, technique.rules)}
    assert len(served) == 1
    for worker in plan.workers:
        found = looked_up(library, plan, [worker], which)
        if worker.stage not in served:
            assert found is None
            continue
        assert set(found.plan.workers) == set(plan.workers) - {worker}
        assert found.plan.placement == plan.placement.without([worker])
        assert found.plan.routes.microbatches == plan.routes.microbatches
        assert found.period == library.find(grid, 1, technique).found.period


@pytest.mark.parametrize("technique", BOTH)
def test_a_library_serves_names_by_their_places(tmp_path, technique):
    which = terms(technique, UNEVEN)
    plan = example(which)
    library, grid = filled(tmp_path, which, 1)
    (place,) = normalised(grid, 1, technique.rules)
    guest = WorkerId(0, (place.stage + 1) % 4)
    names = {place: guest, guest: place}
    found = looked_up(library, renamed(plan, names), [guest], which)
    assert found.plan == renamed(looked_up(library, plan, [place], which).plan, names)


def test_two_of_one_stage_may_be_any_two(tmp_path):
    slow, quick = (9.0,) * 3, (0.125,)
    which = terms(costs=replace(UNEVEN, forward=slow + quick, input=slow + quick, weight=slow + quick))
    plan = planned_grid(regular_grid(4, STAGES, 3, which), (), which, at_once=False).plan
    library, grid = filled(tmp_path, which, 2, pipelines=4, microbatches=3)
    assert per_stage(normalised(grid, 2, which.technique.rules), 4) == (0, 0, 0, 2)
    for lost in combinations([WorkerId(p, 3) for p in range(4)], 2):
        assert set(looked_up(library, plan, lost, which).plan.workers) == set(plan.workers) - set(lost)
    assert looked_up(library, plan, [WorkerId(0, 0), WorkerId(0, 3)], which) is None


def test_nothing_is_looked_up_where_there_is_nothing(tmp_path):
    which = terms()
    assert looked_up(PlanLibrary(tmp_path), example(which), [WorkerId(1, 1)], which) is None
    plan = regular_plan(3, split_evenly(5, 4), 2)
    uneven = shrunken_plan(plan.workers, plan.routes.microbatches[:5], 5, max_layers=2)
    assert looked_up(PlanLibrary(tmp_path), uneven, uneven.workers[:1], terms(costs=unit_costs(5))) is None


@pytest.mark.parametrize("technique", BOTH)
def test_a_split_that_costs_something_takes_no_more_schedules(technique, monkeypatch):
    """Plans with nothing but whole backward passes are tried, too: within the same number of schedules."""
    made = []
    monkeypatch.setattr(search, "list_schedule", lambda *args, **more: made.append(1) or list_schedule(*args, **more))
    costs = parse_costs(2, costs="10,11,8", split="3")
    terms = Terms(technique=technique, costs=costs, in_flight=2)
    healthy = planned_grid(regular_grid(2, split_evenly(2, 2), 4, terms), (), terms, at_once=False).plan
    assert 1 <= len(made) <= 200
    made.clear()
    rerouted(healthy, [WorkerId(0, 1)], terms)
    assert 1 <= len(made) <= 12
