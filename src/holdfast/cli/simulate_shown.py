"""What ``holdfast simulate`` shows of what became of a job, and how: as a table, or JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.config.job import Cluster
from holdfast.sim.compare import Compared
from holdfast.sim.ledger import Part
from holdfast.sim.systems.system import System
from holdfast.sim.world import World

__all__ = ["ShownRuns", "head_of", "rows_of", "table_of", "to_json", "to_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRuns:
    """What became of a job, and in which worlds.

    Attributes:
        job: its name.
        trace: what happened to machines, as it was asked for.
        worlds: of each run.
        found: by the name of the strategy.
        assumed: what no profile tells.
        measured: what of that runs have shown, by name.
        systems: those of them that are models only.
    """

    job: str
    trace: str
    worlds: Sequence[World]
    found: Mapping[str, Compared]
    assumed: Cluster
    measured: Sequence[str] = ()
    systems: Sequence[System] = ()

    def machine_s(self, found: Compared) -> float:
        """Seconds of a machine that there is, for each sample that is trained, over all runs; infinite for none."""
        paid = sum(world.mean_available() * world.lasts_s for world in self.worlds)
        samples = found.samples * sum(each.steps for each in found.outcomes)
        return paid / samples if samples else math.inf


def rows_of(shown: ShownRuns) -> dict[str, dict[str, object]]:
    """Returns what became of the job by each strategy, for programs; what is infinite is None."""
    return {
        name: {
            "throughput": found.throughput,
            "goodput": found.mean(lambda each: each.goodput),
            "lost_s": found.mean(lambda each: each.lost_s),
            "breakdown": found.breakdown,
            "failures": found.mean(lambda each: each.failures),
            "ci95": list(found.ci95),
            "steps": found.mean(lambda each: each.steps),
            "restarts": found.mean(lambda each: each.restarts),
            "machine_s_per_sample": None if math.isinf(cost := shown.machine_s(found)) else cost,
        }
        for name, found in shown.found.items()
    }


def to_json(shown: ShownRuns) -> str:
    """Returns all of it, for programs."""
    assumed = msgspec.structs.asdict(shown.assumed)
    found = {
        "strategies": rows_of(shown),
        "seconds": shown.worlds[0].lasts_s,
        "assumptions": assumed,
        "measured": list(shown.measured),
        "models": {each.name: _model(each) for each in shown.systems},
    }
    return json.dumps(found) + "\n"


def _model(each: System) -> dict[str, str]:
    return {"costs": each.costs, "source": each.source, "assumed": each.assumed}


def head_of(shown: ShownRuns) -> tuple[tuple[str, str], ...]:
    """Returns what holds for all strategies: names, and what is to be said."""
    worlds, first = shown.worlds, next(iter(shown.found.values()))
    failures = statistics.fmean(each.failures for each in worlds)
    machines = statistics.fmean(each.mean_available() for each in worlds)
    step_s, most = first.outcomes[0].healthy_s, max(each.machines for each in worlds)
    models = ", ".join(each.name for each in shown.systems)
    runs = f"{len(worlds)} run(s) of {worlds[0].lasts_s / 3600:.4g} h"
    return (
        ("job", f"{shown.job}: a step of {first.samples} samples takes {step_s:.4g} s if nobody is missing"),
        (
            "trace",
            f"{shown.trace}: {runs}; on average {failures:.4g} failures, and {machines:.4g} machines of {most}",
        ),
        ("assumed", str(shown.assumed)),
        *((("measured", f"{', '.join(shown.measured)} of these, by runs"),) if shown.measured else ()),
        *((("model only", f"{models}: as their authors say that they are (docs/strategies.md)"),) if models else ()),
    )


def table_of(shown: ShownRuns) -> list[list[str]]:
    """Returns the names of the columns, and a row for each strategy."""
    parts = (part.value for part in Part)
    names = ["strategy", "samples/s", "95 %", "goodput", "steps", *parts, "restarts", "machine s/sample"]
    return [names, *([*_row(name, found), f"{shown.machine_s(found):.4g}"] for name, found in shown.found.items())]


def to_table(shown: ShownRuns) -> str:
    """Returns it for people, in columns."""
    rows = table_of(shown)
    head = "".join(f"{name:<11}{text}\n" for name, text in head_of(shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(text.ljust(width) if not column else text.rjust(width) for column, (text, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in rows)
    )
    return head + "\n" + "".join(f"{line.rstrip()}\n" for line in lines)


def _row(name: str, found: Compared) -> list[str]:
    low, high = found.ci95
    seconds = found.outcomes[0].seconds
    return [
        name,
        f"{found.throughput:.4g}",
        f"[{low:.4g}, {high:.4g}]" if len(found.outcomes) > 1 else "-",
        f"{found.mean(lambda each: each.goodput):.1%}",
        f"{found.mean(lambda each: each.steps):.0f}",
        *(f"{value / seconds:.2%}" for value in found.breakdown.values()),
        f"{found.mean(lambda each: each.restarts):.3g}",
    ]
