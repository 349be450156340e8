"""Schedules of all kinds, as digests: whatever is made over in the code that makes them, they stay the same to a bit.

After a change that is meant to change some: ``python -m tests.golden.test_schedule_digests`` writes the digests anew.
"""

from __future__ import annotations

import hashlib
import itertools
from functools import partial
from math import inf
from pathlib import Path

import pytest

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.placement import LayerRange, home_placement, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import parse_costs
from holdfast.core.routes import Route, Routes, Visit, home_routes, reroute
from holdfast.core.schedule import format_orders
from holdfast.errors import HoldfastError
from holdfast.planning.costed_grid import CostedGrid, grid_problem
from holdfast.planning.normalise import per_stage
from holdfast.planning.planner import Technique, make_plan, plan_bound, plan_routes
from holdfast.planning.remainder import plan_remainder, progress_at
from holdfast.schedule.array_scheduler import array_schedule
from holdfast.schedule.builders import Limit, adaptive_plan, one_f_one_b, regular_plan
from holdfast.schedule.evaluate import evaluate, steady_period
from holdfast.schedule.list_scheduler import list_schedule, plain_urgency
from holdfast.schedule.problem import routes_problem
from holdfast.schedule.route_bounds import route_bound

FILE = Path(__file__).parent / "schedule-digests.txt"
COSTS = {
    "alike": {},
    "uneven": {"costs": "3:1:2:3:1:2,2,1:2:1:2:1:2", "comm": "1"},
    "nothing takes time": {"costs": "0,2,1", "comm": "0"},
    "fractions": {"costs": "0.1,0.3,0.1", "comm": "0.1", "optimizer": "0.2"},
    "memory": {"costs": "2,2,1", "memory": "1,0.5,0.5,13"},
    "room for one": {"costs": "2,2,1", "memory": "1,0,1,6"},
    "split": {"costs": "3,2,2", "split": "1", "optimizer": "1:3:1:3:1:3"},
}
LAYERS = 6
ROWS = {
    "alike": [[2, 2, 2]] * 3,
    "unlike": [[2, 4], [3, 2, 1], [6]],
    "crossing": [[1, 5], [5, 1], [3, 3]],
    "lanes": [[2, (4, 2)], [(3, 3), 3], [6]],
}
"""The sizes of each pipeline's stages; with how many lanes, if they have several."""


def costs_of(name):
    return parse_costs(LAYERS, **COSTS[name])


def routes_of(rows, lost):
    placement = home_placement([list(_ranges(row)) for row in ROWS[rows]])
    home = home_routes(placement, Batch((4,) * len(ROWS[rows])))
    return placement.without(lost), reroute(placement, home, lost), home


def _ranges(row):
    start = 0
    for stage in row:
        size, lanes = stage if isinstance(stage, tuple) else (stage, 1)
        yield from [LayerRange(start, start + size)] * lanes
        start += size


def told(schedule):
    return repr((schedule.starts, schedule.rows, schedule.sequence, sorted(schedule.fused)))


def built(rows, lost, costs, limit):
    placement, routes, home = routes_of(rows, lost)
    orders = one_f_one_b(placement, routes, costs_of(costs), limit=limit, home=home)
    return format_orders(orders)


def listed(rows, lost, costs, coupled, patience, ahead):
    placement, routes, _ = routes_of(rows, lost)
    problem = routes_problem(placement, routes, costs_of(costs), coupled=coupled)
    forward_first = ahead == 1
    return told(list_schedule(problem, plain_urgency(problem, ahead, forward_first=forward_first), patience=patience))


def by_arrays(lost, costs, coupled):
    grid = CostedGrid(pipelines=4, stages=split_evenly(LAYERS, 3), microbatches=5, costs=costs_of(costs))
    return told(array_schedule(grid_problem(grid, lost, coupled=coupled), patience=0.5))


def searched(technique, lost, costs):
    grid = CostedGrid(pipelines=3, stages=split_evenly(LAYERS, 3), microbatches=4, costs=costs_of(costs))
    planned = make_plan(grid, lost, technique, time_limit_s=inf, tries=6)
    lower = plan_bound(grid, per_stage(lost, 3), technique)
    return told(planned.schedule) + repr((planned.found, planned.bound, lower))


def routed(technique, rows, lost, costs):
    placement, routes, _ = routes_of(rows, lost)
    planned = plan_routes(placement, routes, costs_of(costs), technique, ties=((0, 5),), time_limit_s=inf, tries=4)
    lower = route_bound(planned.problem, technique.rules)
    return told(planned.schedule) + repr((planned.found, planned.bound, lower))


