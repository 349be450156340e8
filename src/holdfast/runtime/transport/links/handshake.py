"""Two workers prove to each other that the coordinator has given them the key of their pair.

    dialer                                            listener
      HELLO: who it is, its process, a fresh number ->
                                  <- ANSWER: a fresh number, and a proof over both ends and both numbers
      PROOF: the same, the other way round         ->

No key travels. A proof is good for one direction of one pair of processes and for the two numbers that were drawn for
it, so a recorded handshake proves nothing. What is read before is 64 bytes of a stranger, and then 32.

Where links are sealed both say, beside their numbers, their :class:`~holdfast.runtime.transport.links.sealing.Share` in
the connection's key, 32 bytes more: what is proved is proved over these, too.

Nor does the number travel that a process has drawn for itself, but a digest of it: keys are made of these numbers and
of the job's token, and so who has nothing but the token, and listens, cannot make them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast.control.messages import Peer
from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError
from holdfast.runtime.transport.links.wire import BadFrame

if TYPE_CHECKING:
    from holdfast.runtime.transport.links.sealing import Seal, Share

__all__ = ["NONCE_BYTES", "UNKNOWN", "Dialogue", "Met", "Turn", "dialing", "listening", "mark"]

NONCE_BYTES = 16
_CLEAR, _SEALED = b"holdfast link 1\n", b"holdfast seal 1\n"
_NAME = struct.Struct("<16s")
_HELLO_BYTES = len(_CLEAR) + _NAME.size + 2 * NONCE_BYTES
_PROOF_BYTES = _SHARE_BYTES = 32
UNKNOWN = object()
"""What a handshake yields while nobody has told who the caller is."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one end does next: sends something, then reads so many bytes, which are sent back into the generator."""

    send: bytes
    read: int


class Met(NamedTuple):
    """Who the other end is, and what seals what goes from the dialer to the listener; None: it is in the clear."""

    peer: Peer
    seal: Seal | None


Draw = Callable[[], "Share"]
Dialogue = Generator[Turn | object, bytes, Met]
"""One end of a handshake; returns whom it was with. Raises BadFrame: the other end could not prove who it is."""


def dialing(worker: WorkerId, nonce: bytes, to: Peer, draw: Draw | None = None) -> Dialogue:
    """The end that will send.

    Args:
        worker: who we are.
        nonce: of our process.
        to: whom we call.
        draw: draws our share in the key of this connection; None: it stays in the clear.
    """
    share = draw() if draw else None
    ours = _fresh(share)
    hello = (_SEALED if share else _CLEAR) + _NAME.pack(str(worker).encode()) + mark(nonce) + ours
    answer = yield Turn(hello, len(ours) + _PROOF_BYTES)
    theirs, proof = answer[: len(ours)], answer[len(ours) :]
    said = hello + _NAME.pack(str(to.worker).encode()) + to.here.nonce + theirs
    _check(proof, to.key, b"listener" + said)
    yield Turn(_proof(to.key, b"dialer" + said), 0)
    return _met(to, share, theirs, said)


def listening(
    worker: WorkerId, nonce: bytes, known: Callable[[WorkerId, bytes], Peer | None], draw: Draw | None = None
) -> Dialogue:
    """The end that will read; yields UNKNOWN while the caller is not known.

    Args:
        worker: who we are.
        nonce: of our process.
        known: the process of a worker by the mark of its nonce; None if we were told of no such process.
        draw: see dialing.
    """
    magic = _SEALED if draw else _CLEAR
    hello = yield Turn(b"", _HELLO_BYTES)
    if hello[: len(magic)] != magic:
        raise BadFrame("whoever called does not speak as a worker")
    if draw:
        hello += yield Turn(b"", _SHARE_BYTES)
    at = len(magic) + _NAME.size
    name, caller = hello[len(magic) : at].rstrip(b"\0"), hello[at : at + NONCE_BYTES]
    try:
        source = WorkerId.parse(name.decode("ascii"))
    except (ConfigError, UnicodeDecodeError):
        raise BadFrame("whoever called has no worker's name") from None
    while (peer := known(source, caller)) is None:
        yield UNKNOWN
    share = draw() if draw else None
    ours = _fresh(share)
    said = hello + _NAME.pack(str(worker).encode()) + nonce + ours
    proof = yield Turn(ours + _proof(peer.key, b"listener" + said), _PROOF_BYTES)
    _check(proof, peer.key, b"dialer" + said)
    return _met(peer, share, hello[at + NONCE_BYTES :], said)


def mark(nonce: bytes) -> bytes:
    """Returns by which a process is known to whoever has been told its nonce, and to nobody else."""
    return hashlib.blake2b(nonce, digest_size=NONCE_BYTES).digest()


def _fresh(share: Share | None) -> bytes:
    """What one end draws for this connection alone."""
    return os.urandom(NONCE_BYTES) + (share.public if share else b"")


def _met(peer: Peer, share: Share | None, theirs: bytes, said: bytes) -> Met:
    return Met(peer, share.agree(theirs[NONCE_BYTES:], peer.key, said) if share else None)


def _proof(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, said, "sha256")


def _check(proof: bytes, key: bytes, said: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(key, said)):
        raise BadFrame("the other end does not know the key of this pair")
