"""What workers run of an evaluation: every micro-batch once through all layers, spread over pipelines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from holdfast.core.evaluation import Evaluating, evaluation
from holdfast.core.excerpts import excerpts
from holdfast.core.ids import WorkerId, evaluated, place_in_evaluation
from holdfast.core.instructions import Compute, Payload, Receive, Send
from holdfast.core.placement import split_evenly
from holdfast.core.routes import reroute
from holdfast.core.schedule import OpKind, Orders
from holdfast.schedule.builders import regular_plan

GRIDS = [(1, 1, 1), (2, 2, 4), (3, 4, 2), (2, 3, 5), (4, 1, 1)]


def grid(pipelines, stages, microbatches):
    return regular_plan(pipelines, split_evenly(stages + 2, stages), microbatches)


def without(plan, *lost):
    left = plan.placement.without(lost)
    return replace(plan, placement=left, routes=reroute(plan.placement, plan.routes, lost), orders=Orders(()))


def test_when_it_is_due():
    evaluating = Evaluating(every=10, microbatches=4)
    assert [step for step in range(26) if evaluating.due(step, 25)] == [10, 20, 25]
    assert [step for step in range(21) if evaluating.due(step, 20)] == [10, 20]
    assert not Evaluating(every=1, microbatches=1).due(0, 5)


@pytest.mark.parametrize("of", GRIDS)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_each_microbatch_goes_once_through_all_layers(of, count):
    plan = grid(*of)
    ran, sent, received = Counter(), Counter(), Counter()
    for worker in plan.workers:
        for each in evaluation(plan, worker, range(count)).operations:
            if isinstance(each, Compute):
                assert each.op.kind is OpKind.F
                ran.update((place_in_evaluation(each.op.microbatch), layer) for layer in each.layers.indices)
            elif isinstance(each, Send):
                sent[each.payload, worker, each.peer, each.microbatch, each.boundary] += 1
            elif isinstance(each, Receive):
                received[each.payload, each.peer, worker, each.microbatch, each.boundary] += 1
    assert ran == Counter((number, layer) for number in range(count) for layer in range(plan.placement.num_layers))
    assert sent == received
    assert {payload for payload, *_ in sent} <= {Payload.ACTIVATION}
    assert sent.total() == count * (of[1] - 1)


@pytest.mark.parametrize("of", [(2, 2, 4), (3, 2, 4), (4, 2, 8)])
def test_few_of_them_are_spread_over_pipelines(of):
    plan, pipelines = grid(*of), of[0]
    last = [worker for worker in plan.workers if worker.stage == of[1] - 1]
    shares = [sum(isinstance(each, Compute) for each in evaluation(plan, w, range(pipelines)).operations) for w in last]
    assert max(shares) <= 2
    assert sum(shares) == pipelines
    assert sum(map(bool, shares)) >= pipelines - 1


def test_an_excerpt_says_the_same():
    plan = grid(3, 4, 2)
    for worker, excerpt in excerpts(plan, plan.workers).items():
        assert evaluation(excerpt, worker, range(7)) == evaluation(plan, worker, range(7))


def test_behind_a_loss_others_run_it():
    plan = without(grid(2, 2, 2), WorkerId(1, 1))
    ran = [
        each.op.microbatch
        for each in evaluation(plan, WorkerId(0, 1), range(4)).operations
        if isinstance(each, Compute)
    ]
    assert ran == [evaluated(number) for number in range(4)]
