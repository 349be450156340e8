"""The link to one worker: what is to be sent to it, and the connection to it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.runtime.transport.framing import Body
from holdfast.runtime.transport.links.dialer import Dialer
from holdfast.runtime.transport.links.loop import READ, WRITE, EventLoop
from holdfast.runtime.transport.links.opening import Opening
from holdfast.runtime.transport.links.outbox import Outbox
from holdfast.runtime.transport.links.peers import Peers
from holdfast.runtime.transport.links.silence import silence_s
from holdfast.runtime.transport.links.wire import BACKGROUND, Kind, Label

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.carrier import Carriers
    from holdfast.runtime.transport.links.sealing import Sending

__all__ = ["Sender", "look_s"]

_AGAIN_S = 0.005
"""After which a call that was not answered is made again."""
_UNANSWERED_S = 3.5
"""How long nobody's host may answer calls, at least: the kernel makes one at once, after 1 s and after 3 s."""
_LOOKS = 8
"""So often at least it is looked, in the time that a host may be silent, whether it is."""
_NOTHING = memoryview(b"")
_NO_GENERATION = -1
"""Of a connection on which no generation relied: what belongs to none is lost with it."""


class Sender:
    """One link, of which any thread may make use. Its connection is made, watched and ended in the loop's thread.

    Args:
        worker: to whom.
        loop: which waits for the connection.
        dialer: makes it.
        peers: knows whom to call.
        lost: told that the connection with a process has ended, why, and which generation was entered on it last.
        left: told whenever all was sent that belongs to a step.
        over: a generation that is over, and all before it.
        carriers: carry bodies by another way; None: nothing does.
    """

    def __init__(
        self,
        worker: WorkerId,
        loop: EventLoop,
        dialer: Dialer,
        peers: Peers,
        *,
        lost: Callable[[Peer, str, int], None],
        left: Callable[[], None],
        over: int,
        carriers: Carriers | None = None,
    ) -> None:
        self.worker = worker
        self._loop, self._dialer, self._peers = loop, dialer, peers
        self._tell_lost, self._left, self._carriers = lost, left, carriers
        # All that follows but `_opening`, which is the loop's thread's, is changed under the lock: any thread says
        # something and writes as much as the socket takes; the loop's thread connects, goes on writing, and notices the
        # end. With it held the loop is called, `left`, and `Peers`, whose lock is taken behind this one.
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._peer: Peer | None = None
        self._connection: Sending | None = None
        self._opening: Opening | None = None
        self._called = self._blocked = False
        self._over, self._entered, self._dropped = over, 0, False
        self._enter: Label | None = None  # while nothing but ENTER was said in this generation
        self._said_again = False  # that, to the same process
        # The loop's thread's alone: at how many looks in a row the host was silent; whether a call was answered since.
        self._silent_looks, self._answered = 0, False
        self._sent: Counter[Kind] = Counter()

    # For any thread

    @property
    def busy(self) -> bool:
        """Whether something is still to be sent, or was lost with a connection, of what was said since ENTER."""
        return self._dropped or self._outbox.owes

    @property
    def sent(self) -> Counter[Kind]:
        """How many bytes were given to be sent, by kind."""
        with self._lock:
            return self._sent.copy()

    def send(self, label: Label, body: Body, *, lent: bool = False, more: bool = False) -> None:
        """See ConnectionManager.send."""
        with self._lock:
            if label.generation <= self._over:
                return
            if label.kind is Kind.ENTER:
                self._entered, self._enter, self._dropped, self._said_again = label.generation, label, False, False
            elif label.kind not in BACKGROUND:
                if label.generation != self._entered:  # said by who has yet to hear that the generation is over
                    return
                self._enter = None
            self._sent[label.kind] += len(body)
            self._put(label, body, lent=lent)
            if not more:
                self._go_on()
            if lent and not self._outbox.empty:
                self._outbox.give_back()

    def _put(self, label: Label, body: Body, *, lent: bool) -> None:
        carriers = self._carriers
        carry = carriers.way(self._peer, label, body, lent=lent) if carriers is not None and self._peer else None
        if carry is not None:
            self._outbox.announce(label, len(body), carry)
            return
        if carriers is not None:
            body = carriers.on_host(body)
        assert isinstance(body, memoryview), "nothing takes what is on a device"
        self._outbox.put(label, body, lent=lent)

    def warm_up(self) -> None:
        """Connects, though there is nothing to say yet."""
        with self._lock:
            self._go_on()

    def drop(self, generation: int) -> None:
        """Forgets what is still to be sent of a generation and all before it, and sends no more of them."""
        with self._lock:
            self._over = max(self._over, generation)
            self._outbox.drop(generation)

    def renew(self) -> None:
        """Leaves a process of the past, with all that was meant for it; an ENTER alone is meant for the new one, too.

        Whoever is told of a generation before it is told of a new process in it has called the old one.
        """
        with self._lock:
            if self._peer is None or self._peers.is_current(self._peer):
                return
            self._forget(self._peer)
            before, self._connection, self._peer = self._connection, None, None
            self._outbox, self._blocked, self._said_again = Outbox(), False, False
            if self._enter is not None and self._enter.generation > self._over:
                self._outbox.put(self._enter, _NOTHING)
                self._dropped = False  # what was lost with the old process is owed to the new one again
            else:
                self._entered, self._enter = 0, None
        if before is not None:
            self._loop.do(partial(self._loop.hang_up, before))

    def _forget(self, peer: Peer) -> None:
        """What is announced on the next connection is not of the group of the last one."""
        if self._carriers is not None:
            self._carriers.forget(peer)

    def _go_on(self) -> None:
        """Sends what can be sent, under the lock."""
        if self._connection is None:
            if not self._called:
                self._called = True
                self._loop.do(self._call)
        elif not self._blocked:
            self._write(self._connection)

    def _write(self, to: Sending) -> None:
        owed = self._outbox.owes
        try:
            while parts := self._outbox.next():
                self._outbox.took(to.sendmsg(parts))
        except BlockingIOError:
            self._blocked = True
            self._loop.do(lambda: self._watch(to))
        except OSError as error:
            reason = f"its connection broke: {error.strerror or error}"
            self._loop.do(lambda: self._hang_up(to, reason))
        if owed and not self._outbox.owes:
            self._left()

    # In the loop's thread

    def look_again(self) -> None:
        """Somebody's process is new: what waited for that goes on."""
        if self._peer is None and self._opening is not None:
            self._opening.give_up()
            self._silent_looks = 0
        with self._lock:
            if not self._outbox.empty:
                self._go_on()

    def break_off(self, peer: Peer, reason: str) -> None:
        """Ends the connection with a process, if there is one."""
        with self._lock:
            known = self._peer is not None and self._peer.here.nonce == peer.here.nonce
            connection = self._connection if known else None
        if connection is not None:
            self._hang_up(connection, reason)

    def look(self, silent_s: float) -> None:
        """Tells of a host that is silent, whose connection is ended; to be called each ``look_s(silent_s)``.

        Looks are counted, not seconds: while we are stopped there are none.
        """
        with self._lock:
            connection, peer, entered, calls = self._connection, self._peer, self._entered, self._called
        answered = self._answered or (self._opening is not None and self._opening.answered)
        limit_s = max(silent_s, _UNANSWERED_S) if connection is None else silent_s
        silent = calls if connection is None else silence_s(connection) >= look_s(silent_s)
        self._silent_looks = self._silent_looks + 1 if silent and not answered else 0
        self._answered = False
        if self._silent_looks * look_s(silent_s) <= limit_s:
            return
        self._silent_looks = 0
        if connection is not None:
            self._hang_up(connection, f"its host has acknowledged nothing for {limit_s:g} s")
        elif peer is not None:
            self._tell_lost(peer, f"its host has answered no call for {limit_s:g} s", entered)

    def _call(self) -> None:
        peer = self._peers.of(self.worker)
        with self._lock:
            self._peer = peer
            if peer is None:  # once somebody tells who that is, it is called
                self._called = False
                return
        try:
            self._opening = self._dialer.call(peer, self._connected, self._not_connected)
        except (OSError, ValueError, OverflowError):
            self._not_connected()

    def _not_connected(self) -> None:
        """Calls again, soon, for the sake of a step; what belongs to none is forgotten."""
        self._answered = self._answered or (self._opening is not None and self._opening.answered)
        self._opening = None
        with self._lock:
            left = None if self._outbox.owes or self._outbox.empty else self._peer
            if left is not None:
                self._outbox = Outbox()
            self._called = not self._outbox.empty
            if self._called:
                self._loop.after(_AGAIN_S, self._call)
        if left is not None:
            self._tell_lost(left, "it cannot be connected with", _NO_GENERATION)

    def _connected(self, connection: Sending, peer: Peer) -> None:
        """Somebody takes what we send."""
        self._opening, self._answered = None, True
        with self._lock:
            if peer is self._peer:
                self._connection, self._blocked, self._called = connection, False, False
                self._listen_to(connection, READ)
                self._write(connection)
                return
        connection.close()  # another process has come meanwhile
        self._call()

    def _watch(self, connection: Sending) -> None:
        with self._lock:
            if self._connection is connection and self._blocked:
                self._listen_to(connection, READ | WRITE)

    def _listen_to(self, connection: Sending, events: int) -> None:
        self._loop.watch(connection, events, lambda ready: self._served(connection, ready))

    def _served(self, connection: Sending, events: int) -> None:
        """The other end takes more; or it says something, which it never does unless it is gone."""
        if self._connection is not connection:
            return
        if events & READ and (reason := self._why_it_spoke(connection)):
            self._hang_up(connection, reason)
        elif events & WRITE:
            with self._lock:
                if self._connection is not connection:  # it is renewed by now
                    return
                self._blocked = False
                self._write(connection)
                if not self._blocked:
                    self._listen_to(connection, READ)

    def _why_it_spoke(self, connection: Sending) -> str | None:
        try:
            said = connection.recv(1)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"its connection broke: {error.strerror or error}"
        return "it spoke where it only listens" if said else "it closed its connection"

    def _hang_up(self, connection: Sending, reason: str) -> None:
        """Ends a connection; what may be lost with it is the generation, but ENTER alone is said again on another."""
        with self._lock:
            if self._connection is not connection:
                return
            peer, entered, enter = self._peer, self._entered, None if self._said_again else self._enter
            if peer is not None:
                self._forget(peer)
            self._dropped = self._dropped or (enter is None and self._outbox.owes)
            self._connection, self._blocked, self._outbox = None, False, Outbox()
            if enter is not None and enter.generation > self._over:
                self._said_again = True
                self._outbox.put(enter, _NOTHING)
                self._go_on()
        self._loop.hang_up(connection)
        if peer is not None:
            self._tell_lost(peer, reason, entered if enter is None else _NO_GENERATION)


def look_s(silent_s: float) -> float:
    """How long it is from one look at a connection to the next, seconds."""
    return silent_s / _LOOKS
