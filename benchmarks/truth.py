"""Whole jobs with losses and joins: how `holdfast simulate` says that they go, and how they really go.

Workers, sockets, coordinator, plans and recoveries are real; the compute is emulated by sleeps. Each run loses five
workers and is offered as many new ones, at times, not at steps, whose numbers would depend on the speed that is in
question. What is compared is how long it takes until as many steps are committed as really are in a minute.

A simulation is told the job, the profile that is slept by, and when faults were really sent; how fast messages,
connections and new processes are is taken from other runs, of a smaller grid, that lose others at other times. It runs
in a process of its own that knows no folder of a run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config.job import Cluster
from holdfast.config.load import parse_job
from holdfast.core.faults import Fault
from holdfast.core.profile import Link, Profile
from holdfast.recovery.rates import step_seconds
from holdfast.runtime.train import Summary
from holdfast.settings.planning import healthy_plan
from holdfast.sim.calibrate import Layers, medians, shown_by
from holdfast.sim.engine import Outcome, simulate
from holdfast.sim.prepare import prepared, speeds_of
from holdfast.sim.world import Happening, Kind, World
from holdfast.telemetry.events import FaultInjected, StepOps, read_events
from measure import Recorder, interval, print_table, progress, verdict
from measured_run import measured_run, op_profile

TARGET = 0.03
_LAYERS = 16
_OTHER_S = 18.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to train and to recover: its grid of 8 workers, keys of the job, and whom it loses when."""

    name: str
    grid: str
    keys: dict[str, Any]
    victims: tuple[str, ...]
    joins: bool = True

    def faults(self, every_s: float) -> tuple[str, ...]:
        """One is lost every so many seconds; another one is offered 0.4 of that later."""
        lost = [f"kill:{worker}@+{(0.3 + index) * every_s:g}s" for index, worker in enumerate(self.victims)]
        come = [f"join:new@+{(0.7 + index) * every_s:g}s" for index in range(len(self.victims) * self.joins)]
        return (*lost, *come)

    @property
    def smaller(self) -> str:
        """Half of the grid, on which other runs show how fast the machine is."""
        pipelines, stages = map(int, self.grid.split("x"))
        return f"{pipelines}x{stages // 2}" if pipelines < stages else f"{pipelines // 2}x{stages}"

    def others(self) -> tuple[str, ...]:
        """Whom those runs lose, and when."""
        pipelines, stages = map(int, self.smaller.split("x"))
        lost = (f"kill:{pipelines - 1}.{stages - 1}@+4s", "kill:0.0@+11s")
        return (*lost, *("join:new@+6s", "join:new@+13s")[: 2 * self.joins])


