"""What people may ask whoever leads a job for: that a node goes, or that the job ends; and what it says to that."""

from __future__ import annotations

import msgspec

from holdfast.control.membership import Membership, Tell
from holdfast.control.messages import Leave, Message, Preempted
from holdfast.core.nodes import NodeId
from holdfast.errors import HoldfastError
from holdfast.parsing import parsing

__all__ = ["Answer", "Drain", "Order", "Stop", "consider", "decode_order"]


class Drain(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The workers of nodes are to leave: of all that are called ``node``, or of those of them with these nonces."""

    node: str
    only: tuple[str, ...] = ()


class Stop(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The job is to end behind a checkpoint, or ``at_once`` without one."""

    at_once: bool = False


Order = Drain | Stop


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of an order: ``text``, for people; ``refused``: nothing. ``nodes``: the nonces of those drained."""

    text: str
    refused: bool = False
    nodes: tuple[str, ...] = ()


_order: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def decode_order(data: bytes) -> Order:
    """Reads what somebody asked for; raises msgspec.ValidationError on anything else."""
    try:
        with parsing(msgspec.ValidationError):
            return _order.decode(data)
    except HoldfastError as error:
        raise msgspec.ValidationError(str(error)) from None


def consider(order: Order, state: Membership) -> tuple[Answer, Message | None, tuple[Tell, ...]]:
    """Returns what is said to an order, what happens to the job by it, and what agents are told.

    An order may be given again: nothing is done twice.
    """
    match order:
        case Drain():
            answer, nodes = _drained(order, state)
            return answer, None, tuple(Tell(to=None, node=node, command=Leave()) for node in nodes)
        case Stop(at_once=True):
            return Answer(text="it ends at once"), Preempted(at_once=True), ()
        case Stop() if not state.rules.checkpoint_every:
            text = "it makes no checkpoints (checkpoint.every), so all that it has done would be lost; it goes on"
            return Answer(text=text, refused=True), None, ()
        case Stop():
            return Answer(text="it makes a checkpoint, and ends"), Preempted(), ()


def _drained(order: Drain, state: Membership) -> tuple[Answer, tuple[NodeId, ...]]:
    name, contact = order.node, state.contact
    called = [node for node in contact.agents if node.name == name and node.nonce in (order.only or (node.nonce,))]
    told = tuple(node for node in called if node in contact.here)
    if not called:
        names = ", ".join(sorted({node.name for node in contact.agents})) or "none yet"
        return Answer(text=f"there is no node {name}; nodes: {names}", refused=True), ()
    if not told:
        return Answer(text=f"node {name} has no connection just now", refused=True), ()
    workers = ", ".join(str(worker) for node in told for worker in state.roster.on(node)) or "it has none"
    text = f"node {name} is told that its workers are to leave: {workers}"
    return Answer(text=text, nodes=tuple(node.nonce for node in told)), told
