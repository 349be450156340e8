"""Who there is, and who of them can be talked to."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holdfast.control.messages import Hello
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process

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
        needed: those of them that cannot go yet, since nobody else holds some of their layers.
        dormant: workers that were told to compute nothing, if others can do what they would.
        expected: lost workers for which a new process is being started.
        where: of those for whom an agent has been asked, the node.
        kept: lost workers that have stopped and whose process stays until it is known whose fault it was.
        spares: workers that are there and have no place in the grid: they own nothing and are in no plan.
    """

    processes: Mapping[WorkerId, Process] = field(default_factory=dict)
    lost: frozenset[WorkerId] = _NOBODY
    arriving: frozenset[WorkerId] = _NOBODY
    entering: frozenset[WorkerId] = _NOBODY
    synced: frozenset[WorkerId] = _NOBODY
    leaving: frozenset[WorkerId] = _NOBODY
    needed: frozenset[WorkerId] = _NOBODY
    dormant: frozenset[WorkerId] = _NOBODY
    expected: frozenset[WorkerId] = _NOBODY
    where: Mapping[WorkerId, NodeId] = field(default_factory=dict)
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
            needed=self.needed - gone,
            dormant=self.dormant - gone,
            spares=self.spares - gone,
        )

    def attached(self, worker: WorkerId, process: Process, *, arriving: bool) -> Roster:
        """Returns the roster once a process has attached; ``arriving``: it has yet to enter a generation."""
        told = frozenset({worker} if self.processes.get(worker) != process else ())  # what another one was told
        return replace(
            self,
            processes={**self.processes, worker: process},
            lost=self.lost - {worker},
            leaving=self.leaving - told,
            needed=self.needed - told,
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
            self.not_awaiting(given_up),
            arriving=self.arriving & grid,
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

    def told_to_go(self, workers: Iterable[WorkerId]) -> Roster:
        """Returns the roster once workers were told to go."""
        return replace(self, leaving=self.leaving.union(workers))

    def told_to_rest(self, worker: WorkerId, dormant: bool) -> Roster:
        """Returns the roster once a worker was told to compute nothing, or to compute again."""
        return replace(self, dormant=self.dormant | {worker} if dormant else self.dormant - {worker})

    def caught_up(self, worker: WorkerId) -> Roster:
        """Returns the roster once a worker that entered holds its layers' state."""
        return replace(self, synced=self.synced | {worker})

    def awaiting(self, workers: Mapping[WorkerId, NodeId | None]) -> Roster:
        """Returns the roster once processes are being started for workers; on nodes whose agents are asked, or None."""
        asked = {worker: node for worker, node in workers.items() if node is not None}
        where = {**without(self.where, *workers), **asked}
        return replace(self, expected=self.expected.union(workers), where=where)

    def not_awaiting(self, workers: Iterable[WorkerId]) -> Roster:
        """Returns the roster once workers are there, or nobody is started for them any more."""
        gone = frozenset(workers)
        return replace(self, expected=self.expected - gone, where=without(self.where, *gone))

    @property
    def there(self) -> Set[WorkerId]:
        """Who has attached and is not lost."""
        return self.processes.keys() - self.lost

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Where somebody is, or is being started; of those for which one agent is there, one."""
        nodes = {*(self.processes[worker].node for worker in self.there | self.kept), *self.where.values()}
        return frozenset({node.nonce: node for node in sorted(nodes)}.values())

    def expected_of(self, node: NodeId) -> frozenset[WorkerId]:
        """Who is expected to be started by this node's agent, those among them whom nobody has been asked for."""
        return frozenset(
            worker for worker in self.expected if worker not in self.where or self.where[worker].shares_agent(node)
        )

    def on(self, node: NodeId) -> tuple[WorkerId, ...]:
        """Who is there, or was kept, with a process for which this node's agent is there; in order."""
        there = self.there | self.kept
        return tuple(worker for worker in sorted(there) if self.processes[worker].node.shares_agent(node))

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
        agents: nodes whose agents have said, or are to say, what they have seen and started; since when each is missed,
            or None.
        reachable_since: since when one of them or another has had one; before that it was we who had none.
        seats_from: when workers are first given to nodes: a coordinator that follows another one hears agents before.
        home: the node that the coordinator itself is on; None: it is on none of them.
        others_lead: whether another coordinator could lead, on a node that this one does not reach.
        alone_at: when it was noted last that no other node is reached; if others could lead, in what all of them see.
        patience_s: how long nodes may be away all at once, if nobody else can lead.
        told_gone: nonces of processes whose loss, or leaving, a coordinator has told of whose decisions are lost.
        leaving: nodes that were told to go, and whose agents are there.
    """

    detached: Mapping[WorkerId, float] = field(default_factory=dict)
    returned: Mapping[WorkerId, Hello] = field(default_factory=dict)
    reattach_until: float = 0.0
    agents: Mapping[NodeId, float | None] = field(default_factory=dict)
    reachable_since: float = 0.0
    seats_from: float = 0.0
    home: NodeId | None = None
    others_lead: bool = False
    alone_at: float = -math.inf
    patience_s: float = 60.0
    told_gone: frozenset[str] = frozenset()
    leaving: frozenset[NodeId] = frozenset()

    @property
    def here(self) -> tuple[NodeId, ...]:
        """The nodes whose agents can be told something, in order."""
        return tuple(sorted(node for node, away_since in self.agents.items() if away_since is None))

    def alone_since(self, away: Mapping[NodeId, float]) -> float | None:
        """Since when all nodes but the coordinator's own are away; None if some are not, or there are no others.

        Args:
            away: the nodes that are, and since when.
        """
        others = [node for node in self.agents if self.home is not None and not node.shares_agent(self.home)]
        return max(away[node] for node in others) if others and away.keys() >= set(others) else None

    def agent_of(self, process: Process | None) -> NodeId | None:
        """The node of the agent that can be told about a process; None if it cannot, or no process is known of."""
        if process is None:
            return None
        return next((node for node in self.here if node.shares_agent(process.node)), None)

    @property
    def staying(self) -> tuple[NodeId, ...]:
        """Those of them on which workers can be started, in order."""
        return tuple(node for node in self.here if node not in self.leaving)

    def with_agent(self, node: NodeId, now: float) -> Contact:
        """Returns it once an agent has a connection."""
        since = self.reachable_since if self.here else now
        others = {each: at for each, at in self.agents.items() if not each.shares_agent(node)}
        return replace(self, agents={**others, node: None}, reachable_since=since)

    def told_to_go(self, node: NodeId) -> Contact:
        """Returns it once a node was told to go."""
        return replace(self, leaving=self.leaving | {node})

    def agent_closed(self, node: NodeId, now: float) -> Contact:
        """Returns it once an agent has no connection any more."""
        return replace(self, agents={**self.agents, node: now})

    def without_agents(self, nodes: Collection[NodeId]) -> Contact:
        """Returns it once agents are held to be gone."""
        agents = {node: since for node, since in self.agents.items() if node not in nodes}
        return replace(self, agents=agents, leaving=self.leaving.difference(nodes))

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
