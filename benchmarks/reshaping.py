"""What is left of throughput as workers die one after another: re-routed alone, in other pipelines alone, or both.

Workers, sockets, coordinator, plans and updates are real; the compute is emulated by sleeps, so that many workers fit
on few cores. Twelve workers, 48 equal layers, 96 micro-batches; one more dies every few steps. Measured are the steps
behind the last change before the next loss. No plan can be faster than the living workers' share of all
(layer, micro-batch) pairs, in whole pairs.

- ``oobleck``: the pipelines that the paper's rules give of whoever is left, each with its template, by 1F1B. Where no
  worker is re-routed that is a job without failures: it is trained as one, for every loss.
- ``adaptive``: re-routing alone.
- both: the one of these two that is faster by its plan, as training would take it. Nothing is measured for it.
- ``templates``: both, and any pipelines for so many workers.

What is measured is written after every case, so with ``--go-on`` it can be done in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast.config.job import Job
from holdfast.config.load import parse_job
from holdfast.control.chain.opening import plans_in
from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Profile, costs_from_profile, uniform_profile
from holdfast.planning.templates.batches import fastest_shares
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.reconfigure import Pipelines, reconfigured
from holdfast.planning.templates.stages import stage_table
from holdfast.planning.templates.template import Template
from holdfast.runtime.train import Summary
from holdfast.schedule.evaluate import steady_period
from holdfast.telemetry.events import StepOps, read_events
from measure import RESULTS, Interval, Recorder, interval, print_table, progress
from measured_run import measured_run, step_lengths

_PIPELINES, _STAGES, _MICROBATCHES, _LAYERS = 3, 4, 32, 48
_VICTIMS = tuple(map(WorkerId.parse, ("1.2", "0.1", "2.3", "1.0", "0.2", "2.1")))
"""Spread over pipelines and stages, the first as in SlipStream's running example; each layer keeps an owner."""
_FIRST = 2
_SMALLEST = 2
"""The fewest workers of a pipeline."""
_AFTERWARDS = 2
"""Behind the last loss the job goes on for so many times as long: else other pipelines would not pay until its end."""
TARGET_OFF, TARGET_BETTER, TARGET_BOUND = 0.05, 0.97, 0.97
_COMPARABLE = ("losses", "steps_each", "layer_ms")
"""The options that rows of one file have in common."""


def main() -> int:
    """Runs the benchmark; returns 1 if any run failed."""
    options = _options()
    cases = [(technique, strategy) for technique in options.techniques for strategy in ("adaptive", "templates")]
    recorder = Recorder("reshaping", vars(options), _earlier(options) if options.go_on else [])
    done = {(row["technique"], row["strategy"], row["repetition"]) for row in recorder.rows}
    for repetition in range(options.repetitions):
        for technique, strategy in (("1f1b", "oobleck"), *cases):
            if (technique, strategy, repetition) in done:
                continue
            recorder.begin()
            found = (_measure_oobleck if strategy == "oobleck" else partial(_measure, technique, strategy))(options)
            row = recorder.add(technique=technique, strategy=strategy, repetition=repetition, **found)
            brief = row["error"] or " ".join(f"{step:.2f}" for step in row["steps_s"])
            progress(f"{technique}, {strategy}, run {repetition + 1}/{options.repetitions}: {brief}")
            recorder.write(_summary(recorder.rows, options.layer_ms / 1000))
    _show(_summary(recorder.rows, options.layer_ms / 1000))
    return int(any(row["error"] for row in recorder.rows))


