"""The programme that finds mappings: what the stages that are left cost at least, for several slowest stages at once.

Let m be the time of the slowest stage of a mapping, and k the last stage that takes it. The cost of the mapping is

    N_b m + max(0, sum of w_j over j < k, plus sum of 2 w_j - m over j > k)

so once m is given it is a sum over stages, in two phases: up to stage k, stages of at most m; after it, stages of less.
That is a shortest path over (layers done, GPUs to go, phase), and no number of stages is fixed. A range of m is bounded
from below in the same way: stages of at most its greatest m, and any stage whose time is in the range as stage k.

GPUs are counted from the end, and nodes are filled in order, so a stage that begins with h GPUs to go has the rest of
its node, ``h mod M`` or all M of them, to choose from; one table serves every smaller number of nodes.

All times are whole numbers here, so sums do not depend on their order, and ties are ties. Costs are such numbers times
:attr:`Programme.scale`, plus one for every stage: of equal costs the one with the fewest stages is the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from holdfast.planning.templates.stages import StageTable

__all__ = ["AFTER", "BEFORE", "Numbers", "Programme", "Weights", "spread"]

Numbers = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]

BEFORE, AFTER = 0, 1
"""The phases: the last slowest stage is to come; it is done."""
_EXACT = 2**53
"""Whole numbers up to this one are exact in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What stages cost for some ranges of m: before stage k, as stage k, and after it; infinite where one may not be.

    Axes: range, GPUs less one, first layer, number of layers less one.
    """

    before: Numbers
    turn: Numbers
    after: Numbers


class Programme:
    """All that mappings to any number of nodes have in common.

    Attributes:
        gpus: GPUs per node.
        layers: layers of the model.
        microbatches: N_b.
        stage: the time of a stage in whole units, infinite where it cannot be; axes as of :class:`Weights`, but for the
            first.
        most_held: how many micro-batches a stage can hold; axes as of ``stage``.
        limited: whether memory is limited at all.
        candidates: every time that a stage can take, ascending.
        scale: what a unit of time is in costs.
    """

    def __init__(self, table: StageTable, microbatches: int) -> None:
        self.gpus, self.layers, self.microbatches = table.gpus_per_node, table.num_layers, microbatches
        self.limited = table.memory_bytes is not None
        self.scale = 2 ** self.layers.bit_length()
        self.stage, self.most_held = (np.full((self.gpus, self.layers, self.layers), np.inf) for _ in range(2))
        rows = _in_units(table.layer_s, _EXACT // (4 * (self.layers + microbatches) * self.scale))
        for first in range(self.layers):
            for gpus, row in enumerate(rows):
                self.stage[gpus, first, : self.layers - first] = np.cumsum(np.array(row[first:], dtype=np.float64))
                self.most_held[gpus, first, : self.layers - first] = _most_held(table, first, gpus + 1)
        self.stage[self.most_held < 1] = np.inf
        self.candidates: Numbers = np.unique(self.stage[np.isfinite(self.stage)])
        self._quickest: Numbers = self.stage.min(axis=0)

    def widest(self, top: float) -> int:
        """Returns the most layers that a stage of at most this time has."""
        return int((self._quickest <= top).sum(axis=1).max())

    def least_slowest(self, fewest: int, nodes: int) -> Numbers:
        """Returns the least time of the slowest stage on 0, 1, ... nodes; infinite where there is no mapping at all.

        Memory counts as in :meth:`costs`.

        Args:
            fewest: on fewer nodes it is not asked for.
            nodes: the most nodes.
        """
        left: Numbers = np.full((self.layers + 1, nodes * self.gpus + 1), np.inf)
        left[self.layers, 0] = 0
        wide = self.layers if self.limited else self.widest(self._enough(fewest))
        for first in reversed(range(self.layers)):
            many = min(wide, self.layers - first)
            stage = self._allowed(self.stage[:, first, :many], first, 0, nodes)
            behind = left[first + 1 : first + 1 + many, :-1].reshape(many, nodes, self.gpus)
            spread(np.maximum(stage, behind).min(axis=1), left[first, 1:].reshape(nodes, self.gpus))
        return left[0, :: self.gpus]

    def _enough(self, nodes: int) -> float:
        """Returns a time that no stage need exceed: that of nodes that are one stage each, filled one after another."""
        whole = self.stage[-1]
        return float(whole[0, -1] / nodes + whole[:, 0].max())

    def weights(self, lows: Sequence[float], tops: Sequence[float]) -> Weights:
        """Returns what stages cost if m is within each of these ranges, both ends included."""
        low, top = (np.asarray(each, dtype=np.float64)[:, None, None, None] for each in (lows, tops))
        stage = self.stage[None, :, :, : self.widest(float(top.max()))]
        return Weights(
            before=np.where(stage <= top, stage * self.scale + 1, np.inf),
            turn=np.where((stage >= low) & (stage <= top), 1.0, np.inf),
            after=np.where(stage < top, (2 * stage - top) * self.scale + 1, np.inf),
        )

    def costs(self, lows: Sequence[float], tops: Sequence[float], nodes: int) -> Numbers:
        """Returns what is left to pay if m is within each of these ranges.

        Memory counts as if there were one stage in each node: a bound, and exact for nodes of one GPU.

        Returns:
            Costs by phase, range, layers done, and GPUs to go; infinite where there is no way, or none that begins with
            all layers on all GPUs.

        Cost: some milliseconds for 100 layers, 200 GPUs and 8 ranges, if m is close to the least that is possible.
        """
        many_ranges, weights = len(tops), self.weights(lows, tops)
        left: Numbers = np.full((2, many_ranges, self.layers + 1, nodes * self.gpus + 1), np.inf)
        left[AFTER, :, self.layers, 0] = 0
        for first, (near, far) in reversed(list(enumerate(self.reach(max(tops), nodes)))):
            if near >= far:
                continue
            many = min(weights.before.shape[3], self.layers - first)
            before, turn, after = (
                self._allowed(each[:, :, first, :many], first, near, far)
                for each in (weights.before, weights.turn, weights.after)
            )
            part = slice(near * self.gpus, far * self.gpus)
            shape = (2, many_ranges, 1, many, far - near, self.gpus)
            waiting, turned = left[:, :, first + 1 : first + 1 + many, part].reshape(shape)
            here = left[:, :, first, part.start + 1 : part.stop + 1].reshape(2, many_ranges, far - near, self.gpus)
            spread(np.minimum((before + waiting).min(axis=2), (turn + turned).min(axis=2)), here[BEFORE])
            spread((after + turned).min(axis=2), here[AFTER])
        return left

    def paid(self, low: float, top: float, nodes: int) -> Numbers:
        """Returns the least that was paid on the way from the beginning, if m is within a range: the reverse.

        Returns:
            Costs by phase, layers done, and GPUs to go.
        """
        weights, gpus = self.weights([low], [top]), self.gpus
        found: Numbers = np.full((2, self.layers + 1, nodes * gpus + 1), np.inf)
        found[BEFORE, 0, -1] = 0
        for first, (near, far) in enumerate(self.reach(top, nodes)):
            if near >= far:
                continue
            many, part = min(weights.before.shape[3], self.layers - first), slice(near * gpus, far * gpus)
            here = found[:, first, part.start + 1 : part.stop + 1].reshape(2, 1, far - near, gpus)
            behind = found[:, first + 1 : first + 1 + many, part].reshape(2, many, far - near, gpus)
            before, turn, after = (
                self._allowed(each[0, :, first, :many], first, near, far)
                for each in (weights.before, weights.turn, weights.after)
            )
            for one in range(gpus):
                waiting, turned = here[..., one:]
                left = behind[..., : gpus - one]
                np.minimum(left[BEFORE], before[one] + waiting, out=left[BEFORE])
                np.minimum(left[AFTER], np.minimum(turn[one] + waiting, after[one] + turned), out=left[AFTER])
            found[:, first + 1 : first + 1 + many, part] = behind.reshape(2, many, -1)
        return found

    def _allowed(self, weights: Numbers, first: int, near: int, far: int) -> Numbers:
        """Returns weights of stages from a layer by the node in which they are; axes for nodes and GPUs are added."""
        if not self.limited:
            return weights[..., None, None]
        most = self.most_held[:, first, : weights.shape[-1], None]
        held = np.arange(near + 1, far + 1)
        return np.where(most >= np.minimum(held, self.microbatches), weights[..., None], np.inf)[..., None]

    def reach(self, top: float, nodes: int) -> list[tuple[int, int]]:
        """Returns, for each layer, in which nodes, counted from the end, a stage of at most this time can begin there.

        With more GPUs to go there would be too few for the layers before it, with fewer too few for those from it on;
        and every node takes at least one layer.
        """
        wide = self.widest(top)
        fewest = np.where(self.stage[:, :, :wide] <= top, np.arange(1.0, self.gpus + 1)[:, None, None], np.inf).min(
            axis=0
        )
        done, to_go = np.full(self.layers + 1, np.inf), np.full(self.layers + 1, np.inf)
        done[0] = to_go[self.layers] = 0
        for first in range(self.layers):
            behind = done[first + 1 : first + 1 + wide]
            np.minimum(behind, done[first] + fewest[first, : len(behind)], out=behind)
        for first in reversed(range(self.layers)):
            behind = to_go[first + 1 : first + 1 + wide]
            to_go[first] = (fewest[first, : len(behind)] + behind).min()
        found = []
        for first in range(self.layers):
            fewest_nodes = max(np.ceil(to_go[first] / self.gpus), nodes - first)
            most_nodes = min(np.ceil((nodes * self.gpus - done[first]) / self.gpus), self.layers - first)
            found.append((int(fewest_nodes) - 1, int(most_nodes)) if fewest_nodes <= most_nodes else (0, 0))
        return found


def spread(best: Numbers, here: Numbers) -> None:
    """Lowers ``here``, by node and GPUs to go in it, to the best stages of 1, 2, ... GPUs, by node and GPUs behind.

    Args:
        best: axes ..., GPUs of the stage less one, node, GPUs that are left of the node behind the stage.
        here: axes ..., node, GPUs to go in it less one.
    """
    gpus = here.shape[-1]
    for less_one in range(gpus):
        part = here[..., less_one:]
        np.minimum(part, best[..., less_one, :, : gpus - less_one], out=part)


def _in_units(rows: Sequence[Sequence[float]], most: int) -> list[list[int]]:
    """Returns times in whole units, a power of ten each, of which there are at most so many in a row.

    Decimals that are not longer than that stay what they are, so that what is equal for a person is equal here.
    """
    exact = [[Fraction(repr(float(value))) for value in row] for row in rows]
    total = max(sum(row) for row in exact)
    if not total:
        return [[0] * len(row) for row in rows]
    exponent = math.floor(math.log10(most / total))
    unit = Fraction(10) ** exponent
    return [[round(value * unit) for value in row] for row in exact]


def _most_held(table: StageTable, first: int, gpus: int) -> Numbers:
    """Returns how many micro-batches stages from a layer can hold, by their number of layers less one."""
    if table.memory_bytes is None:
        return np.full(table.num_layers - first, np.inf)
    state, held = (np.cumsum(each[first:], dtype=np.float64) for each in (table.state_bytes, table.held_bytes))
    room = gpus * table.memory_bytes - state - np.maximum.accumulate(table.recomputed_bytes[first:])
    most = np.floor_divide(room, held, out=np.full_like(room, np.inf), where=held > 0)
    return np.where(room < 0, 0.0, most)
