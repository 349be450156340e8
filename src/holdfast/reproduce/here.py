"""The papers' experiments with whole jobs of this package: its strategies, its decisions, and what they cost here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from holdfast.config.job import Cluster
from holdfast.core.profile import LayerProfile, Link, Profile
from holdfast.reproduce.facts import facts
from holdfast.reproduce.found import Constant, Found, Item, Origin, Row
from holdfast.reproduce.gpt3 import SHAPES, estimate
from holdfast.reproduce.jobs import GAPS, HOUR_S, Experiment, fewer_and_fewer
from holdfast.sim.failures import parse_failures
from holdfast.sim.side_by_side import side_by_side

__all__ = ["ITEMS"]

_COSTS = Constant(
    name="what losses and joins cost",
    value=str(Cluster()),
    origin=Origin.MEASURED,
    why="seconds, and bytes per second, with processes of one machine (docs/benchmarks.md)",
)
_RUNS = 3
_OURS = {"GPT-3 Medium": (SHAPES[0], (6, 5, 8)), "GPT-3 6.7b": (SHAPES[2], (10, 3, 51))}
"""Of Oobleck's models: the profile that there is, and the grid of its rates that fits best (oobleck/rates)."""


def of_oobleck(processes: int) -> Found:
    """Throughput while 15 of 30 nodes are lost one by one, as a share of that of all."""
    cells = [(model, gap) for model in _OURS for gap in GAPS]
    with side_by_side(_shares, processes) as each:
        found = dict(zip(cells, each(cells), strict=True))
    printed, rates = facts("oobleck")["table2"]["rows"], facts("oobleck")["samples_per_s_by_nodes"]
    rows = []
    for model, gap in cells:
        for strategy, system in _BESIDE.items():
            share = None
            if system is not None:
                share = printed[model][system.title()][list(GAPS).index(gap)] / rates[system][model][-1]
            beside = f", beside {system.title()}'s" if system else ""
            rows.append(
                Row(
                    what=f"{model}, {gap}: `{strategy}`{beside}",
                    printed=share,
                    ours=found[model, gap][strategy],
                    less_is_better=False,
                )
            )
    return Found(
        rows=tuple(rows),
        constants=(
            _COSTS,
            Constant(
                name="seconds and bytes of layers",
                value="of an A100 with 80 GB",
                origin=Origin.ESTIMATED,
                why="so what stands beside the printed shares is another cluster's: A40s with slower links",
            ),
            Constant(
                name="steps between two checkpoints",
                value="10 of `checkpoint-restart`, 100 of the others",
                origin=Origin.PRINTED,
                why="as Varuna's; the others need one only where all owners of a layer are lost",
            ),
        ),
        says=(
            "What is printed is table 2's rate by the authors' own of 30 nodes. A loss costs `templates` and "
            "`adaptive` no more than part of a step, so what is lost is the lost nodes' share of the work.",
        ),
    )


_BESIDE = {"templates": "oobleck", "checkpoint-restart": "varuna", "adaptive": None}
"""Which strategy does what which system does, and is compared with it."""
_EVERY = {"templates": 100, "checkpoint-restart": 10, "adaptive": 100}
"""Steps between two checkpoints."""


def _shares(cell: tuple[str, str]) -> dict[str, float]:
    """By strategy: which share of the whole grid's steps is made."""
    model, gap = cell
    shape, grid = _OURS[model]
    experiment, world = Experiment(profile=estimate(shape), grid=grid), fewer_and_fewer(GAPS[gap])

    def goodput(name: str) -> float:
        resilience = {"strategy": name, "wait_for_replacement": 1.0}  # in vain, as nobody comes
        job = experiment.job(name, checkpoint={"every": _EVERY[name]}, resilience=resilience)
        return experiment.become(job, world).goodput

    return {name: goodput(name) for name in _BESIDE}


