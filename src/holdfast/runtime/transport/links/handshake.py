"""Two workers prove to each other that the coordinator has given them the key of their pair.

    dialer                                            listener
      HELLO: who it is, its process, a fresh number ->
                                  <- ANSWER: a fresh number, and a proof over both ends and both numbers
      PROOF: the same, the other way round         ->

No key travels. A proof is good for one direction of one pair of processes and for the two numbers that were drawn for
it, so a recorded handshake proves nothing. What is read before is 64 bytes of a stranger, and then 32.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError
from holdfast.runtime.transport.links.wire import BadFrame

__all__ = ["NONCE_BYTES", "UNKNOWN", "Dialogue", "Turn", "dialing", "listening"]

NONCE_BYTES = 16
_MAGIC = b"holdfast link 1\n"
_NAME = struct.Struct("<16s")
_HELLO_BYTES = len(_MAGIC) + _NAME.size + 2 * NONCE_BYTES
_PROOF_BYTES = 32
UNKNOWN = object()
"""What a handshake yields while nobody has told who the caller is."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one end does next: sends something, then reads so many bytes, which are sent back into the generator."""

    send: bytes
    read: int


Dialogue = Generator[Turn | object, bytes, Peer]
"""One end of a handshake; returns whom it was with. Raises BadFrame: the other end could not prove who it is."""


def dialing(worker: WorkerId, nonce: bytes, to: Peer) -> Dialogue:
    """The end that will send.

    Args:
        worker: who we are.
        nonce: of our process.
        to: whom we call.
    """
    ours = os.urandom(NONCE_BYTES)
    hello = _MAGIC + _NAME.pack(str(worker).encode()) + nonce + ours
    answer = yield Turn(hello, NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    said = hello + _NAME.pack(str(to.worker).encode()) + to.here.nonce + theirs
    _check(proof, to.key, b"listener" + said)
    yield Turn(_proof(to.key, b"dialer" + said), 0)
    return to


def listening(worker: WorkerId, nonce: bytes, known: Callable[[WorkerId, bytes], Peer | None]) -> Dialogue:
    """The end that will read; yields UNKNOWN while the caller is not known.

    Args:
        worker: who we are.
        nonce: of our process.
        known: the process of a worker with that nonce; None if we were told of no such process.
    """
    hello = yield Turn(b"", _HELLO_BYTES)
    if hello[: len(_MAGIC)] != _MAGIC:
        raise BadFrame("whoever called does not speak as a worker")
    at = len(_MAGIC) + _NAME.size
    name, caller = hello[len(_MAGIC) : at].rstrip(b"\0"), hello[at : at + NONCE_BYTES]
    try:
        source = WorkerId.parse(name.decode("ascii"))
    except (ConfigError, UnicodeDecodeError):
        raise BadFrame("whoever called has no worker's name") from None
    while (peer := known(source, caller)) is None:
        yield UNKNOWN
    ours = os.urandom(NONCE_BYTES)
    said = hello + _NAME.pack(str(worker).encode()) + nonce + ours
    proof = yield Turn(ours + _proof(peer.key, b"listener" + said), _PROOF_BYTES)
    _check(proof, peer.key, b"dialer" + said)
    return peer


def _proof(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, said, "sha256")


def _check(proof: bytes, key: bytes, said: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(key, said)):
        raise BadFrame("the other end does not know the key of this pair")
