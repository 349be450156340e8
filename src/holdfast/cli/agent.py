"""``holdfast agent``: runs workers on this machine for a job that was begun on another one."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli.arguments import add_coordinator, add_preempt, preemption, reach_from, whole_number
from holdfast.cli.lines import EventLines, describe_ended
from holdfast.runtime.hardening import outlast_readers
from holdfast.runtime.join import join
from holdfast.runtime.launch.joining import JoinRequest
from holdfast.runtime.node.agent import LEFT
from holdfast.runtime.node.signals import Interrupted

__all__ = ["ENDS_WELL", "START_ELSEWHERE", "add_agent_parser", "take_part"]

_DO_NOT_START_AGAIN = 93
START_ELSEWHERE = 75
"""The exit code of who has left a job that goes on: EX_TEMPFAIL."""
ENDS_WELL = ("done", "preempted")


def add_agent_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``agent`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "agent",
        help="run workers on this machine for a job that was begun on another",
        description="Runs workers on this machine for a job that was begun on another one, until the job has ended. "
        "It may be started before the job, after it, or again when it has died; in a running job its workers take the "
        "places of lost ones. SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 has its workers leave between two steps. Exit codes: "
        "0 the job has ended well, 93 otherwise: do not start it again; 75 its workers have left a job that goes on.",
    )
    add_coordinator(parser, "--coordinator")
    parser.add_argument(
        "--slots", type=whole_number(1), default=1, metavar="N", help="how many workers may run here (default: 1)"
    )
    parser.add_argument(
        "--node",
        default="",
        metavar="NAME",
        help="name of this machine, for people (default: HOLDFAST_NODE, what Slurm, Kubernetes or SkyPilot say, or the "
        "host's name)",
    )
    parser.add_argument(
        "--host",
        default="",
        metavar="ADDR",
        help="the address of this machine that its workers listen on (default: by which it reaches the coordinator)",
    )
    add_preempt(parser)
    parser.add_argument("--quiet", action="store_true", help="tells of nothing but losses and faults")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Takes part until the job has ended; returns the exit code."""
    outlast_readers()
    find = reach_from(args)
    request = JoinRequest(where=args.coordinator, find=find, slots=args.slots, node=args.node, host=args.host)
    with preemption(args):
        return take_part(request, quiet=args.quiet)


def take_part(request: JoinRequest, *, quiet: bool) -> int:
    """Is the agent of this machine until the job has ended; returns the exit code."""
    lines = EventLines(quiet=quiet)
    try:
        ended = join(request, on_event=lines.tell)
    except Interrupted as interruption:
        print(f"holdfast: {interruption}: every process of the job on this machine is ended", file=sys.stderr)
        return 128 + interruption.signal_number
    finally:
        lines.end()
    if ended.outcome == LEFT:
        print(ended.detail)
        return START_ELSEWHERE
    print(describe_ended(ended))
    return 0 if ended.outcome in ENDS_WELL else _DO_NOT_START_AGAIN
