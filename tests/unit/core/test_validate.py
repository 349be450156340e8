import dataclasses

import pytest
from tests.plan_texts import instructions_of, orders_of

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.instructions import Reduction
from holdfast.core.lower import lower
from holdfast.core.placement import LayerRange, Placement, split_evenly
from holdfast.core.plan import Ahead
from holdfast.core.profile import parse_costs
from holdfast.core.routes import Route, Routes, Visit
from holdfast.core.schedule import Orders
from holdfast.core.validate import dry_run, render_table, validate
from holdfast.errors import InvalidSchedule
from holdfast.schedule.builders import adaptive_plan, gpipe_orders, regular_plan

PAIR = regular_plan(1, split_evenly(2, 2), 2)


def refusal(plan, **options):
    with pytest.raises(InvalidSchedule) as caught:
        validate(plan, **options)
    return caught.value


def ordered(*rows):
    return dataclasses.replace(PAIR, orders=orders_of("\n".join(rows), Batch((2, 2, 4, 4))))


def programs(*rows, reductions=()):
    split = [row.split(": ") for row in rows]
    return {WorkerId.parse(name): instructions_of(text, Batch((2, 2)), reductions) for name, text in split}


def test_good_plans_are_accepted():
    validate(PAIR)
    validate(adaptive_plan(regular_plan(3, split_evenly(8, 4), 6), [WorkerId(1, 2)]), ties=((0, 7), (0, 1)))
    validate(ordered("0.0: F0.0 F0.1 I0.0 B0.1 W0.0", "0.1: F0.0 F0.1 I0.0 I0.1 W0.1 W0.0"))


FULL = "0.1: F0.0 B0.0 F0.1 B0.1"


