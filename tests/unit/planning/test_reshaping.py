"""Which pipelines whoever is left becomes."""

import itertools
from dataclasses import replace

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.plan import with_listeners
from holdfast.core.profile import unit_costs
from holdfast.core.validate import validate
from holdfast.errors import StateUnavailable
from holdfast.planning.planner import Technique
from holdfast.planning.reshaping import Shapes, reshaped
from holdfast.planning.templates.stages import table_of
from holdfast.planning.training import Terms
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate

LAYERS = 12
BASELINE = regular_plan(3, split_evenly(LAYERS, 4), 6)
SHAPES = Shapes(costs=unit_costs(LAYERS), table=table_of(unit_costs(LAYERS)), minimum=3, state=(1,) * LAYERS)
W = WorkerId


def rows(plan):
    return {route.workers: tuple(visit.layers for visit in route.visits) for route in plan.routes.routes}


def test_pipelines_that_have_lost_nobody_stay_as_they_are():
    found = reshaped(BASELINE, [W(1, 2)], SHAPES)
    assert (found.before_s, found.period) == (108, 90)
    before, after = rows(BASELINE), rows(found.plan)
    for row in (0, 2):
        workers = tuple(W(row, stage) for stage in range(4))
        assert after[workers] == before[workers]
    assert set(found.takes) == {(worker, part) for worker, part in found.takes if worker.pipeline == 1}
    assert found.why == "11 workers become pipelines of 3 + 4 + 4: steps are 20% faster"


@pytest.mark.parametrize("technique", [None, Technique.DECOUPLED, Technique.STAGGERED])
def test_whoever_is_lost_the_rest_is_one_grid_and_no_slower_than_by_re_routing(technique):
    terms = None if technique is None else Terms(technique=technique, costs=SHAPES.costs, in_flight=8)
    shapes = Shapes(costs=SHAPES.costs, table=SHAPES.table, minimum=2, state=SHAPES.state, terms=terms)
    changed = 0
    for lost in itertools.combinations(BASELINE.workers, 3):
        if BASELINE.placement.unowned_layers(lost):
            with pytest.raises(StateUnavailable):
                reshaped(BASELINE, lost, shapes)
            continue
        if sum(worker.pipeline for worker in lost) % 3 and technique is not None:
            continue  # a third of them is enough where the planner makes them
        found = reshaped(BASELINE, lost, shapes)
        if found is None:
            continue
        changed += 1
        validate(found.plan)
        assert set(found.plan.workers) == set(BASELINE.workers) - set(lost)
        assert found.plan.routes.microbatches == BASELINE.routes.microbatches
        assert all(len(row) >= 2 for row in rows(found.plan))
        assert found.period < found.before_s
        if technique is None:
            assert found.before_s == evaluate(adaptive_plan(BASELINE, lost), SHAPES.costs).period
    assert changed > 20


def test_no_pipeline_is_shorter_than_it_may_be():
    """11 workers are no pipelines of 4 without somebody who is left over, unless one is longer."""
    found = reshaped(BASELINE, [W(1, 2)], Shapes(costs=SHAPES.costs, table=SHAPES.table, minimum=4, state=SHAPES.state))
    assert found is None or min(map(len, rows(found.plan))) >= 4
    assert (
        reshaped(BASELINE, [W(1, 2)], Shapes(costs=SHAPES.costs, table=SHAPES.table, minimum=12, state=SHAPES.state))
        is None
    )


def test_what_moves_is_as_little_as_can_be():
    """Of two workers the one takes the place that holds most of it already, whatever their order was."""
    heavy = (100,) + (1,) * (LAYERS - 1)
    found = reshaped(BASELINE, [W(1, 1)], Shapes(costs=SHAPES.costs, table=SHAPES.table, minimum=3, state=heavy))
    takers = [worker for worker, part in found.takes if 0 in part]
    assert takers == [], "who has the layer that is dear keeps it"


@pytest.mark.parametrize(("tolerate", "pipelines"), [(0, 1), (1, 2), (2, 2)])
def test_as_many_failures_are_tolerated_afterwards(tolerate, pipelines):
    """Seven workers and as many layers: in one pipeline all are equally busy, in 3 + 4 they are not.

    Three pipelines of three take nine, so for two failures there are two pipelines, too.
    """
    costs = unit_costs(7)
    shapes = Shapes(costs=costs, table=table_of(costs), minimum=3, state=(1,) * 7, tolerate=tolerate)
    found = reshaped(regular_plan(3, split_evenly(7, 3), 20), [W(0, 0), W(1, 1)], shapes)
    assert len(rows(found.plan)) == pipelines


@pytest.mark.parametrize("technique", [Technique.DECOUPLED, Technique.STAGGERED])
def test_the_planner_keeps_to_the_memory_of_a_worker(technique):
    """However many micro-batches may be in flight; a layer takes ten, and one for each micro-batch."""
    costs = replace(unit_costs(LAYERS), state=(10,) * LAYERS)
    table = replace(SHAPES.table, state_bytes=(10,) * LAYERS, held_bytes=(1,) * LAYERS)
    terms = Terms(technique=technique, costs=costs, in_flight=8)

    def most(memory):
        bound = replace(table, memory_bytes=memory)
        shapes = Shapes(costs=costs, table=bound, minimum=3, state=SHAPES.state, terms=terms)
        found = reshaped(BASELINE, [W(1, 2)], shapes)
        return max(peak for _, peak in evaluate(found.plan, costs).peak_memory)

    assert most(None) > 53
    assert most(53) <= 53


def test_whoever_runs_nothing_is_of_use_later():
    """As one that got a place in a grid that was to grow, and did not."""
    idle = [W(3, 0), W(4, 0)]
    places = [(worker, BASELINE.placement.single_ranges[W(0, 1)]) for worker in idle]
    waiting = with_listeners(BASELINE, places)
    found = reshaped(waiting, [W(1, 2)], SHAPES)
    assert set(found.plan.workers) == set(waiting.workers) - {W(1, 2)}
    one_more = reshaped(waiting, [W(0, 0), W(1, 2)], SHAPES)
    assert set(one_more.plan.workers) == set(waiting.workers) - {W(0, 0), W(1, 2)}
    assert {len(row) for row in rows(one_more.plan)} == {4}, "each has taken the place of one that was lost"
    gone_again = reshaped(waiting, [W(1, 2), W(3, 0), W(4, 0)], SHAPES)
    assert gone_again == reshaped(BASELINE, [W(1, 2)], SHAPES), "as if they had never come"
