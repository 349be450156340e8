"""Spot machines that come and go as those of a trace did, without the trace."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from holdfast.errors import ConfigError
from holdfast.sim.world import Happening, Kind, World, check

__all__ = ["KNOWN", "Spot", "fitted", "weibull"]

_LEAST_SHAPE, _MOST_SHAPE = 0.2, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """How machines come and go, about their mean number.

    Attributes:
        most: machines that there were at once.
        gap_s: mean seconds from one instant at which some came or went to the next.
        shape: of these gaps, which are Weibull's; less than 1 are bursts.
        lost: how many went at once, on average; by a geometric distribution.
        come: how many came at once.
        share: machines that there were on average, of the most.
        spread: the standard deviation of their number in time, of the most.
    """

    most: int
    gap_s: float
    shape: float
    lost: float
    come: float
    share: float
    spread: float

    def draw(self, machines: int, lasts_s: float, seed: str, notice_s: float = 0.0) -> World:
        """Return a world that begins with so many machines, and never has more; each goes as often as those did."""
        sizes = {Kind.LOST: self.lost, Kind.COMES: self.come}
        scaled = {kind: max(1.0, size * machines / self.most) for kind, size in sizes.items()}
        kept = statistics.fmean(scaled[kind] / size for kind, size in sizes.items())
        gap_s = self.gap_s * kept * self.most / machines
        gaps, drawn = random.Random(f"{seed}:gaps"), random.Random(f"{seed}:who")
        mean = self.share * machines
        pull = statistics.fmean(scaled.values()) / (4 * max(self.spread, 1e-3) ** 2 * machines)
        there, known, at, found = list(range(machines)), machines, 0.0, list[Happening]()
        while (at := at + weibull(gaps, gap_s, self.shape)) < lasts_s:
            evenly = scaled[Kind.COMES] / (scaled[Kind.COMES] + scaled[Kind.LOST])
            goes = drawn.random() < evenly + pull * (len(there) - mean) / machines
            count = _geometric(drawn, scaled[Kind.LOST if goes else Kind.COMES])
            for _ in range(min(count, len(there) - 1 if goes else machines - len(there))):
                if goes:
                    machine = there.pop(drawn.randrange(len(there)))
                    kind = Kind.LEAVES if notice_s else Kind.LOST
                    found.append(Happening(at_s=at, kind=kind, machine=machine, grace_s=notice_s))
                else:
                    found.append(Happening(at_s=at, kind=Kind.COMES, machine=known))
                    there.append(known)
                    known += 1
        return check(World(machines=machines, happenings=tuple(found), lasts_s=lasts_s))


def weibull(drawn: random.Random, mean: float, shape: float) -> float:
    """Draw by Weibull's distribution of this mean; a shape of 1 is the exponential one, less than 1 are bursts."""
    return drawn.weibullvariate(mean / math.gamma(1 + 1 / shape), shape)


def _geometric(drawn: random.Random, mean: float) -> int:
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - drawn.random()) / math.log(1.0 - 1.0 / mean))


def fitted(world: World) -> Spot:
    """Return how the machines of a world come and go.

    Raises:
        ConfigError: too few do for anything to be said.
    """
    lost = Counter(each.at_s for each in world.happenings if each.goes)
    come = Counter(each.at_s for each in world.happenings if each.kind is Kind.COMES)
    instants = sorted({*lost, *come})
    gaps = [after - before for before, after in pairwise(instants)]
    if len(gaps) < 2 or not lost or not come:
        raise ConfigError("expected a trace in which machines go and come at three instants or more")
    counts = world.available()
    most = max(count for _, count in counts)
    mean = world.mean_available()
    spans = [(after - at, count) for (at, count), (after, _) in pairwise([*counts, (world.lasts_s, 0)])]
    variance = sum(seconds * (count - mean) ** 2 for seconds, count in spans if seconds > 0) / world.lasts_s
    return Spot(
        most=most,
        gap_s=statistics.fmean(gaps),
        shape=_shape(gaps),
        lost=statistics.fmean(lost.values()),
        come=statistics.fmean(come.values()),
        share=mean / most,
        spread=math.sqrt(variance) / most,
    )


def _shape(gaps: Sequence[float]) -> float:
    """Weibull's, by the mean and the standard deviation; found by halving."""
    wanted = (statistics.pstdev(gaps) / statistics.fmean(gaps)) ** 2
    low, high = _LEAST_SHAPE, _MOST_SHAPE
    while high - low > 1e-6:
        middle = (low + high) / 2
        varies = math.gamma(1 + 2 / middle) / math.gamma(1 + 1 / middle) ** 2 - 1
        low, high = (middle, high) if varies > wanted else (low, middle)
    return low


KNOWN: Mapping[str, Spot] = MappingProxyType(
    {
        "ec2-p3": Spot(most=32, gap_s=255.0, shape=0.77, lost=2.13, come=1.92, share=0.75, spread=0.21),
        "ec2-g4dn": Spot(most=24, gap_s=397.0, shape=0.84, lost=1.55, come=1.56, share=0.53, spread=0.15),
        "gcp-a100": Spot(most=64, gap_s=1307.0, shape=0.50, lost=4.28, come=4.27, share=0.89, spread=0.09),
        "gcp-v100": Spot(most=80, gap_s=681.0, shape=0.52, lost=9.42, come=8.08, share=0.95, spread=0.11),
    }
)
"""Fitted to what Bamboo's authors observed (github.com/uclasystem/bamboo): of 11 hours on EC2, of a day on GCP."""
