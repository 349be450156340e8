"""SlipStream's tables and figures: whole jobs by simulation, plans by the planner."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs
from holdfast.drawing.curves import Point, curves_to_svg
from holdfast.planning.costed_grid import CostedGrid
from holdfast.planning.library import PlanLibrary
from holdfast.planning.normalise import bound_cost, min_max, place
from holdfast.planning.planner import Technique, make_plan, plan_bound
from holdfast.reproduce.facts import facts
from holdfast.reproduce.found import Constant, Found, Item, Origin, Row
from holdfast.reproduce.gpt3 import SHAPES, estimate
from holdfast.reproduce.jobs import HOUR_S, MINUTE_S, Experiment, come_and_go, one_by_one
from holdfast.sim.side_by_side import side_by_side
from holdfast.sim.systems.rows import bamboo, elastic_batching, oobleck

__all__ = ["ITEMS"]

_MEDIUM, _MIDDLE, _LARGE = "GPT-3 Medium", "GPT-3 3.35B", "GPT-3 6.7B"
_SHAPES = dict(zip((_MEDIUM, _MIDDLE, _LARGE), SHAPES, strict=True))
_GAPS = {"6h": 6 * HOUR_S, "2h": 2 * HOUR_S, "30m": HOUR_S / 2}
_STALL_S = 10.0
_STALLS = (0.0, 10.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 420.0)

_PROFILE = Constant(
    name="seconds and bytes of layers",
    value="of an A100 with 80 GB",
    origin=Origin.ESTIMATED,
    why="from operations and bytes (profiles/README.md); embedding and head make the outer stages longer, without "
    "which some of the printed cells would beat what any schedule can do",
)
_OOBLECK_STALL = Constant(
    name="Oobleck stands still at each loss and join",
    value="10 s",
    origin=Origin.ARTIFACT,
    why="2 to 10 s in its authors' simulator",
)
_BAMBOO_RATE = Constant(
    name="Bamboo's speed by 1F1B's",
    value="0.71",
    origin=Origin.FITTED,
    why="to table 1's Medium at 6h; that steps take 1.5 times as long while a worker computes for two is in the ranges "
    "only, as this column has a loss, too",
)


def example(processes: int) -> Found:
    """The running example: three pipelines of four stages, six micro-batches each, worker 1.2 lost."""
    printed = facts("slipstream")["example"]["slots"]
    lost = [WorkerId(1, 2)]
    rows = []
    for name, memory, failed, what in (
        ("1f1b", "1,0,1,4:3:2:1", [], "fault-free 1F1B, makespan"),
        ("adaptive", "1,0,1,4:3:2:1", lost, "one lost, 1F1B's memory, makespan"),
        ("decoupled", "1,0,1,4", lost, "one lost, decoupled, makespan"),
        ("staggered", "2,1,1,8", lost, "one lost, decoupled and staggered, period"),
    ):
        grid = CostedGrid(pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=parse_costs(4, memory=memory))
        found = make_plan(grid, failed, Technique(name), tries=200, time_limit_s=math.inf).found
        slots = found.period if name == "staggered" else found.makespan
        rows.append(Row(what=what, printed=printed[name], ours=slots, unit="slots", within=0.0))
    healthy = CostedGrid(pipelines=3, stages=split_evenly(4, 4), microbatches=6, costs=parse_costs(4))
    best = make_plan(healthy, [], Technique.STAGGERED, tries=200, time_limit_s=math.inf).found
    rows.append(Row(what="fault-free, decoupled and staggered, period", printed=None, ours=best.period, unit="slots"))
    return Found(
        rows=tuple(rows),
        constants=(
            Constant(
                name="memory for the last one",
                value="4 micro-batches, of which the input's gradient frees half",
                origin=Origin.ASSUMED,
                why="if all is held until the weights' gradient, 4 give 29, 5 give 28 and 6 give 27 slots",
            ),
        ),
        says=(
            "The zero overhead is one against 1F1B, which has bubbles: without a loss the same techniques take 19 "
            "slots.",
        ),
    )


def table1(processes: int) -> Found:
    """Throughput under ever more losses, none of which is made good."""
    known = facts("slipstream")["table1"]
    with side_by_side(_cells_of_table1, min(processes, len(_SHAPES))) as each:
        cells = dict(zip(_SHAPES, each(list(_SHAPES)), strict=True))
    rows = []
    for model in _SHAPES:
        for column, gap in enumerate(_GAPS):
            for system, row in (("SlipStream", "adaptive"), ("Oobleck", "oobleck"), ("Bamboo", "bamboo")):
                printed = known["rows"][system][model][column]
                ours, reach = cells[model][gap, row]
                rows.append(
                    Row(
                        what=f"{model}, {gap}: {system}",
                        printed=None if printed == "OOM" else printed,
                        ours=ours,
                        reach=reach,
                        fitted=(system, gap) == ("Bamboo", "6h") and printed != "OOM",
                    )
                )
            ours, reach = cells[model][gap, "elastic-batching"]
            rows.append(Row(what=f"{model}, {gap}: elastic batching", printed=None, ours=ours, reach=reach))
    stalls = {
        model: _stall_for(known["rows"]["Oobleck"][model][2], cells[model]["30m", "oobleck"][0]) for model in _SHAPES
    }
    return Found(
        rows=tuple(rows),
        constants=(
            _PROFILE,
            Constant(
                name="losses",
                value="the first at once, then one each interval, of 6 h",
                origin=Origin.PRINTED,
                why="ranges: also the first after one interval, as the column of 6 h fits only a run that is whole for "
                "most of its time; who is lost is drawn once",
            ),
            _OOBLECK_STALL,
            _BAMBOO_RATE,
            Constant(
                name="fault-free",
                value="1F1B of the whole grid is 1.00",
                origin=Origin.ASSUMED,
                why="staggered plans of it are 1 to 2 % faster",
            ),
        ),
        says=(
            "SlipStream's rows are whole jobs of this package in virtual time: its coordinator's decisions, its "
            "planner, workers that change places, and what all of that costs. Oobleck and Bamboo are models.",
            "What is printed of Oobleck at 30m needs training to stand still for "
            + ", ".join(f"{stall:.0f} s ({model})" for model, stall in stalls.items())
            + " at each loss; its own artifact has 2 to 10 s. No one reading meets all of 6.7B's SlipStream cells: "
            "0.66 fits stages of equal length, 0.97 only unequal ones.",
            "OOM is not modelled: no rule of memory gives the printed pattern. With scores kept, Medium alone needs "
            "81 GB without any redundancy; without them 6.7B twice takes 42 GB.",
        ),
    )


_bamboo = partial(bamboo, slower=1.0)
"""As fast with somebody missing as table 1 has it."""


def _cells_of_table1(model: str) -> dict[tuple[str, str], tuple[float, tuple[float, float]]]:
    """All of one model, as plans that are made for one cell serve others: by interval and system."""
    known = facts("slipstream")["table1"]
    pipelines, stages = known["grids"][model]
    microbatches = known["batch"][model] // known["microbatch"][model] // pipelines
    experiment = Experiment(profile=estimate(_SHAPES[model]), grid=(pipelines, stages, microbatches))
    ways = experiment.ways({"oobleck": oobleck, "bamboo": _bamboo, "elastic-batching": elastic_batching})
    others = experiment.ways({"bamboo": bamboo})
    lasts_s = known["hours"] * HOUR_S
    found = {}
    for gap, every_s in reversed(_GAPS.items()):
        for name, become in ways.items():
            reached = [
                experiment.throughput(
                    way(one_by_one(pipelines * stages, every_s, lasts_s, first_s=first_s, seed=model))
                )
                for first_s in (0.0, every_s)
                for way in ((become, others[name]) if name == "bamboo" else (become,))
            ]
            found[gap, name] = reached[0], (min(reached), max(reached))
    return found


def _stall_for(printed: float, ours: float) -> float:
    """Seconds for which a system has to stand still at each of twelve losses so that its throughput is as printed."""
    lasts_s, losses = 6 * HOUR_S, 12
    moving = ours * lasts_s / (lasts_s - losses * _STALL_S)
    return lasts_s * (1 - printed / moving) / losses


def table3(processes: int) -> Found:
    """How long it takes to plan for up to a quarter of all workers lost."""
    known = facts("slipstream")["table3"]
    cells = [(stages, int(pipelines)) for pipelines in known["rows"] for stages in known["stages"]]
    with side_by_side(_filled, processes) as each:
        found = dict(zip(cells, each(cells), strict=True))
    rows = tuple(
        Row(
            what=f"{pipelines} pipelines of {stages} stages",
            printed=known["rows"][str(pipelines)][known["stages"].index(stages)],
            ours=found[stages, pipelines][0],
            unit="s",
            less_is_better=True,
        )
        for stages, pipelines in cells
    )
    worst = max(gap for _, gap in found.values())
    return Found(
        rows=rows,
        constants=(
            Constant(
                name="micro-batches of a pipeline",
                value="twice its stages",
                origin=Origin.ASSUMED,
                why="none are given",
            ),
        ),
        says=(
            "The paper's are of Gurobi on 96 cores. Here one schedule is made for each number of losses that needs "
            f"one of its own, on one core, and proved right; none is more than {100 * worst:.1f} % above what "
            "nothing can beat.",
        ),
    )


def _filled(cell: tuple[int, int]) -> tuple[float, float]:
    """Processor seconds, and by how much the worst schedule is above its bound."""
    stages, pipelines = cell
    grid = _even(stages, pipelines, 2 * stages)
    began = time.process_time()
    filled = PlanLibrary(None).fill(grid, stages * pipelines // 4, Technique.DECOUPLED, time_limit_s=0.0)
    return time.process_time() - began, filled.worst_gap


def _even(stages: int, pipelines: int, microbatches: int, *, held: int | None = None) -> CostedGrid:
    """All operations take one slot; a stage may hold so many micro-batches, of which each counts half after I."""
    return CostedGrid(
        pipelines=pipelines,
        stages=split_evenly(stages, stages),
        microbatches=microbatches,
        costs=parse_costs(stages, memory=f"2,1,1,{2 * (held or stages)}"),
    )


def figure8(processes: int) -> Found:
    """Throughput while machines come and go as in a trace."""
    known = facts("slipstream")["figure8"]
    with side_by_side(_run_of_figure8, min(processes, 2)) as each:
        large, medium = each((_LARGE, _MEDIUM))
    over: dict[str, list[Point]] = {
        f"{model} over Oobleck": [(stall, found["adaptive"] / found[f"oobleck {stall:g}"]) for stall in _STALLS]
        for model, found in ((_LARGE, large), (_MEDIUM, medium))
    }
    printed = known["over_oobleck_6_7b"]
    needed = next((stall for stall, ratio in over[f"{_LARGE} over Oobleck"] if ratio >= printed), None)
    stalls = f"more than {_STALLS[-1]:g}" if needed is None else f"about {needed:g}"
    rows = [
        Row(
            what=f"{_LARGE}: SlipStream over Oobleck",
            printed=printed,
            ours=large["adaptive"] / large["oobleck 10"],
            unit="x",
            reach=(large["adaptive"] / large["oobleck 0"], large["adaptive"] / large[f"oobleck {_STALLS[-1]:g}"]),
        ),
        Row(
            what=f"{_MEDIUM}: SlipStream over Bamboo",
            printed=known["over_bamboo_medium"],
            ours=medium["adaptive"] / medium["bamboo"],
            unit="x",
            reach=(medium["adaptive"] / medium["bamboo"], medium["adaptive"] / medium["bamboo, slower"]),
        ),
    ]
    rows += [
        Row(what=f"{model}: {name}, by the whole grid's 1F1B", printed=None, ours=found[row])
        for model, found in ((_LARGE, large), (_MEDIUM, medium))
        for name, row in (
            ("SlipStream", "adaptive"),
            ("Oobleck", "oobleck 10"),
            ("Bamboo", "bamboo"),
            ("elastic batching", "elastic-batching"),
        )
    ]
    return Found(
        rows=tuple(rows),
        constants=(
            Constant(
                name="trace",
                value="6 h from minute 45 on: 24 machines at first, 15 at least",
                origin=Origin.ARTIFACT,
                why="beside Oobleck, called GCP there, though all its times are those of Bamboo's trace of AWS g4dn",
            ),
            Constant(name="grids", value="3 x 8 (6.7B), 12 x 2 (Medium)", origin=Origin.ASSUMED),
            _PROFILE,
            _OOBLECK_STALL,
            _BAMBOO_RATE,
        ),
        says=(
            "Between losses Oobleck's pipelines are faster on 6.7B: its layers move, so that n of N machines make n "
            "/ N of the throughput, where a stage of three workers that loses one makes two thirds. The printed "
            f"1.46 can only be stalls, of {stalls} s at each of the trace's instants; the picture has the "
            "ratio over all of them.",
        ),
        pictures={
            "slipstream-figure8": curves_to_svg(
                over,
                "Throughput of SlipStream by Oobleck's, over the seconds for which that stands still at each loss "
                "and join",
                marks={"artifact": _STALL_S},
            )
        },
    )


def _run_of_figure8(model: str) -> dict[str, float]:
    known, table = facts("slipstream")["figure8"], facts("slipstream")["table1"]
    pipelines, stages = {_LARGE: (3, 8), _MEDIUM: (12, 2)}[model]
    microbatches = math.ceil(table["batch"][model] / table["microbatch"][model] / pipelines)
    experiment = Experiment(profile=estimate(_SHAPES[model]), grid=(pipelines, stages, microbatches))
    rows = facts("oobleck")["come_and_go_minute_come_gone"]["gcp"]
    world = come_and_go(rows, 45 * MINUTE_S, known["hours"] * HOUR_S, seed=model)
    systems = {f"oobleck {stall:g}": partial(oobleck, stall_s=stall) for stall in _STALLS}
    ways = experiment.ways(
        {
            **systems,
            "bamboo": _bamboo,
            "bamboo, slower": bamboo,
            "elastic-batching": elastic_batching,
        }
    )
    return {name: experiment.throughput(become(world)) for name, become in ways.items()}


def figure9(processes: int) -> Found:
    """Throughput of large grids with some of the workers lost, by what as many fewer would make."""
    known = facts("slipstream")["figure9"]
    cells = [(model, percent) for model in known["grids"] for percent in known["failed_pct"]]
    with side_by_side(_scaled, processes) as each:
        found = dict(zip(cells, each(cells), strict=True))
    rows = tuple(
        Row(
            what=f"{model}: {percent} % lost, by fault-scaled 1F1B",
            printed=1.0 if percent < 10 else 0.995,
            ours=found[model, percent],
            unit="x",
            within=0.0,
            less_is_better=False,
        )
        for model, percent in cells
    )
    over: list[Point] = [(float(m), _bounded(m)) for m in (1, 2, 3, 4, 6, 8, 12, 16)]
    return Found(
        rows=rows,
        constants=(
            Constant(
                name="micro-batches of a pipeline",
                value="four times its stages",
                origin=Origin.ASSUMED,
                why="none are given; with ever more of them the bound at 10 % comes down to 0.974",
            ),
            Constant(name="operations", value="of equal length", origin=Origin.ASSUMED),
        ),
        says=(
            "What is printed are words: at 1 % at or above fault-scaled, at 5 % comparable, at 10 % from 0.5 to "
            "11.5 % below (0.995 here). With equal stages plans are above it: 1F1B, by which it is scaled, has "
            "bubbles, and plans fill them.",
        ),
        pictures={
            "slipstream-figure9": curves_to_svg(
                {"the bound of 32 pipelines of 8 stages": over},
                "10 % lost: throughput by fault-scaled 1F1B, over micro-batches for each stage",
            )
        },
    )


def _scaled(cell: tuple[str, int]) -> float:
    model, percent = cell
    pipelines, stages = facts("slipstream")["figure9"]["grids"][model]
    grid, workers = _even(stages, pipelines, 4 * stages), stages * pipelines
    lost = math.ceil(workers * percent / 100)
    scaled: float = _classic(grid) / _period(grid, lost, Technique.STAGGERED) / (1 - lost / workers)
    return scaled


def _where_least(grid: CostedGrid, lost: int) -> tuple[int, ...]:
    """How many each stage loses of so many, where they cost least."""
    return min_max(len(grid.stages), lost, bound_cost(grid))[lost]


def _period(grid: CostedGrid, lost: int, technique: Technique) -> float:
    failed = place(_where_least(grid, lost), grid.pipelines)
    return make_plan(grid, failed, technique, time_limit_s=0.0).found.period


def _classic(grid: CostedGrid) -> float:
    return (grid.microbatches + len(grid.stages) - 1) * 3.0


def _bounded(per_stage: int) -> float:
    pipelines, stages = facts("slipstream")["figure9"]["grids"]["18.4B"]
    grid, lost = _even(stages, pipelines, per_stage * stages), pipelines * stages // 10
    period = plan_bound(grid, _where_least(grid, lost), Technique.STAGGERED).period
    scaled: float = _classic(grid) / period / (1 - lost / (pipelines * stages))
    return scaled


def figure10(processes: int) -> Found:
    """What each technique adds when a loss comes every half an hour."""
    known = facts("slipstream")["figure10"]
    cells = [(model, share) for model in _SHAPES for share in (0.5, 1.0, 2.0, None)]
    with side_by_side(_gains, processes) as each:
        found = dict(zip(cells, each(cells), strict=True))
    rows = []
    for number, (technique, reach) in enumerate(
        (
            ("decoupled over adaptive", known["decoupled_gain_pct"]),
            ("staggered over decoupled", known["staggered_gain_pct"]),
        )
    ):
        for model in _SHAPES:
            gains = [found[model, share][number] for share in (0.5, 1.0, 2.0, None)]
            rows.append(
                Row(
                    what=f"{model}: {technique}, with table 1's micro-batches",
                    printed=reach[0],
                    ours=gains[-1],
                    unit="%",
                    reach=(min(gains), max(gains)),
                    why="with so many micro-batches planned schedules have few bubbles",
                )
            )
    return Found(
        rows=tuple(rows),
        constants=(
            Constant(
                name="micro-batches of a pipeline",
                value="64, 128 and 256",
                origin=Origin.PRINTED,
                why="ranges: also a half, one and two for each stage",
            ),
            Constant(name="operations", value="of equal length", origin=Origin.ASSUMED),
            Constant(name="lost", value="12 of 32, where it costs least", origin=Origin.PRINTED),
        ),
        says=(
            "Printed are 63 to 118 % and 7 to 11 %; the lower ends stand here. Adaptive plans here are planned as "
            "well: of 1F1B's order with holes in it decoupling gains more.",
        ),
    )


def _gains(cell: tuple[str, float | None]) -> tuple[float, float]:
    """Percent that decoupling gains over adaptive plans, and staggering over that."""
    model, share = cell
    table = facts("slipstream")["table1"]
    pipelines, stages = table["grids"][model]
    given = table["batch"][model] // table["microbatch"][model] // pipelines
    microbatches = given if share is None else max(1, round(share * stages))
    grid = _even(stages, pipelines, microbatches, held=2 * stages)
    techniques = (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)
    periods = [_period(grid, 12, technique) for technique in techniques]
    return 100 * (periods[0] / periods[1] - 1), 100 * (periods[1] / periods[2] - 1)


def figure11(processes: int) -> Found:
    """Bytes that each stage of 6.7B needs at most."""
    profile, stages, memory = estimate(_SHAPES[_LARGE]), 8, 80e9
    parts = split_evenly(len(profile.layers), stages)
    rows, curve = [], []
    for number, part in enumerate(parts):
        layers = [profile.layers[index] for index in part.indices]
        state = sum(each.parameter_bytes + each.optimizer_bytes + 2 * each.parameter_bytes for each in layers)
        each_held = sum(each.held_after_forward_bytes for each in layers)
        size = (state + (stages - number) * each_held) / 1e9
        curve.append((float(number), size))
        rows.append(Row(what=f"stage {number}, 1F1B", printed=None, ours=size, unit="GB"))
        room = int((memory - state) // each_held)
        rows.append(Row(what=f"stage {number}, micro-batches that it could hold", printed=None, ours=room))
    return Found(
        rows=tuple(rows),
        constants=(
            _PROFILE,
            Constant(
                name="state of a parameter", value="18 bytes", origin=Origin.ESTIMATED, why="with a sum of gradients"
            ),
        ),
        says=(
            "The figure has no numbers. Of the 80 GB that the text says are nearly used, plans here need a third: "
            "nothing gains by holding more than twice as many micro-batches as there are stages.",
        ),
        pictures={
            "slipstream-figure11": curves_to_svg({"1F1B": curve}, "GB of each stage of 6.7B, at most", unit="GB")
        },
    )


def _items() -> Iterator[Item]:
    yield Item(name="slipstream/example", title="the running example (figures 3 to 6)", find=example)
    yield Item(name="slipstream/table1", title="throughput under ever more losses", find=table1)
    yield Item(name="slipstream/table3", title="how long planning takes", find=table3)
    yield Item(name="slipstream/figure8", title="throughput while machines come and go", find=figure8)
    yield Item(name="slipstream/figure9", title="large grids with some workers lost", find=figure9)
    yield Item(name="slipstream/figure10", title="what each technique adds", find=figure10)
    yield Item(name="slipstream/figure11", title="memory of each stage", find=figure11)


ITEMS = tuple(_items())
"""What can be had of it, in the paper's order."""
