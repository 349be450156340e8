"""How ``holdfast simulate`` shows what became of a job: as a table, or JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.sim.compare import Compared
from holdfast.sim.ledger import Part
from holdfast.sim.prepare import Assumed
from holdfast.sim.world import World

__all__ = ["FORMATS", "ShownRuns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRuns:
    """What became of a job, and in which worlds.

    Attributes:
        job: its name.
        trace: what happened to machines, as it was asked for.
        worlds: of each run.
        found: by the name of the strategy.
        assumed: what no profile tells.
    """

    job: str
    trace: str
    worlds: Sequence[World]
    found: Mapping[str, Compared]
    assumed: Assumed


def _to_json(shown: ShownRuns) -> str:
    rows = {
        name: {
            "throughput": found.throughput,
            "goodput": found.mean(lambda each: each.goodput),
            "lost_s": found.mean(lambda each: each.lost_s),
            "breakdown": found.breakdown,
            "failures": found.mean(lambda each: each.failures),
            "ci95": list(found.ci95),
            "steps": found.mean(lambda each: each.steps),
            "restarts": found.mean(lambda each: each.restarts),
        }
        for name, found in shown.found.items()
    }
    assumed = dataclasses.asdict(shown.assumed)
    return json.dumps({"strategies": rows, "seconds": shown.worlds[0].lasts_s, "assumptions": assumed}) + "\n"


def _to_table(shown: ShownRuns) -> str:
    worlds, first = shown.worlds, next(iter(shown.found.values()))
    failures = statistics.fmean(each.failures for each in worlds)
    machines = statistics.fmean(each.mean_available() for each in worlds)
    head = (
        f"job        {shown.job}: a step of {first.samples} samples takes {first.outcomes[0].healthy_s:.4g} s if "
        "nobody is missing\n"
        f"trace      {shown.trace}: {len(worlds)} run(s) of {worlds[0].lasts_s / 3600:.4g} h; on average "
        f"{failures:.4g} failures, and {machines:.4g} machines of {max(each.machines for each in worlds)}\n"
        f"assumed    {shown.assumed}\n\n"
    )
    names = ["strategy", "samples/s", "95 %", "goodput", "steps", *(part.value for part in Part), "restarts"]
    rows = [names, *(_row(name, found) for name, found in shown.found.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = (
        "  ".join(text.ljust(width) if not column else text.rjust(width) for column, (text, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in rows)
    )
    return head + "".join(f"{line.rstrip()}\n" for line in lines)


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


FORMATS: Mapping[str, Callable[[ShownRuns], str]] = MappingProxyType({"json": _to_json, "table": _to_table})
