"""``holdfast reproduce``: tables and figures of the four papers, computed here, each number beside the printed one.

Without a name it lists what there is. All of it takes some minutes, most of them SlipStream's, whose tables are whole
jobs in virtual time. Numbers are the same each time, but for those that are seconds of planning.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.cli.arguments import whole_number
from holdfast.cli.simulating import processes_of
from holdfast.errors import ConfigError
from holdfast.reproduce.found import Found, Item
from holdfast.reproduce.registry import ITEMS, wanted
from holdfast.reproduce.telling import section, to_json, to_markdown, to_page

__all__ = ["add_reproduce_parser"]


def add_reproduce_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``reproduce`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "reproduce", help="the papers' tables and figures, beside what they print", description=__doc__
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="such as swift/table5, a paper such as swift, or all; default: list them",
    )
    parser.add_argument("--out", metavar="DIR", help="write reproduction.md, reproduction.html and pictures there")
    parser.add_argument("--format", choices=("markdown", "json"), default="markdown", help="of what is printed")
    parser.add_argument(
        "--jobs", type=whole_number(1), metavar="N", help="computations at once; default: one for each processor"
    )
    parser.add_argument("--quiet", action="store_true", help="not a line for each")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints, or writes, what was asked for, and returns the exit code 0.

    Raises:
        ConfigError: there is nothing of a name, or nothing can be written there.
    """
    if not args.names:
        for item in ITEMS.values():
            print(f"{item.name:20}  {item.title}")
        return 0
    items, processes = wanted(args.names), processes_of(args)
    out = None if args.out is None else _made(Path(args.out))
    found: dict[Item, Found] = {}
    for item in items:
        began = time.monotonic()
        found[item] = item.find(processes)
        if not args.quiet:
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{len(found)} of {len(items)}: {item.name}, {took}", file=sys.stderr, flush=True)
    if out is not None:
        _write(out, found)
        print(f"written to {out}: reproduction.md, reproduction.html and pictures")
    elif args.format == "json":
        sys.stdout.write(to_json(found))
    else:
        print("\n\n".join(section(item, each) for item, each in found.items()))
    return 0


def _made(out: Path) -> Path:
    """The folder, before anything is computed for it."""
    try:
        (out / "pictures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}") from None
    return out


def _write(out: Path, found: Mapping[Item, Found]) -> None:
    texts = {"reproduction.md": to_markdown(found), "reproduction.html": to_page(found)}
    texts |= {f"pictures/{name}.svg": svg for each in found.values() for name, svg in each.pictures.items()}
    try:
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
