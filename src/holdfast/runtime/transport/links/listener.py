"""Where a worker is called: everybody is let in, a bounded number at a time, and has to prove who it is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.control.messages import Peer
from holdfast.runtime.transport.links.handshake import Dialogue, Met
from holdfast.runtime.transport.links.loop import READ, EventLoop
from holdfast.runtime.transport.links.opening import Opening, family_of

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.sealing import Receiving

__all__ = ["Listener"]

_STRANGERS = 64
"""How many callers may be without proof at a time; beyond it, the one who has waited longest is let go."""
_BACKLOG = 1024
"""How many may wait to be let in: beyond it, the kernel lets them call again after seconds, peers too."""
_AT_ONCE = 64
"""How many are let in at a stretch."""
_DEAF_S = 0.05
"""For how long nobody is let in once this process may open no more files."""


class Listener:
    """Accepts, in the loop's thread.

    Args:
        loop: which waits for callers.
        host: the address to listen on, at a free port.
        dialogue: makes our end of one handshake.
        proved: takes the connection of a caller who is a worker, and who that is.
    """

    def __init__(
        self,
        loop: EventLoop,
        host: str,
        dialogue: Callable[[], Dialogue],
        proved: Callable[[Receiving, Peer], None],
    ) -> None:
        self._loop, self._dialogue, self._proved = loop, dialogue, proved
        self._strangers: dict[int, Opening] = {}
        self._count = 0
        self._socket = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._listen()

    def look_again(self) -> None:
        """Others are known now: callers of whom nobody had told may be among them."""
        for stranger in list(self._strangers.values()):
            stranger.look_again()

    def close(self) -> None:
        """Ends: nobody is let in, and whoever has proved nothing is let go."""
        self._loop.hang_up(self._socket)
        for stranger in list(self._strangers.values()):
            stranger.give_up()

    def _listen(self) -> None:
        self._loop.watch(self._socket, READ, lambda _: self._accept())

    def _accept(self) -> None:
        """Lets in who has called."""
        try:
            for _ in range(_AT_ONCE):
                self._greet(self._socket.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the caller waits until somebody has gone
                self._loop.forget(self._socket)
                self._loop.after(_DEAF_S, self._listen)

    def _greet(self, connection: socket.socket) -> None:
        if len(self._strangers) >= _STRANGERS:
            next(iter(self._strangers.values())).give_up()
        self._count += 1
        number = self._count
        self._strangers[number] = opening = Opening(
            self._loop,
            connection,
            self._dialogue(),
            proved=lambda ready, met: self._let_in(number, ready, met),
            failed=lambda: self._let_go(number),
        )
        opening.begin()

    def _let_in(self, number: int, connection: socket.socket, met: Met) -> None:
        del self._strangers[number]
        self._proved(met.seal.receiving(connection) if met.seal else connection, met.peer)

    def _let_go(self, number: int) -> None:
        del self._strangers[number]