def _earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what was measured with the same options before, but for runs that failed."""
    path = RESULTS / "reshaping.json"
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    for name in _COMPARABLE:
        if (before := document["settings"][name]) != (now := vars(options)[name]):
            raise SystemExit(
                f"{path}: was measured with {name} {before}, not {now}: give the same, or leave out --go-on"
            )
    return [row for row in document["rows"] if not row["error"]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--techniques", nargs="+", default=["staggered"], help="of the planner")
    parser.add_argument("--losses", type=int, default=len(_VICTIMS), help="workers that die, at most 6")
    parser.add_argument("--steps-each", type=int, default=6, help="from one loss to the next")
    parser.add_argument("--layer-ms", type=float, default=3.0, help="length of F, I and W of a layer")
    parser.add_argument("--repetitions", type=int, default=1, help="runs of each case, alternating")
    parser.add_argument("--go-on", action="store_true", help="keep what results/ has of the same settings")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a run longer than this has failed")
    return parser.parse_args()


def _profile(layer_s: float) -> Profile:
    return uniform_profile(_LAYERS, forward_s=layer_s, backward_input_s=layer_s, backward_weight_s=layer_s)


def _measure(technique: str, strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    profile = _profile(options.layer_ms / 1000)
    strikes = [_FIRST + options.steps_each * number for number in range(options.losses)]
    faults = [
        Fault(kind=FaultKind.KILL, worker=worker, step=step, point=Point.BACKWARD)
        for worker, step in zip(_VICTIMS, strikes, strict=False)
    ]
    job = _job(technique, strategy, strikes[-1] + _AFTERWARDS * options.steps_each)
    row = partial(_struck_row, profile, strikes, technique == "staggered")
    return measured_run(job, row, limit_s=options.limit_s, faults=faults, emulate=profile)


def _measure_oobleck(options: argparse.Namespace) -> dict[str, Any]:
    """A job without failures for each loss, in the pipelines that the rules have made of whoever is left."""
    profile = _profile(options.layer_ms / 1000)
    found: dict[str, Any] = {"error": None, "steps_s": [], "planned_s": [], "layouts": []}
    for layout in _by_the_rules(profile)[: options.losses]:
        job = _parsed("reshaping-oobleck", {"layout": layout}, {"steps": options.steps_each}, {})
        ran = measured_run(job, partial(_row, profile, [0], False), limit_s=options.limit_s, emulate=profile)
        if ran["error"]:
            return {"error": f"{layout}: {ran['error']}"}
        found["layouts"].append(layout)
        found["steps_s"] += ran["steps_s"]
        found["planned_s"] += ran["planned_s"]
    return found


def _by_the_rules(profile: Profile) -> list[list[dict[str, Any]]]:
    """Returns the pipelines after each loss, as a job file has them."""
    microbatches = _PIPELINES * _MICROBATCHES
    templates = best_templates(stage_table(profile, 1), range(_SMALLEST, _PIPELINES * _STAGES + 1), microbatches)
    pipelines = Pipelines(
        pipelines=tuple(tuple(range(p * _STAGES, (p + 1) * _STAGES)) for p in range(_PIPELINES)),
    )
    layouts = []
    for victim in _VICTIMS:
        lost = victim.pipeline * _STAGES + victim.stage
        pipelines = reconfigured(pipelines, {lost}, _SMALLEST, templates)
        layouts.append(_layout([templates[len(nodes)] for nodes in pipelines.pipelines], microbatches))
    return layouts


def _layout(templates: Sequence[Template], microbatches: int) -> list[dict[str, Any]]:
    shares = fastest_shares([template.pace for template in templates], microbatches)
    return [
        {"stages": [len(layers.indices) for layers in template.layers_by_node], "microbatches": share}
        for template, share in zip(templates, shares, strict=True)
    ]


def _job(technique: str, strategy: str, steps: int) -> Job:
    planned = {} if technique == "1f1b" else {"in_flight": 2 * _STAGES}
    return _parsed(
        f"reshaping-{strategy}",
        {"pipelines": _PIPELINES, "stages": _STAGES, "microbatches": _MICROBATCHES},
        {"steps": steps, "technique": technique, **planned},
        {"strategy": strategy} | ({"smallest_pipeline": _SMALLEST} if strategy == "templates" else {}),
    )


def _parsed(name: str, grid: dict[str, Any], train: dict[str, Any], resilience: dict[str, Any]) -> Job:
    return parse_job(
        {
            "name": name,
            "model": {"kind": "gpt", "layers": _LAYERS - 2, "width": 8, "heads": 1, "context": 8, "dropout": 0},
            "data": {"kind": "text", "path": __file__},
            "grid": grid,
            "train": train,
            "resilience": resilience,
        }
    )


def _struck_row(profile: Profile, strikes: list[int], staggered: bool, summary: Summary) -> dict[str, Any]:
    if summary.unfired or len(summary.report.failures) != len(strikes):
        return {"error": f"{len(summary.report.failures)} failures; not fired: {summary.unfired}"}
    return _row(profile, strikes, staggered, summary)


def _row(profile: Profile, begins: list[int], staggered: bool, summary: Summary) -> dict[str, Any]:
    """The steps of the last plan in each stretch from one of these steps to the next, and what it says of them."""
    plans = plans_in(summary.run_dir / "control.db")
    events = read_events(summary.run_dir / "events.jsonl")
    ran = {event.step: event.generation for _, event in events if isinstance(event, StepOps)}
    lengths, costs = step_lengths(summary), costs_from_profile(profile)
    steps_s, planned_s = [], []
    for begin, end in zip(begins, [*begins[1:], summary.steps], strict=True):
        newest = ran[end - 1]
        last = [step for step in range(begin + 1, end) if ran[step] == newest][1:]  # a change reaches into its first
        if not last:
            return {"error": f"no two steps of one plan between steps {begin} and {end}: more --steps-each are needed"}
        steps_s.append(statistics.median(lengths[step] for step in last))
        planned_s.append(steady_period(plans[newest], costs, staggered=staggered))
    return {"error": None, "steps_s": steps_s, "planned_s": planned_s}


def _summary(rows: list[dict[str, Any]], layer_s: float) -> list[dict[str, Any]]:
    cells: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in (row for row in rows if not row["error"]):
        for lost, pair in enumerate(zip(row["steps_s"], row["planned_s"], strict=True), 1):
            cells.setdefault((row["technique"], row["strategy"], lost), []).append(pair)
    places = sorted({(technique, lost) for technique, strategy, lost in cells if strategy != "oobleck"})
    return [_entry(cells, technique, lost, layer_s) for technique, lost in places]


def _entry(
    cells: dict[tuple[str, str, int], list[tuple[float, float]]], technique: str, lost: int, layer_s: float
) -> dict[str, Any]:
    """What there is of a technique after so many losses; Oobleck's pipelines run by 1F1B, whatever it is."""
    entry: dict[str, Any] = {"technique": technique, "lost": lost, "bound_s": _bound_units(lost) * layer_s}
    for strategy in ("oobleck", "adaptive", "templates"):
        if pairs := cells.get(("1f1b" if strategy == "oobleck" else technique, strategy, lost)):
            entry[strategy] = interval([step for step, _ in pairs])
            entry[f"{strategy}_planned_s"] = statistics.median(planned for _, planned in pairs)
    if "oobleck" in entry and "adaptive" in entry:
        entry["both_is"] = min(("adaptive", "oobleck"), key=lambda strategy: entry[f"{strategy}_planned_s"])
        better = min(entry["adaptive"].median, entry["oobleck"].median)
        entry["both_of_better"] = better / entry[entry["both_is"]].median
    if "templates" in entry:
        entry["templates_of_bound"] = entry["bound_s"] / entry["templates"].median
    return entry


