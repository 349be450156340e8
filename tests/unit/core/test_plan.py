import dataclasses
from collections import Counter

import msgspec
import pytest
from tests.plan_texts import orders_of

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, Placement, split_evenly
from holdfast.core.plan import Plan, with_followers
from holdfast.errors import ConfigError
from holdfast.schedule.builders import adaptive_plan, regular_plan

HEALTHY = regular_plan(3, split_evenly(9, 4), 6)


@pytest.mark.parametrize("plan", [HEALTHY, adaptive_plan(HEALTHY, [WorkerId(1, 2)])])
def test_a_plan_travels_over_the_wire(plan):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_what_arrives_is_checked():
    bad = msgspec.json.encode(HEALTHY).replace(b'"num_layers":9', b'"num_layers":0')
    with pytest.raises((ConfigError, msgspec.ValidationError), match="layers"):
        msgspec.json.decode(bad, type=Plan)


def test_the_digest_names_the_plan():
    again = regular_plan(3, split_evenly(9, 4), 6)
    assert again is not HEALTHY
    assert again.digest() == HEALTHY.digest()
    assert len(HEALTHY.digest()) == 64
    others = [
        adaptive_plan(HEALTHY, [WorkerId(1, 2)]),
        regular_plan(3, split_evenly(10, 4), 6),
        regular_plan(3, split_evenly(9, 4), 6, "gpipe"),
        dataclasses.replace(HEALTHY, orders=orders_of("0.0: F0.0", Batch((6, 6, 6)))),
    ]
    assert len({plan.digest() for plan in [*others, HEALTHY]}) == 5


def test_workers_are_those_of_the_placement():
    assert WorkerId(1, 2) not in adaptive_plan(HEALTHY, [WorkerId(1, 2)]).workers
    assert len(HEALTHY.workers) == 12


@pytest.mark.parametrize("lost", [[], [WorkerId(1, 2)], [WorkerId(0, 0), WorkerId(2, 0)]])
def test_every_layer_has_a_writer_among_its_owners(lost):
    plan = adaptive_plan(HEALTHY, lost) if lost else HEALTHY
    writers = {layer: plan.writer_of(layer) for layer in range(9)}
    assert all(writer in plan.placement.owners(layer) for layer, writer in writers.items())
    assert not set(writers.values()) & set(lost)


def test_writing_is_spread_over_the_owners():
    wide = regular_plan(3, split_evenly(12, 2), 2)
    assert set(Counter(wide.writer_of(layer) for layer in range(12)).values()) == {2}


def test_who_follows_a_layer_does_not_write_it():
    """It may have begun a moment ago and hold no state yet."""
    writers = {HEALTHY.writer_of(layer) for layer in range(9)}
    follower = WorkerId(9, 0)
    followed = with_followers(HEALTHY, [(follower, LayerRange(0, 9))])
    assert {followed.writer_of(layer) for layer in range(9)} == writers
    only = Plan(
        placement=Placement(num_layers=1, ranges=(), followed=((follower, LayerRange(0, 1)),)),
        routes=HEALTHY.routes,
        orders=HEALTHY.orders,
    )
    assert only.writer_of(0) is None
