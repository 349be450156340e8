"""The executor: runs one worker's program for one step, without doing any I/O itself.

It is a generator. It yields what is to be sent, received, computed and reduced; a shell does it (over sockets, or under
a virtual clock) and sends the result back in, or throws a ClusterError in at the place where it happened. The compute
engine is reached through :class:`StagePort`; of it only the operations that take time go through the shell.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.core.faults import Point
from holdfast.core.ids import MicroBatch
from holdfast.core.lower import Compute, Instruction, Payload, Receive, Reduce, Reduction, Send, Step, WorkerProgram
from holdfast.core.schedule import Op, OpKind
from holdfast.errors import InternalError

__all__ = [
    "Committed",
    "Effect",
    "Execution",
    "Expect",
    "FinishReduce",
    "Give",
    "Reach",
    "Ready",
    "Run",
    "StagePort",
    "StartReduce",
    "Take",
]


class StagePort(Protocol):
    """What the executor needs of a compute engine; values are opaque to it."""

    def begin(self, step: int) -> None:
        """Forgets everything of the step before."""

    def forward(self, step: int, microbatch: int, activation: Any) -> Any:
        """Runs the stage forward; returns what goes to the next stage, None from the last."""

    def backward(self, kind: OpKind, step: int, microbatch: int, gradient: Any) -> Any:
        """Runs B, I or W; returns what goes to the previous stage, None from the first and for W."""

    def message(self, layers: tuple[int, ...], dissent: int) -> Any:
        """Returns this worker's contribution to a reduction; ``dissent`` 1: not ready for a prepared generation."""

    def accept(self, layers: tuple[int, ...], reduced: Any) -> None:
        """Takes the sum of all contributions; raises LedgerError unless every micro-batch counts once."""

    def tally(self) -> Any:
        """Returns what this worker knows of the step's verdict."""

    def merge_tallies(self, ours: Any, theirs: Any) -> Any:
        """Returns what both know."""

    def conclude(self, tally: Any) -> None:
        """Takes the complete tally: whether the step counts, and the scale of its gradients."""

    @property
    def unanimous(self) -> bool:
        """Whether, in the step concluded last, every owner of every layer was ready for the prepared generation."""

    @property
    def following(self) -> bool:
        """Whether we have no state yet: updates are kept until there is one."""

    def update(self, layer: int) -> None:
        """Runs the optimizer for a layer on the copy."""

    def swap(self, layer: int) -> None:
        """Makes the copy of a layer the live one, one step further."""


