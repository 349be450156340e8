"""Who there is, and who of them can be talked to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holdfast.control.messages import Hello
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process

__all__ = ["Contact", "Roster", "without"]

_V = TypeVar("_V")
_NOBODY: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who there is. All of it is stored.

    Attributes:
        processes: that of each worker that attached, the last one if there were several.
        lost: workers that are gone, of the grid or not.
        arriving: workers that attached to the running job and are in no generation yet.
        entering: members of this generation without state.
        synced: members of this generation that followed layers, those of ``entering`` or others, and have caught up.
        leaving: workers that were told to go; one without state goes when it has caught up.
        dormant: workers that were told to compute nothing, if others can do what they would.
        expected: lost workers for which a new process is being started.
        kept: lost workers that have stopped and whose process stays until it is known whose fault it was.
        spares: workers that are there and have no place in the grid: they own nothing and are in no plan.
    """

    processes: Mapping[WorkerId, Process] = field(default_factory=dict)
    lost: frozenset[WorkerId] = _NOBODY
    arriving: frozenset[WorkerId] = _NOBODY
    entering: frozenset[WorkerId] = _NOBODY
    synced: frozenset[WorkerId] = _NOBODY
    leaving: frozenset[WorkerId] = _NOBODY
    dormant: frozenset[WorkerId] = _NOBODY
    expected: frozenset[WorkerId] = _NOBODY
    kept: frozenset[WorkerId] = _NOBODY
    spares: frozenset[WorkerId] = _NOBODY

    def may_be(self, worker: WorkerId | None, process: Process | None) -> bool:
        """Whether this is the newest process of a worker that we know of, or we know of none, as of the agent's."""
        return worker is None or self.processes.get(worker, process) == process

    def departed(self, gone: frozenset[WorkerId]) -> Roster:
        """Returns the roster once ``gone`` are lost."""
        return replace(
            self,
            lost=self.lost | gone,
            arriving=self.arriving - gone,
            entering=self.entering - gone,
            synced=self.synced - gone,
            leaving=self.leaving - gone,
            dormant=self.dormant - gone,
            spares=self.spares - gone,
        )

    def attached(self, worker: WorkerId, process: Process, *, arriving: bool) -> Roster:
        """Returns the roster once a process has attached; ``arriving``: it has yet to enter a generation."""
        return replace(
            self,
            processes={**self.processes, worker: process},
            lost=self.lost - {worker},
            arriving=self.arriving | {worker} if arriving else self.arriving,
        )

    def seated(self, spares: Iterable[WorkerId], *, arriving: bool) -> Roster:
        """Returns the roster once spares have places; ``arriving``: they have yet to enter a generation."""
        taken = frozenset(spares)
        arrived = self.arriving | taken if arriving else self.arriving
        return replace(self, spares=self.spares - taken, arriving=arrived)

    def to_enter_again(self) -> Roster:
        """Returns the roster once a generation is given up: whoever has no state by now has to enter again."""
        return replace(
            self,
            arriving=self.arriving | (self.entering - self.synced - self.lost),
            entering=_NOBODY,
            synced=_NOBODY,
        )

    def gone_over(self, entering: frozenset[WorkerId]) -> Roster:
        """Returns the roster behind a boundary at which ``entering`` enter, or have yet to catch up."""
        return replace(self, arriving=self.arriving - entering, entering=entering, synced=self.synced & entering)

    def confined(self, places: Iterable[WorkerId], before: Iterable[WorkerId]) -> Roster:
        """Returns the roster once the grid has these places alone, and no longer those ``before``.

        Whoever has come for another one is a spare. Who is being started for none of them is expected all the same, or
        its name would be given to somebody else, too.
        """
        grid = frozenset(places)
        given_up = frozenset(before) - grid
        return replace(
            self,
            arriving=self.arriving & grid,
            expected=self.expected - given_up,
            spares=self.spares | (self.arriving - grid),
        )

    def let_in(self, workers: Iterable[WorkerId]) -> Roster:
        """Returns the roster once workers that have come are members: they are given their state as all are."""
        return replace(self, arriving=self.arriving.difference(workers))

    def mustered(self, workers: Iterable[WorkerId]) -> Roster:
        """Returns the roster once those of these workers that have come are members without state."""
        come = self.arriving.intersection(workers)
        return replace(self, arriving=self.arriving - come, entering=self.entering | come)

    def provided(self) -> Roster:
        """Returns the roster once every member holds state."""
        return replace(self, entering=_NOBODY, synced=_NOBODY)

    def told_to_go(self, worker: WorkerId) -> Roster:
        """Returns the roster once a worker was told to go."""
        return replace(self, leaving=self.leaving | {worker})

    def told_to_rest(self, worker: WorkerId, dormant: bool) -> Roster:
        """Returns the roster once a worker was told to compute nothing, or to compute again."""
        return replace(self, dormant=self.dormant | {worker} if dormant else self.dormant - {worker})

    def caught_up(self, worker: WorkerId) -> Roster:
        """Returns the roster once a worker that entered holds its layers' state."""
        return replace(self, synced=self.synced | {worker})

    def awaiting(self, workers: Iterable[WorkerId]) -> Roster:
        """Returns the roster once processes are being started for workers."""
        return replace(self, expected=self.expected.union(workers))

    def not_awaiting(self, workers: Iterable[WorkerId]) -> Roster:
        """Returns the roster once workers are there, or nobody is started for them any more."""
        return replace(self, expected=self.expected.difference(workers))

    def released(self, stopped: Iterable[WorkerId]) -> Roster:
        """Returns the roster once the processes of workers that have stopped need not stay any more."""
        return replace(self, kept=self.kept.difference(stopped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Who can be talked to. None of it is stored: a coordinator that is started again finds it out anew.

    Attributes:
        detached: workers that are not lost and whose process has no connection, and since when.
        returned: workers that are back at a coordinator that was started again, and what they said.
        reattach_until: when those that are not back are given up.
        agent_away: whether the agent has to say first what it has seen and started.
        told_gone: nonces of processes whose loss, or leaving, a coordinator has told of whose decisions are lost.
    """

    detached: Mapping[WorkerId, float] = field(default_factory=dict)
    returned: Mapping[WorkerId, Hello] = field(default_factory=dict)
    reattach_until: float = 0.0
    agent_away: bool = False
    told_gone: frozenset[str] = frozenset()

    def departed(self, gone: Iterable[WorkerId]) -> Contact:
        """Returns it once ``gone`` are lost: nobody listens to them any more."""
        absent = frozenset(gone)
        return replace(self, detached=without(self.detached, *absent), returned=without(self.returned, *absent))

    def closed(self, worker: WorkerId, now: float) -> Contact:
        """Returns it once the connection of a worker is gone."""
        return replace(self, detached={**self.detached, worker: now}, returned=without(self.returned, worker))

    def connected(self, worker: WorkerId) -> Contact:
        """Returns it once a process of a worker is there, or is not listened for any more."""
        return replace(self, detached=without(self.detached, worker))

    def back(self, worker: WorkerId, hello: Hello) -> Contact:
        """Returns it once a worker is back at a coordinator that was started again."""
        return replace(self, returned={**self.returned, worker: hello})


def without(values: Mapping[WorkerId, _V], *workers: WorkerId) -> Mapping[WorkerId, _V]:
    """Returns ``values`` without those of ``workers``."""
    return {worker: value for worker, value in values.items() if worker not in workers}
