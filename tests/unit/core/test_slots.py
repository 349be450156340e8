"""Plans for places become plans for whoever sits there."""

from dataclasses import replace

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.plan import Ahead, with_listeners
from holdfast.core.slots import renamed, slots_of
from holdfast.core.validate import validate
from holdfast.planning.shrink import shrunken_plan
from holdfast.schedule.builders import adaptive_plan, regular_plan

PLAN = regular_plan(3, split_evenly(5, 4), 2)
A, B = WorkerId(1, 2), WorkerId(2, 0)


def test_a_healthy_grid_sits_on_its_own_places():
    slots = slots_of(PLAN)
    assert slots.stages == split_evenly(5, 4)
    assert all(place == worker for place, worker in slots.workers.items())
    assert slots.filled(PLAN) == PLAN


def test_two_that_change_places_do_what_the_other_did():
    swapped = renamed(PLAN, {A: B, B: A})
    validate(swapped)
    assert swapped.orders.of(A) == PLAN.orders.of(B)
    assert swapped.placement.layers_of(A) == PLAN.placement.layers_of(B)
    slots = slots_of(swapped)
    assert slots.workers[B] == A
    assert slots.workers[A] == B
    assert slots.places([A]) == {B}
    assert renamed(swapped, {A: B, B: A}) == PLAN


def test_a_plan_for_places_is_one_for_whoever_sits_there():
    swapped = renamed(PLAN, {A: B, B: A})
    slots = slots_of(swapped)
    for_workers = slots.filled(adaptive_plan(PLAN, slots.places([A])))
    validate(for_workers)
    assert A not in for_workers.workers
    assert for_workers.placement.layers_of(B) == PLAN.placement.layers_of(A)
    assert for_workers.routes.microbatches == PLAN.routes.microbatches


def test_a_smaller_grid_has_seats_where_micro_batches_can_be_shared_evenly():
    left = [worker for worker in PLAN.workers if worker.pipeline]
    smaller = shrunken_plan(left, PLAN.routes.microbatches, 5, max_layers=2)
    slots = slots_of(smaller)
    assert len(slots.rows) * len(slots.rows[0]) <= len(left)
    assert {worker for row in slots.rows for worker in row} == set(smaller.workers)
    of_places = regular_plan(len(slots.rows), slots.stages, len(slots.microbatches[0]))
    assert slots.filled(of_places).placement == smaller.placement
    assert slots.filled(of_places).routes == smaller.routes
    validate(slots.filled(of_places))


def test_micro_batches_that_cannot_be_shared_evenly_are_no_regular_grid():
    smaller = shrunken_plan(PLAN.workers[:4], PLAN.routes.microbatches[:5], 5, max_layers=3)
    assert len({route.workers for route in smaller.routes.routes}) > 1
    assert slots_of(smaller) is None


@pytest.mark.parametrize(
    "plan",
    [
        adaptive_plan(PLAN, [A]),
        with_listeners(PLAN, [(WorkerId(9, 0), split_evenly(5, 4)[0])]),
    ],
    ids=["re-routed", "one computes nothing"],
)
def test_what_is_not_the_plan_of_a_whole_grid_has_no_seats(plan):
    assert slots_of(plan) is None


def test_what_is_run_ahead_is_renamed_too():
    place = PLAN.routes.routes[0].visits[1]
    ahead = (Ahead(A, PLAN.routes.microbatches[2], place.layers), Ahead(B, PLAN.routes.microbatches[4], place.layers))
    swapped = renamed(replace(PLAN, ahead=ahead), {A: B, B: A})
    assert swapped.ahead == tuple(replace(each, worker=who) for each, who in zip(ahead[::-1], (A, B), strict=True))
    assert renamed(swapped, {A: B, B: A}).ahead == ahead


def test_micro_batches_are_renamed_too():
    first, last = PLAN.routes.microbatches[0], PLAN.routes.microbatches[-1]
    other = renamed(PLAN, {}, {first: last, last: first})
    validate(renamed(other, {}))
    assert other.routes.of(first).visits == PLAN.routes.of(last).visits
