"""Oobleck's tables and figures: whole jobs by its authors' measured rates and costs, and how long planning takes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from holdfast.drawing.curves import Point, curves_to_svg
from holdfast.drawing.shares import shares_to_svg
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.stages import StageTable
from holdfast.reproduce.facts import facts
from holdfast.reproduce.found import Constant, Found, Item, Origin, Row
from holdfast.reproduce.gpt3 import SHAPES, estimate
from holdfast.reproduce.jobs import GAPS, HOUR_S, MINUTE_S, NODES, Experiment, come_and_go, fewer_and_fewer
from holdfast.sim.engine import Outcome
from holdfast.sim.ledger import Part
from holdfast.sim.systems.rows import Facts, oobleck, varuna
from holdfast.sim.systems.system import System, simulate_system
from holdfast.sim.world import World

__all__ = ["ITEMS"]

_LARGE, _MIDDLE, _BERT = "GPT-3 6.7b", "GPT-3 2.7b", "BERT-Large"

_GOES_ON = "by the authors steps go on during restarts"

_RATES = Constant(
    name="samples per second by the number of nodes",
    value="15 to 30 nodes",
    origin=Origin.ARTIFACT,
    why="measured by the authors",
)
_COSTS = Constant(
    name="standing still",
    value="Oobleck 2 to 10 s, Varuna 76 to 701 s and 11.2 to 120 s for a checkpoint every 10 steps",
    origin=Origin.ARTIFACT,
    why="in their simulator, not in the paper; batches as there (1,024 for 6.7b), not as in table 1",
)
_STILL = Constant(
    name="while a system restarts",
    value="nobody trains",
    origin=Origin.ASSUMED,
    why="in the authors' simulator steps go on meanwhile, but for the one that is under way at its end; ranges are "
    "up to a restart in no time, which is the most that this could be worth",
)


def _facts_of(system: str, model: str, *, restart_s: float, save_s: float) -> Facts:
    """What a row takes, where it is measured how fast so many machines are."""
    known = facts("oobleck")
    rates, batch, fewest = known["samples_per_s_by_nodes"][system][model], known["batch"][model], known["fewest_nodes"]

    def step_s(machines: int) -> float | None:
        rate = rates[min(machines, NODES) - fewest] if machines >= fewest else 0.0
        return batch / rate if rate else None

    healthy_s = step_s(NODES)
    assert healthy_s is not None, "all of them train"
    return Facts(
        pipelines_of=(frozenset({0}),) * NODES,
        pipelines=1,
        job_s=healthy_s,
        healthy_s=healthy_s,
        of_pipelines=lambda count: healthy_s if count else None,
        of_grids=step_s,
        of_templates=step_s,
        detect_s=0.0,
        start_s=restart_s,
        load_s=0.0,
        save_s=save_s,
        pin_s=save_s,
    )


def _oobleck(model: str, *, stall: float = 1.0) -> tuple[System, Facts]:
    """It, if it stands still for so much of what the authors say."""
    found = _facts_of("oobleck", model, restart_s=0.0, save_s=0.0)
    return oobleck(found, stall_s=stall * facts("oobleck")["restart_s"]["oobleck"][model]), found


def _varuna(model: str, *, stall: float = 1.0, saves: bool = True) -> tuple[System, Facts]:
    """It; without checkpoints' cost as in table 4, where it goes back by two steps at most."""
    known = facts("oobleck")
    save_s = known["varuna_checkpoint_s"][model] if saves else 0.0
    restart_s = stall * known["restart_s"]["varuna"][model]
    found = _facts_of("varuna", model, restart_s=restart_s, save_s=save_s)
    return varuna(found, every=known["varuna_every"] if saves else 2), found


def _samples_per_s(of: tuple[System, Facts], world: World, model: str) -> float:
    return _become(of, world).steps * float(facts("oobleck")["batch"][model]) / world.lasts_s


def _become(of: tuple[System, Facts], world: World) -> Outcome:
    system, known = of
    return simulate_system(system, world, places=NODES, healthy_s=known.healthy_s)


def _cell(model: str, gap: str, printed: float, name: str, of: Callable[..., tuple[System, Facts]]) -> Row:
    world = fewer_and_fewer(GAPS[gap])
    still, moving = (_samples_per_s(of(model, stall=stall), world, model) for stall in (1.0, 0.0))
    return Row(
        what=f"{model}, {gap}: {name}",
        printed=printed,
        ours=still,
        unit="samples/s",
        reach=(min(still, moving), max(still, moving)),
        why=_GOES_ON,
    )


