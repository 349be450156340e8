"""All links of one worker: those that it sends on, those that it reads, and the thread that serves them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from holdfast.control.messages import Here, Peer
from holdfast.core.ids import WorkerId
from holdfast.runtime.tensors import settle_thread
from holdfast.runtime.transport.framing import Body
from holdfast.runtime.transport.links.dialer import Dialer
from holdfast.runtime.transport.links.handshake import NONCE_BYTES, Draw, listening
from holdfast.runtime.transport.links.inbox import Inbox
from holdfast.runtime.transport.links.listener import Listener
from holdfast.runtime.transport.links.loop import EventLoop
from holdfast.runtime.transport.links.peers import Peers
from holdfast.runtime.transport.links.reader import SCRATCH_BYTES, Reader
from holdfast.runtime.transport.links.sender import Sender, look_s
from holdfast.runtime.transport.links.slices import Slices
from holdfast.runtime.transport.links.wire import Kind, Label

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.carrier import Carriers, Carrying
    from holdfast.runtime.transport.links.sealing import Receiving

__all__ = ["ConnectionManager"]


class ConnectionManager:
    """What any thread may do with the links of a worker.

    Attributes:
        slices: what belongs to no step.

    Args:
        worker: who we are.
        inbox: where goes what comes of a step.
        host: the address to listen on, at a free port.
        silent_s: how long another worker's host may leave what is sent to it without acknowledging anything.
        sealed: whether only both ends can read what goes over a link; it needs the package ``cryptography``.
        carrying: how the bodies of long messages are carried by another way; None: links carry all.
    """

    def __init__(
        self,
        worker: WorkerId,
        inbox: Inbox,
        *,
        host: str,
        silent_s: float,
        sealed: bool = False,
        carrying: Carrying | None = None,
    ) -> None:
        self.slices = Slices(self.send)
        self._inbox = inbox
        self._silent_s = silent_s
        self._peers = Peers()
        nonce = os.urandom(NONCE_BYTES)
        # Any thread adds to `_senders` and raises `_over`, under the lock, which is not held while a sender is used:
        # that has a lock of its own. Nobody is ever taken out, so `busy` looks without it. `_asked_busy` only ever
        # becomes true. `_readers`, `_scratch`, `_dialer` and `_listener` are the links' thread's alone.
        self._lock = threading.Lock()
        self._senders: dict[WorkerId, Sender] = {}
        self._over = 0
        self._readers: dict[WorkerId, Reader] = {}
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._asked_busy = False
        draw: Draw | None = None
        if sealed:
            from holdfast.runtime.transport.links.sealing import Share

            draw = Share
        self._carriers: Carriers | None = None
        if carrying is not None:
            from holdfast.runtime.transport.links.carrier import Carriers

            self._carriers = Carriers(
                worker,
                carrying,
                current=self._peers.of,
                say=self.send,
                lost=self._carrier_lost,
                left=self._all_left,
                add=inbox.add,
                broke=inbox.fail,
                memory=inbox.memory,
            )
        self._loop = EventLoop()
        self._dialer = Dialer(self._loop, worker, nonce, draw)
        dialogue = partial(listening, worker, nonce, self._peers.known, draw)
        self._listener = Listener(self._loop, host, dialogue, self._take_up)
        self.here = Here(address=self._listener.address, nonce=nonce)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def meet(self, peers: Iterable[Peer]) -> None:
        """Learns who the others are now; a link with another process of the same worker is over from now on."""
        told = tuple(peers)
        self._inbox.await_anew({peer.worker for peer in told if not self._peers.is_current(peer)})
        self._peers.learn(told)  # only now are new processes let in
        with self._lock:
            known = [self._senders[peer.worker] for peer in told if peer.worker in self._senders]
        for sender in known:
            sender.renew()
        self._loop.do(self._look_again)

    def send(self, to: WorkerId, label: Label, body: Body, *, lent: bool = False, more: bool = False) -> None:
        """Sends a message, at once or as soon as that can be done; its bytes stay ours if they are lent.

        Or with the next one, if there is ``more`` for the same worker at once.

        A generation begins with ENTER; what belongs to none that has begun, or to one that is over, is not sent.
        """
        self._sender_to(to).send(label, body, lent=lent, more=more)

    def warm_up(self, workers: Iterable[WorkerId]) -> None:
        """Connects with workers to whom something may have to be sent later."""
        for worker in workers:
            self._sender_to(worker).warm_up()

    def drop(self, generation: int) -> None:
        """Forgets what is still to be sent of a generation and all before it, and sends no more of them."""
        with self._lock:
            self._over = max(self._over, generation)
        for sender in self._all_senders():
            sender.drop(generation)

    def busy(self, workers: Iterable[WorkerId], generation: int) -> list[WorkerId]:
        """To whom something of a generation, the last one, is still to be sent.

        From now on, whoever waits in the inbox is woken when that changes.
        """
        self._asked_busy = True
        return [worker for worker in workers if self._is_busy(worker, generation)]

    def _is_busy(self, worker: WorkerId, generation: int) -> bool:
        if self._carriers is not None and self._carriers.busy(worker, generation):
            return True
        return worker in self._senders and self._senders[worker].busy

    def sent(self) -> Counter[Kind]:
        """How many bytes were given to be sent, by kind."""
        return sum((sender.sent for sender in self._all_senders()), Counter())

    def straight(self, workers: Iterable[WorkerId], size: int) -> bool:
        """Whether what is so long goes to all of these from a device's memory."""
        carriers = self._carriers
        return carriers is not None and all(carriers.straight(worker, size) for worker in workers)

    @property
    def carried(self) -> int:
        """How many bytes went by another way."""
        return 0 if self._carriers is None else sum(self._carriers.carried.values())

    def close(self) -> None:
        """Ends all links, and the thread."""
        self._loop.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _sender_to(self, worker: WorkerId) -> Sender:
        with self._lock:
            if (sender := self._senders.get(worker)) is None:
                sender = self._senders[worker] = Sender(
                    worker,
                    self._loop,
                    self._dialer,
                    self._peers,
                    lost=self._lose,
                    left=self._all_left,
                    over=self._over,
                    carriers=self._carriers,
                )
            return sender

    def _all_senders(self) -> list[Sender]:
        with self._lock:
            return list(self._senders.values())

    def _all_left(self) -> None:
        if self._asked_busy:
            self._inbox.wake()

    def _lose(self, peer: Peer, reason: str, since: int) -> None:
        """Tells who waits for a worker that a link with it is broken, unless it was one with a process of the past."""
        if self._carriers is not None:
            self._carriers.forget(peer)
        self._peers.if_current(peer, partial(self._inbox.lose, peer.worker, reason, since))
        self._peers.if_current(peer, partial(self.slices.lose, peer.worker, reason))

    def _carrier_lost(self, peer: Peer, reason: str, since: int) -> None:
        """What carried between us and a process has failed: so the links with it end, by which it hears of that."""
        self._lose(peer, reason, since)
        self._loop.do(partial(self._break_off, peer, reason))

    # In the loop's thread

    def _break_off(self, peer: Peer, reason: str) -> None:
        reader, sender = self._readers.get(peer.worker), self._senders.get(peer.worker)
        if reader is not None and reader.peer.here.nonce == peer.here.nonce:
            reader.close()
            self._ended(reader, reason)
        if sender is not None:
            sender.break_off(peer, reason)

    def _run(self) -> None:
        settle_thread()  # sums are folded here, while the worker computes
        try:
            self._look_out()
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - told to the thread that would wait for us for ever
            self._inbox.fail(error)
            self.slices.fail(error)
        self._listener.close()
        self._loop.close()
        if self._carriers is not None:
            self._carriers.close()

    def _look_again(self) -> None:
        """Somebody's process is new: callers may be known now, and old links be over."""
        self._listener.look_again()
        for worker, reader in list(self._readers.items()):
            if not self._peers.is_current(reader.peer):
                del self._readers[worker]
                self._forget(reader)
        for sender in self._all_senders():
            sender.look_again()

    def _look_out(self) -> None:
        """Looks, again and again, whether the hosts of those to whom we send are there."""
        for sender in self._all_senders():
            sender.look(self._silent_s)
        self._loop.after(look_s(self._silent_s), self._look_out)

    def _take_up(self, connection: Receiving, peer: Peer) -> None:
        """Somebody who has proved to be a worker sends to us from now on."""
        if before := self._readers.pop(peer.worker, None):
            self._forget(before)
        self._readers[peer.worker] = Reader(
            connection,
            peer,
            loop=self._loop,
            inbox=self._inbox,
            slices=self.slices,
            carriers=self._carriers,
            scratch=self._scratch,
            ended=self._ended,
        )

    def _forget(self, reader: Reader) -> None:
        """Closes a link in whose place another one comes; what was announced on it may have been lost."""
        reader.close()
        if self._carriers is not None:
            self._carriers.forget(reader.peer)

    def _ended(self, reader: Reader, reason: str) -> None:
        del self._readers[reader.peer.worker]
        self._lose(reader.peer, reason, reader.entered)  # who has yet to come says so on another link
