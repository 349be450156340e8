"""What workers, agents and the coordinator say to each other: typed values, encoded as msgpack.

Every message is a tagged struct that refuses unknown fields, so nothing but these values can come in from the network.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.errors import ConfigError

__all__ = [
    "Activity",
    "Attached",
    "Blob",
    "Command",
    "Ended",
    "Exited",
    "Failure",
    "Fence",
    "Finished",
    "Heartbeat",
    "Hello",
    "Install",
    "Joined",
    "Message",
    "Progress",
    "Resume",
    "Save",
    "Saved",
    "Shutdown",
    "Status",
    "StepDone",
    "Suspect",
    "decode_command",
    "decode_message",
    "encode",
    "pack",
    "unpack",
]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages: immutable, closed."""


# From workers and agents to the coordinator.


class Exited(_Wire, frozen=True, tag=True, kw_only=True):
    """The agent saw a worker's process end. ``status``: exit code, or minus the signal's number."""

    worker: WorkerId
    status: int


Activity = Literal["waiting", "running", "finished"]


class Hello(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker (or, with ``worker`` empty, the node's agent) attaches, for the first time or again.

    ``generation``, ``activity``, ``step``: where the worker stands; it waits until it was told to run steps, and again
    from when it gives them up. ``exits``: all that the agent has seen so far.
    """

    worker: WorkerId | None
    pid: int
    generation: int = 0
    activity: Activity = "waiting"
    step: int = 0
    exits: tuple[Exited, ...] = ()


class Status(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker has aborted everything older than ``generation`` and says where its layers are.

    ``executed``: (step, number of (layer, micro-batch) pairs that it had begun), of its last steps.
    """

    worker: WorkerId
    generation: int
    layer_steps: tuple[tuple[int, int], ...]
    executed: tuple[tuple[int, int], ...]


class Blob(_Wire, frozen=True, tag=True, kw_only=True):
    """A rendezvous value for the members ``to`` of ``generation``; the coordinator passes it on unread."""

    worker: WorkerId
    generation: int
    key: str
    value: bytes
    to: tuple[WorkerId, ...]


class Joined(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker's transport for ``generation`` stands."""

    worker: WorkerId
    generation: int


class Suspect(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker's communication failed: a suspicion, not a verdict; the coordinator decides."""

    worker: WorkerId
    generation: int
    peer: WorkerId | None
    detail: str


class Heartbeat(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker's progress: the operation index it is at, in ``step`` of ``generation``."""

    worker: WorkerId
    generation: int
    step: int
    op: int


class StepDone(_Wire, frozen=True, tag=True, kw_only=True):
    """The reporting worker swapped in the results of ``step``; ``loss`` is the mean over its micro-batches.

    ``omitted``: a gradient was not finite, so the step left the weights as they were.
    """

    worker: WorkerId
    generation: int
    step: int
    loss: float | None
    omitted: bool


class Finished(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker has run the last step of the job."""

    worker: WorkerId
    generation: int


class Saved(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker wrote the layers that it was asked to; ``digests`` are of all layers that it holds."""

    worker: WorkerId
    generation: int
    digests: tuple[tuple[int, str], ...]


class Failure(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker cannot go on for a reason that no recovery cures."""

    worker: WorkerId
    error: str
    user_fault: bool
    traceback: str = ""


# From the coordinator.


class Attached(_Wire, frozen=True, tag=True, kw_only=True):
    """The coordinator accepted the connection."""


class Install(_Wire, frozen=True, tag=True, kw_only=True):
    """Stop everything older, join ``generation`` with ``plan``; no plan: nothing can be trained any more."""

    generation: int
    plan: Plan | None


class Resume(_Wire, frozen=True, tag=True, kw_only=True):
    """Everyone's state is known: take back whatever is ahead of ``step`` and run from there."""

    generation: int
    step: int


class Save(_Wire, frozen=True, tag=True, kw_only=True):
    """Take back to ``step`` and write ``layers`` into ``directory``."""

    generation: int
    step: int
    layers: tuple[int, ...]
    directory: str


class Shutdown(_Wire, frozen=True, tag=True, kw_only=True):
    """The job is over: exit."""

    reason: str


class Progress(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: a step was done."""

    step: int
    loss: float | None
    omitted: bool
    alive: int
    generation: int


class Fence(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: this worker is no member any more; see to it that its process is gone."""

    worker: WorkerId


class Ended(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: how the job ended. ``outcome``: done, lost, user-error or error."""

    outcome: str
    detail: str
    step: int
    directory: str
    generations: int
    lost_layers: tuple[int, ...]


Message = Hello | Status | Blob | Joined | Suspect | Heartbeat | StepDone | Finished | Saved | Failure | Exited
Command = Attached | Install | Resume | Blob | Save | Shutdown | Progress | Fence | Ended

_encoder = msgspec.msgpack.Encoder()
_parcel: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(value: Message | Command) -> bytes:
    """Returns the wire form of a message or command."""
    return _encoder.encode(value)


def pack(encoded: list[bytes]) -> bytes:
    """Returns one parcel of several encoded messages: what waits to be sent travels together."""
    return _encoder.encode([msgspec.Raw(each) for each in encoded])


def unpack(parcel: bytes) -> list[msgspec.Raw]:
    """Returns the encoded messages of a parcel; raises msgspec.DecodeError if it is none."""
    return _parcel.decode(parcel)


def decode_message(data: bytes | msgspec.Raw) -> Message:
    """Reads what a worker or agent sent; raises msgspec.ValidationError on anything else."""
    try:
        return _message.decode(data)
    except ConfigError as error:  # a value that no worker or plan can have
        raise msgspec.ValidationError(str(error)) from None


def decode_command(data: bytes | msgspec.Raw) -> Command:
    """Reads what the coordinator sent; raises msgspec.ValidationError on anything else."""
    try:
        return _command.decode(data)
    except ConfigError as error:
        raise msgspec.ValidationError(str(error)) from None
