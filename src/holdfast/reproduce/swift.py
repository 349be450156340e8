"""SWIFT's tables and figures: what failures cost over a whole run, by formulas, and what is logged in which groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from holdfast.drawing.curves import Point, curves_to_svg
from holdfast.planning.groups.chain import MachineChain
from holdfast.planning.groups.costs import GroupCosts
from holdfast.planning.groups.merging import authors_groups, greedy_groups
from holdfast.planning.groups.programme import best_groups
from holdfast.recovery.checkfreq import OVERHEAD
from holdfast.reproduce.facts import facts
from holdfast.reproduce.found import Constant, Found, Item, Origin, Row, Verdict

__all__ = ["ITEMS"]

_HOUR_S = 3600.0
_FLOAT32, _BOTH_WAYS = 4, 2
_WRN, _VIT, _BERT = "Wide-ResNet-50", "ViT-128/32", "BERT-128"
_SNAPSHOT_EVERY, _RUNS, _HELPERS = 30, 10, 16
_KILLED_AT, _SAVED_AT = 150, 100
_NETWORK = 5e9
"""Bytes per second of 40 Gbit/s."""
_MACHINES = 16

_INIT_S = Constant(
    name="beginning anew after a failure",
    value="100 s",
    origin=Origin.ASSUMED,
    why="from 60 to 120 s, hours of the run change by less than 0.2 %",
)
_WRN_SAVE_S = Constant(
    name="a checkpoint of Wide-ResNet-50",
    value="20 s",
    origin=Origin.FITTED,
    why="to SWIFT's 480.7 h in table 5 and to 11.8 h in figure 13; from 2 to 25 s, what global checkpoints come to "
    "changes by 0.2 %",
)
_BERT_SAVE_S = Constant(
    name="a checkpoint of BERT-128, and of ViT-128/32", value="0.93 s", origin=Origin.PRINTED, why="of BERT-128 only"
)
_GIVEN_S = Constant(
    name="until a replacement has the state of Wide-ResNet-50",
    value="1.96 s",
    origin=Origin.PRINTED,
    why="9.8 GB at 40 Gbit/s",
)
_REPLAYED = Constant(
    name="of what is run again, saved by replaying with helpers",
    value="57.3 % (ViT-128/32), 76.3 % (BERT-128)",
    origin=Origin.PRINTED,
    why="measured by the authors, figure 9: input here, as in the paper",
)
_INIT, _SAVE = 100.0, {_WRN: 20.0, _VIT: 0.93, _BERT: 0.93}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole run; hours and seconds.

    Attributes:
        hours: without any failure, nor checkpoints.
        steps: of it.
        every: steps from one checkpoint to the next.
        save_s: of one.
        failures: of the run.
    """

    hours: float
    steps: int
    every: float
    save_s: float
    failures: int

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.hours * _HOUR_S / self.steps

    @property
    def lost_h(self) -> float:
        """Hours from the last checkpoint to a failure, on average."""
        return self.every * self.step_s / 2 / _HOUR_S

    def hours_with(self, again: float, beside_s: float = 0.0) -> float:
        """Return the hours of the run with its failures.

        Args:
            again: how much of the time since the last checkpoint each costs: 1, if all of it is run again as it was.
            beside_s: seconds that each costs beside it and beginning anew.
        """
        saving = self.steps / self.every * self.save_s / _HOUR_S
        return self.hours + saving + self.failures * (again * self.lost_h + (_INIT + beside_s) / _HOUR_S)

    def best_hours(self, again: float, beside_s: float = 0.0) -> float:
        """Return the same with the interval that costs least: the root of 2 x (one checkpoint) x (hours of a failure
        apart), as Young has it.
        """
        if not again:
            return replace(self, every=math.inf).hours_with(0.0, beside_s)
        best_s = math.sqrt(2 * self.save_s * self.hours * _HOUR_S / (self.failures * again))
        return replace(self, every=best_s / self.step_s).hours_with(again, beside_s)

    def error_h(self, again: float) -> float:
        """Return the standard error of the mean of ten runs: failures come at any time between two checkpoints."""
        spread = again * 2 * self.lost_h / math.sqrt(12)
        return math.sqrt(self.failures / _RUNS) * spread


