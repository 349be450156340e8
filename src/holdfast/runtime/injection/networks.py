"""Nodes in networks of their own, put around what starts their processes: so that a node's link can be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.runtime.isolation import Namespace, Networks
from holdfast.runtime.node.children import Child
from holdfast.runtime.node.entries import EntryPoint
from holdfast.runtime.node.worker_group import Processes
from holdfast.runtime.specs import WorkerSpec

__all__ = ["InNamespace", "IsolatedWorkers"]


@dataclass(frozen=True, slots=True)
class InNamespace(EntryPoint):
    """What runs in a process that moves to a network before anything else.

    Attributes:
        namespace: the network.
    """

    namespace: Namespace

    @classmethod
    def of(cls, entry: EntryPoint, namespace: Namespace) -> InNamespace:
        """Returns the same, in a network."""
        return cls(entry.name, entry.function, namespace)

    def __call__(self, *args: Any) -> None:
        """Moves, and calls the function."""
        self.namespace.enter()  # before there is any socket
        EntryPoint.__call__(self, *args)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedWorkers:
    """See :class:`holdfast.runtime.node.worker_group.Processes`; each worker starts in the network of its node.

    Attributes:
        inner: starts them.
        networks: one for each node.
        nodes: which workers are on which.
        ids: of the nodes, as if each were a machine.
    """

    inner: Processes
    networks: Networks
    nodes: tuple[tuple[WorkerId, ...], ...]
    ids: tuple[NodeId, ...]

    def start(self, main: Callable[..., None], /, *arguments: object, name: str) -> Child:
        """See Processes.start."""
        (spec,) = arguments
        assert isinstance(spec, WorkerSpec), "only workers are started here"
        assert isinstance(main, EntryPoint), "what runs there is known by name"
        namespace = self.networks.node(self._number_of(spec.worker))
        return self.inner.start(InNamespace.of(main, namespace), replace(spec, host=namespace.host), name=name)

    def node_of(self, worker: WorkerId) -> NodeId:
        """Returns the node of a worker."""
        return self.ids[self._number_of(worker)]

    def _number_of(self, worker: WorkerId) -> int:
        return {member: number for number, node in enumerate(self.nodes) for member in node}[worker]

    def attend(self, child: Child, on_end: Callable[[Child], None], /) -> None:
        """See Processes.attend."""
        self.inner.attend(child, on_end)

    def kill(self, child: Child, /) -> None:
        """See Processes.kill."""
        self.inner.kill(child)

    def terminate(self, child: Child, /) -> None:
        """See Processes.terminate."""
        self.inner.terminate(child)
