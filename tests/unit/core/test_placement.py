import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, Placement, regular_placement, split_evenly
from holdfast.errors import ConfigError


def test_layer_range():
    layers = LayerRange(2, 5)
    assert list(layers.indices) == [2, 3, 4]
    assert 2 in layers
    assert 5 not in layers
    assert "2" not in layers


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_empty_or_negative_ranges_are_refused(start, stop):
    with pytest.raises(ConfigError, match=f"{start}:{stop}"):
        LayerRange(start, stop)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(1, 1), (7, 3), (10, 4), (8, 8)])
def test_split_evenly_covers_all_and_differs_by_one(num_layers, num_stages):
    stages = split_evenly(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage.indices] == list(range(num_layers))
    sizes = [len(stage.indices) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_layers_are_refused(num_stages):
    with pytest.raises(ConfigError, match=rf"grid\.stages = {num_stages} .* 4 layers"):
        split_evenly(4, num_stages)


def test_regular_placement_and_its_owners():
    placement = regular_placement(3, split_evenly(6, 2))
    assert [str(worker) for worker in placement.workers] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert placement.held_by(WorkerId(1, 1)) == (LayerRange(3, 6),)
    assert placement.layers_of(WorkerId(1, 1)) == (3, 4, 5)
    assert placement.owners(2) == (WorkerId(0, 0), WorkerId(1, 0), WorkerId(2, 0))
    assert placement.unowned_layers() == ()


def test_without_leaves_layers_unowned():
    placement = regular_placement(2, split_evenly(4, 2)).without([WorkerId(0, 1), WorkerId(1, 1), WorkerId(7, 7)])
    assert placement.workers == (WorkerId(0, 0), WorkerId(1, 0))
    assert placement.unowned_layers() == (2, 3)
    assert placement.owners(3) == ()


def test_whoever_has_no_place_has_no_layers():
    assert regular_placement(1, split_evenly(2, 1)).layers_of(WorkerId(5, 0)) == ()


@pytest.mark.parametrize("stages", [(), (LayerRange(1, 2),), (LayerRange(0, 2), LayerRange(3, 4))])
def test_stages_with_gaps_are_refused(stages):
    with pytest.raises(ConfigError, match="without a gap"):
        regular_placement(2, stages)


def test_malformed_placements_are_refused():
    a, b = (WorkerId(0, 0), LayerRange(0, 1)), (WorkerId(0, 1), LayerRange(1, 3))
    with pytest.raises(ConfigError, match=r"0\.0 comes after 0\.1"):
        Placement(num_layers=3, ranges=(b, a))
    with pytest.raises(ConfigError, match=r"worker 0\.1 has layers 1:3"):
        Placement(num_layers=2, ranges=(a, b))
    with pytest.raises(ConfigError, match="0 layers"):
        Placement(num_layers=0, ranges=())
    with pytest.raises(ConfigError, match="without pipelines"):
        regular_placement(0, split_evenly(2, 2))


W00, W01, W10 = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)


def test_who_follows_a_layer_is_a_member_of_it_but_no_owner():
    placement = Placement(
        num_layers=6,
        ranges=((W00, LayerRange(0, 2)), (W00, LayerRange(4, 5)), (W01, LayerRange(0, 6))),
        followed=((W00, LayerRange(2, 4)), (W10, LayerRange(1, 3))),
    )
    assert placement.workers == (W00, W01, W10)
    assert placement.held_by(W00) == (LayerRange(0, 2), LayerRange(4, 5))
    assert placement.followed_by(W00) == (LayerRange(2, 4),)
    assert placement.layers_of(W00) == (0, 1, 2, 3, 4)
    assert placement.layers_of(W10) == (1, 2)
    assert (placement.held_by(W10), placement.followed_by(W01)) == ((), ())
    assert placement.owners(2) == (W01,)
    assert placement.owners_by_layer[:3] == ((W00, W01), (W00, W01), (W01,))
    assert placement.members_by_layer[:3] == ((W00, W01), (W00, W01, W10), (W00, W01, W10))
    assert placement.holds(W00, LayerRange(4, 5))
    assert not placement.holds(W00, LayerRange(2, 3)), "it only follows it"
    left = placement.without([W01])
    assert left.unowned_layers() == (2, 3, 5), "followers hold nothing"
    assert left.followed == placement.followed


@pytest.mark.parametrize(
    ("held", "followed", "said"),
    [
        ([(W01, 0, 1), (W00, 1, 2)], [], "sorted"),
        ([(W00, 0, 2), (W00, 2, 3)], [], "apart from one another"),
        ([(W00, 0, 2), (W00, 1, 3)], [], "apart from one another"),
        ([(W00, 0, 2)], [(W00, 1, 3)], "some of which it holds"),
        ([(W00, 0, 2)], [(W01, 3, 7)], "has layers 3:7, but the model has 6"),
    ],
)
def test_rows_that_contradict_one_another_are_refused(held, followed, said):
    rows = [tuple((worker, LayerRange(start, stop)) for worker, start, stop in each) for each in (held, followed)]
    with pytest.raises(ConfigError, match=said):
        Placement(num_layers=6, ranges=rows[0], followed=rows[1])
