"""What of a worker's messages crosses nodes, and is logged for whoever may have to run layers again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Send
from holdfast.core.plan import Plan
from holdfast.core.program import WorkerProgram

__all__ = ["LogFilter"]


@dataclass(slots=True, kw_only=True)
class LogFilter:
    """What a worker logs: what it sends to other nodes on which somebody holds layers that no other node has.

    Attributes:
        node_of: the node of each worker; whoever is not in it is on one of its own.
        ends: payloads and boundaries of what is logged under the plan that runs.
        sums: the ties, by their number, whose sums are logged.
    """

    node_of: Mapping[WorkerId, int]
    ends: frozenset[tuple[Payload, int]] = frozenset()
    sums: Mapping[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        """Whether anything is logged."""
        return bool(self.ends or self.sums)

    def follow(self, plan: Plan, program: WorkerProgram, ties: tuple[tuple[int, ...], ...]) -> None:
        """Goes over to another plan.

        Args:
            plan: the plan.
            program: that it gives to the worker.
            ties: tuples of layers that share weights.
        """
        owners = plan.placement.owners_by_layer
        alone = {layer for layer, workers in enumerate(owners) if len(set(map(self._node, workers))) < 2}
        lonely = {worker for worker in plan.workers if not alone.isdisjoint(plan.placement.held_layers(worker))}
        here = self._node(program.worker)
        self.ends = frozenset(
            (each.payload, each.boundary)
            for each in program.operations
            if isinstance(each, Send)
            and each.payload in (Payload.ACTIVATION, Payload.GRADIENT)
            and each.peer in lonely
            and self._node(each.peer) != here
        )
        apart = (each for each in program.reductions if len(set(map(self._node, each.workers))) > 1)
        self.sums = {
            each.layers: ties.index(each.layers)
            for each in apart
            if each.layers in ties and not lonely.isdisjoint(each.workers)
        }

    def _node(self, worker: WorkerId) -> int | WorkerId:
        return self.node_of.get(worker, worker)
