"""Several strategies in the same worlds, several times: how they differ, and by how much that could be chance."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from holdfast.sim.engine import Outcome
from holdfast.sim.ledger import Part
from holdfast.sim.side_by_side import side_by_side
from holdfast.sim.world import World

__all__ = ["Compared", "Simulated", "compare", "interval"]

Simulated = Callable[[World], Outcome]
"""What becomes of a job in a world."""


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

    @property
    def lost(self) -> dict[str, float]:
        """What the seconds of a run were lost to, on average: the parts but the useful one, of which ``slower`` is what
        the whole grid would not have needed for the same steps.
        """
        parts = self.breakdown
        slower = parts.pop(Part.USEFUL.value) - self.mean(lambda each: each.steps * each.healthy_s)
        return {"slower": max(0.0, slower), **parts}


def compare(
    jobs: Mapping[str, Simulated],
    worlds: Sequence[World],
    samples: int,
    *,
    processes: int = 1,
    said: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Compared]:
    """Return what becomes of each job in each of the worlds, which does not depend on the number of processes.

    Args:
        jobs: what becomes of the job in a world, by the name of the strategy.
        worlds: one for each run.
        samples: of a step.
        processes: how many simulate side by side.
        said: called with the number of simulations that are over, and that of all.

    Raises:
        ConfigError: one of several processes was ended by somebody else.
    """
    ordered = tuple(product(jobs, range(len(worlds))))
    with side_by_side(_Task(jobs=jobs, worlds=worlds), min(processes, len(ordered))) as simulated:
        outcomes = defaultdict[str, list[Outcome]](list)
        said(0, len(ordered))
        for done, ((name, _), outcome) in enumerate(zip(ordered, simulated(ordered), strict=True), 1):
            outcomes[name].append(outcome)
            said(done, len(ordered))
    return {name: Compared(outcomes=tuple(found), samples=samples) for name, found in outcomes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What is simulated: any of these jobs in any of these worlds."""

    jobs: Mapping[str, Simulated]
    worlds: Sequence[World]

    def __call__(self, which: tuple[str, int]) -> Outcome:
        """Simulate one."""
        name, run = which
        return self.jobs[name](self.worlds[run])


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
