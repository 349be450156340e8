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
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from holdfast.planning.templates.stages import StageTable

__all__ = ["AFTER", "BEFORE", "Numbers", "Programme", "Weights", "Room"]

Numbers = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]
_Counts = npt.NDArray[np.int64]

BEFORE, AFTER = 0, 1
"""The phases: the last slowest stage is to come; it is done."""
_EXACT = 2**53
"""Whole numbers up to this one are exact in float64."""
_DIGITS = 1000
"""Decimals of so many digits hold any sum of float64 numbers exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What stages cost for some ranges of m; infinite where one may not be.

    Axes: range, GPUs less one, first layer, number of layers less one.

    Attributes:
        stay: before stage k, and after it; one axis more, the phase, comes first.
        turn: as stage k.
    """

    stay: Numbers
    turn: Numbers

    @property
    def widest(self) -> int:
        """The most layers of a stage."""
        return int(self.turn.shape[3])

    @property
    def turns(self) -> list[tuple[int, int]]:
        """For each first layer, between which numbers of layers less one there may be a stage k; alike if none may."""
        may: _Flags = np.isfinite(self.turn.min(axis=(0, 1)))
        ends: _Counts = np.where(may.max(axis=1), self.widest - may[:, ::-1].argmax(axis=1), 0)
        return list(zip(may.argmax(axis=1).tolist(), ends.tolist(), strict=True))


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
        room = Room((), nodes, self.gpus)
        wide = self.layers if self.limited else self.widest(self._enough(fewest))
        for first in reversed(range(self.layers)):
            many = min(wide, self.layers - first)
            stage = self._allowed(self.stage[:, first, :many], first, 0, 0, nodes)
            behind = left[first + 1 : first + 1 + many, :-1].reshape(many, nodes, self.gpus)
            np.minimum.reduce(np.maximum(stage, behind), axis=1, out=room.by_left)
            room.gather(left[first, 1:].reshape(nodes, self.gpus))
        return left[0, :: self.gpus]

    def _enough(self, nodes: int) -> float:
        """Returns a time that no stage need exceed: that of nodes that are one stage each, filled one after another."""
        whole = self.stage[-1]
        return float(whole[0, -1] / nodes + whole[:, 0].max())

    def weights(self, lows: Sequence[float], tops: Sequence[float]) -> Weights:
        """Returns what stages cost if m is within each of these ranges, both ends included."""
        low, top = (np.asarray(each, dtype=np.float64)[:, None, None, None] for each in (lows, tops))
        stage = self.stage[None, :, :, : self.widest(float(top.max()))]
        stay: Numbers = np.empty((2, len(tops), *stage.shape[1:]))
        stay[BEFORE] = np.where(stage <= top, stage * self.scale + 1, np.inf)
        stay[AFTER] = np.where(stage < top, (2 * stage - top) * self.scale + 1, np.inf)
        return Weights(stay=stay, turn=np.where((stage >= low) & (stage <= top), 1.0, np.inf))

    def costs(self, lows: Sequence[float], tops: Sequence[float], nodes: int) -> Numbers:
        """Returns what is left to pay if m is within each of these ranges.

        Memory counts as if there were one stage in each node: a bound, and exact for nodes of one GPU.

        Returns:
            Costs by phase, range, layers done, and GPUs to go; infinite where there is no way, or none that begins with
            all layers on all GPUs.

        Cost: some milliseconds for 100 layers, 200 GPUs and 8 ranges, if m is close to the least that is possible.
        """
        many_ranges, weights = len(tops), self.weights(lows, tops)
        turns, room = weights.turns, Room((2, many_ranges), nodes, self.gpus)
        left: Numbers = np.full((2, many_ranges, self.layers + 1, nodes * self.gpus + 1), np.inf)
        left[AFTER, :, self.layers, 0] = 0
        for first, (near, far) in reversed(list(enumerate(self.reach(max(tops), nodes)))):
            if near >= far:
                continue
            many, part = min(weights.widest, self.layers - first), slice(near * self.gpus, far * self.gpus)
            behind = left[:, :, first + 1 : first + 1 + many, part]
            behind = behind.reshape(2, many_ranges, 1, many, far - near, self.gpus)
            stay = self._allowed(weights.stay[:, :, :, first, :many], first, 0, near, far)
            fewest, most = turns[first]
            turn = self._allowed(weights.turn[:, :, first, fewest:most], first, fewest, near, far)
            here = left[:, :, first, part.start + 1 : part.stop + 1].reshape(2, many_ranges, far - near, self.gpus)
            room.relax(stay, turn, fewest, behind, here)
        return left

    def paid(self, low: float, top: float, nodes: int) -> Numbers:
        """Returns the least that was paid on the way from the beginning, if m is within a range: the reverse.

        Returns:
            Costs by phase, layers done, and GPUs to go.
        """
        weights, gpus = self.weights([low], [top]), self.gpus
        turns = weights.turns
        found: Numbers = np.full((2, self.layers + 1, nodes * gpus + 1), np.inf)
        found[BEFORE, 0, -1] = 0
        for first, (near, far) in enumerate(self.reach(top, nodes)):
            if near >= far:
                continue
            many, part = min(weights.widest, self.layers - first), slice(near * gpus, far * gpus)
            here = found[:, first, part.start + 1 : part.stop + 1].reshape(2, 1, far - near, gpus)
            behind = found[:, first + 1 : first + 1 + many, part].reshape(2, many, far - near, gpus)
            stay = self._allowed(weights.stay[:, 0, :, first, :many], first, 0, near, far)
            fewest, most = turns[first]
            turn = self._allowed(weights.turn[0, :, first, fewest:most], first, fewest, near, far)
            for one in range(gpus):
                left = behind[..., : gpus - one]
                np.minimum(left, stay[:, one] + here[..., one:], out=left)
                if fewest < most:
                    turned = left[AFTER, fewest:most]
                    np.minimum(turned, turn[one] + here[BEFORE, ..., one:], out=turned)
            found[:, first + 1 : first + 1 + many, part] = behind.reshape(2, many, -1)
        return found

    def _allowed(self, weights: Numbers, first: int, fewest: int, near: int, far: int) -> Numbers:
        """Returns weights of stages from a layer by the node in which they are; axes for nodes and GPUs are added.

        Args:
            weights: their last axes are GPUs less one, and number of layers, from some fewest on.
            first: the layer.
            fewest: the fewest layers less one.
            near: the first node, counted from the end.
            far: behind the last.
        """
        if not self.limited:
            return weights[..., None, None]
        most = self.most_held[:, first, fewest : fewest + weights.shape[-1], None]
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


