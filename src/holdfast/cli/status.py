"""``holdfast status``: how a running job is, as the coordinator that leads it says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import msgspec

from holdfast.cli.arguments import add_coordinator, hours
from holdfast.cli.leader import talk_with_leader
from holdfast.cli.lines import describe_ended
from holdfast.control.client import ask, watch
from holdfast.control.coordinator import STATUS
from holdfast.control.membership import Phase
from holdfast.control.messages import Ended
from holdfast.control.reach import Reach
from holdfast.control.status import JobStatus, NodeStatus
from holdfast.errors import ConfigError
from holdfast.parsing import parsing
from holdfast.telemetry.shown import shown

__all__ = ["add_status_parser", "read_status", "tell_status"]

_CLEAR = "\x1b[H\x1b[2J"


def add_status_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``status`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "status",
        help="how a running job on several machines is",
        description="Says how a job is that agents of other machines may take part in (`holdfast train --listen`): its "
        "nodes and workers, how far it is, what may be lost now, and who was lost last. `holdfast inspect` tells more, "
        "where its run directory is at hand.",
    )
    add_coordinator(parser)
    parser.add_argument("--watch", action="store_true", help="again every second, until the job has ended")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="text: for people (default); json: a line each time"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints it once and returns 0; with ``--watch`` 0 at the end of the job, 1 if that is not seen."""

    def talk(reach: Reach) -> Iterator[int | None]:
        for answer in watch(reach) if args.watch else (ask(STATUS, reach),):
            status = read_status(answer, args.coordinator)
            _show(status, args)
            yield 0 if not args.watch or status.phase == Phase.ENDED else None

    return talk_with_leader(args, talk, ended=partial(_show_ended, as_json=args.format == "json"))


def _show_ended(ended: Ended, *, as_json: bool) -> int:
    known = {"phase": Phase.ENDED, "ended": ended.outcome, "detail": ended.detail}
    print(msgspec.json.encode(known).decode() if as_json else describe_ended(ended))
    return 0


def read_status(answer: bytes, where: str) -> JobStatus:
    """Returns what whoever leads says of the job, fit to be shown.

    Raises:
        ConfigError: it is nothing of that kind; ``where``: who says it.
    """
    with parsing(lambda text: ConfigError(f"{where}: what it says cannot be read: {text}")):
        return shown(msgspec.json.decode(answer, type=JobStatus))


def _show(status: JobStatus, args: argparse.Namespace) -> None:
    if args.format == "json":
        print(msgspec.json.encode(status).decode(), flush=True)
    else:
        print((_CLEAR if args.watch and sys.stdout.isatty() else "") + tell_status(status), flush=True)


def tell_status(status: JobStatus) -> str:
    """Returns a job for people: lines on all of it, a table of its nodes, and who was lost last."""
    rate = f", {status.steps_per_s:.2f} steps/s over the last minute" if status.steps_per_s else ""
    left = f", {hours(round((status.steps - status.step) / status.steps_per_s))} left" if status.steps_per_s else ""
    saved = "no checkpoint" if status.checkpoint is None else f"the newest checkpoint is of step {status.checkpoint}"
    lines = [
        f"job {status.job}: {status.phase}, {status.step} of {status.steps} steps done{rate}{left}",
        f"{len(status.alive)} of {status.workers} workers, generation {status.generation}; {saved}",
        _to_lose(status),
        *_table(status.nodes),
        *(f"{', '.join(each.workers)} lost {hours(round(each.ago_s))} ago: {each.how}" for each in status.failures),
    ]
    return "\n".join(lines)


def _to_lose(status: JobStatus) -> str:
    """What may be lost now without anything being lost with it."""
    workers, nodes = status.workers_to_lose, status.nodes_to_lose
    if workers is None or nodes is None:
        return "nothing more may be lost now: not every layer has an owner that is there"
    if not workers:
        return "some layer has one owner alone: with that, what was done since the last checkpoint may be lost"
    any_nodes = f"any {nodes} node(s)" if nodes else "no node for certain"
    return f"may be lost at once: any {workers} worker(s), {any_nodes}"


def _table(nodes: tuple[NodeStatus, ...]) -> list[str]:
    rows = [("node", "workers", "room", "")]
    for node in nodes:
        away = "" if node.away_s is None else f"away for {node.away_s:.1f} s"
        state = [text for text in ("leads" if node.leads else away, "leaving" if node.leaving else "") if text]
        rows.append((node.name, " ".join(node.workers) or "-", str(node.room), ", ".join(state)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
