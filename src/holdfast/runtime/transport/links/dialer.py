"""How a worker calls another one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.runtime.transport.links.handshake import Draw, Met, dialing
from holdfast.runtime.transport.links.loop import EventLoop
from holdfast.runtime.transport.links.opening import Opening, family_of

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.sealing import Sending

__all__ = ["Dialer"]


class Dialer:
    """Makes connections, in the loop's thread.

    Args:
        loop: which waits for them.
        worker: who we are.
        nonce: of our process.
        draw: see dialing.
    """

    def __init__(self, loop: EventLoop, worker: WorkerId, nonce: bytes, draw: Draw | None) -> None:
        self._loop, self._worker, self._nonce, self._draw = loop, worker, nonce, draw

    def call(
        self,
        peer: Peer,
        proved: Callable[[Sending, Peer], None],
        failed: Callable[[], None],
    ) -> Opening:
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

        def ready(connection: socket.socket, met: Met) -> None:
            proved(met.seal.sending(connection) if met.seal else connection, met.peer)

        dialogue = dialing(self._worker, self._nonce, peer, self._draw)
        opening = Opening(self._loop, connection, dialogue, proved=ready, failed=failed)
        opening.begin()
        return opening
