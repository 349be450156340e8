"""``holdfast groups``: machines that are recovered together, so that what is logged between them fits a limit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial

from holdfast.cli.arguments import above_0, from_0, whole_number
from holdfast.cli.groups_shown import FORMATS, ShownGroups
from holdfast.errors import ConfigError
from holdfast.planning.groups.chain import MOST_MACHINES, Grouping, MachineChain
from holdfast.planning.groups.merging import authors_groups, greedy_groups
from holdfast.planning.groups.programme import best_groups

__all__ = ["add_groups_parser", "run"]


def add_groups_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``groups`` command; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser(
        "groups", help="machines that are recovered together, within a limit of logs", description=__doc__
    )
    parser.add_argument(
        "--compute",
        type=_numbers("seconds of each machine"),
        required=True,
        metavar="r0,r1,...",
        help="seconds that each machine of the pipeline computes in a step",
    )
    parser.add_argument(
        "--boundary-bytes",
        type=_numbers("bytes, or those of each boundary"),
        required=True,
        metavar="b|b0,b1,...",
        help="bytes between two machines in a step, both directions: one number for all boundaries, or one for each",
    )
    parser.add_argument(
        "--limit", type=from_0("bytes"), required=True, metavar="M", help="bytes that all logs together may take"
    )
    parser.add_argument(
        "--bandwidth",
        type=above_0("bytes per second, such as 1.5e9"),
        required=True,
        metavar="B",
        help="bytes per second between two machines",
    )
    parser.add_argument(
        "--interval",
        type=whole_number(1),
        required=True,
        metavar="T",
        help="steps from one checkpoint to the next: logs of so many are kept",
    )
    parser.add_argument(
        "--algorithm",
        choices=["exact", "greedy", "authors"],
        default="exact",
        help="the best groups (exact, the default), SWIFT's greedy merge (greedy), or the merge rule of its published "
        "code (authors), whose list of boundaries has an entry for the last machine, too",
    )
    parser.add_argument(
        "--parallel",
        action="store_true",
        help="a group is recovered by as many copies of it as all machines have room for",
    )
    parser.add_argument("--format", choices=sorted(FORMATS), default="table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints groups and what they come to, and returns the exit code 0.

    Raises:
        ConfigError: counts do not fit, or a number is too large; the message names the flag and what would be right.
    """
    boundaries = _boundaries(args)
    between = len(args.compute) - 1
    chain = MachineChain(
        compute_s=args.compute,
        boundary_bytes=boundaries[:between],
        bandwidth=args.bandwidth,
        interval=args.interval,
        limit_bytes=args.limit,
        parallel=args.parallel,
    )
    algorithms = _algorithms(args.algorithm, boundaries[-1])
    shown = ShownGroups(chain=chain, grouping=algorithms[args.algorithm](chain), algorithms=algorithms)
    sys.stdout.write(FORMATS[args.format](shown))
    return 0


def _algorithms(first: str, behind_bytes: float) -> Mapping[str, Callable[[MachineChain], Grouping]]:
    """Returns what makes groups, by name, the one that was asked for first."""
    known: dict[str, Callable[[MachineChain], Grouping]] = {
        "exact": best_groups,
        "greedy": greedy_groups,
        "authors": partial(authors_groups, behind_bytes=behind_bytes),
    }
    return {first: known[first], **known}


def _boundaries(args: argparse.Namespace) -> tuple[float, ...]:
    """Returns the boundaries; of the authors' rule with the entry of the last machine, which may be left out.

    What is left out there is as large as the last boundary.
    """
    machines: int = len(args.compute)
    if machines > MOST_MACHINES:
        raise ConfigError(f"--compute has {machines} machines: expected at most {MOST_MACHINES}")
    given: tuple[float, ...] = args.boundary_bytes
    if len(given) == 1:
        return given * machines
    allowed = {machines - 1} | ({machines} if args.algorithm == "authors" else set())
    if len(given) not in allowed:
        wanted = " or ".join(map(str, sorted(allowed - {0})))
        wanted = f"1 number{f' or {wanted}' if wanted and wanted != '1' else ''}"
        raise ConfigError(f"--boundary-bytes has {len(given)} numbers for {machines} machine(s): expected {wanted}")
    return given if len(given) == machines else (*given, given[-1])


def _numbers(what: str) -> Callable[[str], tuple[float, ...]]:
    """Returns the type of an argument that is some numbers, 0 or more, joined by commas."""
    number = from_0(what)

    def parse(text: str) -> tuple[float, ...]:
        return tuple(map(number, text.split(",")))

    return parse