def of_swift(processes: int) -> Found:
    """Hours of whole runs with failures, and of the same without any."""
    known = facts("swift")
    cells = [(model, name, seed) for model in known["table4"] for name in _WAYS for seed in range(_RUNS)]
    with side_by_side(_hours, processes) as each:
        found = dict(zip(cells, each(cells), strict=True))
    rows = []
    for model, (_, globally, swift, _) in known["table5"].items():
        for name, printed in zip(_WAYS, (globally, swift), strict=True):
            hours = [found[model, name, seed] for seed in range(_RUNS)]
            rows.append(
                Row(
                    what=f"{model}: {name}",
                    printed=printed,
                    ours=statistics.fmean(hours),
                    unit="h",
                    reach=(min(hours), max(hours)),
                    within=0.01,
                    less_is_better=True,
                )
            )
    return Found(
        rows=tuple(rows),
        constants=(
            _COSTS,
            Constant(
                name="machines",
                value="2 replicas of Wide-ResNet-50; pipelines of 16 otherwise, all as fast",
                origin=Origin.ASSUMED,
                why="that step without losses takes what table 4 says is all that is published of BERT-128",
            ),
            Constant(name="state", value="9.8 GB of Wide-ResNet-50; 19.3 GB of the others", origin=Origin.ESTIMATED),
            Constant(
                name="failures",
                value="17 h apart on average, at random; another machine is there a second later",
                origin=Origin.PRINTED,
                why=f"{_RUNS} runs of each, of which the ranges are; steps between checkpoints as in table 4",
            ),
        ),
        says=(
            "Table 5's runs, by the decisions of the coordinator: whoever is lost is waited for, and its layers "
            "are replayed by it and all others. Replays are priced as if all that was logged were read in time.",
        ),
    )


_WAYS = {"checkpoint-restart": "off", "adaptive": "on"}
"""By name, whether what crosses machines is logged where nobody else holds the same layers."""
_FLOAT32, _ADAM, _WEIGHTS_PER_LAYER = 4, 3, 12
"""Bytes; what Adam keeps of each weight, itself among them; weights of a layer by its width squared."""
_NETWORK = Link(latency_s=5e-5, bytes_per_s=5e9)
"""40 Gbit/s."""
_HELPERS = 15
"""All others, as in the paper's parallel recovery."""
_WAITS_S = 60.0
"""At most, for another machine."""


def _hours(cell: tuple[str, str, int]) -> float:
    """Of a whole run, beside what one without failures, and checkpoints, takes."""
    model, name, seed = cell
    steps, every, hours = facts("swift")["table4"][model]
    experiment = _of_swift(model, hours * HOUR_S / steps)
    logs = _WAYS[name] if model in facts("swift")["shapes"] else "off"
    job = experiment.job(
        name,
        checkpoint={"every": every},
        logging={"use": logs, "helpers": _HELPERS if logs == "on" else 0},
        resilience={"strategy": name, "wait_for_replacement": _WAITS_S},
        train={"steps": 1, "seed": 0, "technique": "1f1b"},
    )
    machines = math.prod(experiment.grid[:2])
    between = facts("swift")["mtbf_h"]
    world = parse_failures(f"poisson:mtbf={between}h,repair=1s").draw(machines, hours * HOUR_S, f"{model}:{seed}")
    return float(hours) / experiment.become(job, world).goodput


def _of_swift(model: str, step_s: float) -> Experiment:
    """A job whose step takes so long if nobody is missing, by 1F1B, with layers that are all alike."""
    shape = facts("swift")["shapes"].get(model)
    if shape is None:
        pipelines, stages, microbatches, boundary, layers = 2, 1, 4, 0, 4
        state = round(facts("swift")["figure3"]["state_bytes"])
    else:
        hidden = facts("swift")["hidden"]
        pipelines, stages, microbatches, layers = 1, 16, shape["batch"] // shape["microbatch"], 16
        boundary = shape["microbatch"] * shape["tokens"] * hidden * _FLOAT32
        state = facts("swift")["stages"] * _WEIGHTS_PER_LAYER * hidden**2 * _ADAM * _FLOAT32
    pass_s = step_s / (microbatches + stages - 1) / (layers // stages)
    layer = LayerProfile(
        name="layer",
        forward_s=pass_s / 3,
        backward_input_s=pass_s / 3,
        backward_weight_s=pass_s / 3,
        held_after_forward_bytes=2 * boundary,
        held_after_input_bytes=boundary,
        boundary_bytes=boundary,
        parameter_bytes=state // layers // _ADAM,
        optimizer_bytes=state // layers // _ADAM * (_ADAM - 1),
    )
    profile = Profile(layers=(layer,) * layers, link=_NETWORK)
    return Experiment(profile=profile, grid=(pipelines, stages, microbatches))


def _items() -> Iterator[Item]:
    yield Item(name="oobleck/here", title="table 2's losses, by what runs here", find=of_oobleck)
    yield Item(name="swift/here", title="table 5's runs, by what runs here", find=of_swift)


ITEMS = tuple(_items())
"""The same experiments, for the papers whose own tables take costs of others."""
