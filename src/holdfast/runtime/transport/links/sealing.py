"""What only two processes can read: both ends agree on a key, and what one sends is sealed with it, record by record.

A key is of one connection, on which one end sends. Each end draws a pair of keys for it (X25519), shows the other one
the public half in the handshake, and makes the connection's key of both halves, of the key that the coordinator has
given to this pair of processes, and of all that was said (HKDF). So whoever steals a pair's key later cannot read what
it has recorded, and whoever sits on the line meanwhile cannot take part.

A record is its size in 4 bytes, and so many bytes of AES-256-GCM whose nonce is the record's number: one that is
changed, said again, or put elsewhere cannot be opened, nor can the one behind one that was left out. What TLS does in
records of 16 KiB at most is done here in longer ones, which mostly are opened right where they belong.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from holdfast.runtime.transport.links.wire import BadFrame

__all__ = ["RECORD_BYTES", "Receiving", "Seal", "SealingSocket", "Sending", "Share", "UnsealingSocket"]

RECORD_BYTES = 256 << 10
"""The longest record, without its size and its tag: the other end opens one while the next one is sealed."""
_SHORT_BYTES = 16 << 10
"""Shorter parts are sealed together; longer ones in records of their own, which can be opened in their place."""
_SIZE_BYTES, _TAG_BYTES, _KEY_BYTES, _NONCE_BYTES = 4, 16, 32, 12
_RECORDS = 1 << 20
"""So many records are sealed with one key: 2^34 blocks at most, far from where AES-GCM can be told from noise."""
_NOTHING = memoryview(b"")


class Share:
    """One end's part in the agreement on a connection's key.

    Attributes:
        public: what the other end is shown, 32 bytes.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, theirs: bytes, pair: bytes, said: bytes) -> Seal:
        """Returns what both ends agree on.

        Args:
            theirs: what the other end has shown.
            pair: the key of this pair of processes.
            said: all that was said in the handshake, by both.

        Raises:
            BadFrame: what the other end has shown is no key.
        """
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise BadFrame("the other end has shown a key of which none can be made") from None
        return Seal(HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=pair, info=said).derive(secret))


class Seal:
    """The key of one connection, for the one end that sends on it or for the one that reads."""

    def __init__(self, key: bytes) -> None:
        self._key, self._cipher, self._number = key, AESGCM(key), 0

    def sending(self, connection: socket.socket) -> SealingSocket:
        """Returns the end that sends."""
        return SealingSocket(connection, self)

    def receiving(self, connection: socket.socket) -> UnsealingSocket:
        """Returns the end that reads."""
        return UnsealingSocket(connection, self)

    def close(self, record: memoryview | bytes, into: memoryview) -> None:
        """Seals the next record; ``into`` is longer by the tag."""
        self._cipher.encrypt_into(self._nonce(), record, None, into)

    def open(self, record: memoryview, into: memoryview) -> None:
        """Opens the next record.

        Raises:
            BadFrame: it is not what the other end has sent next; what is in ``into`` means nothing.
        """
        try:
            self._cipher.decrypt_into(self._nonce(), record, None, into)
        except InvalidTag:
            raise BadFrame("a record that came is not the one that was sent") from None

    def _nonce(self) -> bytes:
        if self._number == _RECORDS:
            self._key = HKDFExpand(algorithm=SHA256(), length=_KEY_BYTES, info=b"next").derive(self._key)
            self._cipher, self._number = AESGCM(self._key), 0
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")


