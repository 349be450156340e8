import dataclasses

import pytest
from tests.plan_texts import instructions_of, orders_of, printed

from holdfast.core.ids import Batch, WorkerId, beside
from holdfast.core.instructions import (
    Compute,
    Payload,
    Reduce,
    Reduction,
    Send,
)
from holdfast.core.lower import lower, lower_worker
from holdfast.core.placement import LayerRange, Placement, home_placement, split_evenly
from holdfast.core.plan import Plan, with_listeners
from holdfast.core.program import groups
from holdfast.core.routes import Route, Routes, Visit
from holdfast.core.validate import validate
from holdfast.errors import InvalidSchedule
from holdfast.planning.shrink import shrunken_plan
from holdfast.schedule.builders import adaptive_plan, home_plan, regular_plan


def text_of(plan, worker, **options):
    programs = {program.worker: program for program in lower(plan, **options)}
    return printed(programs[WorkerId.parse(worker)].instructions)


def with_row(plan, row):
    """The plan with the operations of one worker replaced, so that one line is lowered at a time."""
    ((worker, ops),) = orders_of(row, plan.routes.batch).rows
    orders = dataclasses.replace(plan.orders, rows=tuple(sorted((dict(plan.orders.rows) | {worker: ops}).items())))
    return dataclasses.replace(plan, orders=orders)


TALL = regular_plan(1, split_evenly(3, 3), 1)
WIDE = regular_plan(2, split_evenly(2, 1), 1)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0.0: F0.0 B0.0", "F0.0 SEND_ACT0.0>0.1 RECV_GRAD0.0<0.1 B0.0"),
        ("0.1: F0.0 B0.0", "RECV_ACT0.0<0.0 F0.0 SEND_ACT0.0>0.2 RECV_GRAD0.0<0.2 B0.0 SEND_GRAD0.0>0.0"),
        ("0.1: F0.0 I0.0 W0.0", "RECV_ACT0.0<0.0 F0.0 SEND_ACT0.0>0.2 RECV_GRAD0.0<0.2 I0.0 SEND_GRAD0.0>0.0 W0.0"),
        ("0.2: F0.0 B0.0", "RECV_ACT0.0<0.1 F0.0 B0.0 SEND_GRAD0.0>0.1"),
    ],
)
def test_operations_receive_compute_and_send(row, expected):
    worker = row.partition(":")[0]
    lowered = text_of(with_row(TALL, row), worker).partition(" SUM")[0]
    assert " ".join(word for word in lowered.split() if not word.startswith("REDUCE")) == expected


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ("0.0", "REDUCE_L0 SUM_L0 RECV_VOTE0.0<0.1 SEND_VERDICT0.0>0.1 STEP_L0"),
        ("0.1", "REDUCE_L1 SUM_L1 RECV_VOTE0.0<0.2 SEND_VOTE0.0>0.0 RECV_VERDICT0.0<0.0 SEND_VERDICT0.0>0.2 STEP_L1"),
        ("0.2", "REDUCE_L2 SUM_L2 SEND_VOTE0.0>0.1 RECV_VERDICT0.0<0.1 STEP_L2"),
    ],
)
def test_the_vote_travels_to_the_first_stage_and_the_verdict_back(worker, expected):
    text = text_of(TALL, worker)
    assert text[text.index("REDUCE") :] == expected


def test_layers_reduce_downwards_and_step_upwards():
    assert text_of(WIDE, "1.0") == "F1.0 B1.0 REDUCE_L1 B1.0 REDUCE_L0 SUM_L1 SUM_L0 STEP_L0 STEP_L1"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0.1: F0.0 F0.1 B0.1 B0.0", "F0.0 F0.1 B0.1 >0.1 B0.0[5:6] L5 B0.0[4:5] L4 B0.0[3:4] >0.0 L3"),
        (
            "0.1: F0.0 F0.1 I0.0 I0.1 W0.1 W0.0",
            "F0.0 F0.1 I0.0 >0.0 I0.1 >0.1 W0.1 W0.0[5:6] L5 W0.0[4:5] L4 W0.0[3:4] L3",
        ),
    ],
)
def test_a_worker_contributes_as_soon_as_a_layer_is_complete(row, expected):
    """But sends a gradient on first, for which the worker before waits."""
    assert told(with_row(regular_plan(2, split_evenly(6, 2), 2), row), "0.1") == expected