_FIVE = ("1.0", "3.1", "0.0", "2.1", "1.1")
_OOBLECK = {"resilience.strategy": "templates", "resilience.failure_every_s": 11.0}
"""How often failures come is told: runs so short differ in what they make of the time before their first step."""
CASES = (
    Case(
        name="slipstream",
        grid="4x2",
        keys={"resilience.strategy": "adaptive", "train.technique": "staggered"},
        victims=_FIVE,
    ),
    Case(name="oobleck", grid="4x2", keys=_OOBLECK, victims=_FIVE),
    Case(
        name="auto", grid="4x2", keys={"resilience.strategy": "auto", "resilience.failure_every_s": 11.0}, victims=_FIVE
    ),
    Case(name="both", grid="4x2", keys={**_OOBLECK, "train.technique": "staggered"}, victims=_FIVE),
    Case(
        name="replication",
        grid="2x4",
        keys={"resilience.strategy": "adaptive"},
        victims=("1.2", "0.0", "1.1", "0.3", "1.0"),
    ),
    Case(
        name="logging",
        grid="1x8",
        keys={
            "resilience.strategy": "adaptive",
            "logging.use": "on",
            "checkpoint.every": 5,
            "grid.microbatches": 8,
            "resilience.wait_for_replacement": 60,
        },
        victims=("0.2", "0.5", "0.0", "0.7", "0.3"),
    ),
    Case(
        name="checkpoint-restart",
        grid="4x2",
        keys={
            "resilience.strategy": "checkpoint-restart",
            "checkpoint.every": 10,
            "resilience.wait_for_replacement": 60,
        },
        victims=_FIVE,
        joins=False,
    ),
)


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    if options.predict:
        print(json.dumps(_predict(json.load(sys.stdin))))
        return 0
    cases = [case for case in CASES if case.name in options.cases]
    recorder = Recorder("truth", vars(options))
    for repetition in range(options.repetitions):
        for case in cases:
            shown = _calibrated(case, options, recorder, repetition)
            recorder.begin()
            row = recorder.add(case=case.name, repetition=repetition, **_measured(case, shown, options))
            progress(f"{case.name}, run {repetition + 1}/{options.repetitions}: {_brief(row)}")
    summary = [_summary(case, recorder.rows) for case in cases]
    print_table(
        f"seconds until as many steps are over as really are in {options.horizon_s:g} s; target: within {TARGET:.0%}",
        ["case", "grid", "lost", "steps", "real", "simulated", "gap %", "without losses", "verdict"],
        [
            [
                each["case"],
                each["grid"],
                str(each["lost"]),
                *(each[name].show(1, digits) for name, digits in (("steps", 0), ("real", 2), ("simulated", 2))),
                each["gap"].show(100, 1),
                each["healthy"].show(1, 2),
                verdict(each["off"], TARGET),
            ]
            for each in summary
        ],
    )
    recorder.write(summary)
    return int(any(row["error"] for row in recorder.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    parser.add_argument("--repetitions", type=int, default=3, help="runs per case, alternating between cases")
    parser.add_argument("--quick", action="store_true", help="one run per case, of half the time")
    parser.add_argument("--op-ms", type=float, default=20.0, help="length of every emulated F, I and W of a worker")
    parser.add_argument("--microbatches", type=int, default=2, help="per worker, so that a step takes the same time")
    parser.add_argument("--latency-ms", type=float, default=3.0, help="of every message between workers")
    parser.add_argument("--horizon-s", type=float, default=60.0, help="in so many seconds real steps are counted")
    parser.add_argument("--limit-s", type=float, default=300.0, help="a run longer than this has failed")
    parser.add_argument("--predict", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.horizon_s = 1, options.horizon_s / 2
    return options


def _job(case: Case, grid: str, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    pipelines, stages = map(int, grid.split("x"))
    tree: dict[str, Any] = {
        "name": f"truth-{case.name}",
        "model": {"kind": "vit", "layers": _LAYERS - 2},  # is not built; no layers of it share weights
        "data": {"kind": "digits"},
        "grid": {"pipelines": pipelines, "stages": stages, "microbatches": options.microbatches * stages},
        "train": {"steps": steps},
    }
    for key, value in case.keys.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return tree


def _profile(grid: str, options: argparse.Namespace) -> Profile:
    """Equal stages; a message takes longer than it really does here, so that whoever takes it waits for its time."""
    plain = op_profile(_LAYERS, int(grid.split("x")[1]), options.op_ms / 1000)
    layers = tuple(replace(layer, parameter_bytes=4096) for layer in plain.layers)
    return replace(plain, layers=layers, link=Link(latency_s=options.latency_ms / 1000, bytes_per_s=1e9))


def _ran(
    case: Case, grid: str, faults: tuple[str, ...], horizon_s: float, options: argparse.Namespace
) -> dict[str, Any]:
    """A run that is long enough; what it committed, when its faults were sent, and what it shows of the machine."""
    profile = _profile(grid, options)
    job, speeds = parse_job(_job(case, grid, options, 1)), speeds_of(profile, Cluster())
    healthy_s = step_seconds(healthy_plan(job, _LAYERS, profile), speeds.rates)
    steps = round(horizon_s / healthy_s) + 2
    tree = _job(case, grid, options, steps)
    row = partial(_row, tree, profile, horizon_s)
    parsed = tuple(map(Fault.parse, faults))
    found = measured_run(parse_job(tree), row, limit_s=options.limit_s, faults=parsed, emulate=profile)
    return {"error": None, "tree": tree, **found}


def _row(tree: dict[str, Any], profile: Profile, horizon_s: float, summary: Summary) -> dict[str, Any]:
    if summary.unfired:
        return {"error": f"not fired: {summary.unfired}"}
    events = read_events(Path(summary.run_dir) / "events.jsonl")
    job, commits = parse_job(tree), dict(summary.report.commits)
    began = max(at for at, e in events if isinstance(e, StepOps) and (e.step, e.generation) == (0, 1))
    sent = [(at - began, e.kind, e.worker) for at, e in events if isinstance(e, FaultInjected)]
    plan = healthy_plan(job, _LAYERS, profile)
    shown = shown_by(events, Layers(plan=plan, profile=profile, ahead=job.train.technique == "staggered"))
    counted = sorted(at - began for at in commits.values() if at <= began + horizon_s)
    return {"sent": sent, "steps": len(counted) - 1, "seconds": counted[-1], "shown": dict(medians([shown]))}


def _calibrated(case: Case, options: argparse.Namespace, recorder: Recorder, repetition: int) -> dict[str, float]:
    """How fast this machine is, by half of the grid that trains and recovers in the same way."""
    recorder.begin()
    found = _ran(case, case.smaller, case.others(), _OTHER_S, options)
    row = recorder.add(case=case.name, repetition=repetition, calibration=True, **found)
    shown = {} if row["error"] else row["shown"]
    told = row["error"] or ", ".join(f"{name} {value:.4g}" for name, value in sorted(shown.items()))
    progress(f"{case.name}, {case.smaller}: {told}")
    return shown


def _measured(case: Case, shown: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    found = _ran(
        case, case.grid, case.faults(options.horizon_s / (len(case.victims) + 0.4)), options.horizon_s, options
    )
    if found["error"]:
        return found
    told = {
        "tree": found["tree"],
        "profile": msgspec.to_builtins(_profile(case.grid, options)),
        "sent": found["sent"],
        "steps": found["steps"],
        "shown": shown,
        "joins": case.joins,
    }
    asked = [sys.executable, __file__, "--predict"]
    done = subprocess.run(asked, input=json.dumps(told), capture_output=True, text=True, check=True)
    return {**found, **json.loads(done.stdout), "used": shown}


def _predict(told: dict[str, Any]) -> dict[str, Any]:
    """How long a simulation takes until so many steps are committed, from the end of the first one on."""
    job, profile = parse_job(told["tree"]), msgspec.convert(told["profile"], Profile)
    assumed = Cluster(**told["shown"])
    speeds, one = speeds_of(profile, assumed), prepared(job, profile)
    one = replace(one, rules=replace(one.rules, steps=job.train.steps))  # some decisions are about how many are left
    machines = {str(worker): index for index, worker in enumerate(one.plan.workers)}
    number = count(len(machines))

    def of(lasts_s: float, happenings: tuple[Happening, ...] = ()) -> Outcome:
        here = tuple(each for each in happenings if each.at_s < lasts_s)
        return simulate(one, World(machines=len(machines), happenings=here, lasts_s=lasts_s), speeds)

    alone = of(1.0)
    first_s = alone.rates[0][0] + alone.healthy_s
    happenings = []
    for at, kind, worker in sorted(told["sent"]):
        if kind == "kill":
            happenings.append(Happening(at_s=first_s + at, kind=Kind.LOST, machine=machines[worker]))
        if kind == "join":
            happenings.append(Happening(at_s=first_s + at, kind=Kind.COMES, machine=next(number)))
        elif not told["joins"]:  # a process is started where the lost one was
            comes_s = first_s + at + assumed.detect_s
            happenings.append(Happening(at_s=comes_s, kind=Kind.COMES, machine=next(number)))
    steps = told["steps"] + 1
    least = happenings[-1].at_s + assumed.detect_s  # from then on no step is given up any more
    most = first_s + 10 * steps * alone.healthy_s
    while most - least > 1e-3:
        middle = (least + most) / 2
        least, most = (least, middle) if of(middle, tuple(happenings)).steps >= steps else (middle, most)
    parts = of(most, tuple(happenings)).parts
    return {
        "simulated_s": most - first_s,
        "healthy_s": (steps - 1) * alone.healthy_s,
        "parts": {part.value: seconds for part, seconds in parts.items()},
    }


def _brief(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    return (
        f"{row['steps']} steps in {row['seconds']:.2f} s, simulated {row['simulated_s']:.2f} ({_gap(row):+.1%}), "
        f"without losses {row['healthy_s']:.2f}"
    )


def _gap(row: dict[str, Any]) -> float:
    """By how much more is trained in the same time than simulated."""
    return float(row["simulated_s"] / row["seconds"] - 1)


def _summary(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["case"] == case.name and not row["error"] and not row.get("calibration")]
    return {
        "case": case.name,
        "grid": case.grid,
        "lost": len(case.victims),
        "steps": interval([row["steps"] for row in good]),
        "real": interval([row["seconds"] for row in good]),
        "simulated": interval([row["simulated_s"] for row in good]),
        "healthy": interval([row["healthy_s"] for row in good]),
        "gap": interval([_gap(row) for row in good]),
        "off": interval([abs(_gap(row)) for row in good]),
    }


if __name__ == "__main__":
    raise SystemExit(main())
