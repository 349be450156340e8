"""What ``holdfast advise`` says, in plain words or as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from holdfast.cli.simulate_shown import ShownRuns, rows_of, to_table
from holdfast.planning.groups.chain import Grouping
from holdfast.recovery.choice import headline, size_of
from holdfast.sim.advice import AS_IT_IS, Advice
from holdfast.sim.compare import interval

__all__ = ["ShownAdvice", "to_json", "to_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAdvice:
    """An advice, and how it came about.

    Attributes:
        advice: it.
        path: of the job.
        shown: all that was simulated: the job as it is, then what it could be told, the best first.
    """

    advice: Advice
    path: str
    shown: ShownRuns

    @property
    def gain(self) -> tuple[float, float, float]:
        """How many samples more are trained than as it is, as a share; and the 95 % interval of that."""
        before, after = self.advice.as_it_is.throughputs, self.advice.ranked[0][1].throughputs
        ratios = [b / a - 1 for a, b in zip(before, after, strict=True) if a > 0]
        return (sum(ratios) / len(ratios), *interval(ratios)) if ratios else (float("inf"),) * 3

    @property
    def flags(self) -> tuple[str, ...]:
        """What is to be set otherwise in the job, as ``KEY=VALUE``."""
        return tuple(
            f"{key}={value:.0f}" if isinstance(value, float) else f"{key}={value}" for key, value in self.advice.changes
        )


def to_json(told: ShownAdvice) -> str:
    """Returns all of it, for programs."""
    advice, best, (mean, low, high) = told.advice, told.advice.best, told.gain
    trains = advice.as_it_is.throughput > 0
    found = {
        "set": dict(advice.changes),
        "settings": dict(best.settings),
        "gain": mean if trains else None,
        "gain_ci95": [low, high] if trains else None,
        "ties": [each.name for each in advice.ties],
        "missing": dataclasses.asdict(advice.missing),
        "checkpoints": dataclasses.asdict(best.interval),
        "grids": {str(each): each.step_s for each in dict.fromkeys(each.shape for each, _ in advice.ranked)},
        "too_large": {str(each): each.memory_bytes for each in advice.too_large},
        "memory_bytes": advice.memory_bytes,
        "recovery": {"way": advice.choice.way, "reasons": advice.choice.reasons},
        "logs": None if best.grouping is None else dataclasses.asdict(best.grouping),
        "refused": dict(advice.refused),
        "strategies": rows_of(told.shown),
        "assumptions": msgspec.structs.asdict(told.shown.assumed),
    }
    return json.dumps(found) + "\n"


def to_text(told: ShownAdvice) -> str:
    """Returns it for people: what to set, why each, and what was compared."""
    lines = [f"{name:<12}{text}" for name, text in _advice(told)]
    command = " ".join(
        ("holdfast train", shlex.quote(told.path), *(f"--set {shlex.quote(each)}" for each in told.flags))
    )
    refused = [f"not tried   {', '.join(names)}: {why}" for why, names in _refused(told).items()]
    return "\n".join([*lines, "", f"  {command}", "", to_table(told.shown).rstrip("\n"), *refused]) + "\n"


def _refused(told: ShownAdvice) -> dict[str, list[str]]:
    """Who cannot be, by the reason; strategies alone where they cannot be with any grid."""
    found: dict[str, list[str]] = {}
    tried = {candidate.row.name for candidate, _ in told.advice.ranked}
    for name, why in told.advice.refused.items():
        _, row = name.split(", ")
        names = found.setdefault(why.removeprefix(f"{told.path}: "), [])
        if (known := name if row in tried else row) not in names:
            names.append(known)
    return found


def _advice(told: ShownAdvice) -> Iterator[tuple[str, str]]:
    advice, best = told.advice, told.advice.best
    yield "grid", _grid(advice)
    yield "memory", _memory(advice)
    yield "strategy", _strategy(advice)
    missing, tolerate = advice.missing, dict(best.settings)["resilience.tolerate"]
    yield (
        "failures",
        f"resilience.tolerate {tolerate}: in 99 % of the time at most {missing.mostly} machine(s) are missing, at the "
        f"worst {missing.most}",
    )
    yield "checkpoints", _checkpoints(told)
    choice = advice.choice
    yield "lost layers", headline(choice.way, choice.advised, choice.why)
    yield from (("", reason) for reason in choice.reasons if reason != choice.why)
    if best.grouping is not None:
        yield "logs", _logs(best.grouping, best.interval.every)
    yield "gain", _gain(told)


def _grid(advice: Advice) -> str:
    best, own = advice.best.shape, advice.own
    if best == own:
        return f"{own}, as it is: no other is better, of grids that train to the same bits with as many workers"
    return f"{best} instead of {own}: while nobody is missing a step takes {best.step_s:.4g} s, not {own.step_s:.4g} s"


def _memory(advice: Advice) -> str:
    best, limit = advice.best.shape, size_of(advice.memory_bytes)
    text = f"the fullest worker of {best} holds {size_of(best.memory_bytes)}"
    if advice.assumes_memory:
        text += f"; taken for possible are {limit}, twice what one of {advice.own} holds (--worker-memory says it)"
    if advice.too_large:
        text += f"; {', '.join(map(str, advice.too_large))} would need more than {limit}"
    return text


def _strategy(advice: Advice) -> str:
    best, found = advice.ranked[0]
    others = [(each, other) for each, other in advice.ranked[1:] if each.row.name != best.row.name]
    share = found.mean(lambda each: each.goodput)
    text = f"{best.row.name}: {share:.1%} of what its grid trains if nobody is ever missing"
    if others and found.throughput:
        each, other = others[0]
        text += f"; the next one, {each.name}, trains {other.throughput / found.throughput - 1:+.1%}"
    if ties := [each.name for each in advice.ties]:
        text += f"; what may be as good, for all that these runs tell: {'; '.join(ties)}"
    return text


def _checkpoints(told: ShownAdvice) -> str:
    best = told.advice.best
    shape, found = best.shape, best.interval
    costs = f"one holds training up for {shape.stall_s:.3g} s and is written after {shape.write_s:.3g} s"
    if not found.every:
        return f"as often as {best.row.name} makes of what they cost: {costs}; that is every {found.checkfreq} steps"
    minutes, hours = found.every * shape.step_s / 60, found.between_s / 3600
    return (
        f"every {found.every} steps ({minutes:.3g} min), by Young's rule: {costs}, and one is needed every "
        f"{hours:.3g} h, or less often"
    )


def _logs(grouping: Grouping, every: int) -> str:
    """How much they take, and which nodes are lost together for that."""
    *joined, last = [f"{group[0]} to {group[-1]}" for group in grouping.groups if len(group) > 1] or [""]
    size = size_of(grouping.storage_bytes)
    text = f"{size} at most, of {every} steps from one checkpoint to the next; a lost step of a node is run again in "
    text += f"{grouping.recovery_s:.3g} s"
    if not last:
        return f"{text}, each by itself"
    nodes = f"{', '.join(joined)} and {last}" if joined else last
    return f"{text} on average: nodes {nodes} are replayed together, and log nothing among themselves"


def _gain(told: ShownAdvice) -> str:
    advice, (mean, low, high) = told.advice, told.gain
    cost, before = (told.shown.machine_s(found) for found in (advice.ranked[0][1], advice.as_it_is))
    sure = f" [{low:+.1%}, {high:+.1%}]" if len(told.shown.worlds) > 1 else ""
    return (
        f"{mean:+.1%}{sure} samples, to what the job trains {AS_IT_IS}; a sample costs {cost:.4g} s of a machine, not "
        f"{before:.4g} s"
    )
