"""``holdfast certs``: makes the certificates of a job's control connections."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.control.certificates import ANY_HOST, make_certificates, make_node_certificates
from holdfast.errors import ConfigError

__all__ = ["add_certs_parser"]

_MAX_DAYS = 36525.0
"""A hundred years; what is wanted for longer is a mistake, and dates end with the year 9999."""


def add_certs_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``certs`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser("certs", help="make certificates for control connections", description=__doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder; readable for its owner only")
    parser.add_argument(
        "--host",
        dest="hosts",
        action="append",
        metavar="NAME",
        help="a name or IP address that processes of the job are reached by; may be repeated (default: any: all of the "
        "job's show this certificate, on whichever machine they are)",
    )
    parser.add_argument(
        "--nodes",
        metavar="NAME,NAME...",
        help="makes a folder DIR/NAME for each of these nodes, as agents call them (`--node`, or the host's name), "
        "what is in it speaks for no other node; the job is begun on the first of them",
    )
    parser.add_argument("--days", type=float, default=365.0, help="how long they are valid (default 365)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the files, prints the section of the job file that uses them and returns 0."""
    if not 0.0 < args.days <= _MAX_DAYS:  # also what is no number
        raise ConfigError(f"--days: expected more than 0 and at most {_MAX_DAYS:g}, got {args.days:g}")
    out, hosts = Path(args.out), tuple(args.hosts or [ANY_HOST])
    if args.nodes is None:
        ca, cert, key = make_certificates(out, hosts, days=args.days)
    else:
        first, *others = make_node_certificates(out, hosts, args.nodes.split(","), days=args.days)
        ca, cert, key = (first / f"{name}.pem" for name in ("ca", "cert", "key"))
        print(f"# for {first.name}, if the job is begun there")
        for each in others:
            print(f"# for the agent of {each.name}: --certs {each}")
    print(f"control:\n  tls: {{ca: {ca}, cert: {cert}, key: {key}}}")
    return 0