@pytest.mark.parametrize(
    ("row", "position", "rule"),
    [
        ("F0.0 F0.1 B0.0", -1, "micro-batch 0.1 needs F B or F I W here, found F"),
        ("F0.0 F0.1 B0.0 I0.1", -1, "found F I"),
        ("F0.0 B0.0", -1, "found nothing"),
        ("F0.0 F0.1 F0.0 B0.0 B0.1", 2, "F of this micro-batch is already done"),
        ("F0.0 F0.1 B0.0 I0.0 B0.1", 3, "I cannot follow F B"),
        ("F0.0 I0.0 B0.0 F0.1 B0.1", 2, "B cannot follow F I"),
        ("F0.0 W0.0 I0.0 F0.1 B0.1", 1, "W cannot follow F:"),
        ("B0.0 F0.0 F0.1 B0.1", 0, "B cannot follow nothing"),
        ("F0.0 B0.0 F0.1 B0.1 F3.3", 4, "micro-batch 3.3 does not visit this worker"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(row, position, rule):
    error = refusal(ordered(f"0.0: {row}", FULL))
    assert rule in error.rule
    assert (error.worker, error.position) == ("0.0", position)
    shown = next(line for line in str(error).splitlines() if line.startswith("0.0:"))
    words = row.split()
    assert shown.split(" <-- ERROR HERE")[0].split()[-1] == words[position]
    assert FULL in str(error)


def test_workers_that_wait_for_one_another_are_named():
    error = refusal(ordered("0.0: F0.0 B0.0 F0.1 B0.1", "0.1: F0.0 F0.1 B0.0 B0.1"))
    assert "wait for one another" in error.rule
    assert "0.0 at RECV_GRAD0.0<0.1" in error.rule
    assert "0.1 at RECV_ACT0.1<0.0" in error.rule
    assert (error.worker, error.position) in {("0.0", 1), ("0.1", 1)}
    assert "<-- ERROR HERE" in str(error)


def test_rows_are_for_the_workers_of_the_placement():
    assert refusal(ordered("0.0: F0.0 F0.1 B0.0 B0.1")).worker == "0.1"
    assert "not in the placement" in refusal(ordered("0.0: F0.0 F0.1 B0.0 B0.1", FULL, "0.2: F0.0")).rule


def placed(*ranges):
    held = tuple((WorkerId(0, stage), LayerRange(*layers)) for stage, layers in enumerate(ranges))
    return dataclasses.replace(PAIR, placement=Placement(num_layers=2, ranges=held))


def visiting(*ranges):
    visits = tuple(Visit(WorkerId(0, stage), LayerRange(*layers)) for stage, layers in enumerate(ranges))
    routes = Routes(tuple(Route(route.microbatch, visits) for route in PAIR.routes.routes))
    return dataclasses.replace(PAIR, routes=routes)


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (placed((0, 1), (0, 1)), "layer(s) 1 have no owner"),
        (placed((1, 2), (0, 1)), "runs layers 0:1 here, where layers 1:2 are"),
        (visiting((0, 1), (0, 1)), "needs layer 1 here, but runs layers 0:1"),
        (visiting((0, 2)), "runs layers 0:2 here, where layers 0:1 are"),
        (placed((0, 2)), "visits a worker that is not in the placement"),
        (dataclasses.replace(PAIR, routes=Routes(())), "no micro-batch"),
        (
            dataclasses.replace(
                PAIR, routes=Routes(tuple(Route(r.microbatch, r.visits[:1]) for r in PAIR.routes.routes))
            ),
            "ends before layer 1",
        ),
    ],
)
def test_bad_routes_are_refused(plan, rule):
    assert rule in refusal(plan).rule


SHADOW = dataclasses.replace(
    PAIR,
    placement=Placement(num_layers=2, ranges=((WorkerId(0, 0), LayerRange(0, 2)), (WorkerId(0, 1), LayerRange(1, 2)))),
)
ONE, TWO = (Ahead(WorkerId(0, 0), microbatch, LayerRange(1, 2)) for microbatch in PAIR.routes.microbatches)


def test_what_is_run_ahead_comes_next_and_is_its_own():
    validate(dataclasses.replace(SHADOW, ahead=(ONE, TWO)))


@pytest.mark.parametrize(
    ("ahead", "rule"),
    [
        ((TWO, ONE), "must be sorted, at most once"),
        ((ONE, dataclasses.replace(ONE, layers=LayerRange(1, 3))), "must be sorted, at most once"),
        ((ONE, ONE, TWO), "must be sorted, at most once"),
        ((dataclasses.replace(ONE, layers=LayerRange(0, 1)),), "which are not its next ones"),
        ((dataclasses.replace(ONE, worker=WorkerId(0, 1)),), "which are not its next ones"),
        ((dataclasses.replace(ONE, worker=WorkerId(0, 2)),), "which are not its next ones"),
        ((dataclasses.replace(ONE, layers=LayerRange(1, 3)),), "which are not its next ones"),
    ],
)
def test_what_is_run_ahead_otherwise_is_refused(ahead, rule):
    assert rule in refusal(dataclasses.replace(SHADOW, ahead=ahead)).rule


def test_a_wrong_way_shows_in_the_messages():
    """Stages in another order: whoever sends an activation of one layer's output, nobody waits for it."""
    plan = regular_plan(1, split_evenly(4, 4), 2)
    a, b, c, d = plan.routes.routes[0].visits
    crossed = Routes(tuple(Route(route.microbatch, (a, c, b, d)) for route in plan.routes.routes))
    orders = gpipe_orders(plan.placement, crossed)
    wrong = dataclasses.replace(plan, routes=crossed, orders=orders)
    flaw = dry_run({program.worker: program.instructions for program in lower(wrong)})
    assert flaw is not None
    assert "wait for one another" in flaw.rule
    assert "needs layer 1 here, but runs layers 2:3" in refusal(wrong).rule


def test_too_much_memory_is_refused_where_it_happens():
    error = refusal(PAIR, costs=parse_costs(2, memory="2,1,1,3"))
    assert (error.worker, error.position, error.op) == ("0.0", 1, "F0.1")
    assert "holds 4 of memory, more than the 3" in error.rule
    validate(PAIR, costs=parse_costs(2, memory="2,1,1,4"))


def test_the_table_is_aligned_and_marked():
    orders = orders_of("0.0: F0.10 B0.10\n0.1: F0.1", Batch((11,)))
    assert render_table(orders) == "0.0: F0.10 B0.10\n0.1: F0.1"
    assert render_table(orders, (WorkerId(0, 0), 0)).splitlines()[0] == "0.0: F0.10 <-- ERROR HERE B0.10"
    assert render_table(orders, (WorkerId(0, 1), 7)).splitlines()[1] == "0.1: F0.1  <-- ERROR HERE"
    assert render_table(Orders(())) == ""


PAIRED = Reduction((0,), (WorkerId(0, 0), WorkerId(0, 1)))
TIED = Reduction((0, 1), (WorkerId(0, 0), WorkerId(0, 1)))
FOREIGN = Reduction((5,), (WorkerId(0, 1),))


@pytest.mark.parametrize(
    ("rows", "place", "rule"),
    [
        (["0.0: SEND_ACT0.0>0.1", "0.1: F0.0"], ("0.0", 0), "nobody receives"),
        (["0.0: SEND_ACT0.0>9.9"], ("0.0", 0), "nobody receives"),
        (["0.0: F0.0", "0.1: F0.0 RECV_ACT0.0<0.0"], ("0.1", 1), "worker 0.0, which has ended"),
        (["0.1: RECV_ACT0.0<9.9"], ("0.1", 0), "worker 9.9, which has ended"),
        (["0.0: SEND_ACT0.0>0.1 SEND_ACT0.0>0.1", "0.1: RECV_ACT0.0<0.0"], ("0.0", 1), "sent twice"),
        (["0.0: SEND_ACT0.0>0.1", "0.1: RECV_ACT0.0<0.0 RECV_ACT0.0<0.0"], ("0.1", 1), "has ended"),
        (["0.0: SEND_ACT0.0>0.1", "0.1: RECV_GRAD0.0<0.0"], ("0.1", 0), "has ended"),
        (["0.0: REDUCE_L0 SUM_L0", "0.1: F0.0"], ("0.0", 1), "worker 0.1, which has ended"),
        (["0.0: SUM_L0", "0.1: REDUCE_L0"], ("0.0", 0), "wait for one another: 0.0 at SUM_L0"),
        (
            ["0.0: REDUCE_L0 SUM_L0 REDUCE_L0+1", "0.1: SUM_L0+1 REDUCE_L0 REDUCE_L0+1"],
            ("0.0", 1),
            "wait for one another",
        ),
        (["0.0: REDUCE_L0 REDUCE_L0+1", "0.1: REDUCE_L0+1 REDUCE_L0"], ("0.1", 0), "the others have L0 here"),
        (["0.0: REDUCE_L0 REDUCE_L0", "0.1: REDUCE_L0 REDUCE_L0+1"], ("0.1", 1), "the others have L0 here"),
        (["0.0: REDUCE_L5", "0.1: REDUCE_L5"], ("0.0", 0), "no part in this reduction"),
    ],
)
def test_programs_that_do_not_match_are_found(rows, place, rule):
    fault = dry_run(programs(*rows, reductions=(PAIRED, TIED, FOREIGN)))
    assert rule in fault.rule
    assert (str(fault.worker), fault.position) == place


def test_programs_that_match_pass():
    rows = [
        "0.0: SEND_ACT0.0>0.1 RECV_GRAD0.0<0.1 REDUCE_L0 SUM_L0",
        "0.1: RECV_ACT0.0<0.0 REDUCE_L0 SEND_GRAD0.0>0.0 SUM_L0",
    ]
    assert dry_run(programs(*rows, reductions=(PAIRED,))) is None
