"""The programme again, with the stages to go counted: exact where these decide what a stage has to hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.planning.templates.programme import AFTER, Numbers, Programme, Room, Weights

__all__ = ["counted_costs"]


def counted_costs(
    programme: Programme, low: float, top: float, nodes: int, most_stages: int, budget: float
) -> Iterator[Numbers]:
    """Yields what is left to pay with 0, 1, ... stages to go, if m is within a range.

    A stage with t stages to go, itself included, holds ``min(N_b, t)`` micro-batches.

    Args:
        programme: the programme.
        low: the least m of the range.
        top: its greatest.
        nodes: nodes of the pipeline.
        most_stages: the most stages to count.
        budget: ways that cost more, by all that is known without counting, are left out.

    Yields:
        Costs by phase, layers done, and GPUs to go; no more once there is no way left.

    Cost: as :meth:`Programme.costs` for one range, times the stages, but for what the budget leaves out.
    """
    layers, gpus = programme.layers, programme.gpus
    weights, reach, paid = programme.weights([low], [top]), programme.reach(top, nodes), programme.paid(low, top, nodes)
    turns, room = weights.turns, Room((2,), nodes, gpus)
    left: Numbers = np.full((2, layers + 1, nodes * gpus + 1), np.inf)
    left[AFTER, layers, 0] = 0
    yield left
    for stages in range(1, most_stages + 1):
        fitting = _fitting(programme, weights, stages)
        alive = np.isfinite(left.min(axis=0))
        rows = np.flatnonzero(alive.max(axis=1))
        if not len(rows):
            return
        fewest, most = alive.argmax(axis=1), alive.shape[1] - 1 - alive[:, ::-1].argmax(axis=1)
        behind, left = left, np.full_like(left, np.inf)
        wide = fitting.widest
        for first in range(max(0, int(rows[0]) - wide), int(rows[-1])):
            to = rows[rows.searchsorted(first, side="right") : rows.searchsorted(first + wide, side="right")]
            near, far = reach[first]
            if not len(to) or near >= far:
                continue
            near, far = max(near, int(fewest[to].min()) // gpus), min(far, int(most[to].max()) // gpus + 1)
            if near >= far:
                continue
            many, part = int(to[-1]) - first, slice(near * gpus, far * gpus)
            reached = behind[:, first + 1 : first + 1 + many, part].reshape(2, 1, many, far - near, gpus)
            stay = fitting.stay[:, 0, :, first, :many, None, None]
            short, long = turns[first]
            turn = fitting.turn[0, :, first, short : min(long, many), None, None]
            here = left[:, first, part.start + 1 : part.stop + 1].reshape(2, far - near, gpus)
            room.relax(stay, turn, short, reached, here)
        left[left + paid > budget] = np.inf
        yield left


def _fitting(programme: Programme, weights: Weights, stages: int) -> Weights:
    """Returns the weights of the stages that can be with so many stages to go."""
    held = min(programme.microbatches, stages)
    fits = programme.most_held[None, :, :, : weights.widest] >= held
    return Weights(stay=np.where(fits, weights.stay, np.inf), turn=np.where(fits, weights.turn, np.inf))
