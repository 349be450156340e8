"""Several strategies in the same worlds, several times: how they differ, and by how much that could be chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.sim.engine import Outcome, Prepared, Speeds, simulate
from holdfast.sim.ledger import Part
from holdfast.sim.world import World

__all__ = ["Compared", "compare", "interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What became of a job by one strategy, over all runs.

    Attributes:
        outcomes: of each run.
        samples: of a step.
    """

    outcomes: tuple[Outcome, ...]
    samples: int

    @property
    def throughputs(self) -> tuple[float, ...]:
        """Samples per second of each run."""
        return tuple(self.samples * each.steps / each.seconds for each in self.outcomes)

    @property
    def throughput(self) -> float:
        """Samples per second, on average."""
        return statistics.fmean(self.throughputs)

    @property
    def ci95(self) -> tuple[float, float]:
        """Where the mean throughput of ever more runs is, with a probability of 95 %."""
        return interval(self.throughputs)

    def mean(self, of: Callable[[Outcome], float]) -> float:
        """Return the mean of something over all runs."""
        return statistics.fmean(map(of, self.outcomes))

    @property
    def breakdown(self) -> dict[str, float]:
        """What the seconds of a run were good for, on average."""
        return {part.value: self.mean(lambda each, part=part: each.parts[part]) for part in Part}  # type: ignore[misc]


def compare(
    jobs: Mapping[str, Prepared],
    worlds: Sequence[World],
    speeds: Speeds,
    samples: int,
    said: Callable[[str, int], None] = lambda strategy, run: None,
) -> dict[str, Compared]:
    """Return what becomes of each job in each of the worlds.

    Args:
        jobs: by the name of the strategy.
        worlds: one for each run.
        speeds: of the cluster.
        samples: of a step.
        said: called before each run of each.
    """
    found = {}
    for name, job in jobs.items():
        outcomes = []
        for run, world in enumerate(worlds):
            said(name, run)
            outcomes.append(simulate(job, world, speeds))
        found[name] = Compared(outcomes=tuple(outcomes), samples=samples)
    return found


_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t of 95 % for 1, 2, ... degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean by Student's t; of one value, that value twice.

    >>> interval([5.0])
    (5.0, 5.0)
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, mean
    degrees = len(values) - 1
    factor = _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.4 / degrees
    reach = factor * statistics.stdev(values) / math.sqrt(len(values))
    return mean - reach, mean + reach
