"""A connection on which nothing is proved yet."""

from __future__ import annotations

import socket
from collections.abc import Callable

from holdfast.runtime.transport.links.handshake import UNKNOWN, Dialogue, Met, Turn
from holdfast.runtime.transport.links.loop import READ, WRITE, EventLoop
from holdfast.runtime.transport.links.wire import BadFrame

__all__ = ["Opening", "family_of"]

_HANDSHAKE_S = 5.0


class Opening:
    """One handshake, in the loop's thread; it ends with one call, of ``proved`` or of ``failed``.

    Args:
        loop: which waits for it.
        connection: one that is there, or being made.
        dialogue: our end of the handshake.
        proved: takes the connection, and whom it is with.
        failed: called when it is closed, after 5 s at the latest.

    Attributes:
        answered: whether the host at the other end has, if only to refuse.
    """

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        dialogue: Dialogue,
        *,
        proved: Callable[[socket.socket, Met], None],
        failed: Callable[[], None],
    ) -> None:
        self._loop, self._connection, self._dialogue = loop, connection, dialogue
        self._proved, self._failed = proved, failed
        self._sending, self._reading, self._came = b"", 0, b""
        self._unknown = self._over = self.answered = False
        self._timer = loop.after(_HANDSHAKE_S, self.give_up)

    def begin(self) -> None:
        """Starts it, if it was not given up already."""
        self._connection.setblocking(False)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch(READ | WRITE)
        self._advance()

    def look_again(self) -> None:
        """Others are known now: goes on if that is what it waits for."""
        if not self._unknown:
            return
        self._loop.cancel(self._timer)
        self._timer = self._loop.after(_HANDSHAKE_S, self.give_up)
        self._unknown, self._reading = False, 0
        self._watch(READ)
        self._advance()
        self._proceed()

    def give_up(self) -> None:
        """Closes the connection, unless it is proved, or closed, already."""
        if not self._over:
            self._end()
            self._connection.close()
            self._failed()

    def _end(self) -> None:
        self._over = True
        self._loop.cancel(self._timer)
        self._loop.forget(self._connection)

    def _watch(self, events: int) -> None:
        self._loop.watch(self._connection, events, lambda _: self._proceed())

    def _proceed(self) -> None:
        """Sends and reads what the handshake wants, as far as it goes."""
        try:
            while not self._over and not self._unknown:
                if not self._said_and_heard():
                    return
                self._advance()
            if self._unknown:
                self._loop.forget(self._connection)
        except BlockingIOError:
            self._watch(WRITE if self._sending else READ)
        except OSError as error:
            self.answered = self.answered or isinstance(error, ConnectionRefusedError | ConnectionResetError)
            self.give_up()

    def _said_and_heard(self) -> bool:
        """Sends what is to be sent, then reads what is awaited; returns whether the other end is still there."""
        while self._sending:
            self._sending = self._sending[self._connection.send(self._sending) :]
            self.answered = True  # else nothing could be sent
        while len(self._came) < self._reading:
            came = self._connection.recv(self._reading - len(self._came))
            if not came:
                self.give_up()
                return False
            self._came += came
        return True

    def _advance(self) -> None:
        """Gives what came to the dialogue, and goes on with what it wants next."""
        came, self._came = self._came, b""
        try:
            turn = self._dialogue.send(came if self._reading else None)  # type: ignore[arg-type]
        except StopIteration as end:
            self._end()
            self._proved(self._connection, end.value)
        except BadFrame:
            self.give_up()
        else:
            self._unknown = turn is UNKNOWN
            if isinstance(turn, Turn):
                self._sending, self._reading = turn.send, turn.read


def family_of(host: str) -> socket.AddressFamily:
    """Returns the family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
