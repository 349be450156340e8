"""Which way a job recovers from the loss of a node: by replicas, by logs, or by checkpoints alone; and why."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile, costs_from_profile
from holdfast.core.routes import Route, Visit
from holdfast.core.timeline import Timeline
from holdfast.errors import ConfigError
from holdfast.schedule.evaluate import evaluate

__all__ = [
    "FAR",
    "Choice",
    "Circumstances",
    "Sizes",
    "Way",
    "choose",
    "circumstances_of",
    "crossing_bytes",
    "headline",
    "size_of",
    "sizes_of",
]

FAR = 10.0
"""Logs that are so many times the model's state per step are worth less than another checkpoint."""


class Way(StrEnum):
    """How lost layers come back."""

    REROUTE = "re-route"
    """Others that hold the same layers run what the lost ones would have run."""
    REPLICATE = "replicate"
    """The same, and somebody who waits for it takes the place and a copy of the state."""
    LOG = "log"
    """They are computed again from a checkpoint and from what other nodes sent to them."""
    CHECKPOINT = "checkpoint"
    """Everybody goes back to a checkpoint."""
    STOP = "stop"
    """They do not: what lives is saved, and the job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is known of layers where no profile tells times.

    Attributes:
        boundary_bytes: of one micro-batch, what each layer hands on.
        state_bytes: parameters and optimizer state of each layer.
    """

    boundary_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks that both are of the same layers."""
        if len(self.boundary_bytes) != len(self.state_bytes):
            raise ConfigError(
                f"{len(self.boundary_bytes)} boundaries and {len(self.state_bytes)} states cannot be those of the same "
                "layers: expected one of each for every layer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the choice depends on.

    Attributes:
        alone: layers whose owners are all on one node, ascending.
        spares: processes that wait for a place.
        crossing_bytes: what would be logged in a step, by all workers: what nodes with such layers are sent by others.
        state_bytes: the size of the model: parameters and optimizer state.
        copy_s: seconds in which the most pressed of the senders copies its share of that off its device; None where
            times are not known.
        bubble_s: seconds of a step in which that one has nothing to do; None where times are not known.
    """

    alone: tuple[int, ...]
    spares: int
    crossing_bytes: float
    state_bytes: float
    copy_s: float | None = None
    bubble_s: float | None = None

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("spares", "crossing_bytes", "state_bytes", "copy_s", "bubble_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} = {value} is impossible: expected a number from 0")
        if (self.copy_s is None) is not (self.bubble_s is None):
            raise ConfigError(
                f"copy_s = {self.copy_s} and bubble_s = {self.bubble_s} say nothing: expected both times, or none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way, and why.

    Attributes:
        way: how lost layers come back.
        advised: what the figures speak for; another one than ``way`` where something else decided.
        reasons: sentences for people, each with its figures.
        why: what decided: one of the reasons, or something else.
    """

    way: Way
    advised: Way
    reasons: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        """A line for the way, and one for each reason."""
        told = self.way if self.way is self.advised else headline(self.way, self.advised, self.why)
        return "\n".join([told, *(f"  {reason}" for reason in self.reasons)])


def headline(way: str, advised: str, why: str) -> str:
    """Returns a way in one line; see :class:`Choice`.

    >>> headline("checkpoint", "log", "logging.use: off")
    'checkpoint (logging.use: off; the figures speak for log)'
    """
    return f"{way} ({why})" if way == advised else f"{way} ({why}; the figures speak for {advised})"


def choose(found: Circumstances, told: Way | None = None, who: str = "as told") -> Choice:
    """Returns how lost layers come back.

    Replicas are used where every layer has an owner on another node; else logs, where something crosses nodes, they are
    not far larger than the model, and can be copied while the senders have nothing else to do; else checkpoints.

    Args:
        found: the figures.
        told: what somebody has decided, whatever they say; None: nobody has.
        who: who or what has, for people.

    Source: Zhong et al., "SWIFT", sections 3 and 5.4. "Far exceeds the model size" is :data:`FAR` times here, as the
    paper has no number; its ViT-128/32 logs about twice its own size. The paper's "replicas" are copied to a
    replacement; here others go on at once, and the copy is for whoever waits for the place. The paper compares with the
    mean bubble; here it is that of the worker for whom it is tightest.

    >>> some = Circumstances(alone=(3, 4), spares=0, crossing_bytes=2e9, state_bytes=1e9, copy_s=0.2, bubble_s=0.1)
    >>> print(choose(some))
    checkpoint
      no other node has an owner of layer(s) 3-4
      2 GB cross nodes in a step, 2 times the 1 GB of the model; up to 10 times are worth it
      copying takes the most pressed sender 0.2 s of a step, in which it has nothing else to do for 0.1 s
    """
    advised, reasons, decisive = _without_replicas(found) if found.alone else _by_replicas(found)
    way = told or advised
    return Choice(way=way, advised=advised, reasons=reasons, why=reasons[decisive] if way is advised else who)


def _by_replicas(found: Circumstances) -> tuple[Way, tuple[str, ...], int]:
    """The way, the reasons, and which of them decided."""
    held = "every layer has owners on several nodes"
    if found.spares:
        return Way.REPLICATE, (held, f"{found.spares} process(es) wait to take a lost one's place"), 1
    return Way.REROUTE, (held,), 0


def _without_replicas(found: Circumstances) -> tuple[Way, tuple[str, ...], int]:
    """The way, the reasons, and which of them decided."""
    alone = f"no other node has an owner of layer(s) {_ranges(found.alone)}"
    if not found.crossing_bytes:
        return Way.CHECKPOINT, (alone, "nothing crosses nodes on its way to them, so there is nothing to log"), 1
    times = found.crossing_bytes / found.state_bytes if found.state_bytes else math.inf
    size = (
        f"{size_of(found.crossing_bytes)} cross nodes in a step, {times:.3g} times the {size_of(found.state_bytes)} of "
        f"the model; up to {FAR:.3g} times are worth it"
    )
    fits = found.copy_s is None or found.bubble_s is None or found.copy_s <= found.bubble_s
    worth = times <= FAR and fits
    return Way.LOG if worth else Way.CHECKPOINT, (alone, size, _time(found)), 2 if times <= FAR and not fits else 1


def _time(found: Circumstances) -> str:
    if found.copy_s is None:
        return (
            "without a profile it is not known whether copying fits into the time in which senders wait; a step that "
            "cannot be logged in time is left out"
        )
    return (
        f"copying takes the most pressed sender {found.copy_s:.3g} s of a step, in which it has nothing else to do for "
        f"{found.bubble_s:.3g} s"
    )


def size_of(num_bytes: float) -> str:
    """Returns a size for people.

    >>> size_of(24.66e9), size_of(1_234_567), size_of(1234)
    ('24.66 GB', '1.235 MB', '1234 bytes')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= 0.1 * unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} bytes"


