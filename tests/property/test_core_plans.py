"""Any grid, any survivable failures, any costs: what every plan must keep, and what the validator must refuse."""

import dataclasses
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.plan_texts import instructions_of, orders_of, printed

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Reduce
from holdfast.core.lower import lower
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, parse_costs
from holdfast.core.program import groups
from holdfast.core.schedule import Op, OpKind, Orders, format_orders
from holdfast.core.validate import validate
from holdfast.errors import InvalidSchedule
from holdfast.schedule.bounds import bound
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.schedule.evaluate import evaluate

FEW = settings(max_examples=60)
MANY = settings(max_examples=200)


@dataclasses.dataclass(frozen=True)
class Case:
    num_pipelines: int
    num_stages: int
    microbatches: int
    stages: tuple[LayerRange, ...]
    failed: frozenset[WorkerId]
    costs: Costs

    @property
    def healthy(self):
        return regular_plan(self.num_pipelines, self.stages, self.microbatches, costs=self.costs)

    @property
    def plan(self):
        return adaptive_plan(self.healthy, self.failed, self.costs)

    @property
    def lower_bound(self):
        alive = [self.num_pipelines - sum(worker.stage == s for worker in self.failed) for s in range(self.num_stages)]
        loads = [-(-self.num_pipelines * self.microbatches // living) for living in alive]
        comm = [self.costs.comm[layers.stop - 1] for layers in self.stages[:-1]]
        return bound([self.costs.of(layers) for layers in self.stages], comm, loads)


@st.composite
def costs_for(draw, num_layers):
    def row(least, most, count=num_layers):
        return tuple(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)))

    gives_input, gives_weight = row(0, 3), row(1, 3)
    return Costs(
        forward=row(0, 12),
        input=row(0, 12),
        weight=row(0, 12),
        optimizer=row(0, 5),
        comm=row(0, 4, num_layers - 1),
        takes=tuple(a + b for a, b in zip(gives_input, gives_weight, strict=True)),
        gives_input=gives_input,
        gives_weight=gives_weight,
    )


@st.composite
def cases(draw, pipelines=5, stages=6, microbatches=12):
    dp, pp, m = draw(st.integers(1, pipelines)), draw(st.integers(1, stages)), draw(st.integers(1, microbatches))
    num_layers = pp + draw(st.integers(0, 3))
    alive = [draw(st.sets(st.integers(0, dp - 1), min_size=1)) for _ in range(pp)]
    failed = frozenset(WorkerId(p, s) for s in range(pp) for p in range(dp) if p not in alive[s])
    return Case(dp, pp, m, split_evenly(num_layers, pp), failed, draw(costs_for(num_layers)))


@MANY
@given(cases())
def test_every_survivable_failure_has_a_valid_plan(case):
    plan = case.plan
    validate(plan, ties=((0, case.stages[-1].stop - 1),) if case.stages[-1].stop > 1 else ())
    assert (
        set(plan.workers)
        == {WorkerId(p, s) for p in range(case.num_pipelines) for s in range(case.num_stages)} - case.failed
    )


@MANY
@given(cases())
def test_living_workers_keep_their_own_and_peers_share_evenly(case):
    plan = case.plan
    for worker in plan.workers:
        assert set(plan.routes.through(worker)) >= set(case.healthy.routes.through(worker))
    for stage in range(case.num_stages):
        loads = [len(plan.routes.through(worker)) for worker in plan.workers if worker.stage == stage]
        assert sum(loads) == case.num_pipelines * case.microbatches
        assert max(loads) - min(loads) <= 1


@FEW
@given(cases())
def test_the_limits_of_1f1b_hold_after_failures(case):
    costs = dataclasses.replace(
        case.costs,
        takes=(1,) * len(case.costs.takes),
        gives_input=(0,) * len(case.costs.takes),
        gives_weight=(1,) * len(case.costs.takes),
    )
    for worker, peak in evaluate(case.plan, costs).peak_memory:
        held = len(case.stages[worker.stage].indices)
        assert peak <= held * (case.num_stages - worker.stage)


@FEW
@given(cases(), st.integers(1, 8))
def test_memory_is_never_exceeded(case, factor):
    takes = max(case.costs.of(stage).takes for stage in case.stages)
    costs = dataclasses.replace(case.costs, capacity=(takes * factor,) * case.costs.num_layers)
    validate(adaptive_plan(case.healthy, case.failed, costs), costs=costs)
    validate(regular_plan(case.num_pipelines, case.stages, case.microbatches, costs=costs), costs=costs)


@MANY
@given(cases())
def test_no_plan_beats_the_bound(case):
    lower_bound = case.lower_bound
    timeline = evaluate(case.plan, case.costs)
    assert timeline.makespan >= lower_bound.makespan
    assert timeline.period >= lower_bound.period


@MANY
@given(cases(4, 4, 5), st.randoms(use_true_random=False), st.booleans())
def test_no_order_beats_the_bound_even_split_and_with_a_staggered_optimizer(case, rng, split):
    plan = shuffled(case.plan, rng, split)
    validate(plan)
    timeline = evaluate(plan, case.costs)
    lower_bound = case.lower_bound
    assert timeline.makespan >= lower_bound.makespan
    assert staggered_period(timeline, case) >= lower_bound.period


def staggered_period(timeline, case):
    """The period when each stage runs its optimizer step as soon as all its workers are done."""
    periods = []
    for stage, layers in enumerate(case.stages):
        spans = [span for span in timeline.spans if span.worker.stage == stage]
        busy = max(span.end for span in spans) - min(span.start for span in spans)
        periods.append(busy + case.costs.of(layers).optimizer)
    return max(periods)


