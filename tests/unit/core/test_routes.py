import itertools

import pytest

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, Placement, regular_placement, split_evenly
from holdfast.core.routes import Route, Routes, home_routes, reroute
from holdfast.errors import ConfigError, InfeasiblePlan, StateUnavailable

GRID = regular_placement(3, split_evenly(4, 4))
BATCH = Batch((6, 6, 6))
HOME = home_routes(3, 4, 6)


def loads(routes, stage):
    return {p: len(routes.through(WorkerId(p, stage))) for p in range(3) if routes.through(WorkerId(p, stage))}


def test_home_routes_stay_in_their_pipeline():
    assert HOME.of(BATCH.named(2, 5)) == tuple(WorkerId(2, stage) for stage in range(4))
    assert HOME.through(WorkerId(1, 3)) == tuple(BATCH.named(1, index) for index in range(6))
    assert len(HOME.microbatches) == 18


def test_peers_share_what_a_failed_worker_had():
    routes = reroute(GRID, HOME, [WorkerId(1, 2)])
    assert loads(routes, 2) == {0: 9, 2: 9}
    for index in range(6):
        stand_in = WorkerId(0 if index % 2 == 0 else 2, 2)
        assert routes.of(BATCH.named(1, index)) == (WorkerId(1, 0), WorkerId(1, 1), stand_in, WorkerId(1, 3))
        assert routes.of(BATCH.named(0, index)) == HOME.of(BATCH.named(0, index))


def test_several_failed_peers_share_evenly():
    assert loads(reroute(GRID, HOME, [WorkerId(0, 1), WorkerId(2, 1)]), 1) == {1: 18}
    grid, home = regular_placement(5, split_evenly(1, 1)), home_routes(5, 1, 7)
    routes = reroute(grid, home, [WorkerId(0, 0), WorkerId(3, 0)])
    assert sorted(len(routes.through(WorkerId(p, 0))) for p in (1, 2, 4)) == [11, 12, 12]


def test_remainders_of_different_stages_go_to_different_pipelines():
    grid, home = regular_placement(3, split_evenly(2, 2)), home_routes(3, 2, 1)
    routes = reroute(grid, home, [WorkerId(2, 0), WorkerId(2, 1)])
    assert routes.of(Batch((1, 1, 1)).named(2, 0)) == (WorkerId(0, 0), WorkerId(1, 1))


def test_the_order_of_failures_does_not_matter():
    failed = [WorkerId(1, 2), WorkerId(0, 2), WorkerId(2, 0)]
    results = {reroute(GRID, HOME, order) for order in itertools.permutations(failed)}
    assert len(results) == 1


def test_nobody_failed_changes_nothing():
    assert reroute(GRID, HOME, []) == HOME


def test_a_layer_without_owner_is_named():
    with pytest.raises(StateUnavailable, match=r"2.*0\.2, 1\.2, 2\.2") as caught:
        reroute(GRID, HOME, [WorkerId(p, 2) for p in range(3)])
    assert caught.value.layers == (2,)


def test_an_unknown_failed_worker_is_refused():
    with pytest.raises(ConfigError, match=r"9\.9"):
        reroute(GRID, HOME, [WorkerId(9, 9)])


def test_ranges_that_nobody_holds_whole_need_layers_to_move():
    placement = Placement(
        num_layers=2,
        ranges=(
            (WorkerId(0, 0), LayerRange(0, 2)),
            (WorkerId(1, 0), LayerRange(0, 1)),
            (WorkerId(1, 1), LayerRange(1, 2)),
        ),
    )
    first, second = (WorkerId(0, 0),), (WorkerId(1, 0), WorkerId(1, 1))
    routes = Routes(tuple(map(Route, Batch((1, 1)).microbatches, (first, second))))
    with pytest.raises(InfeasiblePlan, match=r"layers 0:2"):
        reroute(placement, routes, [WorkerId(0, 0)])


def test_malformed_routes_are_refused():
    route = Route(BATCH.named(0, 0), (WorkerId(0, 0),))
    with pytest.raises(ConfigError, match="once each"):
        Route(BATCH.named(0, 0), (WorkerId(0, 0), WorkerId(0, 0)))
    with pytest.raises(ConfigError, match="nobody"):
        Route(BATCH.named(0, 0), ())
    with pytest.raises(ConfigError, match=r"0\.0 comes after 0\.0"):
        Routes((route, route))
    with pytest.raises(ConfigError, match=r"micro-batch 3\.3 has no route"):
        Routes((route,)).of(Batch((4,) * 4).named(3, 3))
    with pytest.raises(ConfigError, match=r"grid\.microbatches = 0"):
        home_routes(1, 1, 0)
