"""Jobs of the papers, as they would be trained here, beside systems that have no runtime here: in the same worlds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from holdfast.config.job import Cluster, Job
from holdfast.config.load import parse_job
from holdfast.core.profile import Profile
from holdfast.sim.compare import Simulated
from holdfast.sim.engine import Outcome, Prepared, simulate
from holdfast.sim.prepare import prepared, speeds_of
from holdfast.sim.speeds import Speeds
from holdfast.sim.systems.facts import facts_of
from holdfast.sim.systems.rows import Facts
from holdfast.sim.systems.system import System, simulate_system
from holdfast.sim.world import Happening, Kind, World, check

__all__ = ["GAPS", "HOUR_S", "MINUTE_S", "NODES", "Experiment", "come_and_go", "fewer_and_fewer", "one_by_one"]

MINUTE_S, HOUR_S = 60.0, 3600.0
NODES = 30
"""Oobleck's."""
GAPS = {"6h": 6 * HOUR_S, "1h": HOUR_S, "10m": 10 * MINUTE_S}
"""Between two losses, in seconds, by Oobleck's names of them."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A job of a paper on its grid.

    Attributes:
        profile: of its layers.
        grid: pipelines, stages, and micro-batches of each pipeline.
    """

    profile: Profile
    grid: tuple[int, int, int]

    def job(self, strategy: str, **sections: Mapping[str, Any]) -> Job:
        """Return the job as it would be trained here, with staggered updates; its model stands in for the profile's.

        Args:
            strategy: by which.
            sections: what else it says, by section.
        """
        pipelines, stages, microbatches = self.grid
        return parse_job(
            {
                "name": "reproduced",
                "model": {"kind": "gpt", "layers": len(self.profile.layers) - 2, "width": 8, "heads": 1, "context": 8},
                "data": {"kind": "text", "path": "stdlib"},
                "grid": {
                    "pipelines": pipelines,
                    "stages": stages,
                    "microbatches": microbatches,
                    "microbatch_size": 1,
                },
                "optimizer": {"kind": "adamw", "lr": 1e-3},
                "train": {"steps": 1, "seed": 0, "technique": "staggered"},
                "resilience": {"strategy": strategy},
                **sections,
            }
        )

    def become(self, job: Job, world: World) -> Outcome:
        """Return what becomes of it in a world."""
        return simulate(prepared(job, self.profile), world, self.speeds)

    @cached_property
    def speeds(self) -> Speeds:
        """How fast the cluster is: what no profile tells is as by default."""
        return speeds_of(self.profile, Cluster())

    @cached_property
    def adaptive(self) -> Prepared:
        """SlipStream's, as it is trained here."""
        return prepared(self.job("adaptive"), self.profile)

    @cached_property
    def facts(self) -> Facts:
        """What systems without a runtime here are modelled by."""
        shapes = prepared(self.job("templates"), self.profile).rules.shapes
        return facts_of(self.job("adaptive"), self.adaptive, self.speeds, shapes)

    def ways(self, systems: Mapping[str, Callable[[Facts], System]]) -> dict[str, Simulated]:
        """Return what becomes of the job in a world: as ``adaptive``, and by each of some systems."""
        ways: dict[str, Simulated] = {"adaptive": partial(simulate, self.adaptive, speeds=self.speeds)}
        return ways | {name: partial(self._by_system, system(self.facts)) for name, system in systems.items()}

    def _by_system(self, system: System, world: World) -> Outcome:
        places = len(self.facts.pipelines_of)
        return simulate_system(system, world, places=places, healthy_s=self.facts.healthy_s)

    def throughput(self, outcome: Outcome) -> float:
        """Return the steps of a run as a share of those that 1F1B would have made of the whole grid."""
        return outcome.steps * self.facts.healthy_s / outcome.seconds


def one_by_one(machines: int, every_s: float, lasts_s: float, *, first_s: float = 0.0, seed: str = "") -> World:
    """Return a world in which one machine after another is lost, and none comes.

    Args:
        machines: in the beginning.
        every_s: from one loss to the next.
        lasts_s: of which it tells.
        first_s: when the first one is lost.
        seed: by which it is drawn who.
    """
    there = list(range(machines))
    random.Random(seed).shuffle(there)
    found = list[Happening]()
    while there and first_s + len(found) * every_s < lasts_s:
        found.append(Happening(at_s=first_s + len(found) * every_s, kind=Kind.LOST, machine=there.pop()))
    return check(World(machines=machines, happenings=tuple(found), lasts_s=lasts_s))


def fewer_and_fewer(every_s: float) -> World:
    """Return the world of Oobleck's table 2: of its nodes one is lost after each interval, until half of them are."""
    return one_by_one(NODES, every_s, NODES // 2 * every_s, first_s=every_s)


def come_and_go(rows: Iterable[Sequence[int]], begin_s: float, lasts_s: float, *, seed: str = "") -> World:
    """Return a world in which so many machines come and go as in a trace, of which it is drawn who goes.

    Args:
        rows: of the trace: minute, how many came, how many went then.
        begin_s: of the trace, where the world begins.
        lasts_s: of which it tells.
        seed: of who goes.
    """
    drawn = random.Random(seed)
    first, found = 0, list[Happening]()
    there, known = list[int](), 0
    for minute, come, gone in rows:
        at_s = minute * MINUTE_S - begin_s
        if at_s <= 0:
            first += come - gone
            continue
        if not found:
            there, known = list(range(first)), first
        for _ in range(come):
            found.append(Happening(at_s=at_s, kind=Kind.COMES, machine=known))
            there.append(known)
            known += 1
        for _ in range(gone):
            machine = there.pop(drawn.randrange(len(there)))
            found.append(Happening(at_s=at_s, kind=Kind.LOST, machine=machine))
    happenings = tuple(each for each in found if each.at_s < lasts_s)
    return check(World(machines=first, happenings=happenings, lasts_s=lasts_s))
