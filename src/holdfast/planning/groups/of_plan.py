"""The nodes of a plan as a chain of machines, for which groups are found."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.profile import Profile, costs_from_profile
from holdfast.planning.groups.chain import MachineChain

__all__ = ["chain_of"]


def chain_of(
    plan: Plan, nodes: Sequence[Sequence[WorkerId]], profile: Profile, *, interval: int, limit_bytes: float
) -> MachineChain | None:
    """Returns what each node computes in a step and passes to the next one; None if they are no chain.

    Args:
        plan: of the whole grid.
        nodes: the workers that fail together, in the order of what they hold.
        profile: of the layers.
        interval: steps from one checkpoint to the next: logs of so many are kept.
        limit_bytes: how much all logs together may take.
    """
    node_of = {worker: index for index, node in enumerate(nodes) for worker in node}
    costs, compute_s = costs_from_profile(profile), [0.0] * len(nodes)
    passed = [0.0] * (len(nodes) - 1)
    for route in plan.routes.routes:
        visited = list(dict.fromkeys(node_of[visit.worker] for visit in route.visits))
        if visited != list(range(len(nodes))):
            return None
        for visit in route.visits:
            found = costs.of(visit.layers)
            compute_s[node_of[visit.worker]] += found.forward + found.backward
        for one, other in pairwise(route.visits):
            if node_of[one.worker] != node_of[other.worker]:
                passed[node_of[one.worker]] += 2 * profile.layers[one.layers.stop - 1].boundary_bytes
    return MachineChain(
        compute_s=tuple(compute_s),
        boundary_bytes=tuple(passed),
        bandwidth=profile.link.bytes_per_s,
        interval=interval,
        limit_bytes=limit_bytes,
    )
