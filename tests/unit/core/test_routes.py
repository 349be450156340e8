import itertools

import pytest

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, Placement, home_placement, regular_placement, split_evenly
from holdfast.core.routes import Route, Routes, Visit, home_routes, reroute
from holdfast.core.sum_order import SumOrder
from holdfast.errors import ConfigError, StateUnavailable

GRID = regular_placement(3, split_evenly(4, 4))
BATCH = Batch((6, 6, 6))
HOME = home_routes(GRID, BATCH)


def loads(routes, stage):
    return {p: len(routes.through(WorkerId(p, stage))) for p in range(3) if routes.through(WorkerId(p, stage))}


def test_home_routes_stay_in_their_pipeline():
    assert HOME.of(BATCH.named(2, 5)).workers == tuple(WorkerId(2, stage) for stage in range(4))
    assert HOME.through(WorkerId(1, 3)) == tuple(BATCH.named(1, index) for index in range(6))
    assert len(HOME.microbatches) == 18


def test_peers_share_what_a_failed_worker_had():
    routes = reroute(GRID, HOME, [WorkerId(1, 2)])
    assert loads(routes, 2) == {0: 9, 2: 9}
    for index in range(6):
        stand_in = WorkerId(0 if index % 2 == 0 else 2, 2)
        assert routes.of(BATCH.named(1, index)).workers == (WorkerId(1, 0), WorkerId(1, 1), stand_in, WorkerId(1, 3))
        assert routes.of(BATCH.named(0, index)) == HOME.of(BATCH.named(0, index))


def test_several_failed_peers_share_evenly():
    assert loads(reroute(GRID, HOME, [WorkerId(0, 1), WorkerId(2, 1)]), 1) == {1: 18}
    grid = regular_placement(5, split_evenly(1, 1))
    home = home_routes(grid, Batch((7,) * 5))
    routes = reroute(grid, home, [WorkerId(0, 0), WorkerId(3, 0)])
    assert sorted(len(routes.through(WorkerId(p, 0))) for p in (1, 2, 4)) == [11, 12, 12]


def test_remainders_of_different_stages_go_to_different_pipelines():
    grid = regular_placement(3, split_evenly(2, 2))
    home = home_routes(grid, Batch((1,) * 3))
    routes = reroute(grid, home, [WorkerId(2, 0), WorkerId(2, 1)])
    assert routes.of(Batch((1, 1, 1)).named(2, 0)).workers == (WorkerId(0, 0), WorkerId(1, 1))


@pytest.mark.parametrize(
    ("lost", "shares"),
    [
        ((0,), {2: [(0, 0), (0, 1)], 1: [(0, 2), (0, 3)]}),
        ((1,), {0: [(1, 0), (1, 1)], 2: [(1, 2), (1, 3)]}),
        ((2,), {1: [(2, 0), (2, 1)], 0: [(2, 2), (2, 3)]}),
        ((0, 1), {2: [(pipeline, index) for pipeline in (0, 1) for index in range(4)]}),
    ],
)
def test_without_stages_each_peer_takes_neighbours_the_one_before_the_lost_the_first(lost, shares):
    placement = regular_placement(3, split_evenly(1, 1))
    home = home_routes(placement, Batch((4, 4, 4)))
    routes = reroute(placement, home, [WorkerId(pipeline, 0) for pipeline in lost])
    for peer, expected in shares.items():
        taken = routes.through(WorkerId(peer, 0))
        assert [mb for mb in taken if mb.pipeline != peer] == [home.batch.named(*each) for each in expected]


def test_who_takes_neighbours_sends_fewer_parts_of_a_sum():
    placement, order = regular_placement(3, split_evenly(1, 1)), SumOrder.of(18, 6)
    home = home_routes(placement, Batch((6, 6, 6)))
    routes = reroute(placement, home, [WorkerId(1, 0)])
    for worker in (WorkerId(0, 0), WorkerId(2, 0)):
        numbers = [home.microbatches.index(mb) for mb in routes.through(worker)]
        assert order.held(numbers)[1] == 2, "one at a time it would be 4"


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


UNLIKE = home_placement([split_evenly(6, 2), split_evenly(6, 3), split_evenly(6, 1)])
"""0:3 3:6, 0:2 2:4 4:6, 0:6."""


