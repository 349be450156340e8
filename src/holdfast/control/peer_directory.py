"""Telling workers of each other: where the others listen, and the key that each pair of processes shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.control.messages import Hello, Here, Meet, Peer
from holdfast.control.token import pair_key
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process

__all__ = ["PeerDirectory"]


@dataclass(slots=True)
class PeerDirectory:
    """What a coordinator knows of where workers listen, and whom it has told. Learned anew from every hello.

    Attributes:
        token: of the job; keys are made of it.
    """

    token: str
    _here: dict[tuple[WorkerId, Process], Here] = field(default_factory=dict)
    """By worker, too: whoever says that it is somebody else's process is not met in its place."""
    _told: dict[WorkerId, dict[WorkerId, bytes]] = field(default_factory=dict)
    _all_told: dict[WorkerId, Mapping[WorkerId, Process]] = field(default_factory=dict)
    """The processes of which a worker was told all that was known since somebody attached last."""
    _found: tuple[Mapping[WorkerId, Process], dict[WorkerId, Here]] | None = None
    """Where those listen that were asked for last: everybody is told of the same ones."""

    def heard(self, hello: Hello) -> None:
        """A worker attaches, for the first time or again: it may have lost what it was told."""
        if hello.worker is None:
            return
        self._told.pop(hello.worker, None)
        self._all_told.clear()
        self._found = None
        if hello.here is not None:
            self._here[hello.worker, hello.process] = hello.here

    def news_for(self, worker: WorkerId, processes: Mapping[WorkerId, Process]) -> Meet | None:
        """Returns what a worker has yet to be told of the others; None if there is nothing.

        Args:
            worker: who is to be told.
            processes: those that count.

        Cost: microseconds where nobody has come since it was asked last, as when somebody was lost and all wait.
        """
        if processes.items() <= self._all_told.get(worker, {}).items():
            return None
        self._all_told[worker] = processes
        here = self._of(processes)
        ours = here.get(worker)
        told = self._told.setdefault(worker, {})
        new = {each: at for each, at in here.items() if each != worker and told.get(each) != at.nonce}
        if ours is None or not new:
            return None
        told.update({each: listens.nonce for each, listens in new.items()})
        return Meet(
            peers=tuple(
                Peer(worker=each, here=listens, key=pair_key(self.token, (worker, ours.nonce), (each, listens.nonce)))
                for each, listens in new.items()
            )
        )

    def _of(self, processes: Mapping[WorkerId, Process]) -> dict[WorkerId, Here]:
        """Where these listen, as far as they have told, in order."""
        if self._found is None or self._found[0] is not processes:
            there = sorted((each, process) for each, process in processes.items() if (each, process) in self._here)
            self._found = (processes, {each: self._here[each, process] for each, process in there})
        return self._found[1]