def _ranges(layers: tuple[int, ...]) -> str:
    """As people write them: ``0-2, 5``."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, stops, strict=True))


def circumstances_of(
    plan: Plan,
    nodes: tuple[tuple[WorkerId, ...], ...],
    known: Profile | Sizes,
    *,
    bandwidth: float,
    spares: int = 0,
    staggered: bool = False,
) -> Circumstances:
    """Returns what the choice for a job depends on.

    Args:
        plan: of the healthy grid.
        nodes: the workers that fail together, see :func:`holdfast.core.placement.group_into_nodes`.
        known: what its layers cost, or how large they are, where no times are known.
        bandwidth: bytes per second at which a worker copies what it logs off its device.
        spares: processes that wait for a place.
        staggered: whether each stage makes its update as soon as its own workers are done.

    Raises:
        ConfigError: a worker is on no node, or the bandwidth is impossible.
    """
    if not 0 < bandwidth < math.inf:
        raise ConfigError(f"a bandwidth of {bandwidth} is impossible: expected bytes per second above 0")
    node_of = {worker: index for index, node in enumerate(nodes) for worker in node}
    if lost := [worker for worker in plan.workers if worker not in node_of]:
        raise ConfigError(f"worker {lost[0]} is on no node: expected every worker of the plan on one")
    sizes = known if isinstance(known, Sizes) else sizes_of(known)
    alone = _alone(plan, node_of)
    sent = crossing_bytes(plan, node_of, sizes.boundary_bytes, alone)
    copy_s, bubble_s = _times(plan, sent, known, bandwidth, staggered=staggered)
    return Circumstances(
        alone=alone,
        spares=spares,
        crossing_bytes=sum(sent.values()),
        state_bytes=sum(sizes.state_bytes),
        copy_s=copy_s,
        bubble_s=bubble_s,
    )


def sizes_of(profile: Profile) -> Sizes:
    """Returns how large the layers of a profile are."""
    layers = profile.layers
    return Sizes(
        boundary_bytes=tuple(each.boundary_bytes for each in layers),
        state_bytes=tuple(each.state_bytes for each in layers),
    )


def _times(
    plan: Plan, sent: Counter[WorkerId], known: Profile | Sizes, bandwidth: float, *, staggered: bool
) -> tuple[float | None, float | None]:
    """How long the most pressed sender copies, and how long it waits; None each where that is not known."""
    if isinstance(known, Sizes):
        return None, None
    if not sent:
        return 0.0, 0.0
    waits = _waits(evaluate(plan, costs_from_profile(known), staggered=staggered))
    pressed = max(sent, key=lambda worker: sent[worker] / bandwidth - waits[worker])
    return sent[pressed] / bandwidth, waits[pressed]


def _waits(timed: Timeline) -> dict[WorkerId, float]:
    """Seconds of a step in which each worker runs no operation; its update counts as none."""
    busy: defaultdict[WorkerId, float] = defaultdict(float)
    for span in timed.spans:
        busy[span.worker] += span.end - span.start
    return {worker: max(0.0, timed.makespan - seconds) for worker, seconds in busy.items()}


def _alone(plan: Plan, node_of: Mapping[WorkerId, int]) -> tuple[int, ...]:
    owners = enumerate(plan.placement.owners_by_layer)
    return tuple(layer for layer, workers in owners if len({node_of[worker] for worker in workers}) < 2)


def crossing_bytes(
    plan: Plan, node_of: Mapping[WorkerId, int], boundary_bytes: tuple[int, ...], alone: tuple[int, ...]
) -> Counter[WorkerId]:
    """Returns how many bytes of a step each worker logs, by worker; whoever logs none is not in it.

    A sender logs what it sends to a node on which the micro-batch is run through a layer that nobody else has.

    Args:
        plan: the plan.
        node_of: the node of each worker.
        boundary_bytes: of one micro-batch, what each layer hands on; its gradient is as large.
        alone: layers whose owners are all on one node.
    """
    lonely = frozenset(alone)
    sent: Counter[WorkerId] = Counter()
    for route in plan.routes.routes:
        needy = _needy(route, node_of, lonely)
        for before, after in zip(route.visits, route.visits[1:], strict=False):
            nodes = node_of[before.worker], node_of[after.worker]
            if nodes[0] != nodes[1]:
                size = boundary_bytes[after.layers.start - 1]
                sent[before.worker] += size * (nodes[1] in needy)
                sent[after.worker] += size * (nodes[0] in needy)
    return +sent


def _needy(route: Route, node_of: Mapping[WorkerId, int], lonely: frozenset[int]) -> frozenset[int]:
    """The nodes that run layers of this micro-batch which only they have."""

    def needs(visit: Visit) -> bool:
        return not lonely.isdisjoint(visit.layers.indices)

    return frozenset(node_of[visit.worker] for visit in route.visits if needs(visit))
