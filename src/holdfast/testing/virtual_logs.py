"""Logs of what crosses nodes, in a simulated job: each process has one of its own, which is lost with it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.core.instructions import Payload
from holdfast.core.program import Wanted
from holdfast.errors import LogGap, ReplicaDiverged
from holdfast.protocol.effects import Consult
from holdfast.protocol.executor import Keep
from holdfast.testing.world import World, copied

if TYPE_CHECKING:
    from holdfast.testing.virtual_worker import VirtualWorker

__all__ = ["VirtualLogs", "VirtualStream"]


@dataclass(slots=True)
class VirtualStream:
    """What one process has logged, by step; and which steps are complete."""

    entries: dict[int, dict[Wanted, Any]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)

    def keep(self, step: int, key: Wanted, value: Any) -> None:
        """Takes an entry; a step is gone on with until its end is told again."""
        self.complete.discard(step)
        self.entries.setdefault(step, {})[key] = value

    def drop(self, step: int) -> None:
        """Forgets a step."""
        self.complete.discard(step)
        self.entries.pop(step, None)

    def collect(self, before: int) -> None:
        """Forgets the steps before one."""
        for step in [each for each in self.entries if each < before]:
            self.drop(step)


class VirtualLogs:
    """See :class:`holdfast.runtime.driver.Logs`.

    Args:
        process: whose.
        world: that it is in.
    """

    def __init__(self, process: VirtualWorker, world: World) -> None:
        self._process, self._world = process, world
        self._main = VirtualStream()
        self._apart: VirtualStream | None = None
        self._consult: Consult | None = None
        self._expected: dict[Wanted, Any] = {}
        world.logged[process.process] = [self._main]

    def keep(self, keep: Keep) -> None:
        """See Logs.keep."""
        key = (keep.payload, keep.boundary, keep.number)
        known = self._expected.get(key)
        if self._apart is not None and known is not None and bytes(known) != bytes(keep.value):
            raise ReplicaDiverged(f"{key} of step {keep.step} is not what was logged")
        value = keep.value if isinstance(keep.value, bytes) else copied(keep.value)
        (self._apart or self._main).keep(keep.step, key, value)

    def kept(self, step: int, why: str = "") -> None:
        """See Logs.kept."""
        stream = self._apart or self._main
        if why or self._world.loses_log(self._process.worker, step):
            stream.drop(step)
        else:
            stream.complete.add(step)
            stream.entries.setdefault(step, {})
        if self._consult is not None and step == self._consult.stop - 1:
            self.leave()

    def idle(self) -> AbstractContextManager[None]:
        """See Logs.idle."""
        return nullcontext()

    def flush(self, limit_s: float) -> bool:
        """See Logs.flush."""
        return True

    def collect(self, before: int) -> None:
        """See Logs.collect."""
        for stream in self._world.logged[self._process.process]:
            stream.collect(before)

    def consult(self, consult: Consult) -> None:
        """See Logs.consult."""
        self._consult, self._apart = consult, VirtualStream()
        self._world.logged[self._process.process].append(self._apart)

    def consulted(self, step: int, limit_s: float) -> Mapping[Wanted, Any] | None:
        """See Logs.consulted."""
        assert self._consult is not None, "what is read was asked for"
        found: dict[Wanted, Any] = {}
        for key in sorted(self._consult.wanted):
            value = self._find(step, key)
            if value is None:
                raise LogGap(f"nobody who lives has logged {key} of step {step}")
            found[key] = value
        vote = self._find(step + 1, (Payload.VOTE, 0, 0))
        if vote is not None and step + 1 < self._consult.stop:
            found[Payload.VOTE, 0, 0] = vote
        numbers = {number for payload, _, number in self._consult.wanted if payload is not Payload.SUM}
        ends = [(payload, boundary, number) for payload, boundary in self._consult.ends for number in numbers]
        self._expected = {key: value for key in ends if (value := self._find(step, key)) is not None}
        return found

    def _find(self, step: int, key: Wanted) -> Any:
        """Of any process that lives; they may differ in nothing."""
        processes = (worker for worker in self._world.running.values() if worker.alive)
        for stream in (each for worker in processes for each in self._world.logged.get(worker.process, ())):
            if step in stream.complete and key in stream.entries.get(step, {}):
                return stream.entries[step][key]
        return None

    def leave(self) -> None:
        """See Logs.leave."""
        self._consult, self._apart, self._expected = None, None, {}