def _run(name: str, **changes: Any) -> Run:
    steps, every, hours = facts("swift")["table4"][name]
    failures = int(hours // facts("swift")["mtbf_h"])
    return replace(Run(hours=hours, steps=steps, every=every, save_s=_SAVE[name], failures=failures), **changes)


def _again(name: str) -> float:
    """How much of the time since a checkpoint SWIFT loses."""
    saved: dict[str, float] = facts("swift")["recovery_less_pct"]["parallel recovery"]
    return 1 - saved[name] / 100 if name in saved else 0.0


def _given(name: str) -> float:
    return facts("swift")["figure3"]["state_bytes"] / _NETWORK if name == _WRN else 0.0


def table3(processes: int) -> Found:
    """Bytes that are logged in a step."""
    shapes, hidden = facts("swift")["shapes"], facts("swift")["hidden"]
    rows = []
    for name, printed in facts("swift")["table3"].items():
        entry = shapes[name]["batch"] * shapes[name]["tokens"] * hidden * _FLOAT32 * _BOTH_WAYS
        rows += [
            Row(
                what=f"{name}, {groups} groups",
                printed=size,
                ours=entry * (int(groups) - 1) / 1e9,
                unit="GB",
                within=0.001,
            )
            for groups, (size, _) in printed.items()
        ]
    return Found(
        rows=tuple(rows),
        constants=(
            Constant(
                name="tokens of a sample of ViT-128/32",
                value="49",
                origin=Origin.ASSUMED,
                why="images of 224 x 224 in patches of 32 x 32, without a class token",
            ),
        ),
        says=(
            "Samples x tokens x hidden x 4 bytes, both ways, over each boundary between groups. The gigabytes per "
            "second beside these in the paper are the sizes by 107 s, of which nothing says what they are.",
        ),
    )


def table5(processes: int) -> Found:
    """Hours of whole runs with failures."""
    rows = []
    for name, (failures, globally, swift, _) in facts("swift")["table5"].items():
        run = _run(name)
        rows.append(Row(what=f"{name}: failures", printed=failures, ours=run.failures, within=0.0))
        for system, printed, again, fitted in (
            ("global checkpoints", globally, 1.0, False),
            ("SWIFT", swift, _again(name), name == _WRN),
        ):
            hours, error = run.hours_with(again, 0.0 if again == 1 else _given(name)), run.error_h(again)
            rows.append(
                Row(
                    what=f"{name}: {system}",
                    printed=printed,
                    ours=hours,
                    unit="h",
                    reach=(hours - error, hours + error) if error else None,
                    within=0.01,
                    fitted=fitted,
                )
            )
    often = _run(_WRN, every=_SNAPSHOT_EVERY, save_s=OVERHEAD * _SNAPSHOT_EVERY * _run(_WRN).step_s)
    rows += [
        Row(what=f"{_WRN}: {system}", printed=facts("swift")[key], ours=often.hours_with(1.0), unit="h", within=0.01)
        for system, key in (("CheckFreq", "checkfreq_h"), ("Elastic Horovod", "elastic_horovod_h"))
    ]
    implied = {key: _snapshot_s(facts("swift")[key]) for key in ("checkfreq_h", "elastic_horovod_h")}
    return Found(
        rows=tuple(rows),
        constants=(_INIT_S, _WRN_SAVE_S, _BERT_SAVE_S, _GIVEN_S, _REPLAYED),
        says=(
            "T0 + checkpoints + failures x (beginning anew + what is run again); ranges are the standard error of ten "
            "runs, as many as the paper simulates, whose failures come at any time between two checkpoints.",
            "CheckFreq and Elastic Horovod, at the 3.5 % that the paper allows a snapshot every 30 steps, would "
            f"take {often.hours_with(1.0):.1f} h. The printed hours imply {implied['checkfreq_h']:.1f} and "
            f"{implied['elastic_horovod_h']:.1f} s for each snapshot, "
            f"{100 * implied['checkfreq_h'] / (_SNAPSHOT_EVERY * often.step_s):.1f} and "
            f"{100 * implied['elastic_horovod_h'] / (_SNAPSHOT_EVERY * often.step_s):.1f} %, which it does not give; "
            "it is not fitted here.",
        ),
    )


def _snapshot_s(hours: float) -> float:
    """Seconds of a snapshot of Wide-ResNet-50 that a printed number of hours implies."""
    run = _run(_WRN, every=_SNAPSHOT_EVERY, save_s=0.0)
    return (hours - run.hours_with(1.0)) * _HOUR_S * _SNAPSHOT_EVERY / run.steps


def table7(processes: int) -> Found:
    """Groups of ViT-128/32's machines within limits of what is logged."""
    known = facts("swift_groups")
    one_way = _boundary("vit", "vit_tokens_of_the_code", 1)
    always = one_way * known["interval"]
    by_authors = by_rule = 0
    rows = []
    for text, printed in known["table7"].items():
        chain = _vit(float(text), one_way)
        by_authors += [group[0] for group in authors_groups(chain, one_way).groups] == printed
        greedy = greedy_groups(replace(chain, limit_bytes=max(0, chain.limit_bytes - always)))
        by_rule += [group[0] for group in greedy.groups] == printed
        rated = GroupCosts(chain).rated(printed)
        as_many = best_groups(replace(chain, limit_bytes=rated.storage_bytes))
        rows.append(
            Row(
                what=f"at most {float(text):.1e} B: seconds of a lost step, of the printed groups and of the best",
                printed=rated.recovery_s,
                ours=as_many.recovery_s,
                unit="s",
                within=0.001,
                less_is_better=True,
            )
        )
    count = len(known["table7"])
    return Found(
        rows=(
            Row(what="rows that the authors' own rule makes", printed=count, ours=by_authors, within=0.0),
            Row(what="rows that section 5.3's rule makes", printed=count, ours=by_rule, within=0.0),
            *rows,
        ),
        constants=(
            Constant(
                name="bytes per second, and steps between checkpoints", value="1.5e9, 100", origin=Origin.ARTIFACT
            ),
            Constant(name="seconds of each machine", value="0.24 to 4.19", origin=Origin.ARTIFACT),
            Constant(
                name="what crosses a boundary", value="one way, 50 tokens", origin=Origin.ARTIFACT, why="table 3: both"
            ),
        ),
        says=(
            "The printed groups follow the code that the authors published, not section 5.3; the row of 1e12 bytes "
            "comes of neither, as it does not nest in the one before. An exact programme finds better ones "
            "([groups](groups.md)).",
        ),
    )


def table6(processes: int) -> Found:
    """Groups of BERT-128's machines."""
    known = facts("swift_groups")
    entry = _boundary("bert", "bert_tokens", 1) * known["interval"]
    rows = tuple(
        Row(
            what=f"{len(printed)} group{'s' * (len(printed) > 1)}, of which one way is logged",
            printed=float(text) / 1e9,
            ours=(len(printed) - 1) * entry / 1e9,
            unit="GB",
            within=0.0,
            at_most=True,
            missed=Verdict.NOTHING_CAN,
            why="table 3's own sizes are more",
        )
        for text, printed in known["table6"].items()
    )
    return Found(
        rows=rows,
        says=(
            "No times of BERT-128's machines are published, so no groups can be made; what those that are printed "
            "would log is known. What stands as printed here is the limit, which they may not exceed; both ways, as "
            "in table 3, each takes twice as much, and only the last two fit.",
        ),
    )


def figure3(processes: int) -> Found:
    """A step in which a snapshot is made."""
    known, bus = facts("swift")["figure3"], 12e9
    step_s = _run(_WRN).step_s
    copy_s = known["state_bytes"] / bus
    return Found(
        rows=(
            Row(what="a step", printed=None, ours=step_s, unit="s"),
            Row(
                what="a step with a snapshot",
                printed=None,
                ours=step_s + copy_s,
                unit="s",
                reach=(step_s + copy_s, step_s * (1 + OVERHEAD * _SNAPSHOT_EVERY)),
            ),
        ),
        constants=(
            Constant(name="copying to the host", value="12 GB/s", origin=Origin.ASSUMED, why="PCIe 3.0 x16"),
            Constant(name="the most that snapshots may add", value="3.5 %", origin=Origin.PRINTED, why="section 7.1"),
        ),
        says=(
            "The figure has bars without numbers, and the text a stall of 0.2 ms. 9.8 GB is what SGD with momentum "
            "keeps of 1.23e9 parameters, not Adam, of which the text speaks. What a checkpoint costs here is "
            "measured in [benchmarks](benchmarks.md).",
        ),
    )


def figure9(processes: int) -> Found:
    """By how much recovery is shorter."""
    known, shapes = facts("swift")["recovery_less_pct"], facts("swift")["shapes"]
    given_s, step_s = _given(_WRN), _run(_WRN).step_s
    since = {
        "global checkpoints": _KILLED_AT - _SAVED_AT,
        "CheckFreq": _KILLED_AT % _SNAPSHOT_EVERY or _SNAPSHOT_EVERY,
        "Elastic Horovod": _KILLED_AT % _SNAPSHOT_EVERY or _SNAPSHOT_EVERY,
    }
    rows = [
        Row(
            what=f"{_WRN}: replication against {system}",
            printed=printed,
            ours=100 * (1 - given_s / (since[system] * step_s)),
            unit="%",
            within=0.005,
        )
        for system, printed in known[_WRN].items()
    ]
    for name in (_VIT, _BERT):
        alone, shared = _replayed(name, 1), _replayed(name, _HELPERS)
        rows += [
            Row(
                what=f"{name}: logging",
                printed=known["logging"][name],
                ours=100 * (1 - alone),
                unit="%",
                missed=Verdict.OPEN,
                why="what a restart costs",
            ),
            Row(
                what=f"{name}: with parallel recovery",
                printed=known["parallel recovery"][name],
                ours=100 * (1 - shared),
                unit="%",
                missed=Verdict.OPEN,
                why="what traffic and a restart cost",
            ),
        ]
    counts = ", ".join(f"{shapes[name]['batch'] // shapes[name]['microbatch']} ({name})" for name in (_VIT, _BERT))
    return Found(
        rows=tuple(rows),
        constants=(
            _GIVEN_S,
            Constant(
                name="micro-batches of a step",
                value=counts,
                origin=Origin.ASSUMED,
                why="the paper's 16 and 4 are their sizes, as its code has it",
            ),
        ),
        says=(
            "Workers are killed in step 150; checkpoints are those of step 100, snapshots those of step 120 at the "
            "latest, or 30 steps old.",
            "Of logging, these are what replaying without bubbles can save of the lost time: 1 - (m + 7) / (m + "
            "127), with helpers 1 - (m / 16 + 7) / (m + 127), for m micro-batches and 128 stages, 8 of them on a "
            "machine. What is printed includes loading, logs that have to be fetched and undoing, none of which is "
            "given. What both come to in real runs here is in [logging](logging.md).",
        ),
    )


def _replayed(name: str, helpers: int) -> float:
    """Of the time of lost steps, how much replaying a machine's stages takes."""
    shape = facts("swift")["shapes"][name]
    microbatches, stages = shape["batch"] // shape["microbatch"], facts("swift")["stages"]
    own = stages // _MACHINES
    share: float = (microbatches / helpers + own - 1) / (microbatches + stages - 1)
    return share


def figure10(processes: int) -> Found:
    """Throughput of ViT-128/32 while it is replayed."""
    low, high = facts("swift")["parallel_throughput_times"]
    limit = 1 / _replayed(_VIT, _HELPERS)
    return Found(
        rows=(
            Row(
                what=f"{_VIT}: with {_HELPERS} helpers, times a healthy step's",
                printed=high,
                ours=limit,
                unit="x",
                missed=Verdict.OPEN,
                why="what traffic costs",
            ),
            Row(what=f"{_VIT}: without helpers", printed=None, ours=1 / _replayed(_VIT, 1), unit="x"),
        ),
        says=(f"Printed are {low} to {high} times; what comes out here is the limit without any traffic.",),
    )


def figure11(processes: int) -> Found:
    """Recovery of ViT-128/32 against the limit of what is logged."""
    one_way = _boundary("vit", "vit_tokens_of_the_code", 1)
    measured = dict(map(tuple, facts("swift_groups")["figure11"]["ViT"]))
    chains = {limit: _vit(limit, one_way) for limit in measured}
    rules: dict[str, Callable[[MachineChain], float]] = {
        "the authors' groups": lambda chain: authors_groups(chain, one_way).recovery_s,
        "the best groups": lambda chain: best_groups(chain).recovery_s,
    }
    computed = {name: {limit: rule(chain) for limit, chain in chains.items()} for name, rule in rules.items()}
    pairs = list(combinations(sorted(measured), 2))
    rows = tuple(
        Row(
            what=f"pairs of limits of which the higher one is recovered sooner, by {name}",
            printed=sum(measured[more] < measured[less] for less, more in pairs),
            ours=sum(found[more] < found[less] for less, more in pairs),
            within=0.0,
        )
        for name, found in computed.items()
    )
    return Found(
        rows=rows,
        says=(
            "What groups come to for a lost step, without what else a restart costs: the order of the points is the "
            "figure's, their seconds are not to be had. Of BERT-128 no times of machines are published.",
        ),
    )


def figure13(processes: int) -> Found:
    """Hours that are saved where everybody checkpoints as often as is best."""
    known = facts("swift")["saved_at_best_interval_h"]
    wrn = _run(_WRN)
    theirs = {"global checkpoints": wrn.save_s}
    theirs |= {"CheckFreq": _snapshot_s(facts("swift")["checkfreq_h"])}
    theirs |= {"Elastic Horovod": _snapshot_s(facts("swift")["elastic_horovod_h"])}
    swift = wrn.hours_with(_again(_WRN), _given(_WRN))
    rows = [
        Row(
            what=f"{_WRN}: saved over {system}",
            printed=printed,
            ours=replace(wrn, save_s=theirs[system]).best_hours(1.0) - swift,
            unit="h",
            within=0.1,
            fitted=system == "global checkpoints",
        )
        for system, printed in known[_WRN].items()
    ]
    bert = _run(_BERT)
    rows.append(
        Row(
            what=f"{_BERT}: saved over global checkpoints",
            printed=known[_BERT]["global checkpoints"],
            ours=bert.best_hours(1.0) - bert.best_hours(_again(_BERT)),
            unit="h",
            within=0.05,
        )
    )
    curves = {
        f"{_WRN}, global checkpoints": _by_interval(wrn, 1.0),
        f"{_BERT}, global checkpoints": _by_interval(bert, 1.0),
    }
    curves[f"{_BERT}, SWIFT"] = _by_interval(bert, _again(_BERT))
    return Found(
        rows=tuple(rows),
        constants=(
            _INIT_S,
            _WRN_SAVE_S,
            _BERT_SAVE_S,
            _REPLAYED,
            Constant(
                name="a snapshot of CheckFreq, and of Elastic Horovod",
                value=f"{theirs['CheckFreq']:.1f} s, {theirs['Elastic Horovod']:.1f} s",
                origin=Origin.FITTED,
                why="to table 5's hours, so these rows are a check of that table",
            ),
        ),
        says=(
            "With the interval of least cost on both sides; of Wide-ResNet-50 SWIFT keeps its own, as replicas give "
            "the state.",
        ),
        pictures={
            "swift-figure13": curves_to_svg(
                curves, "Hours that checkpoints and failures add, by thousands of steps between checkpoints"
            )
        },
    )


def _by_interval(run: Run, again: float) -> list[Point]:
    steps = [100 * 1.25**power for power in range(22)]
    return [
        (every / 1e3, replace(run, every=every).hours_with(again) - run.hours) for every in steps if every <= 10_000
    ]


def figure14(processes: int) -> Found:
    """How much faster SWIFT is, by the time between failures."""
    between = (4, 8, 17, 34, 68)
    rows, curves = [], {}
    for name in (_WRN, _VIT, _BERT):
        curve = []
        for hours in between:
            run = _run(name)
            run = replace(run, failures=max(1, int(run.hours // hours)))
            ratio = run.best_hours(1.0) / (
                run.best_hours(_again(name), _given(name)) if _again(name) else run.hours_with(0.0, _given(name))
            )
            curve.append((float(hours), 100 * (ratio - 1)))
        curves[name] = curve
        rows += [
            Row(what=f"{name}: faster, with one failure each {hours:g} h", printed=None, ours=percent, unit="%")
            for hours, percent in (curve[0], curve[-1])
        ]
    return Found(
        rows=tuple(rows),
        constants=(_INIT_S, _WRN_SAVE_S, _BERT_SAVE_S, _REPLAYED),
        says=("The figure has no numbers. With the interval of least cost on both sides.",),
        pictures={
            "swift-figure14": curves_to_svg(
                curves, "Percent faster than with global checkpoints, by hours between failures"
            )
        },
    )


def _boundary(model: str, tokens: str, directions: int) -> int:
    """Bytes between two machines in a step."""
    known = facts("swift_groups")
    size: int = known[f"{model}_batch"] * known[tokens] * known["hidden"] * _FLOAT32 * directions
    return size


def _vit(limit: float, boundary: int) -> MachineChain:
    known = facts("swift_groups")
    return MachineChain(
        compute_s=tuple(known["vit_compute_s"]),
        boundary_bytes=(boundary,) * (_MACHINES - 1),
        bandwidth=known["bandwidth"],
        interval=known["interval"],
        limit_bytes=limit,
    )


def _items() -> Iterable[Item]:
    yield Item(name="swift/table3", title="what is logged in a step", find=table3)
    yield Item(name="swift/table5", title="hours of whole runs with failures", find=table5)
    yield Item(name="swift/table6", title="groups of BERT-128's machines", find=table6)
    yield Item(name="swift/table7", title="groups of ViT-128/32's machines", find=table7)
    yield Item(name="swift/figure3", title="a step with a snapshot", find=figure3)
    yield Item(name="swift/figure9", title="by how much recovery is shorter", find=figure9)
    yield Item(name="swift/figure10", title="throughput while it is replayed", find=figure10)
    yield Item(name="swift/figure11", title="recovery by what may be logged", find=figure11)
    yield Item(name="swift/figure13", title="hours by the interval of checkpoints", find=figure13)
    yield Item(name="swift/figure14", title="hours by the time between failures", find=figure14)


ITEMS = tuple(_items())
"""What can be had of it, in the paper's order."""
