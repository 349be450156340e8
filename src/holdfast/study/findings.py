"""What a study comes to: each scenario over all seeds beside the failure-free run, and costs beside their formulas."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.recovery.overhead import DataParallel, per_failure
from holdfast.study.outcomes import Baseline, Held, Outcome

__all__ = ["Cost", "Finding", "Findings", "find"]

_SHARE, _MARGIN_S = 0.1, 0.05
"""A prediction is near if it is off by at most the larger of these."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, or the state before it or without it, over all seeds, after so many mini-batches more.

    Attributes:
        at: the step whose mini-batch failed.
        name: of the scenario; ``before`` or ``baseline``.
        strategy: or the name again.
        progress: percent.
        survivors: how many.
        later: mini-batches made after the one that failed; -1: before it.
        end: whether the run ended there.
        loss: mean over seeds, as what follows.
        accuracy: None where targets are no classes.
        loss_difference: mean of the magnitudes of its relative differences to the baseline's loss.
        accuracy_difference: mean difference to the baseline's accuracy.
    """

    at: int
    name: str
    strategy: str
    progress: int | None
    survivors: int | None
    later: int
    end: bool
    loss: float
    accuracy: float | None
    loss_difference: float
    accuracy_difference: float | None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Processor seconds that a failure cost, means over seeds: measured, and by the formula.

    Attributes:
        at: the step.
        name: of the scenario.
        slowdown: duration of the mini-batch by that of the baseline's.
        measured_s: what was spent more than without the failure.
        predicted_s: the formula's.
    """

    at: int
    name: str
    strategy: str
    slowdown: float
    measured_s: float
    predicted_s: float

    @property
    def near(self) -> bool:
        """Whether the prediction is within 10 % or 50 ms."""
        return abs(self.predicted_s - self.measured_s) <= max(_SHARE * abs(self.measured_s), _MARGIN_S)


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All of a study.

    Attributes:
        workers: how many.
        steps: of a run.
        seeds: of the runs.
        baselines: the runs without failures.
        findings: by step, then by scenario, then by time.
        costs: by step, then by scenario.
        outcomes: of each scenario and seed.
    """

    workers: int
    steps: int
    seeds: tuple[int, ...]
    baselines: tuple[Baseline, ...]
    findings: tuple[Finding, ...]
    costs: tuple[Cost, ...]
    outcomes: tuple[Outcome, ...]

    def after(self, at: int, later: int = 0) -> tuple[Finding, ...]:
        """Returns what is known of one step right after it, or ``later``; what is before it comes first."""
        before = tuple(each for each in self.findings if each.at == at and each.later == -1)
        return before + tuple(each for each in self.findings if each.at == at and each.later == later)


def find(workers: int, steps: int, baselines: Sequence[Baseline], outcomes: Sequence[Outcome]) -> Findings:
    """Returns what records come to.

    Args:
        workers: how many.
        steps: of a run.
        baselines: of each seed.
        outcomes: of the scenarios, in the order in which they are told.
    """
    by_seed = {each.seed: each for each in baselines}
    groups: defaultdict[tuple[int, str], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        groups[each.at, each.name].append(each)
    findings: list[Finding] = []
    for at in dict.fromkeys(each.at for each in outcomes):
        own = [each.before[at] for each in baselines]
        whole = [each.after[at] for each in baselines]
        findings.append(_finding(at, "before", -1, steps, own, [row[0] for row in whole]))
        findings += [_finding(at, "baseline", i, steps, row, row) for i, row in _by_time(at, whole)]
        for (step, name), group in groups.items():
            if step == at:
                beside = [by_seed[each.seed].after[at] for each in group]
                rows = zip(_by_time(at, [each.after for each in group]), _by_time(at, beside), strict=True)
                findings += [_finding(at, name, i, steps, ours, theirs, group[0]) for (i, ours), (_, theirs) in rows]
    costs = tuple(_cost(group, by_seed, workers, steps) for group in groups.values())
    return Findings(
        workers=workers,
        steps=steps,
        seeds=tuple(by_seed),
        baselines=tuple(baselines),
        findings=tuple(findings),
        costs=costs,
        outcomes=tuple(outcomes),
    )


def _by_time(at: int, rows: Sequence[Sequence[Held]]) -> Iterable[tuple[int, list[Held]]]:
    for column in zip(*rows, strict=True):
        yield column[0].steps - at - 1, list(column)


def _finding(
    at: int,
    name: str,
    later: int,
    steps: int,
    ours: Sequence[Held],
    theirs: Sequence[Held],
    of: Outcome | None = None,
) -> Finding:
    pairs = list(zip(ours, theirs, strict=True))
    told = [(a.accuracy, b.accuracy) for a, b in pairs if a.accuracy is not None and b.accuracy is not None]
    return Finding(
        at=at,
        name=name,
        strategy=name if of is None else of.strategy,
        progress=None if of is None else of.progress,
        survivors=None if of is None else of.survivors,
        later=later,
        end=at + 1 + later == steps,
        loss=statistics.fmean(each.loss for each in ours),
        accuracy=statistics.fmean(a for a, _ in told) if told else None,
        loss_difference=statistics.fmean(abs(a.loss - b.loss) / b.loss for a, b in pairs),
        accuracy_difference=statistics.fmean(a - b for a, b in told) if told else None,
    )


def _cost(group: Sequence[Outcome], baselines: dict[int, Baseline], workers: int, steps: int) -> Cost:
    first = group[0]
    rows = [(_measured_s(each), _predicted_s(each, baselines[each.seed], workers, steps)) for each in group]
    return Cost(
        at=first.at,
        name=first.name,
        strategy=first.strategy,
        slowdown=statistics.fmean(each.minibatch_s / each.baseline_s for each in group),
        measured_s=statistics.fmean(measured for measured, _ in rows),
        predicted_s=statistics.fmean(predicted for _, predicted in rows),
    )


def _measured_s(outcome: Outcome) -> float:
    parts = (outcome.init, outcome.restart, outcome.replay)
    return outcome.minibatch_s - outcome.baseline_s + sum(part.cpu_s for part in parts if part is not None)


def _predicted_s(outcome: Outcome, baseline: Baseline, workers: int, steps: int) -> float:
    """By the formula, with what was measured elsewhere: a mini-batch is the mean of the whole failure-free run."""
    of = DataParallel(
        minibatch_s=baseline.minibatch_s,
        minibatches_per_epoch=baseline.steps_per_epoch,
        minibatches=steps,
        workers=workers,
        microbatches=workers,
        model_bytes=baseline.model_bytes,
        checkpoint_s=baseline.checkpoint.cpu_s,
        restart_s=outcome.restart.cpu_s if outcome.restart else 0.0,
        init_s=outcome.init.cpu_s if outcome.init else 0.0,
    )
    return per_failure(outcome.strategy, of, outcome.replayed).seconds
