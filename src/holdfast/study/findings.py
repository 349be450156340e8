"""What a study comes to: each scenario over all seeds beside the failure-free run, and costs beside their formulas."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from holdfast.recovery.overhead import DataParallel, per_failure, work_again
from holdfast.study.outcomes import Baseline, Held, Outcome, Spent

__all__ = ["Cost", "Finding", "Findings", "Parts", "find"]

_SHARE, _OF_A_MINIBATCH = 0.1, 0.25
"""A prediction is near if it is off by at most the larger of these: a part of what was measured, or of a mini-batch."""


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
        loss_difference: mean of the magnitudes of its relative differences to the baseline's loss; infinite where that
            is 0 and this is not.
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
        minibatch_s: of a mini-batch without failures, over all workers.
        measured_s: what was spent more than without the failure.
        predicted_s: the formula's.
    """

    at: int
    name: str
    strategy: str
    slowdown: float
    minibatch_s: float
    measured_s: float
    predicted_s: float

    @property
    def near(self) -> bool:
        """Whether the prediction is within 10 %, or a quarter of a mini-batch; of ``adaptive`` it is an upper bound."""
        margin = max(_SHARE * abs(self.measured_s), _OF_A_MINIBATCH * self.minibatch_s)
        more = self.measured_s - self.predicted_s
        return (more if self.strategy == "adaptive" else abs(more)) <= margin


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What overheads are made of: means over seeds and steps.

    Attributes:
        minibatch_s: processor seconds of a mini-batch, over all workers.
        checkpoint: to write one.
        init: to build model, optimizer and data; None without ``checkpoint-restart``, as what follows.
        restart: to load a checkpoint.
    """

    minibatch_s: float
    checkpoint: Spent
    init: Spent | None
    restart: Spent | None


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All of a study.

    Attributes:
        workers: how many.
        microbatches: of a mini-batch, over all workers.
        steps: of a run.
        seeds: of the runs.
        baselines: the runs without failures.
        findings: by step, then by scenario, then by time.
        costs: by step, then by scenario.
        parts: what they are made of.
        outcomes: of each scenario and seed.
    """

    workers: int
    microbatches: int
    steps: int
    seeds: tuple[int, ...]
    baselines: tuple[Baseline, ...]
    findings: tuple[Finding, ...]
    costs: tuple[Cost, ...]
    parts: Parts
    outcomes: tuple[Outcome, ...]

    def after(self, at: int, later: int = 0) -> tuple[Finding, ...]:
        """Returns what is known of one step right after it, or ``later``; what is before it comes first."""
        before = tuple(each for each in self.findings if each.at == at and each.later == -1)
        return before + tuple(each for each in self.findings if each.at == at and each.later == later)

    def data_parallel(self, mtbf_s: float) -> DataParallel:
        """Returns what the formulas are to know of the job, with so many seconds between two failures."""
        of = _data_parallel(self.baselines[0], workers=self.workers, microbatches=self.microbatches, steps=self.steps)
        return replace(
            of,
            minibatch_s=self.parts.minibatch_s,
            checkpoint_s=self.parts.checkpoint.cpu_s,
            init_s=self.parts.init.cpu_s if self.parts.init else 0.0,
            restart_s=self.parts.restart.cpu_s if self.parts.restart else 0.0,
            mtbf_s=mtbf_s,
        )


def find(
    baselines: Sequence[Baseline], outcomes: Sequence[Outcome], *, workers: int, microbatches: int, steps: int
) -> Findings:
    """Returns what records come to.

    Args:
        baselines: of each seed.
        outcomes: of the scenarios, in the order in which they are told.
        workers: how many.
        microbatches: of a mini-batch, over all workers.
        steps: of a run.
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
    known = {
        seed: _data_parallel(each, workers=workers, microbatches=microbatches, steps=steps)
        for seed, each in by_seed.items()
    }
    costs = tuple(_cost(group, known) for group in groups.values())
    return Findings(
        workers=workers,
        microbatches=microbatches,
        steps=steps,
        seeds=tuple(by_seed),
        baselines=tuple(baselines),
        findings=tuple(findings),
        costs=costs,
        parts=_parts(baselines, outcomes),
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
        loss_difference=statistics.fmean(_apart(a.loss, b.loss) for a, b in pairs),
        accuracy_difference=statistics.fmean(a - b for a, b in told) if told else None,
    )


def _apart(ours: float, theirs: float) -> float:
    """The magnitude of the difference, by that of theirs."""
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs else math.inf


def _parts(baselines: Sequence[Baseline], outcomes: Sequence[Outcome]) -> Parts:
    return Parts(
        minibatch_s=statistics.fmean(each.minibatch_s for each in baselines),
        checkpoint=_mean([each.checkpoint for each in baselines]),
        init=_mean(init) if (init := [each.init for each in outcomes if each.init]) else None,
        restart=_mean(restart) if (restart := [each.restart for each in outcomes if each.restart]) else None,
    )


def _mean(row: Sequence[Spent]) -> Spent:
    return Spent(
        wall_s=statistics.fmean(each.wall_s for each in row), cpu_s=statistics.fmean(each.cpu_s for each in row)
    )


def _cost(group: Sequence[Outcome], known: Mapping[int, DataParallel]) -> Cost:
    first = group[0]
    return Cost(
        at=first.at,
        name=first.name,
        strategy=first.strategy,
        slowdown=statistics.fmean(each.minibatch_s / each.baseline_s for each in group),
        minibatch_s=statistics.fmean(known[each.seed].minibatch_s for each in group),
        measured_s=statistics.fmean(_measured_s(each) for each in group),
        predicted_s=statistics.fmean(_predicted_s(each, known[each.seed]) for each in group),
    )


def _measured_s(outcome: Outcome) -> float:
    parts = (outcome.init, outcome.restart, outcome.replay)
    return outcome.minibatch_s - outcome.baseline_s + sum(part.cpu_s for part in parts if part is not None)


def _predicted_s(outcome: Outcome, of: DataParallel) -> float:
    """By the formula, with what was measured elsewhere: a mini-batch is the mean of the whole failure-free run."""
    of = replace(
        of,
        restart_s=outcome.restart.cpu_s if outcome.restart else 0.0,
        init_s=outcome.init.cpu_s if outcome.init else 0.0,
    )
    casualties = of.workers - (outcome.survivors or 0)
    again = work_again(outcome.strategy, of, casualties, outcome.replayed)
    return per_failure(outcome.strategy, of, outcome.replayed).start_s + again


def _data_parallel(baseline: Baseline, *, workers: int, microbatches: int, steps: int) -> DataParallel:
    """What is known of a job by its run without failures."""
    return DataParallel(
        minibatch_s=baseline.minibatch_s,
        minibatches_per_epoch=baseline.steps_per_epoch,
        minibatches=steps,
        workers=workers,
        microbatches=microbatches,
        state_bytes=baseline.state_bytes,
        checkpoint_s=baseline.checkpoint.cpu_s,
    )
