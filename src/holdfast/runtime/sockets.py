"""The sockets of this process that a library has made and does not tell of, found in /proc/self/fd (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator, Set

from holdfast.runtime.hardening import LISTENING

__all__ = ["deaf_to_strangers", "duplicates", "let_nobody_in", "listens", "sockets"]

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of BPF: return, keeping 0 bytes of a packet
_LOG = logging.getLogger(__name__)


def sockets() -> dict[str, int]:
    """This process's open sockets: identity (inode) to descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


@contextlib.contextmanager
def deaf_to_strangers() -> Iterator[None]:
    """Whatever this process begins to listen on within hears nothing afterwards: all who are to come have come."""
    with LISTENING:
        before = sockets().keys()
        yield
        let_nobody_in({each for each, found in duplicates(sockets().keys() - before) if listens(found)})


def let_nobody_in(listener: set[str]) -> None:
    """From now on a listening socket hears nothing; connections that it accepted before are as they were."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    for _, duplicate in duplicates(listener):
        try:
            filter_ = struct.pack("HP", 1, ctypes.addressof(program))
            duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
        except OSError as error:
            _LOG.warning("port %d stays open to everybody: %s", duplicate.getsockname()[1], error)


def listens(found: socket.socket) -> bool:
    """Whether a socket waits for connections."""
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def duplicates(identities: Set[str]) -> Iterator[tuple[str, socket.socket]]:
    """Every socket of these that is still open, duplicated, so that it stays the one that it is while it is used."""
    for identity, descriptor in sockets().items():
        if identity not in identities:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if os.readlink(f"/proc/self/fd/{duplicate.fileno()}") == identity:  # else it was closed meanwhile
                yield identity, duplicate
