"""How many nodes pipelines may have, and which numbers of nodes these can use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.errors import InfeasiblePlan
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.stages import StageTable
from holdfast.planning.templates.template import Template

__all__ = ["TemplateSet", "make_templates", "usable_nodes"]


def usable_nodes(sizes: Collection[int], nodes: int, at_least: int) -> tuple[int, ...]:
    """Returns the numbers of nodes, up to a number, that pipelines of these sizes can use whole, so many or more.

    >>> usable_nodes((3, 4), 9, 1)
    (3, 4, 6, 7, 8, 9)
    """
    reached = {0}
    for _ in range(at_least):
        reached = {before + size for before in reached for size in sizes if before + size <= nodes}
    left = sorted(reached)
    while left:
        more = {left[0] + size for size in sizes if left[0] + size <= nodes} - reached
        reached |= more
        left = sorted({*left[1:], *more})
    return tuple(sorted(reached))


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSet:
    """The templates of a job: made once, and enough for every number of nodes that it may come to.

    Attributes:
        templates: by number of nodes, ascending; at least one.
        nodes: nodes of the job.
        tolerate: f, how many failures at once leave a copy of every layer.
        microbatches: N_b, with which all templates were chosen.
    """

    templates: Mapping[int, Template]
    nodes: int
    tolerate: int
    microbatches: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of nodes that pipelines may have, ascending."""
        return tuple(self.templates)

    @property
    def minimum(self) -> int:
        """n0: the fewest nodes of a pipeline."""
        return self.sizes[0]

    @property
    def fewest_nodes(self) -> int:
        """The fewest nodes on which as many failures are tolerated: (f + 1) n0."""
        return (self.tolerate + 1) * self.minimum

    @property
    def wasteful_nodes(self) -> tuple[int, ...]:
        """The numbers of nodes, from the fewest on, of which some would be dormant; empty: the guarantee holds.

        Consecutive sizes n0 to n0 + p - 1 guarantee that if p >= 1 + ceil((n0 - 1) / (f + 1)); sizes are cut off by the
        number of layers, and may lack some that have no mapping.
        """
        usable = set(usable_nodes(self.sizes, self.nodes, self.tolerate + 1))
        return tuple(count for count in range(self.fewest_nodes, self.nodes + 1) if count not in usable)


def make_templates(
    table: StageTable, nodes: int, tolerate: int, microbatches: int, *, minimum: int | None = None
) -> TemplateSet:
    """Returns the templates for pipelines of n0 to as many nodes as there are, or layers.

    A pipeline beside f others needs no more than ``nodes - f * n0`` nodes, but merging short ones may need up to
    ``2 n0 - 1``, and after many failures one pipeline may be all there is.

    Args:
        table: what stages take.
        nodes: nodes of the job.
        tolerate: f, from 0.
        microbatches: N_b; sizes above it have no mapping.
        minimum: n0; None: the fewest nodes whose memory suffices.

    Raises:
        InfeasiblePlan: no size has a mapping, or there are not enough nodes for f + 1 pipelines of the smallest.
    """
    least = 1 if minimum is None else minimum
    templates = best_templates(table, range(least, min(nodes, table.num_layers) + 1), microbatches)
    if not templates:
        raise InfeasiblePlan(
            f"no pipeline of {least} to {nodes} nodes can run {table.num_layers} layers with {microbatches} "
            f"micro-batches{_in_memory(table)}: expected more memory, more nodes or a smaller minimum"
        )
    found = TemplateSet(templates=templates, nodes=nodes, tolerate=tolerate, microbatches=microbatches)
    if nodes < found.fewest_nodes:
        raise InfeasiblePlan(
            f"{nodes} nodes are too few to tolerate {tolerate} failure(s): a pipeline needs {found.minimum}, so "
            f"expected at least {found.fewest_nodes} nodes, or fewer failures"
        )
    return found


def _in_memory(table: StageTable) -> str:
    return "" if table.memory_bytes is None else f" and {table.memory_bytes} bytes per GPU"
