"""Splitting one layer's backward pass: I (gradient for the input) first, W (gradients for the weights) later.

The nodes of an autograd graph that lie on a path from the output to the input are the *path*. A node of the path
with an edge that leaves it towards parameters is a *frontier* node. I runs the path alone and captures what arrives at
the frontier; W starts again from there. Parameters whose subgraphs touch share a *group*, which W computes in one call.
Where a group has several frontier nodes, each is clamped to what was captured, because gradient also flows from one
into another.

Both halves run the same nodes in the same order as the fused backward pass, so the results are bitwise equal to it.

Source: the idea is that of ``torch.distributed.pipelining._backward``, which is private. It differs here: groups that
share a node are merged, the frontier is clamped, and nothing is detached in place. So tied weights, subgraphs of
parameters only, outputs that are views and inputs without a gradient all work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["PendingWeights", "fused_gradient", "input_gradient", "weight_gradient"]

Gradients: TypeAlias = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Parameters to differentiate in one call.

    Attributes:
        positions: where these parameters stand in the caller's sequence.
        parameters: the parameters.
        captured: every frontier node of the group and the gradients that arrived at its outputs.
    """

    positions: tuple[int, ...]
    parameters: tuple[Tensor, ...]
    captured: tuple[tuple[Node, Gradients], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWeights:
    """What W needs later: it keeps the part of the layer's graph below the frontier alive until it is dropped.

    Attributes:
        num_parameters: length of the sequence of parameters given to `input_gradient`.
        groups: the groups that W computes one after another.
    """

    num_parameters: int
    groups: tuple[_Group, ...]


def fused_gradient(
    output: Tensor,
    input: Tensor | None,
    parameters: Sequence[Tensor],
    grad_output: Tensor,
    *,
    retain_graph: bool = False,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Compute the gradients for a layer's input and its parameters at once (B).

    Args:
        output: what the layer returned.
        input: what the layer was given; None or without ``requires_grad`` if no gradient is wanted.
        parameters: leaves that require a gradient.
        grad_output: gradient for ``output``, of its shape.
        retain_graph: keep the graph for another pass.

    Returns:
        The gradient for the input (None if none is wanted or the output does not depend on it) and one gradient per
        parameter (None for those that the output does not depend on).
    """
    wanted = [input] if input is not None and input.requires_grad else []
    leaves = [*wanted, *parameters]
    if not leaves or not output.requires_grad:
        return None, [None] * len(parameters)
    gradients = torch.autograd.grad(output, leaves, grad_output, retain_graph=retain_graph, allow_unused=True)
    return gradients[0] if wanted else None, [_dense(gradient) for gradient in gradients[len(wanted) :]]


def input_gradient(
    output: Tensor, input: Tensor | None, parameters: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor | None, PendingWeights]:
    """Compute the gradient for a layer's input (I) and keep what `weight_gradient` needs.

    If no gradient for the input is wanted, or the output does not depend on the input, all work is left to W.

    Args:
        output: what the layer returned.
        input: what the layer was given; None or without ``requires_grad`` if no gradient is wanted.
        parameters: leaves that require a gradient.
        grad_output: gradient for ``output``, of its shape.

    Returns:
        The gradient for the input or None, and the pending half.

    After failure: nothing was changed and no hook is left behind; safe to repeat.
    """
    if not output.requires_grad:
        return None, PendingWeights(num_parameters=len(parameters), groups=())
    root = get_gradient_edge(output)
    target = get_gradient_edge(input).node if input is not None and input.requires_grad else None
    graph = _Graph(root.node, target, parameters)
    if input is None or target is None or target not in graph.path:
        captured = _at_output(root, grad_output)
        return None, PendingWeights(num_parameters=len(parameters), groups=graph.one_group(captured))
    captured = {}
    with ExitStack() as hooks:
        for node in graph.frontier:
            hooks.callback(node.register_prehook(partial(_capture, captured, node)).remove)
        (gradient,) = torch.autograd.grad(output, [input], grad_output, retain_graph=True, allow_unused=True)
    return gradient, PendingWeights(num_parameters=len(parameters), groups=graph.groups(captured))


def weight_gradient(pending: PendingWeights) -> list[Tensor | None]:
    """Compute the gradients for the parameters (W) from what `input_gradient` kept.

    Args:
        pending: the second result of `input_gradient`; drop it afterwards to free the graph.

    Returns:
        One gradient per parameter in the order given then; None for parameters that the output does not depend on.
    """
    gradients: list[Tensor | None] = [None] * pending.num_parameters
    for group in pending.groups:
        for position, gradient in zip(group.positions, _differentiate(group), strict=True):
            gradients[position] = _dense(gradient)
    return gradients


def _dense(gradient: Tensor | None) -> Tensor | None:
    """What an embedding with ``sparse=True`` gives, as all others do: sums are over every element."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


class _Graph:
    """The graph of one layer, divided into the path, the frontier and the groups of parameters."""

    def __init__(self, root: Node, target: Node | None, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._leaves: dict[Node, int] = {get_gradient_edge(leaf).node: place for place, leaf in enumerate(parameters)}
        self._edges: dict[Node, tuple[Node, ...]] = {}
        order = self._walk(root, target)
        self.path = self._leading_to(order, {target} if target is not None else set())
        self._side = self._leading_to(order, set(self._leaves)) - self.path
        self.frontier = [
            node
            for node in order
            if node in self.path and node is not target and not self._side.isdisjoint(self._edges[node])
        ]

    def _walk(self, root: Node, target: Node | None) -> list[Node]:
        """Return every node reachable from the root, each after all nodes below it."""
        order: list[Node] = []
        stack = [(root, False)]
        while stack:
            node, below_done = stack.pop()
            if below_done:
                order.append(node)
            elif node not in self._edges:
                below = () if node is target else tuple(n for n, _ in node.next_functions if n is not None)
                self._edges[node] = below
                stack.append((node, True))
                stack.extend((n, False) for n in below if n not in self._edges)
        return order

    def _leading_to(self, order: Iterable[Node], goals: set[Node]) -> set[Node]:
        found: set[Node] = set()
        for node in order:
            if node in goals or not found.isdisjoint(self._edges[node]):
                found.add(node)
        return found

    def one_group(self, captured: dict[Node, Gradients]) -> tuple[_Group, ...]:
        """Return all reachable parameters as one group that starts at the output."""
        places = tuple(sorted(place for leaf, place in self._leaves.items() if leaf in self._edges))
        return (self._group(places, captured),) if places else ()

    def groups(self, captured: dict[Node, Gradients]) -> tuple[_Group, ...]:
        """Return the groups: connected parts of the subgraphs off the path, with the frontier nodes that feed them."""
        heads = _Sets()
        for node in (*self.frontier, *self._side):
            for below in self._edges[node]:
                if below in self._side:
                    heads.join(node, below)
        places: dict[Node, list[int]] = {}
        for leaf, place in self._leaves.items():
            if leaf in self._side:
                places.setdefault(heads.find(leaf), []).append(place)
        fed: dict[Node, dict[Node, Gradients]] = {}
        for node in self.frontier:
            if node in captured:
                fed.setdefault(heads.find(node), {})[node] = captured[node]
        return tuple(self._group(tuple(sorted(places[head])), fed[head]) for head in places if head in fed)

    def _group(self, places: tuple[int, ...], captured: dict[Node, Gradients]) -> _Group:
        leaves = tuple(self._parameters[place] for place in places)
        return _Group(positions=places, parameters=leaves, captured=tuple(captured.items()))


class _Sets:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        while (parent := self._parent.get(node, node)) is not node:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def join(self, one: Node, other: Node) -> None:
        self._parent[self.find(one)] = self.find(other)


def _at_output(root: GradientEdge, grad_output: Tensor) -> dict[Node, Gradients]:
    """Return the captured gradients of a graph whose only frontier node is its output."""
    return {root.node: (None,) * root.output_nr + (grad_output,)}


def _capture(captured: dict[Node, Gradients], node: Node, gradients: Gradients) -> None:
    captured[node] = tuple(gradients)


def _clamp(gradients: Gradients, _arrived: Gradients) -> Gradients:
    return gradients


def _differentiate(group: _Group) -> Sequence[Tensor | None]:
    edges, starts = [], []
    for node, gradients in group.captured:
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                edges.append(GradientEdge(node, number))
                starts.append(gradient)
    if not edges:
        return [None] * len(group.parameters)
    with ExitStack() as hooks:
        if len(group.captured) > 1:
            for node, gradients in group.captured:
                hooks.callback(_clamp_hook(node, gradients))
        # The graph is kept: groups may run the same stretch of the path, and all of it goes when the caller drops it.
        return torch.autograd.grad(edges, group.parameters, starts, retain_graph=True, allow_unused=True)


def _clamp_hook(node: Node, gradients: Gradients) -> Callable[[], None]:
    remove: Callable[[], None] = node.register_prehook(partial(_clamp, gradients)).remove
    return remove