def test_what_is_summed_by_one_worker_alone_does_not_take_an_operation_apart():
    assert told(regular_plan(1, split_evenly(6, 2), 1), "0.1") == "F0.0 B0.0 >0.0 L5 L4 L3"


def test_tied_weights_wait_for_the_last_of_their_layers():
    assert told(regular_plan(2, split_evenly(3, 1), 1), "0.0", ties=((0, 2),)).endswith("L1 B0.0[0:1] L0 L0+2")


@pytest.mark.parametrize(
    ("visits", "expected"),
    [
        ((3, 5, 3, 5), "F0.0[3:5] F0.1[3:5] B0.0[3:5] >0.0 B0.1[4:5] L5 L4 B0.1[3:4] >0.1 L3"),
        ((3, 6, 3, 5), "F0.0 F0.1[3:5] B0.0[5:6] L5 B0.0[3:5] >0.0 B0.1[4:5] L4 B0.1[3:4] >0.1 L3"),
        ((3, 5, 5, 6), "F0.0[3:5] F0.1[5:6] B0.0[3:5] >0.0 B0.1[5:6] >0.1 L5 L4 L3"),
    ],
    ids=["never computes layer 5", "completes it before", "completes it after"],
)
def test_sums_come_in_one_order_whatever_a_worker_computes(visits, expected):
    plan = with_row(regular_plan(2, split_evenly(6, 2), 2), "0.1: F0.0 F0.1 B0.0 B0.1")
    routes = tuple(
        Route(plan.routes.batch.named(0, index), tuple(covering(WorkerId(0, 1), LayerRange(start, stop))))
        for index, start, stop in [(0, *visits[:2]), (1, *visits[2:])]
    )
    assert told(dataclasses.replace(plan, routes=Routes(routes)), "0.1") == expected


def covering(worker, layers):
    """Visits that cover six layers: these on this worker, what is before and after on others."""
    yield Visit(WorkerId(0, 0), LayerRange(0, 3))
    if layers.start > 3:
        yield Visit(WorkerId(1, 1), LayerRange(3, layers.start))
    yield Visit(worker, layers)
    if layers.stop < 6:
        yield Visit(WorkerId(1, 1), LayerRange(layers.stop, 6))


def told(plan, worker, **options):
    """A program's operations, contributions and sends of gradients, in short; the layers of what is not all of 3:6."""
    program = lower_worker(plan, WorkerId.parse(worker), **options)
    words = []
    for i in program.operations:
        match i:
            case Compute(op=op, layers=layers):
                words.append(str(op) if layers == LayerRange(3, 6) else f"{op}[{layers}]")
            case Reduce(reduction):
                words.append(reduction.name)
            case Send(payload=Payload.GRADIENT, microbatch=microbatch):
                words.append(f">{microbatch}")
    return " ".join(words)


def test_ties_reduce_after_the_layers_over_the_owners_of_any_of_them():
    programs = lower(regular_plan(2, split_evenly(4, 2), 1), ties=((0, 3), (0, 1)))
    text = {str(program.worker): printed(program.instructions) for program in programs}
    assert "SUM_L1 SUM_L0 SUM_L0+3 SUM_L0+1 RECV_VOTE" in text["1.0"]
    assert "SUM_L3 SUM_L2 SUM_L0+3 SEND_VOTE" in text["1.1"]
    tied = next(i.reduction for i in programs[0].instructions if str(i) == "REDUCE_L0+3")
    assert [str(worker) for worker in tied.workers] == ["0.0", "0.1", "1.0", "1.1"]


def test_a_shared_worker_passes_all_votes_before_any_verdict():
    plan = adaptive_plan(regular_plan(2, split_evenly(3, 3), 1), [WorkerId(1, 1)])
    text = text_of(plan, "0.1")
    assert text[text.index("REDUCE_L1") :] == (
        "REDUCE_L1 SUM_L1 RECV_VOTE0.0<0.2 SEND_VOTE0.0>0.0 RECV_VOTE1.0<1.2 SEND_VOTE1.0>1.0 "
        "RECV_VERDICT0.0<0.0 SEND_VERDICT0.0>0.2 RECV_VERDICT1.0<1.0 SEND_VERDICT1.0>1.2 STEP_L1"
    )


