"""How fast a cluster is, and what that makes of actions: seconds, and whether training stands still for them.

A simulator lets so much time pass; a policy compares recoveries by it. Nothing here is measured on the fly: the same
action, view and rates give the same price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Link, Profile, costs_from_profile
from holdfast.core.replay import Replay
from holdfast.core.schedule import OpKind
from holdfast.schedule.evaluate import evaluate, measured

__all__ = ["Price", "Rates", "first_sum_s", "remaining_seconds", "replaying_seconds", "step_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a cluster is.

    Attributes:
        profile: how long operations, updates and tensors between workers take, and how large states are.
        message_s: seconds of a message between workers that carries no tensor of a micro-batch: a part of a sum, or
            what is known of a step.
        control_s: seconds of a message between the coordinator and a worker, in one direction.
        connect_s: seconds until the workers of a generation are connected.
        start_s: seconds until a new process is there.
        copy: how a worker is given state by its peers.
        load: how a worker reads the state of one layer from a checkpoint.
        save: how a worker writes that of one layer at the end.
        sums: parts of a contribution to the sum of a layer's gradients, each as large as its parameters, over the
            profile's link; 0: sums take no time.
    """

    profile: Profile
    message_s: float
    control_s: float
    connect_s: float
    start_s: float
    copy: Link
    load: Link
    save: Link
    sums: int = 0

    def state_bytes(self, layers: Iterable[int]) -> int:
        """Returns how large the state of these layers is."""
        return sum(self._sizes(layers))

    def copying_s(self, layers: Iterable[int]) -> float:
        """Returns how long a worker is given the state of these layers, all at once."""
        return self.copy.seconds_of(self.state_bytes(layers))

    def loading_s(self, layers: Iterable[int]) -> float:
        """Returns how long a worker reads the state of these layers, one after another."""
        return sum(map(self.load.seconds_of, self._sizes(layers)))

    def saving_s(self, layers: Iterable[int]) -> float:
        """Returns how long a worker writes the state of these layers, one after another."""
        return sum(map(self.save.seconds_of, self._sizes(layers)))

    def _sizes(self, layers: Iterable[int]) -> list[int]:
        return [self.profile.layers[layer].state_bytes for layer in layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds from the begin of an action to its end; ``still``: whether nothing is trained meanwhile."""

    seconds: float
    still: bool = True


def step_seconds(
    plan: Plan, rates: Rates, *, updates_ahead: bool = False, slowed: Mapping[WorkerId, float] | None = None
) -> float:
    """Returns how long a step of a plan takes that follows upon another one, from its first operation to its commit.

    What all know of a step, and the verdict, travel along the pipelines beside the last and the first operations; so do
    sums, as far as there are operations left: see :func:`_summing`.

    Args:
        plan: it.
        rates: of the cluster.
        updates_ahead: whether updates are ahead of the verdict.
        slowed: how many times as long some workers' operations and updates take.
    """
    costs, behind = costs_from_profile(rates.profile), _summing(plan, rates)
    return measured(plan, costs, staggered=updates_ahead, behind=behind, slowed=slowed).period + rates.message_s


def first_sum_s(plan: Plan, rates: Rates) -> float:
    """Returns when in a step of a plan somebody contributes first to a sum.

    That is as its last operation that adds begins; at once where it computes nothing, as whoever came for a place that
    the grid is yet to get.
    """
    last = dict.fromkeys(plan.workers, 0.0)
    for span in evaluate(plan, costs_from_profile(rates.profile)).spans:
        if span.op.kind in (OpKind.B, OpKind.W):
            last[span.worker] = span.start
    return min(last.values(), default=0.0)


def remaining_seconds(
    plan: Plan, lasts_s: float, rates: Rates, *, slowed: Mapping[WorkerId, float] | None = None
) -> float:
    """Returns how long what is left of a step takes until its commit: its operations, the longest update, a message.

    Args:
        plan: of whoever goes on with it.
        lasts_s: what its operations take.
        rates: of the cluster.
        slowed: how many times as long some workers' operations and updates take; all are taken to wait for the slowest.
    """
    factor = max((slowed or {}).values(), default=1.0)
    updates, placement = costs_from_profile(rates.profile).optimizer, plan.placement
    update_s = max(sum(updates[layer] for layer in placement.layers_of(worker)) for worker in plan.workers)
    sums_s = max(_summing(plan, rates).values(), default=0.0)
    return factor * (lasts_s + update_s) + sums_s + rates.message_s


def replaying_seconds(replays: Iterable[Replay], rates: Rates) -> float:
    """Returns how long layers are replayed: until the last worker has connected, read them and run its share of steps.

    As if all that was logged were there in time, and sums among those who share took none.
    """
    costs, seconds = costs_from_profile(rates.profile), defaultdict[WorkerId, float](float)
    for each in replays:
        layers, share = each.layers.indices, -(-len(each.microbatches) // len(each.workers))
        passes_s = sum(costs.forward[i] + costs.input[i] + costs.weight[i] for i in layers)
        step_s = share * passes_s + sum(costs.optimizer[i] for i in layers)
        for worker in each.workers:
            seconds[worker] += rates.loading_s(layers) + (each.stop - each.start) * step_s
    return 2 * rates.control_s + rates.connect_s + max(seconds.values(), default=0.0)


def _summing(plan: Plan, rates: Rates) -> dict[WorkerId, float]:
    """Seconds for which each worker's sums are on their way behind its last backward pass.

    The sum of a layer begins as the last of these has gone over it, so from the last layer to the first; sums travel
    one after another. Of two workers each sends all that it has; of more, each sends shares of it to those who add
    them, and what it has added to all (docs/transport.md).
    """
    found: dict[WorkerId, float] = {}
    layers, members = rates.profile.layers, plan.placement.members_by_layer
    for worker in plan.workers if rates.sums else ():
        computed = free = 0.0
        for layer in reversed(plan.placement.held_layers(worker)):
            computed += layers[layer].seconds_of(OpKind.B)
            others = len(members[layer]) - 1
            if others:
                share = rates.sums if others == 1 else (rates.sums + 1) * others / (others + 1)
                size = share * layers[layer].parameter_bytes
                free = max(free, computed) + rates.profile.link.seconds_of(size)
        found[worker] = max(0.0, free - computed)
    return found
