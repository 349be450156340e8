"""What a coordinator says to people of the job that it leads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from holdfast.control.membership import Membership, Output, Tell
from holdfast.control.messages import Message, StepDone, Told
from holdfast.core.ids import WorkerId
from holdfast.core.seating import survives
from holdfast.telemetry.events import Detected

__all__ = ["FailureStatus", "JobStatus", "Lately", "NodeStatus", "status_of"]

_FAILURES = 5
_WINDOW_S = 60.0
_STEPS = 1000


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node.

    Attributes:
        name: of it, for people.
        nonce: what tells it from all others, one of the same name among them.
        workers: those that it has, in order.
        room: how many more could be started there.
        away_s: seconds since its agent's connection ended; None: it stands.
        leads: whether the coordinator that leads is there.
        leaving: whether it was told to go.
    """

    name: str
    workers: tuple[str, ...]
    room: int
    away_s: float | None
    leads: bool
    leaving: bool = False
    nonce: str = ""


class FailureStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that were lost at once; ``ago_s``: seconds since that was told."""

    workers: tuple[str, ...]
    how: str
    ago_s: float


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as whoever leads it knows it.

    Attributes:
        job: its name.
        phase: ``gathering`` before its beginning, ``running``, or what else :class:`Phase` has.
        generation: of the membership.
        step: steps that are done, counted from the beginning of the run.
        steps: that it has.
        steps_per_s: over the last minute; None if that cannot be told.
        alive: the workers that hold their layers' state.
        workers: of the whole grid.
        checkpoint: the step of the newest one; None: there is none.
        workers_to_lose: how many workers may be lost at once, whichever they are, and every layer still has an owner;
            None while some has none.
        nodes_to_lose: how many nodes.
        nodes: in the order of their names.
        ended: how it has ended, and why; empty before.
        needed: who was told to leave and is the only one to hold some layer.
        failures: the last losses that this coordinator has seen, the newest first.
    """

    job: str
    phase: str
    generation: int
    step: int
    steps: int
    steps_per_s: float | None
    alive: tuple[str, ...]
    workers: int
    checkpoint: int | None
    workers_to_lose: int | None
    nodes_to_lose: int | None
    nodes: tuple[NodeStatus, ...]
    failures: tuple[FailureStatus, ...]
    ended: str = ""
    needed: tuple[str, ...] = ()


@dataclass(slots=True)
class Lately:
    """What the membership does not keep, as only people ask for it: how fast steps were, and who was lost."""

    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _failures: deque[tuple[float, tuple[Detected, ...]]] = field(default_factory=lambda: deque(maxlen=_FAILURES))

    def heard(self, messages: Iterable[Message], now: float) -> None:
        """Notes the steps that are done."""
        for each in messages:
            if isinstance(each, StepDone) and (not self._steps or each.step > self._steps[-1][1]):
                self._steps.append((now, each.step))

    def told(self, outputs: Iterable[Output], now: float) -> None:
        """Notes who is told to be lost."""
        told = [each.command.news for each in outputs if isinstance(each, Tell) and isinstance(each.command, Told)]
        if lost := tuple(news for news in told if isinstance(news, Detected)):
            self._failures.append((now, lost))

    def steps_per_s(self, now: float) -> float | None:
        """Returns how many steps were made in a second of the last minute; None if that cannot be told."""
        made = [(at, step) for at, step in self._steps if at > now - _WINDOW_S]
        return (made[-1][1] - made[0][1]) / (now - made[0][0]) if len(made) > 1 else None

    def failures(self, now: float) -> tuple[FailureStatus, ...]:
        """Returns who was lost, the newest first."""
        return tuple(
            FailureStatus(workers=tuple(each.worker for each in of_it), how=how, ago_s=now - at)
            for at, lost in reversed(self._failures)
            for how, of_it in groupby(lost, lambda each: each.how)
        )


def status_of(job: str, state: Membership, lately: Lately, now: float) -> JobStatus:
    """Returns what is to be said of a job.

    Args:
        job: its name.
        state: what is known of it.
        lately: what was noted.
        now: in seconds for which this process has run, as ``lately`` was told.
    """
    where = {worker: process.node for worker, process in state.roster.processes.items()}
    placement = state.grid.baseline.placement.without(state.absent)
    held = all(placement.owners_by_layer) and all(worker in where for worker in state.full)
    return JobStatus(
        job=job,
        phase=state.phase,
        generation=state.generation,
        step=state.last_step + 1,
        steps=state.num_steps,
        steps_per_s=lately.steps_per_s(now),
        alive=_names(state.full if state.generation else state.roster.there),
        workers=len(state.grid.baseline.workers),
        checkpoint=state.checkpoints.newest or None,
        workers_to_lose=state.fewest_owners - 1 if held else None,
        nodes_to_lose=survives(placement, where) if held else None,
        nodes=tuple(_nodes(state, now)),
        failures=lately.failures(now),
        ended="" if state.ended is None else ", ".join(filter(None, (state.ended.outcome, state.ended.detail))),
        needed=_names(state.roster.needed),
    )


def _nodes(state: Membership, now: float) -> Iterable[NodeStatus]:
    home, offers = state.contact.home, state.vacancies.offers
    for node, away_since in sorted(state.contact.agents.items()):
        yield NodeStatus(
            name=node.name,
            workers=_names(state.roster.on(node)),
            room=sum(offer.node.shares_agent(node) for offer in offers),
            away_s=None if away_since is None else max(0.0, now - away_since),
            leads=home is not None and node.shares_agent(home),
            leaving=node in state.contact.leaving,
            nonce=node.nonce,
        )


def _names(workers: Iterable[WorkerId]) -> tuple[str, ...]:
    return tuple(map(str, sorted(workers)))
