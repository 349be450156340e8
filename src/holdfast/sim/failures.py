"""Draws what may happen to machines: they fail, evenly, at random, in racks, with notice, with repair; or are slow."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.sim.spot import KNOWN, Spot, fitted, weibull
from holdfast.sim.traces import number_above_0, read_trace
from holdfast.sim.world import Happening, Kind, World, check

__all__ = ["FORMS", "SLOW", "Failures", "parse_failures", "seconds"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FORMS = (
    "FILE, periodic:30m, poisson:mtbf=17h, weibull:mtbf=17h,shape=0.7, racks:mtbf=17h,size=4, "
    "bursts:mtbf=17h,every=8h,lasts=1h,burst=5m or spot:ec2-p3"
)
"""What :func:`parse_failures` knows; all but FILE may have ``notice=2m``, and all but it and spot ``repair=1h``."""
SLOW = "stragglers=4h,factor=2,stay=30m"
"""What all but FILE may have as well: 4 hours apart on average, machines take twice as long for half an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Times in which machines fail at random with another mean time, between calm ones.

    Attributes:
        every_s: from the begin of one to that of the next one; the first begins after the calm time of one.
        lasts_s: how long each is.
        gap_s: mean seconds between two failures of the cluster meanwhile.
    """

    every_s: float
    lasts_s: float
    gap_s: float

    def after(self, at_s: float, calm_gap_s: float, mean_gaps: float) -> float:
        """Return when the next failure comes behind one, if that is so many mean gaps away.

        Args:
            at_s: when the one before came.
            calm_gap_s: mean seconds between two failures in calm times.
            mean_gaps: how far the next one is away.
        """
        for cycle in count(int(at_s // self.every_s)):
            ends = (cycle + 1) * self.every_s
            for until, gap_s in ((ends - self.lasts_s, calm_gap_s), (ends, self.gap_s)):
                left_s = max(0.0, until - at_s)
                if mean_gaps * gap_s < left_s:
                    return at_s + mean_gaps * gap_s
                at_s, mean_gaps = at_s + left_s, mean_gaps - left_s / gap_s
        raise AssertionError("there is always another one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Machines that become slow, at random, and recover.

    Attributes:
        gap_s: mean seconds from one of the cluster to the next.
        factor: how many times as long a machine takes meanwhile.
        stay_s: how long it is slow.
    """

    gap_s: float
    factor: float
    stay_s: float

    def added_to(self, world: World, seed: str) -> World:
        """Return a world in which machines also become slow, each one that is not there or slow already excepted."""
        gaps, drawn = random.Random(f"{seed}:stragglers"), random.Random(f"{seed}:who is slow")
        there, slow, found = set(range(world.machines)), dict[int, float](), list[Happening]()
        upcoming, at = deque(world.happenings), 0.0
        while (at := at + gaps.expovariate(1 / self.gap_s)) < world.lasts_s:
            found += self._until(at, upcoming, there, slow)
            if quick := sorted(there - slow.keys()):
                machine = drawn.choice(quick)
                slow[machine] = at + self.stay_s
                found.append(Happening(at_s=at, kind=Kind.SLOWS, machine=machine, factor=self.factor))
        found += self._until(world.lasts_s, upcoming, there, slow)
        return check(replace(world, happenings=(*found, *upcoming)))

    @staticmethod
    def _until(at: float, upcoming: deque[Happening], there: set[int], slow: dict[int, float]) -> Iterator[Happening]:
        """What else happens until a moment, and who is as fast as others again."""
        while True:
            first = min(slow, key=lambda machine: slow[machine], default=None)
            ends = math.inf if first is None else slow[first]
            happens = upcoming[0].at_s if upcoming else math.inf
            if min(ends, happens) > at:
                return
            if first is not None and ends < happens:
                del slow[first]
                yield Happening(at_s=ends, kind=Kind.SLOWS, machine=first)
                continue
            each = upcoming.popleft()
            if each.kind is Kind.COMES:
                there.add(each.machine)
            elif each.goes:
                there.discard(each.machine)
                slow.pop(each.machine, None)
            yield each


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """A way in which machines fail.

    Attributes:
        kind: ``periodic``, ``poisson``, ``weibull``, ``racks``, ``bursts`` or ``spot``; else a trace's path.
        gap_s: mean seconds between two failures of the cluster.
        shape: of Weibull's distribution; 1 is Poisson's process, less than 1 are bursts.
        size: how many machines, of consecutive numbers, are lost at once.
        bursts: if the kind is that, when they fail more often, or may.
        repair_s: until another machine is there for each that is lost; None: never.
        notice_s: for how long machines still work once they are known to go.
        spot: how machines come and go, if the kind is that.
        stragglers: how machines become slow meanwhile; None: none does.
    """

    kind: str
    gap_s: float = math.inf
    shape: float = 1.0
    size: int = 1
    bursts: Bursts | None = None
    repair_s: float | None = None
    notice_s: float = 0.0
    spot: Spot | None = None
    stragglers: Stragglers | None = None

    @property
    def is_trace(self) -> bool:
        """Whether it is what a file tells."""
        return self.kind not in _NEXT and self.spot is None

    def draw(self, machines: int, lasts_s: float, seed: str) -> World:
        """Return one world, the same for the same arguments.

        Args:
            machines: how many there are in the beginning; not asked for a trace, which says it.
            lasts_s: of which it is to tell.
            seed: of gaps and victims.

        Raises:
            ConfigError: a trace cannot be read.
        """
        if self.is_trace:
            return read_trace(Path(self.kind), lasts_s=lasts_s, seed=random.Random(seed).getrandbits(31))
        if self.spot is not None:
            world = self.spot.draw(machines, lasts_s, seed, self.notice_s)
        else:
            world = self._draw(machines, lasts_s, seed)
        return world if self.stragglers is None else self.stragglers.added_to(world, seed)

    def _draw(self, machines: int, lasts_s: float, seed: str) -> World:
        gaps, victims = random.Random(f"{seed}:gaps"), random.Random(f"{seed}:victims")
        there, known = list(range(machines)), machines
        found: list[Happening] = []
        back: list[tuple[float, int]] = []
        for at in self._instants(gaps, lasts_s):
            while back and back[0][0] < at:
                there.append(heappop(back)[1])
            if not there:
                break
            for machine in self._victims(there, victims):
                there.remove(machine)
                kind = Kind.LEAVES if self.notice_s else Kind.LOST
                found.append(Happening(at_s=at, kind=kind, machine=machine, grace_s=self.notice_s))
                if self.repair_s is not None and (again := at + self.notice_s + self.repair_s) < lasts_s:
                    found.append(Happening(at_s=again, kind=Kind.COMES, machine=known))
                    heappush(back, (again, known))
                    known += 1
        found.sort(key=lambda each: (each.at_s, each.kind is Kind.COMES, each.machine))
        return check(World(machines=machines, happenings=_renamed(found, machines), lasts_s=lasts_s))

    def _instants(self, gaps: random.Random, lasts_s: float) -> Iterator[float]:
        at = 0.0
        while (at := _NEXT[self.kind](self, at, gaps)) < lasts_s:
            yield at

    def _victims(self, there: list[int], drawn: random.Random) -> list[int]:
        first = drawn.choice(there)
        if self.size == 1:
            return [first]
        rack = first // self.size
        return [machine for machine in sorted(there) if machine // self.size == rack]


def _renamed(found: list[Happening], machines: int) -> tuple[Happening, ...]:
    """Machines that come are numbered in the order of their coming."""
    names: dict[int, int] = {}
    for each in found:
        if each.kind is Kind.COMES:
            names[each.machine] = machines + len(names)
    return tuple(
        Happening(at_s=each.at_s, kind=each.kind, machine=names.get(each.machine, each.machine), grace_s=each.grace_s)
        for each in found
    )


def _next_with_bursts(failures: Failures, at: float, gaps: random.Random) -> float:
    assert failures.bursts is not None, "this kind has them"
    return failures.bursts.after(at, failures.gap_s, gaps.expovariate(1.0))


_NEXT: Mapping[str, Callable[[Failures, float, random.Random], float]] = {
    "bursts": _next_with_bursts,
    "periodic": lambda failures, at, gaps: at + failures.gap_s,
    "poisson": lambda failures, at, gaps: at + gaps.expovariate(1 / failures.gap_s),
    "racks": lambda failures, at, gaps: at + gaps.expovariate(1 / failures.gap_s),
    "weibull": lambda failures, at, gaps: at + weibull(gaps, failures.gap_s, failures.shape),
}
"""By kind: when the next failure comes behind a moment."""


def parse_failures(text: str) -> Failures:
    """Return the way that a text names; see `FORMS`.

    Raises:
        ConfigError: it is none of them.
    """
    kind, colon, rest = text.partition(":")
    if kind == "spot":
        return _spot(rest, text)
    if kind not in _NEXT:
        if colon and not Path(text).exists():
            raise ConfigError(f"--trace {text}: expected {FORMS}")
        return Failures(kind=text)
    parts = [part for part in rest.split(",") if part]
    if parts and "=" not in parts[0]:  # the mean time, in short
        parts[0] = f"mtbf={parts[0]}"
    given = {key: value for key, _, value in (part.partition("=") for part in parts)}
    own = _OWN.get(kind, frozenset())
    if "mtbf" not in given or given.keys() - {"mtbf", "repair", "notice", *_STRAGGLERS} != own:
        raise ConfigError(f"--trace {text}: expected {FORMS}")
    return Failures(
        kind=kind,
        gap_s=seconds(given["mtbf"], f"--trace {text}"),
        bursts=_bursts(given, text) if kind == "bursts" else None,
        shape=number_above_0(given.get("shape", "1"), f"--trace {text}"),
        size=round(number_above_0(given.get("size", "1"), f"--trace {text}")),
        repair_s=seconds(given["repair"], f"--trace {text}") if "repair" in given else None,
        notice_s=seconds(given["notice"], f"--trace {text}") if "notice" in given else 0.0,
        stragglers=_stragglers(given, text),
    )


def _stragglers(given: Mapping[str, str], text: str) -> Stragglers | None:
    if not (said := given.keys() & _STRAGGLERS):
        return None
    if said != _STRAGGLERS:
        raise ConfigError(f"--trace {text}: expected stragglers=, factor= and stay= together, such as {SLOW}")
    where = f"--trace {text}"
    gap_s, stay_s = seconds(given["stragglers"], where), seconds(given["stay"], where)
    factor = number_above_0(given["factor"], where)
    if factor <= 1:
        raise ConfigError(f"{where}: a straggler of factor={factor:g} is not slow: expected more than 1")
    return Stragglers(gap_s=gap_s, factor=factor, stay_s=stay_s)


_STRAGGLERS = frozenset({"stragglers", "factor", "stay"})
_OWN: Mapping[str, frozenset[str]] = {
    "bursts": frozenset({"every", "lasts", "burst"}),
    "racks": frozenset({"size"}),
    "weibull": frozenset({"shape"}),
}
"""What must be said of a kind, beside its mean time."""


def _bursts(given: Mapping[str, str], text: str) -> Bursts:
    every_s, lasts_s, gap_s = (seconds(given[key], f"--trace {text}") for key in ("every", "lasts", "burst"))
    if lasts_s >= every_s:
        raise ConfigError(f"--trace {text}: bursts that never end: expected lasts= less than every=")
    return Bursts(every_s=every_s, lasts_s=lasts_s, gap_s=gap_s)


def _spot(rest: str, text: str) -> Failures:
    """By a name that is known, or as the trace of a file says."""
    name, *parts = rest.split(",")
    given = dict(part.partition("=")[::2] for part in parts)
    if not name or given.keys() - {"notice", *_STRAGGLERS}:
        raise ConfigError(f"--trace {text}: expected such as spot:ec2-p3,notice=2m")
    if name not in KNOWN and not Path(name).exists():
        raise ConfigError(f"--trace {text}: expected spot: and one of {', '.join(KNOWN)}, or the path of a trace")
    try:
        found = KNOWN[name] if name in KNOWN else fitted(read_trace(Path(name)))
    except ConfigError as error:
        raise ConfigError(f"--trace {text}: {error}") from None
    notice_s = seconds(given["notice"], f"--trace {text}") if "notice" in given else 0.0
    return Failures(kind="spot", gap_s=found.gap_s, notice_s=notice_s, spot=found, stragglers=_stragglers(given, text))


def seconds(text: str, where: str) -> float:
    """Return a time such as ``90s``, ``30m``, ``17h`` or ``2d`` in seconds.

    Raises:
        ConfigError: it is none, or not above 0.
    """
    unit = _UNITS.get(text[-1:], 0.0)
    try:
        found = float(text[:-1]) * unit
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise ConfigError(f"{where}: expected a time such as 90s, 30m, 17h or 2d, got {text!r}")
    return found
