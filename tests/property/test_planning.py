"""Any small grid, any survivable failures, any uneven costs: engines, bounds and proofs against one another."""

import dataclasses
import itertools
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.starts_model import least

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import Costs, parse_costs
from holdfast.core.validate import validate
from holdfast.errors import InvalidSchedule
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.normalise import per_stage
from holdfast.planning.planner import Solver, Technique, make_plan, plan_bound
from holdfast.planning.solvers import counting
from holdfast.planning.solvers.process import answer_of, given_of, suits
from holdfast.schedule import timing
from holdfast.schedule.array_scheduler import array_schedule
from holdfast.schedule.bounds import BoundRules, StageBounds, bound
from holdfast.schedule.engine import Schedule
from holdfast.schedule.evaluate import evaluate, steady_period
from holdfast.schedule.list_scheduler import list_schedule, plain_urgency
from holdfast.schedule.problem import to_plan
from holdfast.schedule.timing import (
    as_late_as_possible,
    as_soon_as_possible,
    check,
    group_windows,
    measure,
    rows_to_run,
    sequence_of,
    settle,
)

FEW = settings(max_examples=25)
MANY = settings(max_examples=150)
TECHNIQUES = st.sampled_from([Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED])


@st.composite
def instances(draw, pipelines=4, stages=5, microbatches=6, splits=True, tied=False):
    dp, pp, m = draw(st.integers(1, pipelines)), draw(st.integers(1, stages)), draw(st.integers(1, microbatches))

    def row(least, most, count=pp):
        return tuple(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)))

    gives_input, gives_weight = row(0, 2), row(1, 2)
    takes = tuple(a + b for a, b in zip(gives_input, gives_weight, strict=True))
    costs = Costs(
        forward=row(0, 9),
        input=row(0, 9),
        weight=row(0, 9),
        optimizer=row(0, 5),
        comm=row(0, 4, pp - 1),
        split=draw(st.none() | st.just(row(0, 6))) if splits else None,
        takes=takes,
        gives_input=gives_input,
        gives_weight=gives_weight,
        capacity=draw(st.none() | st.just(tuple(t * k for t, k in zip(takes, row(1, pp), strict=True)))),
    )
    alive = [draw(st.sets(st.integers(0, dp - 1), min_size=1)) for _ in range(pp)]
    failed = frozenset(WorkerId(p, s) for s in range(pp) for p in range(dp) if p not in alive[s])
    pairs = st.lists(st.integers(0, pp - 1), min_size=2, max_size=2, unique=True).map(sorted).map(tuple)
    ties = tuple(draw(st.lists(pairs, max_size=2))) if tied and pp > 1 else ()
    return CostedGrid(pipelines=dp, stages=split_evenly(pp, pp), microbatches=m, costs=costs, ties=ties), failed