def _bound_units(lost: int) -> int:
    """The least time of a step of whoever is left, in lengths of an operation of one layer."""
    pairs = _LAYERS * _PIPELINES * _MICROBATCHES
    return 3 * math.ceil(pairs / (_PIPELINES * _STAGES - lost))


def _show(summary: list[dict[str, Any]]) -> None:
    header = ["technique", "lost"]
    header += [text for name in ("Oobleck alone", "re-routed alone") for text in (f"{name}, s", "off plan %")]
    header += ["both is", "of the better", "templates, s", "off plan %", "bound, s", "of the bound"]
    table = []
    for row in summary:
        cells = [row["technique"], str(row["lost"]), *_timed(row, "oobleck"), *_timed(row, "adaptive")]
        cells += [row.get("both_is", "-"), _part(row, "both_of_better", TARGET_BETTER)]
        cells += [*_timed(row, "templates"), f"{row['bound_s']:.3f}", _part(row, "templates_of_bound", TARGET_BOUND)]
        table.append(cells)
    print_table(
        f"a step of 12 workers less those lost; targets: off plan within {TARGET_OFF:.0%}, both at least "
        f"{TARGET_BETTER} of the better one's throughput, templates at least {TARGET_BOUND} of the bound's; "
        "* marks what misses its target",
        header,
        table,
    )


def _timed(row: dict[str, Any], strategy: str) -> tuple[str, str]:
    """How long a step took, and by how much that is off its plan."""
    measured: Interval | None = row.get(strategy)
    if measured is None or measured.median is None:
        return "-", "-"
    off = measured.median / row[f"{strategy}_planned_s"] - 1
    return measured.show(1, 3), f"{100 * off:+.1f}{'*' if abs(off) > TARGET_OFF else ''}"


def _part(row: dict[str, Any], name: str, target: float) -> str:
    return "-" if name not in row else f"{row[name]:.3f}{'*' if row[name] < target else ''}"


if __name__ == "__main__":
    raise SystemExit(main())
