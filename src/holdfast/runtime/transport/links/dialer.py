"""How a worker calls another one."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from functools import partial

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.runtime.transport.links.handshake import dialing
from holdfast.runtime.transport.links.loop import EventLoop
from holdfast.runtime.transport.links.opening import Opening, family_of

__all__ = ["Dialer"]


class Dialer:
    """Makes connections, in the loop's thread.

    Args:
        loop: which waits for them.
        worker: who we are.
        nonce: of our process.
        tls: what we speak; None: links are in the clear.
    """

    def __init__(self, loop: EventLoop, worker: WorkerId, nonce: bytes, tls: ssl.SSLContext | None) -> None:
        self._loop, self._worker, self._nonce, self._tls = loop, worker, nonce, tls

    def call(self, peer: Peer, proved: Callable[[socket.socket, Peer], None], failed: Callable[[], None]) -> Opening:
        """Calls somebody; ends with one call of ``proved`` or of ``failed``.

        Raises:
            OSError: no more files can be opened.
            ValueError, OverflowError: that is nobody's address.
        """
        host, _, port = peer.here.address.rpartition(":")
        connection = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
        except BaseException:
            connection.close()
            raise
        secure = None
        if self._tls is not None:
            secure = partial(self._tls.wrap_socket, server_hostname=host, do_handshake_on_connect=False)
        dialogue = dialing(self._worker, self._nonce, peer)
        opening = Opening(self._loop, connection, dialogue, secure=secure, proved=proved, failed=failed)
        opening.begin()
        return opening