def test_chains_that_add_no_worker_are_left_out():
    worker = WorkerId(0, 0)
    placement = Placement(num_layers=1, ranges=((worker, LayerRange(0, 1)), (WorkerId(0, 1), LayerRange(0, 1))))
    visits = [(Visit(WorkerId(0, stage), LayerRange(0, 1)),) for stage in range(2)]
    routes = Routes(tuple(Route(each, visits[each.pipeline % 2]) for each in Batch((1,) * 4).microbatches))
    orders = orders_of("0.0: F0.0 B0.0 F2.0 B2.0\n0.1: F1.0 F3.0", routes.batch)
    plan = Plan(placement=placement, routes=routes, orders=orders)
    assert "VOTE" not in text_of(plan, "0.0")
    tall = adaptive_plan(regular_plan(2, split_evenly(2, 2), 1), [WorkerId(1, 0), WorkerId(1, 1)])
    assert "VOTE0.0" in text_of(tall, "0.0")
    assert "VOTE1.0" not in text_of(tall, "0.0")


def test_where_nobody_computes_there_is_no_verdict():
    plan = regular_plan(1, split_evenly(2, 2), 1)
    odd = Plan(placement=plan.placement, routes=Routes(()), orders=orders_of("0.0:\n0.1:", Batch((1,))))
    with pytest.raises(InvalidSchedule, match=r"worker 0\.0.*nobody computes"):
        lower(odd)


@pytest.mark.parametrize(
    ("layers", "verdict", "riding"),
    [
        (LayerRange(0, 1), "RECV_VOTE1.2<0.1 SEND_VOTE1.2>0.0 RECV_VERDICT1.2<0.0 SEND_VERDICT1.2>0.1", "0.0 0.1"),
        (LayerRange(1, 2), "SEND_VOTE1.2>0.1 RECV_VERDICT1.2<0.1", "0.1"),
        (LayerRange(0, 2), "SEND_VOTE1.2>0.1 RECV_VERDICT1.2<0.1", "0.1"),
    ],
    ids=["of the first", "of the last", "of both"],
)
def test_a_listener_stands_behind_whoever_runs_the_last_of_its_layers(layers, verdict, riding):
    plan = with_listeners(regular_plan(1, split_evenly(2, 2), 1), [(WorkerId(1, 1), layers)])
    programs = {str(p.worker): p for p in lower(plan)}
    reduced = " ".join(f"{word}_L{layer}" for word in ("REDUCE", "SUM") for layer in reversed(layers.indices))
    stepped = " ".join(f"STEP_L{layer}" for layer in layers.indices)
    assert printed(programs["1.1"].instructions) == f"{reduced} {verdict} {stepped}"
    before, *after = riding.split()
    votes = " ".join([f"RECV_VOTE1.2<{before}", *(f"SEND_VOTE1.2>{each}" for each in after)])
    verdicts = " ".join([*(f"RECV_VERDICT1.2<{each}" for each in after), f"SEND_VERDICT1.2>{before}"])
    assert printed(programs["1.1"].riding) == f"{votes} {verdicts} {reduced.partition(' SUM')[0]}"
    assert "RECV_VOTE" not in printed(programs["0.0"].riding), "nobody before it waits for its vote"
    validate(plan)


def test_listeners_are_spread_over_the_routes():
    plan = regular_plan(2, split_evenly(2, 2), 1)
    plan = with_listeners(plan, [(WorkerId(2, stage), layers) for stage, layers in enumerate(split_evenly(2, 2))])
    riding = {str(p.worker): printed(p.riding) for p in lower(plan)}
    assert (riding["2.0"].split()[0], riding["2.1"].split()[0]) == ("RECV_VOTE2.1<0.0", "RECV_VOTE2.2<1.1")
    validate(plan)


def test_operations_know_their_layers_and_messages_where_they_cross():
    """The texts do not say it, and nothing compares it: so here it is."""
    placement = home_placement([split_evenly(6, 2), split_evenly(6, 3)])
    plan = adaptive_plan(home_plan(placement, Batch((1, 1))), [WorkerId(0, 0)])
    found = {}
    for program in lower(plan):
        for i in program.operations:
            if isinstance(i, Compute):
                found[str(program.worker), str(i)] = str(i.layers)
            elif not isinstance(i, Reduce):
                found[str(program.worker), str(i)] = i.boundary
    assert found["1.0", "F0.0"] == "0:2"
    assert (found["1.0", "SEND_ACT0.0>1.1"], found["1.1", "RECV_ACT0.0<1.0"]) == (2, 2)
    assert (found["1.1", "F0.0"], found["1.1", "B0.0"], found["1.1", "F1.0"]) == ("2:3", "2:3", "2:4")
    assert (found["1.1", "SEND_ACT0.0>0.1"], found["0.1", "RECV_ACT0.0<1.1"]) == (3, 3)
    assert (found["0.1", "SEND_GRAD0.0>1.1"], found["1.1", "RECV_GRAD0.0<0.1"]) == (3, 3)
    assert (found["1.1", "SEND_GRAD0.0>1.0"], found["1.0", "RECV_GRAD0.0<1.1"]) == (2, 2)
    assert {i.boundary for program in lower(plan) for i in program.verdict} == {0}


