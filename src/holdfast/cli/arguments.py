"""Arguments, and ways to say things, that several commands share."""

from __future__ import annotations

import argparse

__all__ = ["add_overrides", "hours"]


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


def hours(seconds: int) -> str:
    """Returns seconds as hours, minutes and seconds.

    >>> hours(45249), hours(62)
    ('12:34:09', '0:01:02')
    """
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
