"""The link from one worker: takes chunks off its connection and puts them where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.control.messages import Peer
from holdfast.runtime.transport.links.inbox import Inbox, Incoming
from holdfast.runtime.transport.links.loop import READ, EventLoop
from holdfast.runtime.transport.links.slices import Slices
from holdfast.runtime.transport.links.wire import BACKGROUND, CHUNK_BYTES, HEADER_BYTES, BadFrame, Chunk, Kind, after

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.carrier import Carriers
    from holdfast.runtime.transport.links.sealing import Receiving

__all__ = ["SCRATCH_BYTES", "Reader"]

SCRATCH_BYTES = 64 << 10
"""How much is read at once where it is not known yet what comes."""
_READS = 16
"""How often one link is read at a stretch."""
_NOTHING = memoryview(b"")


class Reader:
    """One link, in the loop's thread.

    Attributes:
        peer: who sends on it.
        entered: the newest generation that was entered on it, in which something may be lost with it; 0: none.

    Args:
        connection: with somebody who has proved who it is.
        peer: who that is.
        loop: which waits for what comes.
        inbox: where it goes,
        slices: but for what belongs to no step.
        carriers: bring bodies that go by another way; None: none does.
        scratch: so many bytes that all links of the loop use, one after another.
        ended: told, with the reason, that the connection has ended, unless it was closed here.
    """

    def __init__(
        self,
        connection: Receiving,
        peer: Peer,
        *,
        loop: EventLoop,
        inbox: Inbox,
        slices: Slices,
        carriers: Carriers | None,
        scratch: memoryview,
        ended: Callable[[Reader, str], None],
    ) -> None:
        self.peer, self.entered = peer, 0
        self._connection, self._loop, self._scratch, self._ended = connection, loop, scratch, ended
        self._inbox, self._slices, self._carriers = inbox, slices, carriers
        self._head = b""
        self._chunk: Chunk | None = None
        self._incoming: Incoming | None = None
        self._target = self._room = _NOTHING
        self._filled = self._number = 0
        self._amid = self._hung_up = self._closed = False
        loop.watch(connection, READ, lambda _: self._read())

    def close(self) -> None:
        """Ends the link."""
        self._closed = True
        self._loop.hang_up(self._connection)

    def _read(self) -> None:
        """Takes what has come, as far as it goes, but for others' sake not for ever."""
        if self._closed:
            return
        reason, tries = "it closed its connection", _READS
        try:
            while tries and self._read_some():
                tries -= 1
            if not tries:
                self._loop.do(self._read)
            if not self._hung_up:
                return
        except BadFrame as error:
            reason = str(error)
        except OSError as error:
            reason = f"its connection broke: {error.strerror or error}"
        self.close()
        self._ended(self, reason)

    def _read_some(self) -> bool:
        """Reads once, into the place of the chunk that is coming, or to find the next; returns if there may be more."""
        kept = len(self._head)
        # Behind a chunk that another one follows, the header alone is read: the rest goes where it belongs, uncopied.
        most = HEADER_BYTES if self._amid else SCRATCH_BYTES
        room = self._scratch[kept:most] if self._chunk is None else self._target[self._filled :]
        try:
            came = self._connection.recv_into(room)
        except BlockingIOError:
            return False
        self._hung_up = not came
        if self._chunk is None:
            self._scratch[:kept] = self._head
            self._take_in(kept + came)
        else:
            self._fill(came)
        return came == len(room)

    def _fill(self, size: int) -> None:
        """So many bytes more of a chunk are where they belong."""
        self._filled += size
        if self._chunk is not None and self._filled == self._chunk.size:
            chunk, incoming, self._chunk, self._incoming = self._chunk, self._incoming, None, None
            self._amid = chunk.offset + chunk.size < chunk.total
            if incoming is not None:
                self._taker_of(chunk).add(incoming, chunk)
            self._target = _NOTHING  # nobody's memory is kept for what comes next

    def _take_in(self, size: int) -> None:
        """Reads the headers in what has come, and puts what is behind them where it belongs."""
        at = 0
        while self._chunk is None and size - at >= HEADER_BYTES:
            self._chunk = chunk = Chunk.unpack(self._scratch, at)
            if chunk.number != self._number:
                raise BadFrame(f"chunk {chunk.number} where {self._number} was to come")
            self._number = after(self._number)
            at += HEADER_BYTES
            self._incoming = self._taker_of(chunk).begin(self.peer.worker, chunk)
            if chunk.carried:
                self._carry(chunk, self._incoming)
                continue
            if chunk.label.kind is Kind.ENTER:
                self.entered = chunk.label.generation
            place = None if self._incoming is None else self._incoming.place(chunk)
            here = min(chunk.size, size - at)
            if place is None and here == chunk.size:  # it need not be put anywhere
                self._target = self._scratch[at : at + here]
            else:
                self._target = self._room_for(chunk.size) if place is None else place
                self._target[:here] = self._scratch[at : at + here]
            self._filled = 0
            self._fill(here)
            at += here
        self._head = bytes(self._scratch[at:size])

    def _carry(self, chunk: Chunk, incoming: Incoming | None) -> None:
        """Its body comes by another way."""
        self._chunk = self._incoming = None
        if self._carriers is None:
            raise BadFrame(f"{chunk.label} is to be carried, and nothing is carried here")
        self._carriers.receive(self.peer, chunk, incoming)

    def _taker_of(self, chunk: Chunk) -> Inbox | Slices | Carriers:
        if chunk.label.kind is Kind.CARRIER and self._carriers is not None:
            return self._carriers
        return self._slices if chunk.label.kind in BACKGROUND else self._inbox

    def _room_for(self, size: int) -> memoryview:
        """The link's own place for a chunk that belongs nowhere as a whole."""
        if len(self._room) < size:
            self._room = memoryview(bytearray(CHUNK_BYTES))
        return self._room[:size]
