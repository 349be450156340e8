"""All links of one worker: those that it sends on, those that it reads, and the thread that serves them."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterable
from functools import partial

from holdfast.core.ids import WorkerId
from holdfast.runtime.transport.links.contacts import Contacts
from holdfast.runtime.transport.links.dialer import Dialer
from holdfast.runtime.transport.links.handshake import NONCE_BYTES, listening
from holdfast.runtime.transport.links.inbox import Inbox
from holdfast.runtime.transport.links.listener import Listener
from holdfast.runtime.transport.links.loop import Loop
from holdfast.runtime.transport.links.reader import SCRATCH_BYTES, Reader
from holdfast.runtime.transport.links.sender import Sender
from holdfast.runtime.transport.links.wire import Label
from holdfast.runtime.transport.port import Contact

__all__ = ["Switchboard"]


class Switchboard:
    """What any thread may do with the links of a worker.

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
        self._inbox = inbox
        self._contacts = Contacts()
        self._lock = threading.Lock()
        self._senders: dict[WorkerId, Sender] = {}
        self._over = 0
        self._readers: dict[WorkerId, Reader] = {}
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._asked_busy = False
        called, calling = tls or (None, None)
        self._loop = Loop()
        self._dialer = Dialer(self._loop, worker, self.nonce, calling)
        dialogue = partial(listening, worker, self.nonce, self._contacts.known)
        self._listener = Listener(self._loop, host, dialogue, called, self._take_up)
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def meet(self, contacts: Iterable[Contact]) -> None:
        """Learns who the others are now; a link with another process of the same worker is over from now on."""
        told = tuple(contacts)
        self._contacts.learn(told)
        with self._lock:
            known = [self._senders[contact.worker] for contact in told if contact.worker in self._senders]
        for sender in known:
            sender.renew()
        self._loop.do(self._look_again)

    def send(self, peer: WorkerId, label: Label, body: memoryview, *, lent: bool = False) -> None:
        """Sends a message, at once or as soon as that can be done; its bytes stay ours if they are lent.

        A generation begins with ENTER; what belongs to none that has begun, or to one that is over, is not sent.
        """
        self._sender_to(peer).send(label, body, lent=lent)

    def warm_up(self, peers: Iterable[WorkerId]) -> None:
        """Connects with workers to whom something may have to be sent later."""
        for peer in peers:
            self._sender_to(peer).warm_up()

    def drop(self, generation: int) -> None:
        """Forgets what is still to be sent of a generation and all before it, and sends no more of them."""
        with self._lock:
            self._over = max(self._over, generation)
            senders = list(self._senders.values())
        for sender in senders:
            sender.drop(generation)

    def busy(self, peers: Iterable[WorkerId]) -> list[WorkerId]:
        """To whom something is still to be sent; from now on, whoever waits in the inbox is woken when that changes."""
        self._asked_busy = True
        return [peer for peer in peers if peer in self._senders and self._senders[peer].busy]

    def close(self) -> None:
        """Ends all links, and the thread."""
        self._loop.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _sender_to(self, peer: WorkerId) -> Sender:
        with self._lock:
            if (sender := self._senders.get(peer)) is None:
                sender = self._senders[peer] = Sender(
                    peer,
                    self._loop,
                    self._dialer,
                    self._contacts,
                    lost=self._lose,
                    left=self._all_left,
                    over=self._over,
                )
            return sender

    def _all_left(self) -> None:
        if self._asked_busy:
            self._inbox.wake()

    def _lose(self, contact: Contact, reason: str) -> None:
        """Tells who waits for a worker that a link with it is broken, unless it was one with a process of the past."""
        self._contacts.if_current(contact, partial(self._inbox.lose, contact.worker, reason))

    # In the loop's thread

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - told to the thread that would wait for us for ever
            self._inbox.fail(error)
        self._listener.close()
        self._loop.close()

    def _look_again(self) -> None:
        """Somebody's contact is new: callers may be known now, and old links be over."""
        self._listener.look_again()
        for worker, reader in list(self._readers.items()):
            if not self._contacts.is_current(reader.contact):
                del self._readers[worker]
                reader.close()
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.look_again()

    def _take_up(self, connection: socket.socket, contact: Contact) -> None:
        """Somebody who has proved to be a worker sends to us from now on."""
        if before := self._readers.pop(contact.worker, None):
            before.close()
        self._readers[contact.worker] = Reader(
            connection, contact, loop=self._loop, inbox=self._inbox, scratch=self._scratch, ended=self._ended
        )

    def _ended(self, reader: Reader, reason: str) -> None:
        del self._readers[reader.contact.worker]
        self._lose(reader.contact, reason)
