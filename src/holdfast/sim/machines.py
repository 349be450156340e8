"""Which workers run on which machines, and who waits for room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.core.ids import WorkerId

__all__ = ["Machines"]


@dataclass(slots=True)
class Machines:
    """The machines that are there.

    Attributes:
        room: for how many workers each has.
        hosted: the workers of each.
        wanted: workers that are to be started, once there is room.
        slow: how many times as long some machines take to compute.
    """

    room: int
    hosted: dict[int, set[WorkerId]] = field(default_factory=dict)
    wanted: deque[WorkerId] = field(default_factory=deque)
    slow: dict[int, float] = field(default_factory=dict)

    @property
    def places(self) -> int:
        """For how many workers there is room in all."""
        return self.room * len(self.hosted)

    @property
    def vacant(self) -> int:
        """For how many more there is."""
        return self.places - sum(map(len, self.hosted.values()))

    def slow_down(self, machine: int, factor: float) -> None:
        """A machine takes so many times as long from now on; 1: it is as fast as others."""
        self.slow.pop(machine, None)
        if factor != 1.0:
            self.slow[machine] = factor

    @property
    def slowed(self) -> dict[WorkerId, float]:
        """How many times as long some workers take."""
        return {worker: by for machine, by in self.slow.items() for worker in self.hosted.get(machine, ())}

    def host(self, worker: WorkerId) -> int | None:
        """Give a worker room; return the machine, or None if it has to wait."""
        machine = next((machine for machine, workers in self.hosted.items() if len(workers) < self.room), None)
        if machine is None:
            self.wanted.append(worker)
        else:
            self.hosted[machine].add(worker)
        return machine

    def host_all(self, workers: Iterable[WorkerId]) -> None:
        """Give these workers room, in order, and nobody else."""
        self.clear()
        for worker in workers:
            self.host(worker)

    def leave(self, worker: WorkerId) -> None:
        """Take a worker from its machine."""
        for workers in self.hosted.values():
            workers.discard(worker)

    def clear(self) -> None:
        """Take all workers from their machines."""
        self.wanted.clear()
        for workers in self.hosted.values():
            workers.clear()
