"""How far a step has come on one worker: what is kept of it when it is interrupted."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.instructions import Payload
from holdfast.core.placement import LayerRange

__all__ = ["Logged", "Part", "StepProgress"]


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What lies between two operations on one micro-batch.

    Attributes:
        number: global number of the micro-batch.
        layers: over which layers.
    """

    number: int
    layers: LayerRange


@dataclass(frozen=True, slots=True, order=True)
class Logged:
    """Messages that a worker can send, or send again.

    Attributes:
        payload: activations or gradients.
        boundary: how many layers lie before it.
        numbers: global numbers of the micro-batches, ascending.
    """

    payload: Payload
    boundary: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """What a worker keeps of one step that is under way.

    Attributes:
        step: which.
        contexts: forward passes that no backward pass has gone over yet, sorted.
        halves: I's whose W is to come, sorted.
        counted: per layer, ascending, the micro-batches whose gradients are in sums here that are not complete.
        complete: the reductions whose sum over all workers is here, sorted; each by its layers.
        logged: what was handed on at boundaries between visits, sorted.
    """

    step: int
    contexts: tuple[Part, ...] = ()
    halves: tuple[Part, ...] = ()
    counted: tuple[tuple[int, tuple[int, ...]], ...] = ()
    complete: tuple[tuple[int, ...], ...] = ()
    logged: tuple[Logged, ...] = ()