def table2(processes: int) -> Found:
    """Samples per second while 15 of 30 nodes are lost one by one."""
    rows = []
    for model, printed in facts("oobleck")["table2"]["rows"].items():
        for name, of in (("Oobleck", _oobleck), ("Varuna", _varuna)):
            rows += [_cell(model, gap, printed[name][column], name, of) for column, gap in enumerate(GAPS)]
    world = fewer_and_fewer(GAPS["10m"])
    ours, theirs = (_samples_per_s(of(_LARGE), world, _LARGE) for of in (_oobleck, _varuna))
    moving = _samples_per_s(_varuna(_LARGE, stall=0.0), world, _LARGE)
    rows.append(
        Row(
            what=f"{_LARGE}, 10m: Oobleck over Varuna",
            printed=facts("oobleck")["headline_times"],
            ours=ours / theirs if theirs else math.inf,
            unit="x",
            reach=(ours / moving, ours / theirs if theirs else math.inf),
            why=_GOES_ON,
        )
    )
    return Found(
        rows=tuple(rows),
        constants=(_RATES, _COSTS, _STILL),
        says=(
            "This table and table 4 are output of the authors' simulator, as their code shows: the averages of the "
            "measured rates over 30 to 16 nodes alone are its column of 6h. So what stands here checks its rules, "
            "not what was measured.",
            "Varuna needs 701 s for each restart of 6.7b by the same code: where nodes are lost every 600 s it "
            "makes no step at all, and no ratio is to be had; if steps go on meanwhile, the ratio is that of the "
            "range's lower end, a little above the printed 13.9.",
            "Bamboo is not simulated from these rates: of its restarts only a constant share of redundant work is "
            "published.",
        ),
    )


def table4(processes: int) -> Found:
    """The same, if checkpoints cost Varuna nothing."""
    rows = [
        _cell(model, gap, printed["Varuna no ckpt"][column], "Varuna without cost of checkpoints", _free)
        for model, printed in facts("oobleck")["table4"]["rows"].items()
        for column, gap in enumerate(GAPS)
    ]
    return Found(
        rows=tuple(rows),
        constants=(
            _RATES,
            _COSTS,
            _STILL,
            Constant(name="steps from one checkpoint to the next", value="2", origin=Origin.PRINTED),
        ),
    )


def _free(model: str, *, stall: float = 1.0) -> tuple[System, Facts]:
    return _varuna(model, stall=stall, saves=False)


def rates(processes: int) -> Found:
    """How well what systems would make of so many nodes describes the measured rates, after fitting two constants."""
    rows: list[Row] = []
    pictures = {}
    for system, models in (("oobleck", _OURS), ("varuna", facts("oobleck")["batch"])):
        curves: dict[str, list[Point]] = {}
        points: dict[str, list[Point]] = {}
        for model in models:
            found, curves[model], points[f"{model}, measured"] = _rates_of(system, model)
            rows += found
        shown = list(curves)[-2:]
        pictures[f"oobleck-rates-{system}"] = curves_to_svg(
            {model: curves[model] for model in shown},
            f"{system.title()}: throughput by that of 30 nodes, over nodes",
            points={f"{model}, measured": points[f"{model}, measured"] for model in shown},
        )
    return Found(
        rows=tuple(rows),
        constants=(
            _RATES,
            Constant(
                name="a x what is computed + b, seconds of a step",
                value="two constants of each model",
                origin=Origin.FITTED,
                why="to the points themselves, so that the worst is as near as can be; besides, the nodes of the "
                "shortest pipeline that fit best, ranges are over 2 to 6 of them",
            ),
            Constant(
                name="what is computed of Oobleck",
                value="steps of this package's templates",
                origin=Origin.ESTIMATED,
                why="by the profiles that there are of the same models",
            ),
            Constant(
                name="what is computed of Varuna",
                value="1 / pipelines of so many nodes each",
                origin=Origin.ASSUMED,
                why="equal pipelines only",
            ),
        ),
        says=(
            "Nothing is printed: 15 % at each point was aimed at. A line in 1 / nodes comes within that, too, so "
            "this much agreement proves little; but a line has no steps, and the measured rates have them where "
            "another template, or another number of equal pipelines, comes in.",
            f"Of {_LARGE} Oobleck has no rate on 15 nodes: its memory does not suffice.",
        ),
        pictures=pictures,
    )


