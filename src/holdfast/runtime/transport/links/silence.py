"""What the kernel knows of the host at the other end of a connection: it acknowledges, whatever its processes do."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.sealing import Sending

__all__ = ["silence_s"]

_TCP_INFO = struct.Struct("8B13I")
"""The beginning of Linux's ``struct tcp_info`` (include/uapi/linux/tcp.h)."""
_PROBES, _UNACKED, _LAST_ACK_MS = 3, 12, 20
_UNANSWERED_PROBES = 3
"""Of a window that is full, or of a route that is gone: a living host leaves some unanswered, two in a second."""


def silence_s(connection: Sending) -> float:
    """Returns for how many seconds the other end's host has acknowledged nothing, though it should; 0.0 if it need not.

    It may be more than it should have been: what is to be acknowledged may have been sent a moment ago. A window that
    is full is no silence: the host acknowledges what it has no room for, too.

    Raises:
        OSError: it is closed.
    """
    found = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    owes = found[_UNACKED] > 0 or found[_PROBES] >= _UNANSWERED_PROBES
    return found[_LAST_ACK_MS] / 1000 if owes else 0.0