@dataclass(frozen=True, slots=True)
class Expect:
    """These values will be taken, in this order: receives can be posted early."""

    receives: tuple[Receive, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for this value and return it."""

    receive: Receive
    step: int


@dataclass(frozen=True, slots=True)
class Give:
    """Send this value; never blocks."""

    send: Send
    step: int
    value: Any


@dataclass(frozen=True, slots=True)
class Run:
    """Compute one operation and return its result."""

    op: Op
    step: int
    value: Any


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Submit a contribution; ``value`` must not be changed by the reduction."""

    reduction: Reduction
    step: int
    value: Any


@dataclass(frozen=True, slots=True)
class FinishReduce:
    """Wait for the sum of a reduction that was started and return it."""

    reduction: Reduction
    step: int


@dataclass(frozen=True, slots=True)
class Reach:
    """A named point is reached: a fault may strike here."""

    point: Point
    step: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Return whether the next generation is prepared here; asked once a step, before the first contribution."""

    step: int


@dataclass(frozen=True, slots=True)
class Committed:
    """This worker has swapped in all its layers of ``step``; ``ops`` is what it ran, in order."""

    step: int
    ops: tuple[Op, ...]


Effect = Expect | Take | Give | Run | StartReduce | FinishReduce | Reach | Ready | Committed
Steps = Generator[Effect, Any, None]


@dataclass(slots=True, kw_only=True)
class Execution:
    """One worker's run of one step.

    Attributes:
        program: the worker's instructions.
        stage: the compute engine.
        step: the step to run.
        number: the global number of a micro-batch.
        ops: the operations run so far, readable at any time.
    """

    program: WorkerProgram
    stage: StagePort
    step: int
    number: Callable[[MicroBatch], int]
    ops: list[Op] = field(default_factory=list)
    _value: Any = None
    _tallies: dict[MicroBatch, Any] = field(default_factory=dict)
    _concluded: bool = False

    def run(self) -> Steps:
        """Yields the effects of the step, in order; ends with Committed.

        Raises:
            ClusterError: thrown in by the shell; nothing was committed that ``take_back`` cannot undo.
            LedgerError: a micro-batch does not count exactly once; nothing was updated.
        """
        instructions = self.program.instructions
        self.stage.begin(self.step)
        yield Reach(Point.START, self.step)
        yield Expect(tuple(i for i in instructions if isinstance(i, Receive)), self.step)
        marks = self._half_way()
        for instruction in instructions:
            match instruction:
                case Compute(op=op):
                    self._value = yield Run(op, self.step, self._value)
                    self.ops.append(op)
                    if op in marks:
                        yield Reach(marks[op], self.step)
                case Receive(payload=Payload.ACTIVATION | Payload.GRADIENT):
                    self._value = yield Take(instruction, self.step)
                case Send(payload=Payload.ACTIVATION | Payload.GRADIENT):
                    yield Give(instruction, self.step, self._value)
                    self._value = None
                case _:
                    break
        yield from self._finish(instructions)
        yield Committed(self.step, tuple(self.ops))

    def _half_way(self) -> dict[Op, Point]:
        """The operations after which the points ``forward`` and ``backward`` lie."""
        ops = [i.op for i in self.program.instructions if isinstance(i, Compute)]
        forward = [op for op in ops if op.kind is OpKind.F]
        backward = [op for op in ops if op.kind in (OpKind.B, OpKind.I)]
        marks = {}
        if forward:
            marks[forward[len(forward) // 2]] = Point.FORWARD
        if backward:
            marks[backward[len(backward) // 2]] = Point.BACKWARD
        return marks

    def _finish(self, instructions: tuple[Instruction, ...]) -> Steps:
        """Reduces, agrees on the verdict, updates and swaps."""
        yield from self._reduce([i.reduction for i in instructions if isinstance(i, Reduce)])
        yield from self._agree(instructions)
        yield from self._update([i.layer for i in instructions if isinstance(i, Step)])

    def _agree(self, instructions: tuple[Instruction, ...]) -> Steps:
        """Adds our tally to those of others and settles the verdict over the step."""
        own = self.stage.tally()
        told = False
        for instruction in instructions:
            if isinstance(instruction, Send) and instruction.payload is Payload.VERDICT and not told:
                yield Reach(Point.VERDICT, self.step)
                told = True
            match instruction:
                case Receive(payload=Payload.TALLY, microbatch=chain):
                    received = yield Take(instruction, self.step)
                    self._tallies[chain] = self.stage.merge_tallies(own, received)
                case Receive(payload=Payload.VERDICT, microbatch=chain):
                    self._tallies[chain] = yield Take(instruction, self.step)
                case Send(payload=Payload.TALLY | Payload.VERDICT, microbatch=chain):
                    yield Give(instruction, self.step, self._tallies.get(chain, own))
        if not told:
            yield Reach(Point.VERDICT, self.step)
        self.stage.conclude(next(iter(self._tallies.values()), own))

    def _reduce(self, reductions: list[Reduction]) -> Steps:
        ready = (yield Ready(self.step)) and not self.stage.following
        dissent = 0 if ready else 1
        for index, reduction in enumerate(reductions):
            yield StartReduce(reduction, self.step, self.stage.message(reduction.layers, dissent))
            if index == 0:
                yield Reach(Point.REDUCE, self.step)
        for reduction in reductions:
            self.stage.accept(reduction.layers, (yield FinishReduce(reduction, self.step)))

    def _update(self, layers: list[int]) -> Steps:
        if not layers:
            raise InternalError(f"worker {self.program.worker} has no layer to update")
        for index, layer in enumerate(layers):
            self.stage.update(layer)
            if index == 0:
                yield Reach(Point.UPDATE, self.step)
            self.stage.swap(layer)
            if index == 0:
                yield Reach(Point.COMMIT, self.step)