def way(routes, name):
    """The visits of a micro-batch, as text."""
    route = routes.of(routes.batch.named(*map(int, name.split("."))))
    return " ".join(f"{visit.worker}[{visit.layers}]" for visit in route.visits)


def test_who_holds_parts_of_the_layers_takes_parts():
    home = home_routes(UNLIKE, Batch((2, 2, 1)))
    routes = reroute(UNLIKE, home, [WorkerId(0, 0), WorkerId(2, 0)])
    assert way(routes, "0.0") == "1.0[0:2] 1.1[2:3] 0.1[3:6]"
    assert way(routes, "2.0") == "1.0[0:2] 1.1[2:4] 1.2[4:6]"
    assert way(routes, "1.1") == way(home, "1.1"), "who is not concerned stays"


def test_parts_go_to_whoever_makes_the_highest_load_lowest():
    home = home_routes(UNLIKE, Batch((2, 6, 1)))
    routes = reroute(UNLIKE, home, [WorkerId(0, 0)])
    assert way(routes, "0.0") == "2.0[0:3] 0.1[3:6]", "2.0 has little to do"
    home = home_routes(UNLIKE, Batch((2, 1, 9)))
    assert way(reroute(UNLIKE, home, [WorkerId(0, 0)]), "0.0") == "1.0[0:2] 1.1[2:3] 0.1[3:6]"


def test_who_is_needed_for_two_parts_takes_all_to_its_end():
    placement = home_placement([split_evenly(6, 3), (LayerRange(0, 1), LayerRange(1, 6))])
    home = home_routes(placement, Batch((1, 1)))
    routes = reroute(placement, home, [WorkerId(0, 0), WorkerId(0, 2)])
    assert way(routes, "0.0") == "1.0[0:1] 1.1[1:6]"


def test_who_has_little_to_do_takes_a_part_though_another_holds_all():
    placement = home_placement([split_evenly(6, 1), split_evenly(6, 1), (LayerRange(0, 2), LayerRange(2, 6))])
    routes = reroute(placement, home_routes(placement, Batch((8, 4, 1))), [WorkerId(0, 0), WorkerId(2, 0)])
    assert {way(routes, f"0.{index}") for index in range(8)} == {"1.0[0:2] 2.1[2:6]"}
    assert way(routes, "2.0") == "1.0[0:2] 2.1[2:6]"


def test_malformed_routes_are_refused():
    visits = tuple(Visit(WorkerId(0, 0), LayerRange(layer, layer + 1)) for layer in range(2))
    route = Route(BATCH.named(0, 0), visits[:1])
    with pytest.raises(ConfigError, match="once each"):
        Route(BATCH.named(0, 0), visits)
    with pytest.raises(ConfigError, match="nobody"):
        Route(BATCH.named(0, 0), ())
    with pytest.raises(ConfigError, match=r"0\.0 comes after 0\.0"):
        Routes((route, route))
    with pytest.raises(ConfigError, match=r"micro-batch 3\.3 has no route"):
        Routes((route,)).of(Batch((4,) * 4).named(3, 3))
    with pytest.raises(ConfigError, match=r"micro-batch 0\.0 does not visit worker 9\.9"):
        route.visit(WorkerId(9, 9))
    with pytest.raises(ConfigError, match="for 2 pipelines, but workers are in 3"):
        home_routes(GRID, Batch((1, 1)))


def test_one_that_holds_two_ranges_is_visited_on_the_one_where_it_is_needed():
    """The furthest owner of layer 0 would be needed again at layer 4, so another is taken there."""
    A, B, C, HOME = (WorkerId(1, i) for i in range(4))
    placement = Placement(
        num_layers=6,
        ranges=(
            (A, LayerRange(0, 3)), (A, LayerRange(4, 6)), (B, LayerRange(0, 2)), (C, LayerRange(2, 4)),
            (HOME, LayerRange(0, 6)),
        ),
    )  # fmt: skip
    home = Routes((Route(Batch((1,)).microbatches[0], (Visit(HOME, LayerRange(0, 6)),)),))
    (route,) = reroute(placement, home, [HOME]).routes
    assert [str(visit.worker) for visit in route.visits] == [str(B), str(C), str(A)]
    assert [str(visit.layers) for visit in route.visits] == ["0:2", "2:4", "4:6"]
    with pytest.raises(StateUnavailable, match="has visited before"):
        reroute(placement, home, [HOME, B])