class Room:
    """Memory for the costs of all stages from a layer, and the search for the least of them.

    It is seen in two ways. By what is left: axes ..., GPUs of the stage less one, node, GPUs that are left of the node
    behind it. And by what there was: axes ..., node, GPUs that were to go in it less one, GPUs of the stage less one;
    infinite where a stage has more than were to go.

    Args:
        axes: lengths of the first axes.
        nodes: the most nodes.
        gpus: of a node.
    """

    def __init__(self, axes: tuple[int, ...], nodes: int, gpus: int) -> None:
        room: Numbers = np.full((*axes, gpus, nodes, 2 * gpus - 1), np.inf)
        *others, by_stage, by_node, by_left = room.strides
        strides = (*others, by_node, by_left, by_stage - by_left)
        self.by_left: Numbers = room[..., gpus - 1 :]
        self._by_place: Numbers = np.ndarray(
            (*axes, nodes, gpus, gpus), room.dtype, room, (gpus - 1) * by_left, strides
        )

    def gather(self, here: Numbers) -> None:
        """Writes the least by what there was, of the first nodes: axes ..., node, GPUs to go in it less one."""
        np.minimum.reduce(self._by_place[..., : here.shape[-2], :, :], axis=-1, out=here)

    def relax(self, stay: Numbers, turn: Numbers, fewest: int, behind: Numbers, here: Numbers) -> None:
        """Writes what is left to pay from a layer on, by phase.

        Args:
            stay: costs of stages that leave the phase as it is: axes phase, ..., GPUs less one, layers less one, node
                or 1, and 1.
            turn: costs of stage k, likewise, without the phase.
            fewest: the number of layers less one with which ``turn`` begins.
            behind: what is left to pay behind them: axes phase, ..., 1, layers less one, node, GPUs left of it.
            here: what is written: axes phase, ..., node, GPUs to go in it less one.
        """
        found = self.by_left[..., : here.shape[-2], :]
        np.minimum.reduce(stay + behind, axis=-3, out=found)
        if many := turn.shape[-3]:
            turned = np.minimum.reduce(turn + behind[AFTER, ..., fewest : fewest + many, :, :], axis=-3)
            np.minimum(found[BEFORE], turned, out=found[BEFORE])
        self.gather(here)


def _in_units(rows: Sequence[Sequence[float]], most: int) -> list[list[int]]:
    """Returns times in whole units, a power of ten each, of which there are at most so many in a row.

    Decimals that are not longer than that stay what they are, so that what is equal for a person is equal here.
    """
    with localcontext(prec=_DIGITS):
        exact = [[Decimal(repr(float(value))) for value in row] for row in rows]
        total = max(map(sum, exact))
        if not total:
            return [[0] * len(row) for row in rows]
        exponent = math.floor(math.log10(most / Fraction(total)))
        return [[round(value.scaleb(exponent)) for value in row] for row in exact]


def _most_held(table: StageTable, first: int, gpus: int) -> Numbers:
    """Returns how many micro-batches stages from a layer can hold, by their number of layers less one."""
    if table.memory_bytes is None:
        return np.full(table.num_layers - first, np.inf)
    state, held = (np.cumsum(each[first:], dtype=np.float64) for each in (table.state_bytes, table.held_bytes))
    room = gpus * table.memory_bytes - state - np.maximum.accumulate(table.recomputed_bytes[first:])
    most = np.floor_divide(room, held, out=np.full_like(room, np.inf), where=held > 0)
    return np.where(room < 0, 0.0, most)