def _rates_of(system: str, model: str) -> tuple[tuple[Row, Row], list[Point], list[Point]]:
    """How far off the worst point is, by the fit and by a line; the fit; and the points. Shares of all nodes' rate."""
    known = facts("oobleck")
    rates, batch = known["samples_per_s_by_nodes"][system][model], known["batch"][model]
    nodes = [known["fewest_nodes"] + place for place, rate in enumerate(rates) if rate]
    steps = [batch / rate for rate in rates if rate]
    fits = dict(_fits(system, model, nodes, steps))
    best = min(fits, key=lambda depth: fits[depth][0])
    worst = [100 * off for off, _ in fits.values()]
    fit = Row(
        what=f"{model}, {system.title()} with pipelines of {best} nodes: worst of {len(nodes)} points",
        printed=15.0,
        ours=min(worst),
        unit="%",
        reach=(min(worst), max(worst)),
        at_most=True,
        fitted=True,
    )
    line = Row(
        what=f"{model}, {system.title()}: a line, seconds by 1 / nodes",
        printed=None,
        ours=100 * _fit([1 / count for count in nodes], steps)[0],
        unit="%",
    )
    healthy = batch / rates[-1]
    curve = [(float(count), healthy / step) for count, step in zip(nodes, fits[best][1], strict=True)]
    return (fit, line), curve, [(float(count), healthy / step) for count, step in zip(nodes, steps, strict=True)]


_OURS = {"GPT-3 Medium": (SHAPES[0], 51), _LARGE: (SHAPES[2], 512)}
"""The models of which there is a profile, and their micro-batches in all, by table 1's sizes."""