def test_chains_beside_all_routes_are_numbered_apart_from_microbatches():
    numbers = {each.number for each in Batch((3, 3, 3)).microbatches} | {
        beside(p, i).number for p in range(3) for i in range(3, 9)
    }
    assert len(numbers) == 27


def test_an_operation_off_its_route_is_refused():
    with pytest.raises(InvalidSchedule, match=r"worker 0\.1, position 1 \(F1\.0\)"):
        lower(with_row(regular_plan(2, split_evenly(2, 2), 1), "0.1: F0.0 F1.0"))


def test_groups_are_links_and_reductions():
    plan = regular_plan(3, split_evenly(2, 2), 2)
    found = [" ".join(map(str, group)) for group in groups(lower(plan))]
    assert found == ["0.0 0.1", "0.0 1.0 2.0", "0.1 1.1 2.1", "1.0 1.1", "2.0 2.1"]


def test_two_owners_reduce_in_a_group_of_their_own():
    """They exchange nothing else."""
    assert groups(lower(regular_plan(2, split_evenly(2, 1), 1))) == ((WorkerId(0, 0), WorkerId(1, 0)),)


def test_instructions_round_trip():
    plan = adaptive_plan(regular_plan(3, split_evenly(4, 4), 6), [WorkerId(1, 2)])
    for program in lower(plan, ties=((0, 3),)):
        reductions = {i.reduction for i in program.instructions if hasattr(i, "reduction")}
        text = printed(program.instructions)
        assert instructions_of(text, plan.routes.batch, reductions) == program.instructions


def test_malformed_reductions_are_refused():
    with pytest.raises(InvalidSchedule, match="sorted workers"):
        Reduction((1,), (WorkerId(1, 0), WorkerId(0, 0)))
    assert Reduction((0, 9), (WorkerId(0, 0),)).name == "L0+9"


def riding(plan, worker):
    return printed(next(p for p in lower(plan) if p.worker == WorkerId.parse(worker)).riding)


def test_the_verdict_on_a_step_rides_on_the_first_micro_batch_of_the_next():
    plan = regular_plan(1, split_evenly(3, 3), 2)
    assert riding(plan, "0.0") == (
        "SEND_VOTE0.0>0.1 F0.0 SEND_ACT0.0>0.1 F0.1 SEND_ACT0.1>0.1 RECV_VERDICT0.0<0.1 RECV_GRAD0.0<0.1 B0.0 "
        "RECV_GRAD0.1<0.1 B0.1 REDUCE_L0"
    )
    assert riding(plan, "0.1") == (
        "RECV_VOTE0.0<0.0 SEND_VOTE0.0>0.2 RECV_ACT0.0<0.0 F0.0 SEND_ACT0.0>0.2 RECV_ACT0.1<0.0 F0.1 SEND_ACT0.1>0.2 "
        "RECV_VERDICT0.0<0.2 SEND_VERDICT0.0>0.0 RECV_GRAD0.0<0.2 B0.0 SEND_GRAD0.0>0.0 RECV_GRAD0.1<0.2 B0.1 "
        "SEND_GRAD0.1>0.0 REDUCE_L1"
    )
    assert riding(plan, "0.2").startswith("RECV_VOTE0.0<0.1 RECV_ACT0.0<0.1 F0.0 SEND_VERDICT0.0>0.1 B0.0")


@pytest.mark.parametrize("gone", range(12))
def test_a_grid_whose_pipelines_begin_at_any_micro_batch_ends(gone):
    """Five micro-batches of three pipelines on four new ones: one of these has none with index 0."""
    whole = regular_plan(3, split_evenly(5, 4), 2)
    smaller = shrunken_plan(whole.workers, whole.routes.microbatches[:5], 5, max_layers=2)
    validate(smaller)
    validate(adaptive_plan(smaller, smaller.workers[gone : gone + 1]))