class SealingSocket:
    """A connection on which all that is sent is sealed; the other end says nothing."""

    def __init__(self, connection: socket.socket, seal: Seal) -> None:
        self._connection, self._seal = connection, seal
        self.fileno, self.close = connection.fileno, connection.close
        self.getsockopt, self.recv = connection.getsockopt, connection.recv
        self._room = memoryview(bytearray(_SHORT_BYTES))
        self._sealed, self._taken = _NOTHING, 0

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Sends some of what is to be sent; returns how many bytes of it.

        Raises:
            BlockingIOError: what is sealed has not gone yet, as a whole; the same is to be said again.
            OSError: the connection is broken.
        """
        if not self._sealed:
            self._put_under_seal(parts)
        while self._sealed:
            self._sealed = self._sealed[self._connection.send(self._sealed) :]
        return self._taken

    def _put_under_seal(self, parts: Sequence[memoryview]) -> None:
        end = self._taken = 0
        for record in _records(parts):
            begin, end = end + _SIZE_BYTES, end + _SIZE_BYTES + len(record) + _TAG_BYTES
            if end > len(self._room):
                longer = memoryview(bytearray(max(end, 2 * RECORD_BYTES)))
                longer[: begin - _SIZE_BYTES] = self._room[: begin - _SIZE_BYTES]
                self._room = longer
            self._room[begin - _SIZE_BYTES : begin] = (end - begin).to_bytes(_SIZE_BYTES, "big")
            self._seal.close(record, self._room[begin:end])
            self._taken += len(record)
            if self._taken >= RECORD_BYTES:
                break
        self._sealed = self._room[:end]


def _records(parts: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
    """Cuts what is to be sent into records."""
    short: list[memoryview] = []
    size = 0
    for part in parts:
        if size and size + len(part) > _SHORT_BYTES:
            yield b"".join(short)
            short, size = [], 0
        if len(part) <= _SHORT_BYTES:
            short.append(part)
            size += len(part)
        else:
            yield from (part[at : at + RECORD_BYTES] for at in range(0, len(part), RECORD_BYTES))
    if size:
        yield b"".join(short)


class UnsealingSocket:
    """A connection on which all that comes is sealed."""

    def __init__(self, connection: socket.socket, seal: Seal) -> None:
        self._connection, self._seal = connection, seal
        self.fileno, self.close = connection.fileno, connection.close
        self._came = memoryview(bytearray(_SHORT_BYTES))  # what is in it from `_at` to `_end` is not opened yet
        self._at = self._end = 0
        self._ended = False
        self._opened = self._room = _NOTHING  # of a record that was longer than the place for it, the rest

    def recv_into(self, place: memoryview) -> int:
        """Reads what has come, as a socket does: if that is less than there is room for, more is in the kernel alone.

        Returns:
            How many bytes are in their place; 0 if the other end has closed the connection.

        Raises:
            BlockingIOError: nothing has come as a whole.
            BadFrame: what came is not what the other end has sent.
            OSError: the connection is broken.
        """
        filled = 0
        while filled < len(place):
            if self._opened:
                size = min(len(self._opened), len(place) - filled)
                place[filled : filled + size] = self._opened[:size]
                self._opened = self._opened[size:]
                filled += size
            elif (record := self._whole_record()) is not None:
                filled += self._unseal(record, place[filled:])
            elif filled or not self._fetch():
                break
        if not (filled or self._ended):
            raise BlockingIOError
        return filled

    def _unseal(self, record: memoryview, place: memoryview) -> int:
        """Opens a record where it belongs, or, if that is too short for it, elsewhere; returns how much is there."""
        size = len(record) - _TAG_BYTES
        if size <= len(place):
            self._seal.open(record, place[:size])
            return size
        if len(self._room) < size:
            self._room = memoryview(bytearray(size))
        self._seal.open(record, self._room[:size])
        self._opened = self._room[:size]
        return 0

    def _whole_record(self) -> memoryview | None:
        """Takes the next record out of what came, if it is there as a whole."""
        if self._end - self._at < (whole := self._next_bytes()):
            return None
        record = self._came[self._at + _SIZE_BYTES : self._at + whole]
        self._at += whole
        return record

    def _next_bytes(self) -> int:
        """How many bytes the next record has, with its size; as many as that size, if it has not come yet."""
        begin = self._at + _SIZE_BYTES
        if begin > self._end:
            return _SIZE_BYTES
        size = int.from_bytes(self._came[self._at : begin], "big")
        if not _TAG_BYTES < size <= RECORD_BYTES + _TAG_BYTES:
            raise BadFrame(f"a sealed record of {size} bytes")
        return _SIZE_BYTES + size

    def _fetch(self) -> bool:
        """Reads once more: up to the end of the record that has begun, or the first bytes of what comes next.

        Returns:
            Whether anything has come.
        """
        whole, held = self._next_bytes(), self._end - self._at
        room = self._came
        if whole > len(room):
            room = memoryview(bytearray(_SIZE_BYTES + RECORD_BYTES + _TAG_BYTES))
        room[:held] = self._came[self._at : self._end]
        self._came, self._at, self._end = room, 0, held
        try:
            came = self._connection.recv_into(room[held : max(whole, _SHORT_BYTES)])
        except BlockingIOError:
            return False
        self._ended = not came
        self._end += came
        return came > 0


Sending = socket.socket | SealingSocket
Receiving = socket.socket | UnsealingSocket
"""Either end of a link, which may be in the clear."""