def left(share, lost, costs):
    costs, plan = costs_of(costs), regular_plan(3, split_evenly(LAYERS, 3), 4)
    lasts = evaluate(plan, costs).makespan
    rest = plan_remainder(adaptive_plan(plan, lost), progress_at(plan, costs, share * lasts, 0, lost), costs=costs)
    return repr(rest)


def evaluated(rows, lost, costs, staggered):
    placement, routes, home = routes_of(rows, lost)
    costs = costs_of(costs)
    plan = Plan(placement=placement, routes=routes, orders=one_f_one_b(placement, routes, costs, home=home))
    timeline = evaluate(plan, costs, staggered=staggered, ties=((0, 5),))
    return repr((timeline, steady_period(plan, costs, staggered=staggered)))


def in_either_order(each, memory):
    """Two whole pipelines stand in on both sides of a third one's middle, in either order, and may wait for room."""
    placement = home_placement([split_evenly(3, 3), split_evenly(3, 1), split_evenly(3, 1)])
    first, second, third = split_evenly(3, 3)
    turns = [(W(1, 0), W(2, 0))] * each + [(W(2, 0), W(1, 0))] * each
    ways = [(Visit(one, first), Visit(W(0, 1), second), Visit(other, third)) for one, other in turns]
    routes = Routes(tuple(map(Route, Batch((2 * each,)).microbatches, ways)))
    costs = parse_costs(3, memory=memory)
    return format_orders(one_f_one_b(placement.without([W(0, 0), W(0, 2)]), routes, costs, limit=Limit.MEMORY))


W = WorkerId
NOBODY, ONE, TWO = frozenset(), frozenset({W(1, 1)}), frozenset({W(0, 1), W(1, 0)})
SOMEBODY = {"nobody": NOBODY, "1.1": ONE, "0.1 and 1.0": TWO}
SPLIT = (Technique.DECOUPLED, Technique.STAGGERED)


def cases():
    """All of them by name: what makes each is called without arguments."""
    for rows, lost, costs in itertools.product(ROWS, SOMEBODY, COSTS):
        name = f"{rows} without {lost}, {costs}"
        gone = SOMEBODY[lost] if rows == "alike" else SOMEBODY[lost] - {W(0, 1)}
        for limit in Limit:
            yield f"builder, {limit}: {name}", partial(built, rows, gone, costs, limit)
        yield f"evaluated: {name}", partial(evaluated, rows, gone, costs, costs in ("split", "uneven"))
        for coupled, patience, ahead in ((True, 0.0, 0), (False, 0.4, 2), (False, 0.4, 1)):
            yield (
                f"list, {coupled}, {patience}, {ahead}: {name}",
                partial(listed, rows, gone, costs, coupled, patience, ahead),
            )
    for memory in ("1,0,1,99", "1,0,1,6", "1,0,1,4", "1,0,1,3", "4,1,1,48", "1,0.5,0.5,3"):
        yield f"builder, in either order: {memory}", partial(in_either_order, 4, memory)
    for lost, costs in itertools.product(SOMEBODY, COSTS):
        for coupled in (True, False):
            yield f"arrays, {coupled}: {lost}, {costs}", partial(by_arrays, SOMEBODY[lost], costs, coupled)
        for share in (0.3, 0.7):
            yield f"remainder at {share}: {lost}, {costs}", partial(left, share, SOMEBODY[lost], costs)
    for (lost, costs), technique in zip(
        itertools.product(SOMEBODY, COSTS), itertools.cycle((Technique.ADAPTIVE, *SPLIT)), strict=False
    ):
        yield f"search, {technique}: {lost}, {costs}", partial(searched, technique, SOMEBODY[lost], costs)
        for rows in ("unlike", "crossing", "lanes"):
            yield (
                f"routes, {technique}: {rows} without {lost}, {costs}",
                partial(routed, technique, rows, SOMEBODY[lost] - {W(0, 1)}, costs),
            )


CASES = dict(cases())


def digest(make):
    """Of what comes of it, or of why nothing does."""
    try:
        text = make()
    except HoldfastError as error:
        text = f"{type(error).__name__}: {error}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded():
    lines = FILE.read_text().splitlines()
    return {name: found for found, _, name in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize("kind", sorted({name.partition(",")[0].partition(":")[0] for name in CASES}))
def test_they_are_what_they_were(kind):
    made = {name: digest(make) for name, make in CASES.items() if name.startswith(kind)}
    before = {name: found for name, found in recorded().items() if name.startswith(kind)}
    assert made == before


if __name__ == "__main__":
    FILE.write_text("".join(f"{digest(make)} {name}\n" for name, make in CASES.items()))
