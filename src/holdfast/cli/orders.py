"""``holdfast drain`` and ``holdfast stop``: a node, or the whole job, is told to end in good order."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from holdfast.cli.arguments import add_coordinator, reach_from
from holdfast.cli.lines import describe_ended
from holdfast.cli.status import PATIENCE_S, read_status
from holdfast.control.client import ask, watch
from holdfast.control.coordinator import ORDER
from holdfast.control.membership import Phase
from holdfast.control.messages import Ended
from holdfast.control.orders import Answer, Drain, Order, Stop
from holdfast.control.reach import Reach
from holdfast.control.status import JobStatus
from holdfast.errors import ConfigError, CoordinatorUnavailable
from holdfast.parsing import parsing
from holdfast.plain import one_line

__all__ = ["add_drain_parser", "add_stop_parser"]

_AGAIN_S = 0.5
_GONE_S = 2.0
"""How long a node is not there before it has left: who leads anew hears of it in less."""
_STAYS_S = 5.0
"""How long a node without workers is there before its process is one that stays."""


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
    parser.set_defaults(run=drain)


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
    return _carry_out(Drain(node=args.node), args, _Drained(args.node).told)


def stop(args: argparse.Namespace) -> int:
    """Returns 0 once the job has ended; 1 if that is not seen."""
    return _carry_out(Stop(at_once=args.at_once), args, _ended)


def _carry_out(order: Order, args: argparse.Namespace, done: Callable[[JobStatus], str]) -> int:
    """Tells whoever leads, and whoever leads next, until ``done`` says so of how the job is."""
    find = reach_from(args)
    answered_at: float | None = None
    while True:
        try:
            reach = find()
            if isinstance(reach, Ended):
                print(describe_ended(reach))
                return 0
            answer = _told(order, reach, args.coordinator)
            if answered_at is None:
                if answer.refused:
                    raise ConfigError(f"{args.coordinator}: {answer.text}")
                print(f"the job is told: {answer.text}", flush=True)
                if args.no_wait:
                    return 0
            for each in watch(reach):
                answered_at = time.monotonic()
                if text := done(read_status(each, args.coordinator)):
                    print(text)
                    return 0
        except CoordinatorUnavailable as error:
            if answered_at is None:
                raise ConfigError(f"{error}; expected where a job listens (`holdfast train --listen`)") from None
            if time.monotonic() > answered_at + PATIENCE_S:
                print(f"holdfast: {error}: the job has ended, or its coordinators are gone", file=sys.stderr)
                return 1
        time.sleep(_AGAIN_S)


def _told(order: Order, reach: Reach, where: str) -> Answer:
    said = ask(ORDER, reach, msgspec.msgpack.encode(order))
    with parsing(lambda text: ConfigError(f"{where}: what it says cannot be read: {text}")):
        answer = msgspec.json.decode(said, type=Answer)
    return msgspec.structs.replace(answer, text=one_line(answer.text))


def _ended(status: JobStatus) -> str:
    if status.phase != Phase.ENDED:
        return ""
    return "the job has ended" + (f"; the checkpoint is of step {status.checkpoint}" if status.checkpoint else "")


@dataclass(slots=True)
class _Drained:
    """Whether a node has left, as the job is again and again."""

    name: str
    _workers: tuple[str, ...] = ()
    _seen_at: float = field(default_factory=lambda: time.monotonic())
    """When it was there last, or when this was begun."""
    _busy_at: float = field(default_factory=lambda: time.monotonic())
    """When it had workers last."""

    def told(self, status: JobStatus) -> str:
        """Returns what is to be said once it has left; "" while it has not."""
        now = time.monotonic()
        if status.phase == Phase.ENDED:
            return _ended(status)
        nodes = [node for node in status.nodes if node.name == self.name]
        workers = tuple(worker for node in nodes for worker in node.workers)
        self._seen_at = now if nodes else self._seen_at
        self._busy_at = now if workers else self._busy_at
        if now >= self._seen_at + _GONE_S:
            return f"node {self.name} has left"
        if nodes and now >= self._busy_at + _STAYS_S:
            return f"node {self.name} has no workers any more; its process stays until the job has ended"
        if workers and workers != self._workers:
            needed = [worker for worker in workers if worker in status.needed]
            why = f"; nobody else holds all layers of {', '.join(needed)}" if needed else ""
            print(f"node {self.name} has yet to be left by {', '.join(workers)}{why}", flush=True)
            self._workers = workers
        return ""