@MANY
@given(instances(tied=True), TECHNIQUES, st.booleans())
def test_every_plan_is_proved_twice_and_not_below_its_bound(instance, technique, keep_home):
    grid, failed = instance
    planned = make_plan(grid, failed, technique, time_limit_s=0.0, keep_home=keep_home)
    assert planned.problem.failed == failed
    plan = planned.plan
    validate(plan, costs=grid.costs)
    assert planned.found.period >= planned.bound.period
    assert planned.found.makespan >= planned.bound.makespan
    staggered = technique is Technique.STAGGERED
    at_once = evaluate(plan, grid.costs, staggered=staggered, ties=grid.ties).period
    assert steady_period(plan, grid.costs, staggered=True, ties=grid.ties) <= planned.found.period + 1e-9
    assert planned.found.period <= at_once
    own = {worker: set(plan.routes.through(worker)) for worker in plan.workers}
    for worker, visits in own.items() if keep_home else ():
        assert {mb.index for mb in visits if mb.pipeline == worker.pipeline} == set(range(grid.microbatches))
    for stage in range(len(grid.stages)):
        loads = [len(visits) for worker, visits in own.items() if worker.stage == stage]
        assert max(loads) == -(-grid.pipelines * grid.microbatches // len(loads))


@MANY
@given(instances(splits=False), st.integers(1, 11))
def test_staggering_never_makes_a_step_longer(instance, tries):
    """Its known rules contain those for the makespan, in turns with its own.

    Where I apart takes longer, the search compares schedules before I and W that gain nothing are made one: there the
    best of more schedules may be a worse one after that.
    """
    grid, failed = instance
    periods = {
        technique: make_plan(grid, failed, technique, time_limit_s=inf, tries=count).found.period
        for technique, count in ((Technique.DECOUPLED, tries), (Technique.STAGGERED, 2 * tries))
    }
    assert periods[Technique.STAGGERED] <= periods[Technique.DECOUPLED] * (1 + 1e-9)


@MANY
@given(instances(tied=True), st.randoms(use_true_random=False), st.booleans())
def test_any_urgency_gives_a_schedule_within_memory(instance, rng, coupled):
    grid, failed = instance
    problem = grid_problem(grid, failed, coupled=coupled)
    urgency = plain_urgency(problem)
    rng.shuffle(urgency)
    limits = [rng.randint(1, 5) for _ in grid.stages]
    schedule = list_schedule(problem, urgency, patience=rng.choice([0, 0.5, 1]), limits=limits)
    check(problem, schedule)
    settled = settle(problem, schedule, staggered=True)
    check(problem, settled)
    assert measure(problem, settled, staggered=True).period <= measure(problem, schedule, staggered=True).period


@MANY
@given(instances(), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_all_workers_at_once_give_a_schedule_within_memory_as_early_as_it_can_be(instance, rng, coupled, eager):
    grid, failed = instance
    problem = grid_problem(grid, failed, coupled=coupled)
    limits = rng.choice([None, [rng.randint(1, 5) for _ in grid.stages]])
    ahead = rng.randrange(3)
    schedule = array_schedule(
        problem,
        patience=rng.choice([0, 0.5, 1]),
        limits=limits,
        eager=eager,
        ahead=ahead,
        forward_first=rng.choice([False, True]),
    )
    check(problem, schedule)
    assert schedule.sequence == sorted(schedule.sequence, key=schedule.starts.__getitem__)
    assert as_soon_as_possible(problem, schedule).starts == schedule.starts
    assert all(isinstance(start, int) for start in schedule.starts)


@MANY
@given(instances(), st.booleans())
def test_moments_moved_at_once_end_up_where_they_do_one_by_one(instance, coupled):
    grid, failed = instance
    problem = grid_problem(grid, failed, coupled=coupled)
    schedule = list_schedule(problem, plain_urgency(problem))
    deadlines = [end + stage for stage, end in enumerate(group_windows(problem, schedule)[1])]
    with pytest.MonkeyPatch.context() as patch:
        one_by_one = as_late_as_possible(problem, schedule, deadlines)
        patch.setattr(timing, "_MANY", 0)
        patch.setattr(timing, "_TOGETHER", 0)
        at_once = as_late_as_possible(problem, schedule, deadlines)
    ran = schedule.sequence
    assert [at_once.starts[number] for number in ran] == [one_by_one.starts[number] for number in ran]


@FEW
@given(instances())
def test_each_technique_is_bounded_by_the_one_with_more_freedom(instance):
    grid, failed = instance
    lost = tuple(sum(worker.stage == stage for worker in failed) for stage in range(len(grid.stages)))
    periods = [plan_bound(grid, lost, each).period for each in reversed(Technique)]
    assert periods == sorted(periods)


@FEW
@given(instances(), st.integers(0, 4), st.integers(1, 20))
def test_the_bound_never_falls_with_load(instance, stage, load):
    grid, _ = instance
    stage %= len(grid.stages)
    stages = StageBounds(grid.each, grid.comm)
    fewer, more = stages.of(stage, load), stages.of(stage, load + 1)
    assert fewer.period <= more.period
    assert fewer.makespan <= more.makespan


def every_row(ops):
    """All orders of one worker's operations in which F comes before I before W of the same micro-batch."""
    for row in itertools.permutations(ops):
        position = {op: at for at, op in enumerate(row)}
        if all(position[0, mb] < position[1, mb] < position[2, mb] for _, mb in ops):
            yield row


def brute_force(problem, staggered):
    """The shortest period or makespan over all orders of all workers that are within memory and do not deadlock."""
    best, visits = None, problem.num_visits
    choices = []
    for worker in range(problem.num_workers):
        ops = [(kind, visit) for visit in range(visits) if problem.worker_of[visit] == worker for kind in range(3)]
        choices.append([[kind * visits + visit for kind, visit in row] for row in every_row(ops)])
    for rows in itertools.product(*choices):
        schedule = timed(problem, list(rows))
        if schedule is not None:
            found = measure(problem, schedule, staggered=staggered)
            value = found.period if staggered else found.makespan
            best = value if best is None else min(best, value)
    return best


def timed(problem, rows):
    try:
        schedule = Schedule(starts=[], rows=rows, sequence=sequence_of(problem, rows))
        schedule = as_soon_as_possible(problem, schedule)
        check(problem, schedule)
    except InvalidSchedule:
        return None
    return settle(problem, schedule, staggered=True)


@FEW
@given(instances(pipelines=1, stages=2, microbatches=2, splits=False, tied=True), st.booleans())
def test_brute_force_bound_and_search_agree(instance, staggered):
    grid, failed = instance
    technique = Technique.STAGGERED if staggered else Technique.DECOUPLED
    exact = brute_force(grid_problem(grid, failed), staggered)
    lower = plan_bound(grid, (0,) * len(grid.stages), technique)
    assert (lower.period if staggered else lower.makespan) <= exact
    planned = make_plan(grid, failed, technique, time_limit_s=0.05)
    assert (planned.found.period if staggered else planned.found.makespan) >= exact


def repeats(problem, rows, period):
    """Whether these orders can be run again and again with this period: no cycle of waiting is longer than it."""
    visits, stages, pipelines = problem.num_visits, problem.num_groups, problem.num_workers // problem.num_groups
    per_stage = [[row for row in rows[s * pipelines :][:pipelines] if row] for s in range(stages)]
    waits = [(before, after, 0) for row in rows for before, after in itertools.pairwise(row)]
    for visit, stage in ((visit, visit % stages) for visit in range(visits)):
        waits += [(visit, visit + visits, 0), (visit + visits, visit + 2 * visits, 0)]
        if stage < stages - 1:
            comm = problem.comm[stage]
            waits += [(visit, visit + 1, comm), (visit + 1 + visits, visit + visits, comm)]
    for stage, others in enumerate(window.waits_for for window in problem.windows):
        ends = [row[-1] for other in others for row in per_stage[other]]
        waits += [(end, row[0], problem.optimizer[stage] - period) for end in ends for row in per_stage[stage]]
    starts = [0] * (3 * visits)
    for _ in range(3 * visits + 1):
        later = list(starts)
        for before, after, delay in waits:
            kind, visit = divmod(before, visits)
            later[after] = max(later[after], later[before] + problem.durations[kind][visit % stages] + delay)
        if later == starts:
            return True
        starts = later
    return False


@MANY
@given(instances(pipelines=2, stages=4, microbatches=3, splits=False, tied=True), st.randoms(use_true_random=False))
def test_settled_times_have_the_shortest_period_of_their_orders(instance, rng):
    """Whether or not layers are tied: what is called its period can be kept up, and nothing shorter by a unit."""
    grid, failed = instance
    problem = grid_problem(grid, failed)
    urgency = plain_urgency(problem)
    rng.shuffle(urgency)
    schedule = list_schedule(problem, urgency)
    period = measure(problem, settle(problem, schedule, staggered=True), staggered=True).period
    assert repeats(problem, schedule.rows, period)
    assert not repeats(problem, schedule.rows, period - 1)


@FEW
@given(instances(pipelines=3, stages=4, microbatches=4, tied=True))
def test_ties_never_make_a_period_shorter(instance):
    grid, failed = instance
    plan = make_plan(grid, failed, Technique.STAGGERED, time_limit_s=0.0).plan
    tied = evaluate(plan, grid.costs, staggered=True, ties=grid.ties)
    apart = evaluate(plan, grid.costs, staggered=True)
    assert tied.spans == apart.spans
    assert apart.period <= tied.period
    assert evaluate(plan, grid.costs, ties=grid.ties).period == evaluate(plan, grid.costs).period, "synchronous"


@MANY
@given(instances(pipelines=3, stages=4, microbatches=5), st.randoms(use_true_random=False), st.booleans())
def test_no_mixture_of_whole_and_split_backwards_beats_the_bound(instance, rng, staggered):
    grid, failed = instance
    problem = grid_problem(grid, failed)
    urgency = plain_urgency(problem)
    rng.shuffle(urgency)
    schedule = list_schedule(problem, urgency, limits=[rng.randint(1, 5) for _ in grid.stages])
    pairs = [
        pair for row in schedule.rows for pair in itertools.pairwise(row) if pair[1] - pair[0] == problem.num_visits
    ]
    whole = {before - problem.num_visits for before, _ in pairs if before >= problem.num_visits and rng.random() < 0.7}
    mixed = settle(problem, dataclasses.replace(schedule, fused=frozenset(whole)), staggered=staggered)
    check(problem, mixed)
    technique = Technique.STAGGERED if staggered else Technique.DECOUPLED
    found = measure(problem, mixed, staggered=staggered)
    lower = plan_bound(grid, per_stage(failed, len(grid.stages)), technique)
    assert lower.period <= found.period
    assert lower.makespan <= found.makespan
    plan = to_plan(problem, rows_to_run(problem, mixed))
    validate(plan, costs=grid.costs)
    assert evaluate(plan, grid.costs).makespan <= found.makespan


@pytest.mark.soak
@settings(max_examples=5)
@given(instances(pipelines=2, stages=3, microbatches=3, tied=True), TECHNIQUES)
def test_cp_sat_is_between_the_bound_and_the_list_scheduler(instance, technique):
    grid, failed = instance
    quick = make_plan(grid, failed, technique, time_limit_s=0.05)
    exact = make_plan(grid, failed, technique, time_limit_s=4, engine=Solver.CP_SAT)
    validate(exact.plan, costs=grid.costs)
    assert quick.bound.period <= exact.bound.period <= exact.found.period <= quick.found.period


@settings(max_examples=12)
@given(instances(pipelines=2, stages=3, microbatches=3, splits=False, tied=True), TECHNIQUES, st.integers(1, 3))
def test_counting_and_a_variable_per_start_find_the_same_optimum(instance, technique, unit):
    grid, failed = instance
    costs = grid.costs
    times = {k: tuple(unit * (1 + t % 3) for t in getattr(costs, k)) for k in ("forward", "input", "weight")}
    others = {k: tuple(unit * (t % 3) for t in getattr(costs, k)) for k in ("comm", "optimizer")}
    grid = dataclasses.replace(grid, costs=dataclasses.replace(costs, **times, **others))
    problem, staggered = grid_problem(grid, failed, coupled=technique.rules.coupled), technique is Technique.STAGGERED
    hint = list_schedule(problem, plain_urgency(problem))
    value = technique.minimised(measure(problem, hint, staggered=staggered))
    goal = technique.minimised(plan_bound(grid, per_stage(failed, len(grid.stages)), technique))
    asked, per_unit = given_of(problem, staggered=staggered, hint=hint, value=value, goal=goal, time_limit_s=60)
    assert suits(problem, value)
    counted = counting.solve(asked)
    assert counted["status"] == "OPTIMAL"
    assert counted["value"] == least(asked) == counted["bound"] >= goal
    found = answer_of(problem, counted, per_unit).schedule
    check(problem, found)
    assert technique.minimised(measure(problem, found, staggered=staggered)) == counted["value"]


def test_the_coupled_bound_of_a_grid_is_that_of_its_worst_stage():
    grid = CostedGrid(
        pipelines=2,
        stages=split_evenly(2, 2),
        microbatches=3,
        costs=parse_costs(2, costs="1:2,3:1,1", comm="1", optimizer="0:4"),
    )
    rules = BoundRules(coupled=True, staggered=False)
    stages = StageBounds(grid.each, grid.comm, rules)
    found = bound(grid.each, grid.comm, (3, 6), rules)
    assert found.makespan == max(stages.of(0, 3).makespan, stages.of(1, 6).makespan)
    problem = grid_problem(grid, [WorkerId(0, 1)], coupled=True)
    plan = to_plan(problem, list_schedule(problem, plain_urgency(problem)).rows)
    assert evaluate(plan, grid.costs).makespan >= found.makespan


@pytest.mark.soak
def test_cp_sat_proves_an_optimum_of_uneven_stages():
    costs = parse_costs(2, costs="3:2,2:4,5:1", comm="1", optimizer="2:1", memory="2,1,1,4")
    grid = CostedGrid(pipelines=1, stages=split_evenly(2, 2), microbatches=3, costs=costs)
    found = make_plan(grid, [], Technique.STAGGERED, time_limit_s=20, engine=Solver.CP_SAT)
    assert found.optimal
    assert found.found.period == found.bound.period == 38


def test_cp_sat_proves_the_optimum_of_tied_stages():
    """The same as trying all orders. What is tied waits for the last stage's W, which was nobody's business before."""
    costs = parse_costs(2, costs="2:3,2:1,1:5", optimizer="6:1")
    grid = CostedGrid(pipelines=1, stages=split_evenly(2, 2), microbatches=2, costs=costs)
    tied = dataclasses.replace(grid, ties=((0, 1),))
    periods = [brute_force(grid_problem(each, []), True) for each in (grid, tied)]
    found = [make_plan(each, [], Technique.STAGGERED, time_limit_s=20, engine=Solver.CP_SAT) for each in (grid, tied)]
    assert [each.optimal for each in found] == [True, True]
    assert [each.found.period for each in found] == periods == [19, 26]


def test_cp_sat_proves_the_running_example_with_the_memory_of_1f1b():
    grid = CostedGrid(
        pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=parse_costs(4, memory="1,0,1,4:3:2:1")
    )
    found = make_plan(grid, [WorkerId(1, 2)], Technique.ADAPTIVE, time_limit_s=30, engine=Solver.CP_SAT)
    assert found.optimal
    assert found.found.makespan == found.bound.makespan == 36


@pytest.mark.soak
@pytest.mark.parametrize(("memory", "period"), [("1,0,1,4", 29), ("1,0,1,5", 28), ("1,0,1,6", 27)])
def test_cp_sat_proves_the_staggered_running_example(memory, period):
    grid = CostedGrid(pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=parse_costs(4, memory=memory))
    found = make_plan(grid, [WorkerId(1, 2)], Technique.STAGGERED, time_limit_s=60, engine=Solver.CP_SAT)
    assert found.optimal
    assert found.found.period == found.bound.period == period


def test_a_solver_without_time_leaves_the_list_schedule():
    grid = CostedGrid(pipelines=2, stages=split_evenly(3, 3), microbatches=6, costs=parse_costs(3, memory="1,0,1,3"))
    found = make_plan(grid, [WorkerId(1, 2)], Technique.STAGGERED, time_limit_s=1e-3, engine=Solver.CP_SAT)
    validate(found.plan, costs=grid.costs)
    assert found.found.period >= found.bound.period


@FEW
@given(instances(pipelines=6, stages=4, microbatches=12))
def test_every_worker_gets_its_strays_in_turn(instance):
    grid, failed = instance
    problem = grid_problem(grid, failed)
    for stage in range(len(grid.stages)):
        lost = {worker.pipeline for worker in failed if worker.stage == stage}
        strays = [at for n, at in enumerate(problem.worker_of[stage :: len(grid.stages)]) if n % grid.pipelines in lost]
        alive = grid.pipelines - len(lost)
        for count in range(len(strays)):
            taken = Counter(strays[:count])
            assert max(taken.values(), default=0) <= count // alive + 2
