"""The transport port: what carries tensors between workers, one generation at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload, Receive, Reduction, Send
from holdfast.core.program import WorkerProgram
from holdfast.core.summing import Contribution, SumSize, Total, add_up
from holdfast.core.tensorspec import TensorSpec

if TYPE_CHECKING:  # keys are used where nobody has loaded torch
    import torch

__all__ = [
    "Expected",
    "MessageHandle",
    "MessageKey",
    "ReadySum",
    "Sent",
    "SumHandle",
    "SumKey",
    "Transport",
]


@dataclass(frozen=True, slots=True)
class MessageKey:
    """What a message is: it travels with it and is checked on arrival.

    Attributes:
        generation: the membership under which it was sent.
        step: the step that it belongs to.
        payload: activation, gradient, vote or verdict.
        microbatch: global number of the micro-batch.
        boundary: how many layers lie before it, of an activation or a gradient; else 0.
    """

    generation: int
    step: int
    payload: Payload
    microbatch: int
    boundary: int = 0

    @classmethod
    def of(cls, message: Send | Receive, generation: int, step: int) -> MessageKey:
        """Returns the key of a message of a program, at either end."""
        return cls(
            generation=generation,
            step=step,
            payload=message.payload,
            microbatch=message.microbatch.number,
            boundary=message.boundary,
        )


@dataclass(frozen=True, slots=True)
class SumKey:
    """What a reduction is: its contributions travel with it.

    Attributes:
        generation: the membership under which it is made.
        step: the step that it belongs to.
        reduction: what is summed, over whom.
    """

    generation: int
    step: int
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class Expected:
    """What others send to a worker in one step: all that its plan lets it expect.

    Attributes:
        messages: each with what it holds.
        sums: each with the most that anybody contributes.
    """

    messages: tuple[tuple[Receive, TensorSpec], ...]
    sums: tuple[tuple[Reduction, SumSize], ...]

    @classmethod
    def of(
        cls,
        programs: Iterable[WorkerProgram],
        spec_of: Callable[[Receive], TensorSpec],
        size_of: Callable[[tuple[int, ...]], SumSize],
    ) -> Expected:
        """Returns what a worker's programs make it expect.

        Args:
            programs: of the worker.
            spec_of: what a message holds.
            size_of: the most that anybody contributes to the sum over these layers.
        """
        all_of_them = tuple(programs)
        every = (each for program in all_of_them for each in (*program.closing, *program.besides))
        receives = (each for each in every if isinstance(each, Receive))
        sums = dict.fromkeys(each for program in all_of_them for each in program.reductions)
        return cls(
            messages=tuple((each, spec_of(each)) for each in receives),
            sums=tuple((each, size_of(each.layers)) for each in sums if len(each.workers) > 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that a worker has sent, in ``messages`` to others, for ``sums`` and of its ``state``.

    ``carried``: of these, those that went by another way than links.
    """

    messages: int = 0
    sums: int = 0
    state: int = 0
    carried: int = 0

    def since(self, before: Sent) -> Sent:
        """Returns what was sent after ``before``."""
        return Sent(
            messages=self.messages - before.messages,
            sums=self.sums - before.sums,
            state=self.state - before.state,
            carried=self.carried - before.carried,
        )


class MessageHandle(Protocol):
    """A receive under way."""

    def wait(self) -> torch.Tensor:
        """Blocks until the tensor is there.

        Raises:
            StaleGeneration: the transport was aborted.
            PeerLost: the other end is gone. The transport can only be closed then.
        """

    def kept(self) -> torch.Tensor | None:
        """Returns what has come, whether or not the generation is over; None if it has not, or not all of it.

        The handle is not to be waited for afterwards.
        """


class SumHandle(Protocol):
    """A reduction under way."""

    def wait(self) -> Total:
        """Blocks until the sum is there; see MessageHandle.wait.

        Raises:
            HoldfastError: the contributions do not make a sum, as whoever folds them says.
        """

    @property
    def ready(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""


@dataclass(frozen=True, slots=True)
class ReadySum:
    """A handle of the sum of one worker alone."""

    contribution: Contribution

    @property
    def ready(self) -> bool:
        """See SumHandle."""
        return True

    def wait(self) -> Total:
        """See SumHandle."""
        return add_up((self.contribution,))


class Transport(Protocol):
    """Carries the tensors of one generation at a time. All but ``abort`` are called from one thread."""

    def build(
        self,
        generation: int,
        groups: tuple[tuple[WorkerId, ...], ...],
        neighbours: tuple[WorkerId, ...] = (),
        *,
        step: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        """Connects the members of every group that we are in; blocks until all have come.

        Args:
            generation: greater than any before.
            groups: of workers that exchange messages, or sum.
            neighbours: with whom we may have to connect in another generation.
            step: before which all come to this generation; None while that is not agreed upon.
            expected: what others send to us in each step; None: not known, as where two ends trust each other.

        Raises:
            StaleGeneration: aborted meanwhile.
            PeerLost: a member is gone. One that was never there may be waited for until somebody aborts.
            InternalError: a member comes before another step, where that is heard of.
        """

    def send(self, key: MessageKey, peer: WorkerId, tensor: torch.Tensor) -> None:
        """Starts to send, at once or when it is computed; one in the host's memory may be changed when this returns.

        One in a device's memory goes as it is where that was ``straight``.
        """

    def receive(self, key: MessageKey, peer: WorkerId, spec: TensorSpec) -> MessageHandle:
        """Starts to receive what ``peer`` sends under the same key."""

    def all_reduce(self, key: SumKey, contribution: Contribution) -> SumHandle:
        """Starts to sum what all of the reduction's workers contribute, out of place.

        Nobody changes the argument any more, nor what the handle gives: either may still be on its way to others.

        All workers submit the reductions of the same workers in the same order.
        """

    def straight(self, peers: Iterable[WorkerId], size: int) -> bool:
        """Whether so many bytes go to all others of these from a device's memory, and are not copied to the host's.

        What is given so may come so: what a handle returns is made beside the computation, see Device.joined.
        """

    def hand_on(self) -> None:
        """Has begun, behind this, to send all that was given: called before the worker waits for anything.

        Raises:
            StaleGeneration: aborted meanwhile.
            PeerLost: the other end is gone.
        """

    def drain(self) -> None:
        """Waits until everything sent has left, so that our end loses nothing of it.

        Raises:
            StaleGeneration: aborted meanwhile.
            PeerLost: the other end is gone.
        """

    @property
    def sent(self) -> Sent | None:
        """How much was given to be sent since the beginning; None if nobody counts."""

    def abort(self, generation: int) -> None:
        """Ends ``generation`` and all before it, from any thread: whoever waits gets StaleGeneration, soon."""

    def close(self) -> None:
        """Gives back everything."""
