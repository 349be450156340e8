"""The coordinators of a job: where they listen, and which nodes' agents are to start one that stands by."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from holdfast.control.messages import CoordinatorsAt, Hello, StandingBy
from holdfast.core.nodes import Process

__all__ = ["Standbys"]


@dataclass(slots=True)
class Standbys:
    """What a coordinator that leads knows of all coordinators, itself included. Learned anew from every hello.

    Attributes:
        wanted: how many there are to be; all on nodes of their own, but those with which the job was begun.
        leaving: agents whose nodes are to go, and the coordinators there with them: others are started before.
    """

    wanted: int
    leaving: frozenset[Process] = frozenset()
    _at: dict[Process, tuple[str, ...]] = field(default_factory=dict)
    """The coordinators of each agent that is here."""
    _asked: set[Process] = field(default_factory=set)
    """Agents that were asked to start one, and have yet to answer."""
    _failed: set[Process] = field(default_factory=set)
    """Agents that cannot start one, or keep it alive."""
    _told: CoordinatorsAt = field(default_factory=lambda: CoordinatorsAt(addresses=()))

    @property
    def at(self) -> CoordinatorsAt:
        """Where they are, as all are told."""
        return self._told

    def heard(self, message: Hello | StandingBy) -> None:
        """An agent attaches, or has done what it was asked for."""
        agent = message.process
        self._asked.discard(agent)
        if isinstance(message, Hello):
            self._at[agent] = message.coordinators
        elif message.address:
            self._at[agent] = (message.address,)
        else:
            self._at[agent] = ()
            self._failed.add(agent)

    def only(self, agents: Collection[Process]) -> None:
        """Forgets the agents that are not among these."""
        self._at = {agent: at for agent, at in self._at.items() if agent in agents}
        self._asked &= self._at.keys()

    def to_ask(self, agents: Collection[Process]) -> tuple[Process, ...]:
        """Returns which of these agents, who can be told something, are to start one each; they count as asked."""
        if self.wanted == 1:  # that is us
            return ()
        unfit = self._asked | self._failed | self.leaving
        idle = [agent for agent in agents if not self._at.get(agent) and agent not in unfit]
        there = sum(len(at) for agent, at in self._at.items() if agent not in self.leaving)
        missing = self.wanted - there - len(self._asked - self.leaving)
        asked = tuple(idle[: max(0, missing)])
        self._asked.update(asked)
        return asked

    def news(self) -> CoordinatorsAt | None:
        """Returns what all are to be told, if that is not what they were told last."""
        found = CoordinatorsAt(addresses=self._of(self._at), leaving=self._of(self._at.keys() & self.leaving))
        if self.wanted == 1 or found == self._told:
            return None
        self._told = found
        return found

    def _of(self, agents: Iterable[Process]) -> tuple[str, ...]:
        return tuple(sorted({each for agent in agents for each in self._at[agent]}))
