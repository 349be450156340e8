"""Pipelines that are not alike: whoever is lost, as long as each layer has an owner, there is a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.excerpts import excerpts
from holdfast.core.ids import Batch, WorkerId
from holdfast.core.lower import lower_worker
from holdfast.core.placement import LayerRange, home_placement, split_evenly
from holdfast.core.plan import with_followers, with_listeners
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.core.routes import home_routes, reroute
from holdfast.core.validate import validate
from holdfast.planning.planner import Technique, plan_routes
from holdfast.planning.training import Terms, replanned, rerouted, within_limit
from holdfast.schedule.builders import adaptive_plan, home_plan
from holdfast.schedule.evaluate import evaluate, measured

LANES = st.sampled_from((1, 1, 1, 1, 2, 3))
MANY = settings(max_examples=200)


@st.composite
def layouts(draw):
    """2 to 5 pipelines of 1 to 5 stages of 1 to 3 lanes, cut anywhere, with any numbers of micro-batches."""
    layers = draw(st.integers(1, 8))
    pipelines = []
    for _ in range(draw(st.integers(2, 5))):
        cuts = draw(st.sets(st.integers(1, layers - 1), max_size=4)) if layers > 1 else set()
        stages = [LayerRange(*pair) for pair in pairwise([0, *sorted(cuts), layers])]
        pipelines.append([stage for stage in stages for _ in range(draw(LANES))])
    counts = draw(st.lists(st.integers(1, 5), min_size=len(pipelines), max_size=len(pipelines)))
    return home_placement(pipelines), Batch(tuple(counts))


@st.composite
def losses(draw):
    """Any workers but for an owner of each layer, who is drawn first."""
    placement, batch = draw(layouts())
    kept = {draw(st.sampled_from(placement.owners(layer))) for layer in range(placement.num_layers)}
    gone = draw(st.sets(st.sampled_from(placement.workers)))
    return placement, batch, frozenset(gone - kept)


@MANY
@given(losses(), st.randoms(use_true_random=False))
def test_every_loss_that_leaves_each_layer_an_owner_has_a_plan(loss, rng):
    placement, batch, gone = loss
    healthy = home_plan(placement, batch)
    ties = ((0, placement.num_layers - 1),) if placement.num_layers > 1 else ()
    validate(healthy, ties=ties)
    plan = adaptive_plan(healthy, gone)
    validate(plan, ties=ties)
    assert set(plan.workers) == set(placement.workers) - gone
    again = sorted(gone)
    rng.shuffle(again)
    assert adaptive_plan(healthy, again).digest() == plan.digest()
    for route, home in zip(plan.routes.routes, healthy.routes.routes, strict=True):
        assert route == home or not gone.isdisjoint(home.workers), "who is not concerned stays where it was"


@MANY
@given(losses(), st.integers(1, 3))
def test_memory_for_few_micro_batches_is_enough(loss, held):
    """Even where workers would wait for one another's room."""
    placement, batch, gone = loss
    most = max(len(layers.indices) for _, layers in placement.ranges)
    costs = parse_costs(placement.num_layers, memory=f"1,0,1,{most * held}")
    plan = adaptive_plan(home_plan(placement, batch, costs=costs), gone, costs)
    validate(plan, costs=costs)


@MANY
@given(losses(), st.sampled_from(["decoupled", "staggered"]), st.integers(1, 4))
def test_whoever_is_lost_no_worker_holds_more_micro_batches_than_it_may(loss, technique, in_flight):
    placement, batch, gone = loss
    terms = Terms(technique=Technique(technique), costs=unit_costs(placement.num_layers), in_flight=in_flight)
    healthy = replanned(home_plan(placement, batch, costs=within_limit(terms)), terms)
    validate(healthy, costs=within_limit(terms))
    plan = rerouted(healthy, gone, terms).plan
    for worker, peak in evaluate(plan, terms.costs).peak_memory:
        assert peak <= in_flight * len(placement.layers_of(worker))


