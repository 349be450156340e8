"""What happens to the machines of a cluster, whatever runs on them: values only.

A world is drawn, or read from a trace, before any strategy runs. So all strategies of a comparison meet the same one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from holdfast.errors import ConfigError

__all__ = ["Happening", "Kind", "World", "check"]


class Kind(StrEnum):
    """What can happen to a machine."""

    LOST = "lost"
    """It is gone, with all that runs on it."""
    COMES = "comes"
    """It is there, and free."""
    LEAVES = "leaves"
    """It says that it will be gone, ``grace_s`` later."""
    SLOWS = "slows"
    """From now on it takes ``factor`` times as long as others to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One thing that happens to one machine.

    Attributes:
        at_s: seconds since the job began.
        kind: what.
        machine: which, counted from 0 in the order of their coming; a machine that is lost never comes again.
        grace_s: of one that leaves, how long it still works.
        factor: of one that slows down; 1: it is as fast as others again.
    """

    at_s: float
    kind: Kind
    machine: int
    grace_s: float = 0.0
    factor: float = 1.0

    @property
    def goes(self) -> bool:
        """Whether the machine is lost, or about to be."""
        return self.kind in (Kind.LOST, Kind.LEAVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All that happens.

    Attributes:
        machines: how many there are as the job begins: 0, 1, ...
        happenings: in the order of their times; those of one instant in the order in which they were read.
        lasts_s: seconds, from the job's begin, of which this tells.
    """

    machines: int
    happenings: tuple[Happening, ...]
    lasts_s: float

    @property
    def failures(self) -> int:
        """How many instants there are at which machines are lost, or are about to be."""
        return len({each.at_s for each in self.happenings if each.goes})

    def available(self) -> tuple[tuple[float, int], ...]:
        """Return how many machines there are from each moment on."""
        count, found = self.machines, {0.0: self.machines}
        for each in sorted(self.happenings, key=lambda each: _gone_at(each)):
            if each.goes or each.kind is Kind.COMES:
                count += -1 if each.goes else 1
                found[_gone_at(each)] = count
        return tuple(sorted(found.items()))

    def mean_available(self) -> float:
        """Return how many machines there are on average."""
        steps = [*(row for row in self.available() if row[0] < self.lasts_s), (self.lasts_s, 0)]
        return math.fsum((after[0] - now[0]) * now[1] for now, after in pairwise(steps)) / self.lasts_s


def _gone_at(each: Happening) -> float:
    return each.at_s + each.grace_s


def check(world: World) -> World:
    """Return a world that makes sense.

    Raises:
        ConfigError: it does not: a time goes back, somebody unknown is lost, or somebody known comes.
    """
    alive, known, before = set(range(world.machines)), world.machines, 0.0
    for each in world.happenings:
        if not before <= each.at_s < math.inf:
            raise ConfigError(f"time goes back from {before:g} s to {each.at_s:g} s")
        before = each.at_s
        if each.kind is Kind.COMES:
            if each.machine in alive or each.machine < known:
                raise ConfigError(f"machine {each.machine} comes at {each.at_s:g} s, and has been there before")
            known = each.machine + 1
            alive.add(each.machine)
        elif each.machine not in alive:
            raise ConfigError(f"machine {each.machine} is {each.kind} at {each.at_s:g} s, and is not there")
        elif each.goes:
            alive.discard(each.machine)
    return world
