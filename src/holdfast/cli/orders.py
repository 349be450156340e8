"""``holdfast drain`` and ``holdfast stop``: a node, or the whole job, is told to end in good order."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from holdfast.cli.agent import ENDS_WELL
from holdfast.cli.arguments import add_coordinator
from holdfast.cli.leader import talk_with_leader
from holdfast.cli.lines import describe_ended
from holdfast.cli.status import read_status
from holdfast.control.client import ask, watch
from holdfast.control.coordinator import ORDER
from holdfast.control.membership import Phase
from holdfast.control.messages import Ended
from holdfast.control.orders import Answer, Drain, Order, Stop
from holdfast.control.reach import Reach
from holdfast.control.status import JobStatus
from holdfast.errors import ConfigError
from holdfast.parsing import parsing
from holdfast.plain import one_line

__all__ = ["add_drain_parser", "add_stop_parser"]

_GONE_S = 2.0
"""How long a node is not there before it has left: who leads anew hears of it in less."""
_STAYS_S = 15.0
"""How long a node without workers is there before its process is one that stays."""
_HEEDED_S = 3.0
"""How long it may take until a node is leaving that was told to."""


def add_drain_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``drain`` command; its ``run`` default is :func:`drain`."""
    parser = commands.add_parser(
        "drain",
        help="have the workers of a node leave a running job",
        description="Has the workers of a node leave between two steps, as SIGTERM to its agent does, and waits until "
        "they have: nothing is lost, and nothing run again. Whoever is the only one to hold a layer stays until others "
        "have it. The agent then ends with exit code 75; one that is started there again takes part again.",
    )
    add_coordinator(parser)
    parser.add_argument("node", metavar="NODE", help="its name, as `holdfast status` has it")
    _add_no_wait(parser)
    parser.set_defaults(run=drain, at_once=False)


def add_stop_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``stop`` command; its ``run`` default is :func:`stop`."""
    parser = commands.add_parser(
        "stop",
        help="have a running job make a checkpoint, and end",
        description="Has a job make a checkpoint and end on all its machines, as SIGTERM to `holdfast train` does, and "
        "waits until it has. `holdfast train --resume auto` goes on from there.",
    )
    add_coordinator(parser)
    parser.add_argument("--at-once", action="store_true", help="without another checkpoint")
    _add_no_wait(parser)
    parser.set_defaults(run=stop)


def _add_no_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="return as soon as it is told")


def drain(args: argparse.Namespace) -> int:
    """Returns 0 once the node has left, or the job has ended; 1 if that is not seen."""
    return _carry_out(_Draining(args.node), args)


def stop(args: argparse.Namespace) -> int:
    """Returns 0 once the job has ended as it was to; 1 if it has ended otherwise, or that is not seen."""
    return _carry_out(_Stopping(args.at_once), args)


class _Task(Protocol):
    """What people want, until it is done."""

    @property
    def order(self) -> Order:
        """What whoever leads is told."""

    def told(self, answer: Answer) -> None:
        """It has said that to it."""

    def heeded(self, status: JobStatus) -> bool:
        """Whether whoever leads goes by it, or is still to; else it is told again."""

    def done(self, status: JobStatus) -> str:
        """Returns what is to be said once it is done; "" while it is not."""


def _carry_out(task: _Task, args: argparse.Namespace) -> int:
    """Tells whoever leads, and whoever leads next, and waits until it is done."""
    given = False

    def talk(reach: Reach) -> Iterator[int | None]:
        nonlocal given
        answer = _answered(task.order, reach, args.coordinator)
        task.told(answer)
        if not given:
            if answer.refused:
                raise ConfigError(f"{args.coordinator}: {answer.text}")
            given = True
            print(f"the job is told: {answer.text}", flush=True)
            yield 0 if args.no_wait else None
        for each in watch(reach):
            status = read_status(each, args.coordinator)
            if status.phase == Phase.ENDED:
                yield _tell_end(status, at_once=args.at_once)
            if text := task.done(status):
                print(text)
                yield 0
            yield None
            if not task.heeded(status):
                return

    def tell_ended(ended: Ended) -> int:
        print(describe_ended(ended))
        return 0 if ended.outcome in ENDS_WELL else 1

    return talk_with_leader(args, talk, ended=tell_ended)


def _answered(order: Order, reach: Reach, where: str) -> Answer:
    said = ask(ORDER, reach, msgspec.msgpack.encode(order))
    with parsing(lambda text: ConfigError(f"{where}: what it says cannot be read: {text}")):
        answer = msgspec.json.decode(said, type=Answer)
    return msgspec.structs.replace(answer, text=one_line(answer.text))


def _tell_end(status: JobStatus, *, at_once: bool) -> int:
    saved = f"the newest checkpoint is of step {status.checkpoint}" if status.checkpoint else "there is no checkpoint"
    print(f"the job has ended: {status.ended}; {saved}")
    return 0 if status.ended in ENDS_WELL or (at_once and status.ended.startswith("preempted")) else 1


@dataclass(slots=True)
class _Stopping:
    """A job ends."""

    at_once: bool

    @property
    def order(self) -> Order:
        """See :class:`_Task`."""
        return Stop(at_once=self.at_once)

    def told(self, answer: Answer) -> None:
        """See :class:`_Task`."""

    def heeded(self, status: JobStatus) -> bool:
        """See :class:`_Task`."""
        return True

    def done(self, status: JobStatus) -> str:
        """See :class:`_Task`; the end of a job is told of whatever was wanted."""
        return ""


@dataclass(slots=True)
class _Draining:
    """A node leaves, and not whatever of that name comes after it."""

    name: str
    _nonces: frozenset[str] = frozenset()
    _known: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Which of its workers have been told to be there, and to be needed."""
    _told_at: float = 0.0
    _seen_at: float = 0.0
    """When it was there last, or was told."""
    _busy_at: float = 0.0
    """When it had workers last, or was told."""

    @property
    def order(self) -> Order:
        """See :class:`_Task`."""
        return Drain(node=self.name, only=tuple(sorted(self._nonces)))

    def told(self, answer: Answer) -> None:
        """See :class:`_Task`."""
        now = self._told_at = time.monotonic()
        if not self._nonces:
            self._nonces = frozenset(answer.nodes)
            self._seen_at = self._busy_at = now

    def heeded(self, status: JobStatus) -> bool:
        """See :class:`_Task`."""
        away = [node for node in status.nodes if node.nonce in self._nonces and not node.leaving]
        return not away or time.monotonic() < self._told_at + _HEEDED_S

    def done(self, status: JobStatus) -> str:
        """See :class:`_Task`."""
        now = time.monotonic()
        nodes = [node for node in status.nodes if node.nonce in self._nonces]
        workers = tuple(worker for node in nodes for worker in node.workers)
        needed = tuple(worker for worker in workers if worker in status.needed)
        self._seen_at = now if nodes else self._seen_at
        self._busy_at = now if workers else self._busy_at
        if now >= self._seen_at + _GONE_S:
            return f"node {self.name} has left"
        if now >= self._busy_at + _STAYS_S:
            return (
                f"node {self.name} has no workers any more, and its process is still there: where the job was begun, "
                "and no coordinator stands by elsewhere, it stays until the job has ended"
            )
        if workers and (workers, needed) != self._known:
            why = f"; nobody else holds all layers of {', '.join(needed)}" if needed else ""
            print(f"node {self.name} has yet to be left by {', '.join(workers)}{why}", flush=True)
            self._known = (workers, needed)
        return ""
