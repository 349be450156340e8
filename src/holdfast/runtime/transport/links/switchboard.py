"""The connections of one worker: a thread that accepts, dials, reads, and writes what could not be written at once."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from holdfast.core.ids import WorkerId
from holdfast.runtime.hardening import LISTENING
from holdfast.runtime.transport.links.handshake import (
    NONCE_BYTES,
    UNKNOWN,
    Dialogue,
    Turn,
    dialing,
    listening,
)
from holdfast.runtime.transport.links.inbox import Inbox, Incoming
from holdfast.runtime.transport.links.outbox import Outbox
from holdfast.runtime.transport.links.wire import CHUNK_BYTES, HEADER_BYTES, BadFrame, Chunk, Kind, Label
from holdfast.runtime.transport.port import Contact

__all__ = ["Switchboard"]

_STRANGERS = 64
"""How many callers may be without proof at a time; beyond it, the one who has waited longest is let go."""
_HANDSHAKE_S = 5.0
_AGAIN_S = 0.005
"""After which a call that was not answered is made again."""
_SCRATCH_BYTES = 64 << 10
_DEAF_S = 0.05
"""For how long nobody is let in once this process may open no more files."""
_READS = 16
"""How often one link is read at a stretch."""
_BACKLOG = 128
_NOTHING = memoryview(b"")
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_RECORD_BYTES = 16 << 10
"""The longest record of TLS: shorter messages go into one."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """The link to one worker: what is to be sent, and where; any thread may send, under its lock.

    ``entered`` is the generation that was entered on it, ``dropped`` says whether something was lost with a connection
    since then.
    """

    worker: WorkerId
    lock: threading.Lock = field(default_factory=threading.Lock)
    outbox: Outbox = field(default_factory=Outbox)
    contact: Contact | None = None
    connection: socket.socket | None = None
    called: bool = False
    blocked: bool = False
    calling: _Handshake | None = None
    entered: int = 0
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Handshake:
    """A connection on which nothing is proved yet."""

    connection: socket.socket
    dialogue: Dialogue
    until: float
    secure: Callable[[socket.socket], ssl.SSLSocket] | None
    proved: Callable[[socket.socket, Contact], None]
    failed: Callable[[], None]
    sending: bytes = b""
    reading: int = 0
    came: bytes = b""
    unknown: bool = False


@dataclass(slots=True, eq=False)
class _Reader:
    """The link from one worker."""

    connection: socket.socket
    contact: Contact
    head: bytes = b""
    chunk: Chunk | None = None
    incoming: Incoming | None = None
    target: memoryview = _NOTHING
    filled: int = 0
    room: memoryview = _NOTHING
    amid: bool = False
    ended: bool = False


class Switchboard:
    """All links of one worker.

    Args:
        worker: who we are.
        inbox: where goes what comes.
        host: the address to listen on, at a free port.
        tls: for who is called and for who calls; None: links are in the clear.
    """

    def __init__(
        self,
        worker: WorkerId,
        inbox: Inbox,
        *,
        host: str,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
    ) -> None:
        self.nonce = os.urandom(NONCE_BYTES)
        self._worker = worker
        self._inbox = inbox
        self._tls = tls
        self._lock = threading.Lock()
        self._contacts: dict[WorkerId, Contact] = {}
        self._outgoing: dict[WorkerId, _Outgoing] = {}
        self._incoming: dict[WorkerId, _Reader] = {}
        self._shaking: dict[_Handshake, None] = {}
        self._again: deque[tuple[float, _Outgoing]] = deque()
        self._todo: deque[Callable[[], None]] = deque()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._selector = selectors.DefaultSelector()
        self._alarm, alarmed = socket.socketpair()
        for end in (self._alarm, alarmed):
            end.setblocking(False)
        with LISTENING:
            self._listener = socket.create_server((host, 0), family=_family(host), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._selector.register(alarmed, selectors.EVENT_READ, lambda _: alarmed.recv(4096))
        self._deaf_until: float | None = None
        self._listen()
        self._closed = False
        self._asked_busy = False
        self._over = 0
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    # For any thread

    def meet(self, contacts: Iterable[Contact]) -> None:
        """Learns who the others are now; a link with another process of the same worker is over from now on."""
        told = tuple(contacts)
        with self._lock:
            self._contacts.update((contact.worker, contact) for contact in told)
            known = [self._outgoing[contact.worker] for contact in told if contact.worker in self._outgoing]
        for outgoing in known:
            with outgoing.lock:
                if outgoing.contact is not None and not self._is_current(outgoing.contact):
                    before, outgoing.connection, outgoing.contact = outgoing.connection, None, None
                    outgoing.outbox, outgoing.blocked, outgoing.entered = Outbox(), False, 0
                    if before is not None:
                        self._do(partial(self._close, before))
        self._do(self._look_again)

    def send(self, peer: WorkerId, label: Label, body: memoryview, *, lent: bool = False) -> None:
        """Sends a message, at once or as soon as that can be done; its bytes stay ours if they are lent.

        A generation begins with ENTER; what belongs to none that has begun, or to one that is over, is not sent.
        """
        outgoing = self._link_to(peer)
        with outgoing.lock:
            if label.generation <= self._over:
                return
            if label.kind is Kind.ENTER:
                outgoing.entered, outgoing.dropped = label.generation, False
            elif label.generation != outgoing.entered:  # said by who has yet to hear that the generation is over
                return
            outgoing.outbox.put(label, body, lent=lent)
            self._go_on(outgoing)
            if lent and not outgoing.outbox.empty:
                outgoing.outbox.give_back()

    def warm_up(self, peers: Iterable[WorkerId]) -> None:
        """Connects with workers to whom something may have to be sent later."""
        for peer in peers:
            outgoing = self._link_to(peer)
            with outgoing.lock:
                self._go_on(outgoing)

    def drop(self, generation: int) -> None:
        """Forgets what is still to be sent of a generation and all before it, and sends no more of them."""
        self._over = max(self._over, generation)
        for outgoing in list(self._outgoing.values()):
            with outgoing.lock:
                outgoing.outbox.drop(generation)

    def busy(self, peers: Iterable[WorkerId]) -> list[WorkerId]:
        """To whom something is still to be sent; from now on, whoever waits in the inbox is woken when that changes."""
        self._asked_busy = True
        found = [self._outgoing[peer] for peer in peers if peer in self._outgoing]
        return [outgoing.worker for outgoing in found if outgoing.dropped or not outgoing.outbox.empty]

    def close(self) -> None:
        """Ends all links, and the thread."""
        self._closed = True
        self._do(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _link_to(self, peer: WorkerId) -> _Outgoing:
        with self._lock:
            return self._outgoing.setdefault(peer, _Outgoing(peer))

    def _go_on(self, outgoing: _Outgoing) -> None:
        """Sends what can be sent, under the link's lock."""
        if outgoing.connection is None:
            if not outgoing.called:
                outgoing.called = True
                self._do(lambda: self._call(outgoing))
        elif not outgoing.blocked:
            self._write(outgoing, outgoing.connection)

    def _write(self, outgoing: _Outgoing, to: socket.socket) -> None:
        try:
            while parts := outgoing.outbox.next():
                outgoing.outbox.took(_send(to, parts))
            if self._asked_busy:
                self._inbox.wake()
        except _LATER:
            outgoing.blocked = True
            self._do(lambda: self._watch(outgoing, to))
        except OSError as error:
            reason = _reason(error)
            self._do(lambda: self._hang_up(outgoing, to, reason))

    def _do(self, work: Callable[[], None]) -> None:
        """Has something done by the thread of the links."""
        self._todo.append(work)
        with contextlib.suppress(OSError):  # it has been woken often enough; or it is no more
            self._alarm.send(b"!")

    # In the thread of the links

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, events in self._selector.select(self._next_moment()):
                    if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # else one before it has closed it
                        key.data(events)
                for _ in range(len(self._todo)):  # what these want done comes after what has arrived
                    self._todo.popleft()()
                self._pass_time()
        except BaseException as error:  # noqa: BLE001 - told to the thread that would wait for us for ever
            self._inbox.fail(error)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        for handshake in self._shaking:
            handshake.connection.close()
        self._listener.close()
        self._alarm.close()
        self._selector.close()

    def _next_moment(self) -> float | None:
        moments = [handshake.until for handshake in self._shaking]
        moments += [moment for moment, _ in self._again]
        if self._deaf_until is not None:
            moments.append(self._deaf_until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _pass_time(self) -> None:
        now = time.monotonic()
        for handshake in [each for each in self._shaking if each.until <= now]:
            self._give_up(handshake)
        while self._again and self._again[0][0] <= now:
            self._call(self._again.popleft()[1])
        if self._deaf_until is not None and self._deaf_until <= now:
            self._listen()

    def _listen(self) -> None:
        self._deaf_until = None
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the caller waits until somebody has gone
                self._deaf_until = time.monotonic() + _DEAF_S
                self._selector.unregister(self._listener)
            return
        if len(strangers := [each for each in self._shaking if each.failed is _nothing]) >= _STRANGERS:
            self._give_up(strangers[0])
        dialogue = listening(self._worker, self.nonce, self._known)
        secure = None
        if self._tls is not None:
            secure = partial(self._tls[0].wrap_socket, server_side=True, do_handshake_on_connect=False)
        self._shake(connection, dialogue, secure, self._take_up, _nothing)

    def _known(self, worker: WorkerId, nonce: bytes) -> Contact | None:
        with self._lock:
            contact = self._contacts.get(worker)
        return contact if contact is not None and contact.nonce == nonce else None

    def _is_current(self, contact: Contact) -> bool:
        return self._known(contact.worker, contact.nonce) is not None

    def _call(self, outgoing: _Outgoing) -> None:
        """Dials."""
        with self._lock:
            contact = self._contacts.get(outgoing.worker)
        with outgoing.lock:
            outgoing.contact = contact
            if contact is None:  # once somebody tells who that is, it is called
                outgoing.called = False
                return
        host, _, port = contact.address.rpartition(":")
        connection = None
        try:
            connection = socket.socket(_family(host), socket.SOCK_STREAM)
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
        except (OSError, ValueError, OverflowError):  # no more files can be opened, or that is nobody's address
            if connection is not None:
                connection.close()
            self._call_again(outgoing)
            return
        dialogue = dialing(self._worker, self.nonce, contact)
        secure = None
        if self._tls is not None:
            secure = partial(self._tls[1].wrap_socket, server_hostname=host, do_handshake_on_connect=False)
        outgoing.calling = self._shake(
            connection,
            dialogue,
            secure,
            lambda ready, found: self._connected(outgoing, ready, found),
            lambda: self._call_again(outgoing),
        )

    def _call_again(self, outgoing: _Outgoing) -> None:
        with outgoing.lock:
            outgoing.called = not outgoing.outbox.empty
            if outgoing.called:
                self._again.append((time.monotonic() + _AGAIN_S, outgoing))

    def _shake(
        self,
        connection: socket.socket,
        dialogue: Dialogue,
        secure: Callable[[socket.socket], ssl.SSLSocket] | None,
        proved: Callable[[socket.socket, Contact], None],
        failed: Callable[[], None],
    ) -> _Handshake:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = _Handshake(connection, dialogue, time.monotonic() + _HANDSHAKE_S, secure, proved, failed)
        self._shaking[handshake] = None
        self._selector.register(
            connection, selectors.EVENT_READ | selectors.EVENT_WRITE, lambda _: self._proceed(handshake)
        )
        if secure is None:
            self._step(handshake)
        return handshake

    def _step(self, handshake: _Handshake) -> None:
        """Gives what came to the handshake, and goes on with what it wants next."""
        came, handshake.came = handshake.came, b""
        try:
            turn = handshake.dialogue.send(came if handshake.reading else None)  # type: ignore[arg-type]
        except StopIteration as end:
            del self._shaking[handshake]
            self._selector.unregister(handshake.connection)
            handshake.proved(handshake.connection, end.value)
            return
        except BadFrame:
            self._give_up(handshake)
            return
        handshake.unknown = turn is UNKNOWN
        if isinstance(turn, Turn):
            handshake.sending, handshake.reading = turn.send, turn.read

    def _proceed(self, handshake: _Handshake) -> None:
        """Sends and reads what the handshake wants, as far as it goes."""
        if handshake not in self._shaking:
            return None
        try:
            if handshake.secure is not None and not self._secured(handshake):
                return None
            while handshake in self._shaking and not handshake.unknown:
                if handshake.sending:
                    handshake.sending = handshake.sending[handshake.connection.send(handshake.sending) :]
                elif len(handshake.came) < handshake.reading:
                    came = handshake.connection.recv(handshake.reading - len(handshake.came))
                    if not came:
                        return self._give_up(handshake)
                    handshake.came += came
                else:
                    self._step(handshake)
            if handshake.unknown:
                self._selector.unregister(handshake.connection)
            return None
        except _LATER:
            events = selectors.EVENT_WRITE if handshake.sending else selectors.EVENT_READ
            self._selector.modify(handshake.connection, events, lambda _: self._proceed(handshake))
        except (OSError, ValueError):  # TLS says ValueError of names that nobody can have
            self._give_up(handshake)

    def _secured(self, handshake: _Handshake) -> bool:
        """Goes on with TLS's own handshake, as soon as there is a connection; returns whether it is over."""
        if not isinstance(handshake.connection, ssl.SSLSocket):
            if error := handshake.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            assert handshake.secure is not None
            self._selector.unregister(handshake.connection)
            handshake.connection = handshake.secure(handshake.connection)
            self._selector.register(handshake.connection, selectors.EVENT_READ, lambda _: self._proceed(handshake))
        events = selectors.EVENT_READ
        try:
            handshake.connection.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            events = selectors.EVENT_WRITE
        else:
            handshake.secure = None
            self._step(handshake)
            return True
        self._selector.modify(handshake.connection, events, lambda _: self._proceed(handshake))
        return False

    def _look_again(self) -> None:
        """Somebody's contact is new: callers may be known now, and old links be over."""
        for handshake in [each for each in self._shaking if each.unknown]:
            self._selector.register(
                handshake.connection, selectors.EVENT_READ, lambda _, each=handshake: self._proceed(each)
            )
            handshake.unknown, handshake.reading = False, 0
            handshake.until = time.monotonic() + _HANDSHAKE_S
            self._step(handshake)
            self._proceed(handshake)
        for worker, reader in list(self._incoming.items()):
            if not self._is_current(reader.contact):
                del self._incoming[worker]
                self._close(reader.connection)
        for outgoing in list(self._outgoing.values()):
            if outgoing.contact is None and outgoing.calling in self._shaking:
                self._give_up(outgoing.calling)
            with outgoing.lock:
                if not outgoing.outbox.empty:
                    self._go_on(outgoing)

    def _give_up(self, handshake: _Handshake) -> None:
        del self._shaking[handshake]
        self._close(handshake.connection)
        handshake.failed()

    def _take_up(self, connection: socket.socket, contact: Contact) -> None:
        """Somebody who has proved to be a worker sends to us from now on."""
        if before := self._incoming.pop(contact.worker, None):
            self._close(before.connection)
        reader = self._incoming[contact.worker] = _Reader(connection, contact)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(reader))

    def _connected(self, outgoing: _Outgoing, connection: socket.socket, contact: Contact) -> None:
        """Somebody takes what we send."""
        with outgoing.lock:
            if contact is outgoing.contact:
                self._selector.register(
                    connection, selectors.EVENT_READ, lambda events: self._served(outgoing, connection, events)
                )
                outgoing.connection, outgoing.blocked, outgoing.called = connection, False, False
                self._write(outgoing, connection)
                return
        connection.close()  # another process has come meanwhile
        self._call_again(outgoing)

    def _served(self, outgoing: _Outgoing, connection: socket.socket, events: int) -> None:
        """The other end takes more; or it says something, which it never does unless it is gone."""
        if outgoing.connection is not connection:
            return
        if events & selectors.EVENT_READ:
            try:
                with outgoing.lock:  # TLS lets one thread at a time
                    said = connection.recv(1)
                reason = "it spoke where it only listens" if said else "it closed its connection"
            except _LATER:
                pass
            except OSError as error:
                self._hang_up(outgoing, connection, _reason(error))
                return
            else:
                self._hang_up(outgoing, connection, reason)
                return
        if events & selectors.EVENT_WRITE:
            with outgoing.lock:
                outgoing.blocked = False
                self._write(outgoing, connection)
                if not outgoing.blocked:
                    self._register(outgoing, connection, selectors.EVENT_READ)

    def _watch(self, outgoing: _Outgoing, connection: socket.socket) -> None:
        """Goes on as soon as the other end takes more."""
        if outgoing.connection is connection:
            self._register(outgoing, connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _register(self, outgoing: _Outgoing, connection: socket.socket, events: int) -> None:
        self._selector.modify(connection, events, lambda ready: self._served(outgoing, connection, ready))

    def _hang_up(self, outgoing: _Outgoing, connection: socket.socket, reason: str) -> None:
        with outgoing.lock:
            if outgoing.connection is not connection:
                return
            contact, outgoing.dropped = outgoing.contact, outgoing.dropped or not outgoing.outbox.empty
            outgoing.connection, outgoing.blocked, outgoing.outbox = None, False, Outbox()
        self._close(connection)
        self._lose(contact, reason)

    def _lose(self, contact: Contact | None, reason: str) -> None:
        """Tells who waits for a worker that a link with it is broken, unless it was one with a process of the past."""
        with self._lock:
            current = None if contact is None else self._contacts.get(contact.worker)
            if contact is not None and current is not None and current.nonce == contact.nonce:
                self._inbox.lose(contact.worker, reason)

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is not waited for
            self._selector.unregister(connection)
        connection.close()

    def _read(self, reader: _Reader) -> None:
        """Takes what has come on a link, as far as it goes, but for others' sake not for ever."""
        if self._incoming.get(reader.contact.worker) is not reader:
            return
        reason, tries = "it closed its connection", _READS
        try:
            while tries and self._read_some(reader):
                tries -= 1
            if not tries:
                self._do(partial(self._read, reader))
            if not reader.ended:
                return
        except BadFrame as error:
            reason = str(error)
        except OSError as error:
            reason = _reason(error)
        del self._incoming[reader.contact.worker]
        self._close(reader.connection)
        self._lose(reader.contact, reason)

    def _read_some(self, reader: _Reader) -> bool:
        """Reads once, into the place of the chunk that is coming, or to find the next; returns if there may be more."""
        kept = len(reader.head)
        # Behind a chunk that another one follows, the header alone is read: the rest goes where it belongs, uncopied.
        most = HEADER_BYTES if reader.amid else _SCRATCH_BYTES
        room = self._scratch[kept:most] if reader.chunk is None else reader.target[reader.filled :]
        try:
            came = reader.connection.recv_into(room)
        except _LATER:
            return False
        reader.ended = not came
        if reader.chunk is None:
            self._scratch[:kept] = reader.head
            self._take_in(reader, kept + came)
        else:
            self._fill(reader, came)
        return came == len(room) or (came > 0 and isinstance(reader.connection, ssl.SSLSocket))

    def _fill(self, reader: _Reader, size: int) -> None:
        """So many bytes more of a chunk are where they belong."""
        reader.filled += size
        if reader.chunk is not None and reader.filled == reader.chunk.size:
            chunk, incoming, reader.chunk, reader.incoming = reader.chunk, reader.incoming, None, None
            reader.amid = chunk.offset + chunk.size < chunk.total
            if incoming is not None:
                self._inbox.add(incoming, chunk, reader.target)

    def _take_in(self, reader: _Reader, size: int) -> None:
        """Reads the headers in what has come, and puts what is behind them where it belongs."""
        at = 0
        while reader.chunk is None and size - at >= HEADER_BYTES:
            reader.chunk = chunk = Chunk.unpack(self._scratch, at)
            at += HEADER_BYTES
            reader.incoming = self._inbox.begin(reader.contact.worker, chunk)
            place = None if reader.incoming is None else reader.incoming.place(chunk)
            here = min(chunk.size, size - at)
            if place is None and here == chunk.size:  # it need not be put anywhere
                reader.target = self._scratch[at : at + here]
            else:
                reader.target = self._room(reader, chunk.size) if place is None else place
                reader.target[:here] = self._scratch[at : at + here]
            reader.filled = 0
            self._fill(reader, here)
            at += here
        reader.head = bytes(self._scratch[at:size])

    def _room(self, reader: _Reader, size: int) -> memoryview:
        """The link's own place for a chunk that belongs nowhere as a whole."""
        if len(reader.room) < size:
            reader.room = memoryview(bytearray(CHUNK_BYTES))
        return reader.room[:size]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _send(connection: socket.socket, parts: list[memoryview]) -> int:
    """Sends some of what is to be sent; returns how many bytes."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection.sendmsg(parts)
    return connection.send(b"".join(parts) if sum(map(len, parts)) <= _RECORD_BYTES else parts[0])


def _nothing() -> None:
    pass


def _reason(error: OSError) -> str:
    return f"its connection broke: {error.strerror or error}"
