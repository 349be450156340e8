"""Snapshots of a worker's own layers in its own memory, for strategies that go back to one after a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["KEPT", "Snapshots"]

KEPT = 2
"""Snapshots that a worker holds: a failure may strike when some have taken the newest one and others have not."""


class _Stage(Protocol):
    """What snapshots need of a compute engine; see :class:`holdfast.protocol.worker.Engine`."""

    def layer_steps(self) -> dict[int, int]: ...

    def snapshot(self, layer: int) -> Callable[[], bytes]: ...

    def restore(self, layer: int, data: bytes) -> None: ...

    def take_back(self, to_step: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class Snapshots:
    """The newest snapshots of one worker; nothing of them is written anywhere.

    Attributes:
        every: a snapshot after so many steps; 0 for none.
    """

    every: int = 0
    _taken: dict[int, dict[int, Callable[[], bytes]]] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which a snapshot is held, ascending."""
        return tuple(sorted(self._taken))

    def due(self, step: int, *, beginning: bool) -> bool:
        """Whether to take one before ``step``; ``beginning``: all begin to run steps there, so all have it then."""
        return self.every > 0 and step not in self._taken and (beginning or step % self.every == 0)

    def take(self, step: int, stage: _Stage) -> None:
        """Copies the state of all own layers, which are at ``step``; training waits.

        Cost: one more copy of weights, buffers and optimizer state, of which ``KEPT`` are held.
        """
        while len(self._taken) >= KEPT:
            del self._taken[min(self._taken)]
        self._taken[step] = {layer: stage.snapshot(layer) for layer in stage.layer_steps()}

    def go_back(self, step: int, stage: _Stage) -> None:
        """Brings all own layers back to ``step``: from the snapshot of it, or without one by at most one step.

        Later snapshots are dropped, since their steps are run again.

        Raises:
            InternalError: there is no snapshot of this step and a layer is further ahead than one step.

        After failure: safe to repeat.
        """
        self._taken = {at: layers for at, layers in self._taken.items() if at <= step}
        if step not in self._taken:
            stage.take_back(step)
        for layer, encode in self._taken.get(step, {}).items():
            stage.restore(layer, encode())

    def forget(self) -> None:
        """Drops all: our layers, or their history, are others from now on."""
        self._taken.clear()
