"""Arguments that several commands share."""

from __future__ import annotations

import argparse

__all__ = ["add_overrides"]


def add_overrides(parser: argparse.ArgumentParser, example: str) -> None:
    """Adds ``--set KEY=VALUE``, which may be repeated; ``example`` is for its help."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"override a key of the job file, such as {example}; may be repeated",
    )