def shuffled(plan, rng, split):
    """A plan with the same routes whose orders are any possible ones: operations that are ready, drawn at random."""
    rows = {worker: [] for worker in plan.workers}
    ready = [(OpKind.F, route, 0) for route in plan.routes.routes]
    while ready:
        kind, route, at = ready.pop(rng.randrange(len(ready)))
        rows[route.workers[at]].append(Op(kind, route.microbatch))
        backward = OpKind.I if split and rng.random() < 0.7 else OpKind.B
        if kind is OpKind.F:
            last = at + 1 == len(route.workers)
            ready.append((backward, route, at) if last else (OpKind.F, route, at + 1))
        elif kind is not OpKind.W:
            ready += [(OpKind.W, route, at)] * (kind is OpKind.I)
            ready += [(backward, route, at - 1)] * (at > 0)
    return dataclasses.replace(plan, orders=Orders(tuple((worker, tuple(row)) for worker, row in rows.items())))


@MANY
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 12), *[st.integers(0, 30)] * 4)
def test_1f1b_with_equal_stages_takes_what_the_formula_says(dp, pp, m, f, b, w, o):
    costs = parse_costs(pp, costs=f"{f},{b},{w}", optimizer=str(o))
    timeline = evaluate(regular_plan(dp, split_evenly(pp, pp), m, costs=costs), costs)
    assert timeline.makespan == (m + pp - 1) * (f + b + w)
    assert timeline.period == timeline.makespan + o


@FEW
@given(cases(3, 4, 6))
def test_texts_and_messages_round_trip(case):
    plan = case.plan
    batch = plan.routes.batch
    assert orders_of(format_orders(plan.orders), batch) == plan.orders
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
    for program in lower(plan):
        reductions = [i.reduction for i in program.instructions if isinstance(i, Reduce)]
        assert instructions_of(printed(program.instructions), batch, reductions) == program.instructions


@FEW
@given(cases(4, 4, 4))
def test_groups_are_distinct_and_serve_every_living_worker(case):
    found = groups(lower(case.plan))
    assert list(found) == sorted(set(found))
    assert all(len(group) > 1 and list(group) == sorted(set(group)) for group in found)
    if case.num_stages > 1:
        assert {worker for group in found for worker in group} == set(case.plan.workers)


@FEW
@given(cases(3, 4, 6), st.randoms(use_true_random=False))
def test_failures_give_the_same_plan_in_any_sequence(case, rng):
    sequence = sorted(case.failed)
    rng.shuffle(sequence)
    assert adaptive_plan(case.healthy, sequence, case.costs).digest() == case.plan.digest()


def drop(rows, rng):
    worker = pick_row(rows, rng)
    del rows[worker][rng.randrange(len(rows[worker]))]


def double(rows, rng):
    worker = pick_row(rows, rng)
    rows[worker].insert(rng.randrange(len(rows[worker]) + 1), rng.choice(rows[worker]))


def move(rows, rng):
    source = pick_row(rows, rng)
    target = rng.choice([worker for worker in rows if worker != source] or [None])
    assume(target is not None)
    op = rows[source].pop(rng.randrange(len(rows[source])))
    rows[target].insert(rng.randrange(len(rows[target]) + 1), op)


def swap(rows, rng):
    """Exchanges the forward and the backward of one micro-batch on one worker."""
    worker = pick_row(rows, rng)
    row, microbatch = rows[worker], rng.choice(rows[worker]).microbatch
    first, *_, last = [position for position, op in enumerate(row) if op.microbatch == microbatch]
    row[first], row[last] = row[last], row[first]


def rename(rows, rng):
    worker = pick_row(rows, rng)
    at = rng.randrange(len(rows[worker]))
    others = [kind for kind in OpKind if kind is not rows[worker][at].kind]
    rows[worker][at] = Op(rng.choice(others), rows[worker][at].microbatch)


def pick_row(rows, rng):
    return rng.choice([worker for worker in rows if rows[worker]])


@pytest.mark.parametrize("mutate", [drop, double, move, swap, rename])
@FEW
@given(case=cases(3, 4, 5), rng=st.randoms(use_true_random=False), split=st.booleans())
def test_the_validator_refuses_every_mutation(mutate, case, rng, split):
    plan = shuffled(case.plan, random.Random(7), True) if split else case.plan
    rows = {worker: list(row) for worker, row in plan.orders.rows}
    mutate(rows, rng)
    orders = Orders(tuple((worker, tuple(row)) for worker, row in rows.items()))
    with pytest.raises(InvalidSchedule, match="ERROR HERE"):
        validate(dataclasses.replace(plan, orders=orders))


@FEW
@given(cases(3, 4, 5), st.randoms(use_true_random=False))
def test_reordered_rows_are_refused_exactly_if_they_deadlock(case, rng):
    """Swaps neighbours on one worker; evaluator and validator, which share no code, agree whether the step ends."""
    rows = {worker: list(row) for worker, row in case.plan.orders.rows}
    for _ in range(4):
        worker = pick_row(rows, rng)
        at = rng.randrange(len(rows[worker]) - 1)
        rows[worker][at : at + 2] = reversed(rows[worker][at : at + 2])
    plan = dataclasses.replace(case.plan, orders=Orders(tuple((worker, tuple(row)) for worker, row in rows.items())))
    assume(all(is_paired(row) for row in rows.values()))
    assert ends(lambda: validate(plan)) == ends(lambda: evaluate(plan, case.costs))


def is_paired(row):
    """Whether every micro-batch comes forward first; otherwise the plan breaks another rule than a deadlock."""
    seen = Counter()
    for op in row:
        seen[op.microbatch] += 1
        if (op.kind is OpKind.F) != (seen[op.microbatch] == 1):
            return False
    return True


def ends(call):
    try:
        call()
    except InvalidSchedule:
        return False
    return True
