"""Arguments, their types, and ways to say things, that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path

from holdfast.config.job import Tls
from holdfast.control.messages import Ended
from holdfast.control.reach import Reach
from holdfast.control.token import is_token
from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError
from holdfast.runtime.launch.reaching import reach_in
from holdfast.runtime.node.spot import CLOUDS, find, watched

__all__ = [
    "above_0",
    "add_coordinator",
    "add_overrides",
    "add_preempt",
    "check_address",
    "from_0",
    "grid_shape",
    "hours",
    "preemption",
    "reach_from",
    "token_from",
    "whole_number",
    "worker_names",
]

_LAST_PORT = 65_535


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


def check_address(what: str, address: str) -> None:
    """Checks that this is ``HOST:PORT``, a name or an IPv4 address.

    Raises:
        ConfigError: it is not; ``what`` says where it was given.
    """
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host, re.ASCII) or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        raise ConfigError(f"{what}: expected HOST:PORT, a name or an IPv4 address, such as 10.0.0.5:7000")
    if int(port) > _LAST_PORT:
        raise ConfigError(f"{what}: the last port is {_LAST_PORT}")


def add_coordinator(parser: argparse.ArgumentParser, flag: str = "coordinator") -> None:
    """Adds the arguments that say how the coordinators of a job are reached; see :func:`reach_from`.

    Args:
        parser: of the command.
        flag: what says where they are; without dashes it stands by itself.
    """
    where = parser.add_argument(
        flag,
        metavar="HOST:PORT|RUN_DIR",
        help="where the job listens (`holdfast train --listen`), several joined by commas; or its run directory, in "
        "which that is said",
    )
    where.required = True
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the job's token (-: it is piped in; default: HOLDFAST_TOKEN, else that in the run directory)",
    )
    parser.add_argument(
        "--certs",
        metavar="DIR",
        help="what `holdfast certs` has made, if the job has certificates (control.tls; default: those that the job "
        "in the run directory names)",
    )


def reach_from(args: argparse.Namespace) -> Callable[[], Reach | Ended]:
    """Returns what finds out how the coordinators of a job are reached, or how the job has ended: again and again.

    What it raises, see :func:`holdfast.runtime.launch.reaching.reach_in`.

    Raises:
        ConfigError: something of it is wrong, or there is no token.
    """
    where, token, tls = args.coordinator, token_from(args.token_file), None
    if args.certs is not None:
        ca, cert, key = (str(Path(args.certs).absolute() / f"{name}.pem") for name in ("ca", "cert", "key"))
        tls = Tls(ca=ca, cert=cert, key=key)
    if "/" in where or Path(where).is_dir():
        return partial(reach_in, Path(where).absolute(), token=token, tls=tls)
    if ":" not in where:
        raise ConfigError(
            f"coordinator {where}: expected HOST:PORT, or a run directory (./{where} if it is yet to be made)"
        )
    for address in where.split(","):
        check_address(f"coordinator {where}", address)
    if not token:
        raise ConfigError("--token-file: expected a file with the job's token, or HOLDFAST_TOKEN in the environment")
    return partial(Reach, addresses=where, token=token, tls=tls)


def add_preempt(parser: argparse.ArgumentParser) -> None:
    """Adds ``--preempt``; see :func:`preemption`."""
    parser.add_argument(
        "--preempt",
        metavar="|".join((*CLOUDS, "auto")),
        help="asks the metadata service of this cloud every 2 s whether this machine is to be taken away (a spot or "
        "preemptible one), and does then what SIGTERM does; auto: whichever answers; CLOUD=URL: it is elsewhere",
    )


def preemption(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Returns that within which this process is told if its machine is to be taken away, if that was asked for.

    Raises:
        ConfigError: it cannot be found out.
    """
    cloud = find(args.preempt) if args.preempt else None
    return watched(cloud, tell=lambda text: print(f"holdfast: {text}", file=sys.stderr, flush=True))


def token_from(path: str | None, environ: MutableMapping[str, str] = os.environ) -> str:
    """Returns the token of a job: out of a file (``-``: of what is piped in), else of ``HOLDFAST_TOKEN``; or "".

    It is on no command line, which everybody on a machine can read, nor in the environment of what is started from now
    on.

    Raises:
        ConfigError: the file cannot be read, or what is in it is no token.
    """
    given = environ.pop("HOLDFAST_TOKEN", "")
    where = "HOLDFAST_TOKEN" if path is None else f"--token-file {path}"
    try:
        text = given if path is None else _text_of(path)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    token = text.strip()
    if (token or path is not None) and not is_token(token):
        raise ConfigError(f"{where}: holds no token; expected 16 to 200 letters, digits, '-' or '_'")
    return token


def _text_of(path: str) -> str:
    return sys.stdin.read() if path == "-" else Path(path).read_text()


def hours(seconds: int) -> str:
    """Returns seconds as hours, minutes and seconds.

    >>> hours(45249), hours(62)
    ('12:34:09', '0:01:02')
    """
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def whole_number(least: int) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number from ``least`` on."""

    def parse(text: str) -> int:
        if re.fullmatch(r"\d{1,9}", text, re.ASCII) is None or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is impossible: expected a whole number from {least}")
        return int(text)

    return parse


def above_0(what: str) -> Callable[[str], float]:
    """Returns the type of an argument that is a number above 0; ``what`` says of what, with an example."""

    def parse(text: str) -> float:
        if not 0 < (value := _number(text, what)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is impossible: expected {what}, and above 0")
        return value

    return parse


def from_0(what: str) -> Callable[[str], float]:
    """Returns the type of an argument that is a number of 0 or more; ``what`` says of what."""

    def parse(text: str) -> float:
        if not 0 <= (value := _number(text, f"{what}, such as 1.5 or 8e8")) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is impossible: expected {what}, 0 or more")
        return value

    return parse


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text or 'nothing'}: expected {what}") from None


def grid_shape(text: str) -> tuple[int, int]:
    """The type of an argument that gives pipelines and stages."""
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text} is no grid: expected pipelines x stages, both at least 1, such as 3x4"
        )
    return int(match[1]), int(match[2])


def worker_names(text: str) -> frozenset[WorkerId]:
    """The type of an argument that names workers; none is named by an empty text."""
    try:
        return frozenset(WorkerId.parse(name) for name in text.split(",") if text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
