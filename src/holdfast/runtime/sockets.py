"""What this process has open, and does not itself know the descriptors of, found in /proc/self/fd (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator, Set

__all__ = ["deaf_to_strangers", "leading_to", "opened"]

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of BPF: return, keeping 0 bytes of a packet
_LOG = logging.getLogger(__name__)


def _sockets() -> dict[str, int]:
    """This process's open sockets: identity (inode) to descriptor."""
    return {target: descriptor for descriptor, target in _targets() if target.startswith("socket:")}


def opened(path: str) -> Iterator[int]:
    """The descriptors of this process that stand for a file."""
    wanted = os.path.realpath(path)
    return (descriptor for descriptor, target in _targets() if target == wanted)


def _targets() -> Iterator[tuple[int, str]]:
    """This process's open descriptors, and what they stand for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


@contextlib.contextmanager
def deaf_to_strangers() -> Iterator[None]:
    """Whatever this process begins to listen on within hears nothing afterwards: all who are to come have come.

    For libraries that do not tell on which socket they listen. No other thread may begin to listen meanwhile.
    """
    before = _sockets().keys()
    yield
    _let_nobody_in({each for each, found in _duplicates(_sockets().keys() - before) if _listens(found)})


def _let_nobody_in(listener: set[str]) -> None:
    """From now on a listening socket hears nothing; connections that it accepted before are as they were."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    for _, duplicate in _duplicates(listener):
        try:
            filter_ = struct.pack("HP", 1, ctypes.addressof(program))
            duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
        except OSError as error:
            _LOG.warning("port %d stays open to everybody: %s", duplicate.getsockname()[1], error)


def _listens(found: socket.socket) -> bool:
    """Whether a socket waits for connections."""
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _duplicates(identities: Set[str]) -> Iterator[tuple[str, socket.socket]]:
    """Every socket of these that is still open, duplicated, so that it stays the one that it is while it is used."""
    for identity, descriptor in _sockets().items():
        if identity not in identities:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if os.readlink(f"/proc/self/fd/{duplicate.fileno()}") == identity:  # else it was closed meanwhile
                yield identity, duplicate


def leading_to(addresses: Set[str]) -> Iterator[int]:
    """The descriptors of this process's connections to any of these ports (``HOST:PORT``) or paths (``unix:PATH``)."""
    wanted = {address.removeprefix("unix:") if address.startswith("unix:") else _port(address) for address in addresses}
    for descriptor in _sockets().values():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            peer = duplicate.getpeername()  # of an address of the Internet, whatever its family, the second is the port
            if (str(peer[1]) if isinstance(peer, tuple) else peer) in wanted:
                yield descriptor


def _port(address: str) -> str:
    return address.rpartition(":")[2]
