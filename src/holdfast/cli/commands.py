"""The commands of ``holdfast``, and how each may end.

Exit codes: 0 done, 1 our bug, 2 the user's input, 3 no plan is possible any more (last committed step saved), 4 a
scheduled fault never fired, 75 the workers of this machine have left a job that goes on, 93 (of an agent) the job has
not ended well, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1, 140 SIGUSR2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from holdfast.cli.advise import add_advise_parser
from holdfast.cli.agent import add_agent_parser
from holdfast.cli.board import add_board_parser
from holdfast.cli.certs import add_certs_parser
from holdfast.cli.export import add_export_parser
from holdfast.cli.groups import add_groups_parser
from holdfast.cli.init import add_init_parser
from holdfast.cli.inspect import add_inspect_parser
from holdfast.cli.launch import add_launch_parser
from holdfast.cli.metrics import add_metrics_parser
from holdfast.cli.orders import add_drain_parser, add_stop_parser
from holdfast.cli.plan import add_plan_parser
from holdfast.cli.profile import add_profile_parser
from holdfast.cli.reproduce import add_reproduce_parser
from holdfast.cli.run import add_run_parser
from holdfast.cli.simulate import add_simulate_parser
from holdfast.cli.status import add_status_parser
from holdfast.cli.study import add_study_parser
from holdfast.cli.templates import add_templates_parser
from holdfast.cli.track import add_track_parser
from holdfast.cli.train import add_coordinator_parser, add_train_parser
from holdfast.errors import ConfigError, DecisionsLost, HoldfastError, InfeasiblePlan, StateUnavailable, TooFewWorkers
from holdfast.plain import one_line, plain
from holdfast.version import __version__

__all__ = ["make_parser", "run_command"]


class _Parser(argparse.ArgumentParser):
    """One line for a wrong flag, instead of the whole usage."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"{self.prog}: {one_line(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    about = "Trains PyTorch models and keeps training while workers die."
    parser: argparse.ArgumentParser = _Parser(prog="holdfast", description=about)
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    add_init_parser(commands)
    add_train_parser(commands)
    add_run_parser(commands)
    add_coordinator_parser(commands)
    add_agent_parser(commands)
    add_launch_parser(commands)
    add_plan_parser(commands)
    add_templates_parser(commands)
    add_groups_parser(commands)
    add_profile_parser(commands)
    add_inspect_parser(commands)
    add_status_parser(commands)
    add_board_parser(commands)
    add_track_parser(commands)
    add_metrics_parser(commands)
    add_drain_parser(commands)
    add_stop_parser(commands)
    add_export_parser(commands)
    add_simulate_parser(commands)
    add_advise_parser(commands)
    add_study_parser(commands)
    add_reproduce_parser(commands)
    add_certs_parser(commands)
    return parser


def run_command(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; ``argv``: None takes the process's own arguments."""
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except HoldfastError as error:
        for text in (str(error), *getattr(error, "__notes__", ())):
            print(f"holdfast: {plain(text)}", file=sys.stderr)
        return _exit_code(error, args.command)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _exit_code(error: HoldfastError, command: str) -> int:
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, StateUnavailable | TooFewWorkers | InfeasiblePlan | DecisionsLost):
        return 3 if command in ("train", "run", "coordinator") else 2
    return 1