@st.composite
def beside_whole_ones(draw):
    """A pipeline of one layer per stage beside two or three that are whole, and a loss in it: parts in either order."""
    layers = draw(st.integers(3, 6))
    whole = draw(st.integers(2, 3))
    placement = home_placement([split_evenly(layers, layers), *[split_evenly(layers, 1)] * whole])
    counts = [draw(st.integers(4, 24)), *[draw(st.integers(1, 3)) for _ in range(whole)]]
    lost = draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=layers - 1))
    return placement, Batch(tuple(counts)), frozenset(WorkerId(0, stage) for stage in lost)


@MANY
@given(beside_whole_ones())
def test_workers_that_come_in_either_order_work_together(loss):
    """One micro-batch after another would take as long as all work together."""
    placement, batch, gone = loss
    plan = adaptive_plan(home_plan(placement, batch), gone)
    validate(plan)
    makespan = evaluate(plan, unit_costs(placement.num_layers)).makespan
    assert makespan < 3 * placement.num_layers * sum(batch.counts)


@MANY
@given(beside_whole_ones())
def test_the_planner_keeps_workers_that_come_in_either_order_busy(loss):
    """By 1F1B's limits, which are by how far a worker is from the end, they would wait for one another."""
    placement, batch, gone = loss
    routes, costs = reroute(placement, home_routes(placement, batch), gone), unit_costs(placement.num_layers)
    planned = plan_routes(placement.without(gone), routes, costs, Technique.ADAPTIVE, time_limit_s=inf, tries=12)
    assert planned.found.makespan <= planned.bound.makespan + 6 * placement.num_layers


@MANY
@given(losses(), st.data())
def test_anybody_may_listen(loss, data):
    """Whoever comes needs no peer that holds the same layers."""
    placement, batch, gone = loss
    plan = adaptive_plan(home_plan(placement, batch), gone)
    cuts = sorted(data.draw(st.sets(st.integers(0, placement.num_layers), min_size=2, max_size=4)))
    listeners = [(WorkerId(9, stage), LayerRange(*pair)) for stage, pair in enumerate(pairwise(cuts))]
    validate(with_listeners(plan, listeners))


@MANY
@given(losses(), st.data(), st.booleans())
def test_an_excerpt_gives_its_worker_the_program_of_the_whole_plan(loss, data, listen):
    placement, batch, gone = loss
    plan = adaptive_plan(home_plan(placement, batch), gone)
    layers, ties = LayerRange(0, placement.num_layers), ((0, placement.num_layers - 1),)
    if listen:
        here = data.draw(st.sampled_from([with_listeners, with_followers]))
        plan = here(plan, [(WorkerId(9, 0), layers), (WorkerId(9, 1), layers)])
    for worker, excerpt in excerpts(plan, plan.workers).items():
        assert lower_worker(excerpt, worker, ties) == lower_worker(plan, worker, ties)
        assert (excerpt.placement, excerpt.orders.workers) == (plan.placement, (worker,))


@MANY
@given(losses(), st.data(), st.booleans())
def test_a_plan_is_measured_as_its_timeline_says(loss, data, staggered):
    placement, batch, gone = loss
    plan = adaptive_plan(home_plan(placement, batch), gone)
    layers = LayerRange(0, placement.num_layers)
    if listen := data.draw(st.sampled_from([None, with_listeners, with_followers])):
        plan = listen(plan, [(WorkerId(9, 0), layers)])
    times = data.draw(st.lists(st.integers(1, 9), min_size=layers.stop, max_size=layers.stop))
    costs = replace(unit_costs(layers.stop), forward=tuple(map(float, times)), optimizer=tuple(map(float, times[::-1])))
    ties = ((0, layers.stop - 1),) if layers.stop > 1 and data.draw(st.booleans()) else ()
    timeline = evaluate(plan, costs, staggered=staggered, ties=ties)
    found = measured(plan, costs, staggered=staggered, ties=ties)
    assert (found.makespan, found.period) == (timeline.makespan, timeline.period)