def _fits(
    system: str, model: str, nodes: Sequence[int], steps: Sequence[float]
) -> Iterator[tuple[int, tuple[float, list[float]]]]:
    """By the nodes of the shortest pipeline: how far off the worst point is, and what all come to."""
    for depth in (2, 3, 4, 5, 6):
        if system == "varuna":
            computed = [1 / (count // depth) for count in nodes]
        else:
            shape, total = _OURS[model]
            grid = (NODES // depth, depth, round(total / (NODES // depth)))
            of_templates = Experiment(profile=estimate(shape), grid=grid).facts.of_templates
            computed = [found for count in nodes if (found := of_templates(count)) is not None]
        yield depth, _fit(computed, steps)


def _fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, list[float]]:
    """How far off the worst of a x + b is from y, as a share of that, for the best a and b; and all of a x + b."""
    scale = max(ys) / max(xs)

    def off(a: float, b: float) -> float:
        return max(abs((a * x + b) / y - 1) for x, y in zip(xs, ys, strict=True))

    def best_b(a: float) -> float:
        return _least(lambda b: off(a, b), -max(ys), max(ys))

    a = _least(lambda a: off(a, best_b(a)), 0.0, 3 * scale)
    b = best_b(a)
    return off(a, b), [a * x + b for x in xs]


def _least(of: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that falls, then rises, is least."""
    for _ in range(100):
        one, two = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, two) if of(one) < of(two) else (one, high)
    return (low + high) / 2


def table3(processes: int) -> Found:
    """How long planning templates takes."""
    known = facts("oobleck")["table3"]
    rows = []
    for cell, printed in known["rows"].items():
        nodes, gpus = map(int, cell.split("x"))
        for layers, seconds in zip(known["layers"], printed, strict=True):
            model = _made_up(layers, gpus)
            began = time.process_time()
            best_templates(model, range(1, nodes + 1), 4 * min(layers, nodes * gpus))
            ours = time.process_time() - began
            rows.append(
                Row(
                    what=f"{layers} layers, {nodes} nodes of {gpus} GPUs: all templates",
                    printed=seconds,
                    ours=ours,
                    unit="s",
                    less_is_better=True,
                )
            )
    return Found(
        rows=tuple(rows),
        constants=(
            Constant(
                name="layers",
                value="1 to 3 s each, made up",
                origin=Origin.ASSUMED,
                why="the time does not hang on them",
            ),
        ),
        says=(
            "The paper's search divides and conquers, which is not exact, as a half that is best by itself need not "
            "be so beside another one's slowest stage. Here that stage is enumerated ([templates](templates.md)), "
            "which leaves a sum, and is exact.",
        ),
    )


def _made_up(layers: int, gpus: int) -> StageTable:
    drawn = random.Random(layers)
    times = [drawn.uniform(1, 3) for _ in range(layers)]
    return StageTable(
        layer_s=tuple(tuple(each / count**0.9 for each in times) for count in range(1, gpus + 1)),
        state_bytes=(10,) * layers,
        held_bytes=(1,) * layers,
        recomputed_bytes=(0,) * layers,
    )


def figure11(processes: int) -> Found:
    """What time is lost to, in the runs of table 2 (and of figure 1)."""
    known = facts("oobleck")
    rows, shown = [], {}
    for model in (_BERT, _LARGE):
        for name, of in (("Oobleck", _oobleck), ("Varuna", _varuna)):
            for gap, every_s in GAPS.items():
                found = _become(of(model), fewer_and_fewer(every_s))
                shown[f"{_SHORT[model]}, {gap}: {name}"] = _percent(found.parts, found.seconds)
    worst = _become(_varuna(_LARGE), fewer_and_fewer(GAPS["10m"]))
    least = min(share["useful"] for name, share in shown.items() if name.endswith("Oobleck"))
    rows = [
        Row(what="Oobleck: useful, at least", printed=75.0, ours=least, unit="%", within=0.0, less_is_better=False),
        Row(
            what="Varuna: lost, at most",
            printed=75.0,
            ours=100 - 100 * worst.parts[Part.USEFUL] / worst.seconds,
            unit="%",
            why=_GOES_ON,
        ),
    ]
    lost = {name: {part: share for part, share in parts.items() if part != "useful"} for name, parts in shown.items()}
    return Found(
        rows=tuple(rows),
        constants=(_RATES, _COSTS, _STILL),
        says=(
            "The bars have no numbers; the text says that Oobleck is useful for at least 75 % of the time, and that "
            f"Varuna loses up to 75 %. Parts here add up to the time that is simulated, of {len(known['batch'])} "
            "models two are shown.",
        ),
        pictures={
            "oobleck-figure11": shares_to_svg(lost, "Time that is lost in the runs of table 2, by what to", " %")
        },
    )


_SHORT = {_BERT: "BERT", _LARGE: "6.7b"}


def _percent(parts: Mapping[Part, float], seconds: float) -> dict[str, float]:
    return {part.value: 100 * spent / seconds for part, spent in parts.items()}


def figure10(processes: int) -> Found:
    """Samples per second on spot machines."""
    known = facts("oobleck")
    printed, systems = known["figure10"], {"oobleck": _oobleck, "varuna": _varuna}
    found: dict[tuple[str, str, str, float], float] = {}
    for trace, events in known["come_and_go_minute_come_gone"].items():
        begins_s = next(minute for minute, _, _ in events) * MINUTE_S
        world = come_and_go(events, begins_s, printed["hours"] * HOUR_S)
        for model, (name, of), stall in product((_BERT, _MIDDLE, _LARGE), systems.items(), (1.0, 0.0)):
            found[trace, model, name, stall] = _samples_per_s(of(model, stall=stall), world, model)
    why = f"{_GOES_ON}; who comes waits for the next loss"
    ratios = [found["p3", _MIDDLE, "oobleck", stall] / found["p3", _MIDDLE, "varuna", stall] for stall in (1.0, 0.0)]
    rows = [
        Row(
            what=f"{_MIDDLE}, EC2 (p3): Oobleck over Varuna",
            printed=printed["times"],
            ours=ratios[0],
            unit="x",
            reach=(min(ratios), max(ratios)),
            why=why,
        )
    ]
    rows += [
        Row(
            what=f"{model}, {where}: {name.title()}",
            printed=printed["output_of_their_simulator"][model].get(name) if trace == "p3" else None,
            ours=found[trace, model, name, 1.0],
            unit="samples/s",
            reach=(found[trace, model, name, 1.0], found[trace, model, name, 0.0]),
            why=why,
        )
        for trace, where in (("p3", "EC2 (p3)"), ("gcp", "called GCP"))
        for model in (_BERT, _MIDDLE, _LARGE)
        for name in ("varuna", "oobleck")
    ]
    return Found(
        rows=tuple(rows),
        constants=(
            _RATES,
            _COSTS,
            _STILL,
            Constant(
                name="traces",
                value="of Bamboo's authors, scaled to 15 to 30 machines by Oobleck's",
                origin=Origin.ARTIFACT,
                why="the one called GCP has the times of Bamboo's trace of AWS g4dn",
            ),
        ),
        says=(
            "The averages of figure 10 are output of the same simulator; what stands as printed beside single rates "
            "is what it says for EC2. In it machines that come wait for the next loss, and steps go on during "
            "restarts; here they come in at once, and every restart stands still.",
        ),
    )


def _items() -> Iterator[Item]:
    yield Item(name="oobleck/table2", title="samples per second as nodes are lost", find=table2)
    yield Item(name="oobleck/table3", title="how long planning takes", find=table3)
    yield Item(name="oobleck/table4", title="the same with checkpoints for free", find=table4)
    yield Item(name="oobleck/figure10", title="spot machines", find=figure10)
    yield Item(name="oobleck/figure11", title="what time is lost to (and figure 1)", find=figure11)
    yield Item(name="oobleck/rates", title="what was measured by the number of nodes", find=rates)


ITEMS = tuple(_items())
"""What can be had of it, in the paper's order."""
