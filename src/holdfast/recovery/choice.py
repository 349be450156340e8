"""Which way a job recovers from the loss of a node: by replicas, by logs, or by checkpoints alone; and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.evaluate import Timeline, evaluate
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile, costs_from_profile
from holdfast.core.routes import Route, Visit
from holdfast.errors import ConfigError

__all__ = ["FAR", "Choice", "Circumstances", "Way", "bubble_share", "choose", "circumstances_of", "crossing_bytes"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the choice depends on.

    Attributes:
        alone: layers whose owners are all on one node, ascending.
        spares: processes that wait for a place.
        crossing_bytes: what would be logged in a step, by all workers: what nodes with such layers are sent by others.
        state_bytes: the size of the model: parameters and optimizer state.
        copy_s: seconds in which the most pressed of the senders copies its share of that off its device.
        bubble_s: seconds of a step in which that one has nothing to do.
    """

    alone: tuple[int, ...]
    spares: int
    crossing_bytes: float
    state_bytes: float
    copy_s: float
    bubble_s: float

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("spares", "crossing_bytes", "state_bytes", "copy_s", "bubble_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} = {value} is impossible: expected a number from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way, and why.

    Attributes:
        way: how lost layers come back.
        advised: what the figures speak for; another one than ``way`` where somebody decided otherwise.
        reasons: sentences for people, each with its figures.
    """

    way: Way
    advised: Way
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """A line for the way, and one for each reason."""
        told = "" if self.way is self.advised else f" (as told; the figures speak for {self.advised})"
        return "\n".join([f"{self.way}{told}", *(f"  {reason}" for reason in self.reasons)])


def choose(found: Circumstances, told: Way | None = None) -> Choice:
    """Returns how lost layers come back.

    Replicas are used where every layer has an owner on another node; else logs, where something crosses nodes, they are
    not far larger than the model, and can be copied while the senders have nothing else to do; else checkpoints.

    Args:
        found: the figures.
        told: what somebody has decided, whatever they say; None: nobody has.

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
    if not found.alone:
        advised, reasons = _by_replicas(found)
    else:
        advised, reasons = _without_replicas(found)
    return Choice(way=told or advised, advised=advised, reasons=reasons)


def _by_replicas(found: Circumstances) -> tuple[Way, tuple[str, ...]]:
    held = "every layer has owners on several nodes"
    if found.spares:
        return Way.REPLICATE, (held, f"{found.spares} process(es) wait to take a lost one's place")
    return Way.REROUTE, (held,)


def _without_replicas(found: Circumstances) -> tuple[Way, tuple[str, ...]]:
    alone = f"no other node has an owner of layer(s) {_ranges(found.alone)}"
    if not found.crossing_bytes:
        return Way.CHECKPOINT, (alone, "nothing crosses nodes on its way to them, so there is nothing to log")
    times = found.crossing_bytes / found.state_bytes if found.state_bytes else math.inf
    size = (
        f"{_giga(found.crossing_bytes)} cross nodes in a step, {times:.3g} times the {_giga(found.state_bytes)} of the "
        f"model; up to {FAR:.3g} times are worth it"
    )
    time = (
        f"copying takes the most pressed sender {found.copy_s:.3g} s of a step, in which it has nothing else to do for "
        f"{found.bubble_s:.3g} s"
    )
    worth = times <= FAR and found.copy_s <= found.bubble_s
    return Way.LOG if worth else Way.CHECKPOINT, (alone, size, time)


def _giga(size: float) -> str:
    return f"{size / 1e9:.4g} GB"


def _ranges(layers: tuple[int, ...]) -> str:
    """As people write them: ``0-2, 5``."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, stops, strict=True))


def circumstances_of(
    plan: Plan,
    nodes: tuple[tuple[WorkerId, ...], ...],
    profile: Profile,
    *,
    bandwidth: float,
    spares: int = 0,
    staggered: bool = False,
) -> Circumstances:
    """Returns what the choice for a job depends on.

    Args:
        plan: of the healthy grid.
        nodes: the workers that fail together, see :func:`holdfast.core.placement.group_into_nodes`.
        profile: what its layers cost.
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
    alone = _alone(plan, node_of)
    sent = crossing_bytes(plan, node_of, tuple(each.boundary_bytes for each in profile.layers), alone)
    timed = evaluate(plan, costs_from_profile(profile), staggered=staggered)
    pressed = max(sent, key=lambda worker: sent[worker] / bandwidth - _bubble_s(timed, worker), default=None)
    return Circumstances(
        alone=alone,
        spares=spares,
        crossing_bytes=sum(sent.values()),
        state_bytes=sum(each.state_bytes for each in profile.layers),
        copy_s=0.0 if pressed is None else sent[pressed] / bandwidth,
        bubble_s=0.0 if pressed is None else _bubble_s(timed, pressed),
    )


def _bubble_s(timed: Timeline, worker: WorkerId) -> float:
    """Seconds of a step in which a worker runs no operation; its update counts as none."""
    return max(0.0, timed.makespan - sum(span.end - span.start for span in timed.of(worker)))


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


def bubble_share(stages: int, microbatches: int) -> float:
    """Returns the share of a step that a worker waits in, with GPipe's or 1F1B's schedule and equal stages.

    Source: Zhong et al., "SWIFT", section 2.1.

    >>> bubble_share(4, 4) == 3 / 7
    True
    """
    if stages < 1 or microbatches < 1:
        raise ConfigError(f"{stages} stages with {microbatches} micro-batches are impossible: expected at least 1 each")
    return (stages - 1) / (microbatches + stages - 1)
