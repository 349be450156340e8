"""The executor: runs one worker's program for one step, without doing any I/O itself.

It is a generator. It yields what is to be sent, received, computed and reduced; a driver does it (over sockets, or
under a virtual clock) and sends the result back in, or throws a ClusterError in at the place where it happened. The
compute engine is reached through :class:`StepEngine`; of it only the operations that take time go through the driver.

A step is settled when the votes of all workers have come together: then it is known whether it counts, and the scale
of its gradients. A *closing* step is settled at its end, before its updates. Any other is *staggered*: every layer is
updated as soon as its own gradients are reduced, as if all were well, and the next step begins; the votes ride on its
messages. If all was not well, that next step ends in StepRefused, and the update is made again from the state before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.core.faults import Point
from holdfast.core.ids import Interval, MicroBatch
from holdfast.core.instructions import Compute, Instruction, Payload, Recall, Receive, Reduce, Reduction, Send
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.program import WorkerProgram
from holdfast.core.schedule import Op, OpKind
from holdfast.core.summing import Contribution, SumSize, Total
from holdfast.errors import InternalError, StepDisputed, StepRefused
from holdfast.protocol.auditing import Digests, StepAudit
from holdfast.protocol.step_log import StepLog

__all__ = [
    "AuditSample",
    "StepCommitted",
    "Effect",
    "Execution",
    "Expect",
    "FinishReduce",
    "Keep",
    "Kept",
    "Give",
    "PollReduce",
    "Reach",
    "AskPrepared",
    "Run",
    "RunAll",
    "StartReduce",
    "StepEngine",
    "Take",
    "Verdict",
    "update",
]


class StepEngine(Protocol):
    """What the executor needs of a compute engine; values are opaque to it."""

    def begin(self, step: int, counted: tuple[Interval, ...] | None = None) -> None:
        """Forgets everything of the step before; ``counted``: the micro-batches that sums expect; None: all."""

    def forward(
        self, step: int, microbatch: int, activation: Any, layers: LayerRange | None = None, *, adds: bool = True
    ) -> Any:
        """Runs layers forward, all own ones unless told; returns what the next layer takes, None from the last one.

        ``adds``: whether a backward pass will go over it; else nothing of it is kept.
        """

    def backward(
        self,
        kind: OpKind,
        step: int,
        microbatch: int,
        gradient: Any,
        layers: LayerRange | None = None,
        *,
        adds: bool = True,
    ) -> Any:
        """Runs B, I or W over the same layers; returns the gradient of their input, None from layer 0 and for W.

        It may go over them in parts, from the last to the first; each part but the first takes what the one before
        it returned. ``adds``: of B, whether it adds to sums.
        """

    @property
    def at_a_stretch(self) -> bool:
        """Whether it can `run` several operations, and none of a whole step takes or hands on anything."""

    def run(self, step: int, computes: Sequence[Compute], ran: Callable[[Compute], bool]) -> None:
        """Runs operations one after another, in whichever thread; calls ``ran`` with each, until that returns False."""

    def watch(self, layer: int, microbatch: int) -> None:
        """From now on, in this step, keeps what is computed of this sample, and of what."""

    def audit_message(self, times: int) -> Any:
        """Returns that for another owner, with the digests of having computed it ``times`` times."""

    def audit_bytes(self, layer: int) -> int:
        """Returns how many bytes such a message of a layer has."""

    def audit(
        self, layer: int, microbatch: int, message: Any, times: int
    ) -> tuple[tuple[Digests, ...], tuple[Digests, ...]]:
        """Computes a sample ``times`` times, on scratch; returns the sender's digests, and ours."""

    def sum_message(self, layers: tuple[int, ...]) -> Any:
        """Returns the sum of a reduction that is complete, for an owner that has not got it."""

    def sum_bytes(self, layers: tuple[int, ...]) -> int:
        """Returns how many bytes that has."""

    def take_sum(self, layers: tuple[int, ...], message: Any) -> None:
        """Takes what another owner's ``sum_message`` returned."""

    def message(self, layers: tuple[int, ...], dissent: int) -> Contribution:
        """Returns this worker's contribution to a reduction; ``dissent`` 1: not ready for a prepared generation."""

    def message_size(self, layers: tuple[int, ...]) -> SumSize:
        """Returns how much anybody contributes to a reduction at most."""

    def accept(self, layers: tuple[int, ...], summed: Total) -> None:
        """Takes the sum of all contributions; raises LedgerError unless every micro-batch counts once."""

    def vote(self) -> Any:
        """Returns what this worker knows of the step's verdict."""

    def pack_vote(self, vote: Any) -> bytes:
        """Returns a vote as bytes."""

    def merge_votes(self, ours: Any, theirs: Any) -> Any:
        """Returns what both know."""

    def conclude(self, vote: Any) -> None:
        """Takes the complete vote: whether the step counts, and the scale of its gradients."""

    def speculate(self) -> None:
        """Takes it for granted, until ``settle``, that the step counts and its gradients are not scaled."""

    def settle(self, vote: Any) -> bool:
        """Takes the complete vote of the speculative step; returns whether its updates stand."""

    @property
    def unanimous(self) -> bool:
        """Whether, in the step settled last, every owner of every layer was ready for the prepared generation."""

    def layer_steps(self) -> dict[int, int]:
        """The step that each own layer is at, of those that are held and not merely followed."""

    def update(self, layer: int) -> None:
        """Runs the optimizer for a layer on the copy."""

    def swap(self, layer: int) -> None:
        """Makes the copy of a layer the live one, one step further."""


@dataclass(slots=True, kw_only=True, eq=False)
class Verdict:
    """What a worker knows of the verdict over one step.

    Attributes:
        step: which.
        vote: our own, or that of all workers.
        complete: whether it is that of all workers: the verdict is known here.
        speculative: whether our updates were made ahead of it and are not known to stand.
    """

    step: int
    vote: Any
    complete: bool = False
    speculative: bool = False


@dataclass(frozen=True, slots=True)
class Expect:
    """These values, each of a step, will be taken in this order: receives can be posted early."""

    receives: tuple[tuple[Receive, int], ...]


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
    """Compute one operation, or the part of it that lies in these layers, and return its result.

    ``last``: whether the operation ends with it. ``adds``: see :class:`holdfast.core.remainder.Piece`.
    """

    op: Op
    step: int
    value: Any
    layers: LayerRange | None = None
    last: bool = True
    adds: bool = True


@dataclass(frozen=True, slots=True)
class RunAll:
    """Compute operations, one after another, that take and hand on nothing; tell `Execution.ran` of each."""

    computes: tuple[Compute, ...]
    step: int


@dataclass(frozen=True, slots=True)
class AuditSample:
    """Compute what another owner has run, on scratch; return its digests and ours, see :meth:`StepEngine.audit`."""

    step: int
    layer: int
    microbatch: int
    message: Any
    times: int


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Submit a contribution; ``value`` must not be changed by the reduction."""

    reduction: Reduction
    step: int
    value: Any


@dataclass(frozen=True, slots=True)
class PollReduce:
    """Return the sum of a reduction that was started, None if it is not there yet."""

    reduction: Reduction
    step: int


@dataclass(frozen=True, slots=True)
class FinishReduce:
    """Wait for the sum of a reduction that was started and return it."""

    reduction: Reduction
    step: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Log a value for whoever may have to run layers of this step again: it is sent to another node, or settles one.

    ``boundary``: of an activation or a gradient; of a sum the number of its tie. ``number``: of the micro-batch, or 0.
    A vote is over the step before, as bytes. In a replay it is compared with what was logged.
    """

    payload: Payload
    step: int
    boundary: int
    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Kept:
    """All of a step was logged; or nothing of it counts, if that is ``why``: it is made again."""

    step: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """A named point is reached: a fault may strike here."""

    point: Point
    step: int


@dataclass(frozen=True, slots=True)
class AskPrepared:
    """Return the plan of the generation that is prepared here, None if none is; asked once a step, before all sums."""

    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """This worker has swapped in all its layers of ``step``; ``ops`` is what it ran, in order.

    ``whole``: whether that is all of the step; else it was interrupted, and this is what was run since then.
    ``order``: what was to be run; None: only updates were missing.
    """

    step: int
    ops: tuple[Op, ...]
    whole: bool = True
    order: tuple[Op, ...] | None = None


Effect = (
    Expect
    | Take
    | Give
    | Run
    | RunAll
    | AuditSample
    | StartReduce
    | PollReduce
    | FinishReduce
    | Keep
    | Kept
    | Reach
    | AskPrepared
    | StepCommitted
)
Steps = Generator[Effect, Any, None]


@dataclass(slots=True, kw_only=True)
class Execution:
    """One worker's run of one step.

    Attributes:
        program: the worker's instructions; if they go on with an interrupted step, the stage has resumed it.
        stage: the compute engine.
        step: the step to run.
        generation: in which.
        closing: whether the step is settled at its end; else only if, in the step before, all were ready to go over.
        previous: over the step before, if that ran under the same program: it rides on this step. It does so even if it
            was settled at its end, so that nobody goes on before those who only listen have made their updates.
            None: nothing rides, as in a generation's first step, and wherever updates never run ahead.
        on_settled: what is yielded when the step before is found to stand.
        log: what is handed on is kept here.
        begun: whether the step has started before, so that it does not start here.
        logged: what is logged: activations or gradients at these boundaries; and the sums of these ties, by number.
        ties: the number of each tie whose sum is logged.
        decided: the verdict over a step of the past, which is replayed: nobody is asked, and nothing is told of it.
        audit: what of it is computed a second time, as the program has it; None: nothing.
        asked: yielded before the first forward pass, and before updates: somebody else's loop runs the one, and may
            look at the others. None: there is none.
        started: whether the step has started, here or before: an interruption may come first.
        pairs: (layer, micro-batch) pairs run forward so far.
        ops: the operations run so far, readable at any time.
        verdict: over this step; None until it is reduced.
        closed: whether this step was settled at its end.
        updated: whether all layers were updated with it.
        committed: whether it came to its end.
    """

    program: WorkerProgram
    stage: StepEngine
    step: int
    generation: int = 0
    closing: bool = True
    previous: Verdict | None = None
    on_settled: Any = None
    log: StepLog = field(default_factory=StepLog)
    begun: bool = False
    logged: frozenset[tuple[Payload, int]] = frozenset()
    ties: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    decided: Any = None
    audit: StepAudit | None = None
    asked: Any = None
    started: bool = False
    pairs: int = 0
    ops: list[Op] = field(default_factory=list)
    verdict: Verdict | None = None
    closed: bool = False
    updated: bool = False
    committed: bool = False
    _input: Any = None
    _output: Any = None
    _part: int | None = None
    _dissent: int | None = None
    _awaited: deque[Reduction] = field(default_factory=deque)
    _votes: dict[MicroBatch, Any] = field(default_factory=dict)

    def run(self) -> Steps:
        """Yields the effects of the step, in order; ends with Committed.

        Raises:
            ClusterError: thrown in by the driver; nothing was committed that ``take_back`` cannot undo.
            StepRefused: the step before was updated as if it counted as it is, and it does not.
            StepDisputed: what we have computed a second time has other bits; nobody can commit the step.
            LedgerError: a micro-batch does not count exactly once; its layer was not updated.
        """
        settles = self.previous is not None and self.previous.speculative
        if not settles:
            self.log.forget_before(self.step)
        if not self._goes_on:
            self.stage.begin(self.step, self.program.step.counted)
        if self.audit is not None and self.audit.runner == self.program.worker:
            self.stage.watch(self.audit.sample.layer, self.audit.sample.microbatch)
        if not self.begun:
            yield Reach(Point.START, self.step)
        self.started = True
        yield from self._operate()
        if self.previous is not None and self.previous.speculative:
            raise InternalError(f"step {self.step} came to its end and has not settled the one before")
        # All workers decide alike. Whoever needs nobody for the verdict has it at once.
        self.closed = self.closing or (settles and self.stage.unanimous) or not self.program.verdict
        yield from (self._close() if self.closed else self._stagger())
        self.updated = True
        if self.logged or self.ties:
            yield Kept(self.step)
        if self.decided is None:
            yield StepCommitted(self.step, tuple(self.ops), whole=not self._goes_on, order=self.program.step.order)
        self.committed = True

    @property
    def _goes_on(self) -> bool:
        """Whether the step was interrupted."""
        return self.program.step.goes_on

    def _operate(self) -> Steps:
        """Runs the operations; between them, settles the step before."""
        previous = self.previous
        instructions = self.program.operations if previous is None else self.program.riding
        expected = [(i, self._step_of(i)) for i in instructions if isinstance(i, Receive)]
        yield Expect((*expected, *(self._expected_verdict() if self.closing else ())))
        marks = self._half_way()
        for point in self._passed():
            yield Reach(point, self.step)
        for instruction in self._grouped(instructions, marks):
            match instruction:
                case tuple() as computes:
                    yield from self._compute_all(computes, marks)
                case Compute():
                    yield from self._compute(instruction, marks)
                case Recall(payload=Payload.SUM, boundary=tie, layers=layers):
                    self.stage.take_sum(layers, self.log.recall(self.step, Payload.SUM, tie, 0))
                case Recall(payload=payload, boundary=boundary, microbatch=microbatch):
                    self._input = self._output = self.log.recall(self.step, payload, boundary, microbatch.number)
                case Receive(payload=Payload.SUM, layers=layers):
                    self.stage.take_sum(layers, (yield Take(instruction, self.step)))
                case Send(payload=Payload.SUM, layers=layers):
                    yield Give(instruction, self.step, self.stage.sum_message(layers))
                case Send(payload=Payload.AUDIT) if self.audit is not None:
                    yield Give(instruction, self.step, self.stage.audit_message(self.audit.times))
                case Receive(payload=Payload.AUDIT) if self.audit is not None:
                    yield from self._compare(instruction, self.audit)
                case Reduce(reduction=reduction):
                    yield from self._contribute(reduction)
                case Receive(payload=Payload.ACTIVATION | Payload.GRADIENT):
                    self._input = yield Take(instruction, self.step)
                case Send(payload=Payload.ACTIVATION | Payload.GRADIENT):
                    self._input = None
                    yield Give(instruction, self.step, self._output)
                case Receive() | Send() if previous is not None:
                    yield from self._ride(instruction, previous)

    def _grouped(
        self, instructions: Iterable[Instruction], marks: Mapping[Op, Point]
    ) -> Iterator[Instruction | tuple[Compute, ...]]:
        """Yields instructions in order; those that can be run at a stretch, as far as a named point, as one."""
        if not self.stage.at_a_stretch or self._goes_on:
            yield from instructions
            return
        group: list[Compute] = []
        in_parts: Op | None = None
        for instruction in instructions:
            if isinstance(instruction, Compute) and instruction.last and instruction.op != in_parts:
                group.append(instruction)
                if instruction.op in marks:
                    yield tuple(group)
                    group = []
                continue
            if group:
                yield tuple(group)
                group = []
            if isinstance(instruction, Compute):
                in_parts = None if instruction.last else instruction.op
            yield instruction
        if group:
            yield tuple(group)

    def _compute_all(self, computes: tuple[Compute, ...], marks: Mapping[Op, Point]) -> Steps:
        """Runs operations that take and hand on nothing."""
        if not self.ops and self.asked is not None:
            yield self.asked
        yield RunAll(computes, self.step)
        if (op := computes[-1].op) in marks:
            yield Reach(marks[op], self.step)

    def ran(self, compute: Compute) -> None:
        """An operation is done."""
        if compute.op.kind is OpKind.F and compute.layers is not None:
            self.pairs += len(compute.layers.indices)
        self.ops.append(compute.op)

    def _compute(self, compute: Compute, marks: dict[Op, Point]) -> Steps:
        """Runs an operation, or a part of one, and keeps what it hands on.

        What one part hands to the next is kept until then: should we be interrupted in between, we can go on there.
        """
        op, layers, number = compute.op, compute.layers, compute.op.microbatch.number
        assert layers is not None, "only what was read does not say what it runs over"
        value, self._input = self._input, None
        if op.kind is OpKind.F and not self.ops and self.asked is not None:
            yield self.asked
        self._output = result = yield Run(op, self.step, value, layers, compute.last, compute.adds)
        if op.kind is OpKind.F:
            boundary, payload = layers.stop, Payload.ACTIVATION
        else:
            boundary, payload = layers.start, Payload.GRADIENT
            if self._part is not None:
                self.log.drop(self.step, Payload.GRADIENT, self._part, number)
        if result is not None:
            again = (payload, boundary, number) in self.program.recalled
            always = self._goes_on or not compute.last or again
            self.log.keep(self.step, payload, boundary, number, result, always=always)
            if (payload, boundary) in self.logged:
                yield Keep(payload, self.step, boundary, number, result)
        self._part = None if compute.last or op.kind is OpKind.W else boundary
        self._input = None if compute.last else result
        if compute.last:
            self.ran(compute)
            if op in marks:
                yield Reach(marks[op], self.step)

    def _compare(self, receive: Receive, audit: StepAudit) -> Steps:
        """Computes a sample a second time; what has other bits is not contributed to."""
        message = yield Take(receive, self.step)
        of = audit.sample
        said = yield AuditSample(self.step, of.layer, of.microbatch, message, audit.times)
        found = audit.found(self.program.worker, *said)
        if not found.agreed:
            raise StepDisputed(self.step, found)
        if audit.disputed:
            yield audit.tell(found)

    def _contribute(self, reduction: Reduction) -> Steps:
        """Takes part in a sum; with the first one of a step goes whether we are ready for what is prepared."""
        first = self._dissent is None
        if self._dissent is None:
            self._dissent = int(not self._may_go_over((yield AskPrepared(self.step))))
        yield StartReduce(reduction, self.step, self.stage.message(reduction.layers, self._dissent))
        self._awaited.append(reduction)
        if first and self.decided is None:
            yield Reach(Point.REDUCE, self.step)
        while self._awaited and (reduced := (yield PollReduce(self._awaited[0], self.step))) is not None:
            yield from self._accept(self._awaited.popleft(), reduced)

    def _finish(self, reduction: Reduction) -> Steps:
        """Waits for a sum, unless it was there while operations ran; in the order in which they began."""
        if self._awaited and self._awaited[0] == reduction:
            yield from self._accept(self._awaited.popleft(), (yield FinishReduce(reduction, self.step)))

    def _accept(self, reduction: Reduction, reduced: Any) -> Steps:
        self.stage.accept(reduction.layers, reduced)
        if (tie := self.ties.get(reduction.layers)) is not None:
            yield Keep(Payload.SUM, self.step, tie, 0, self.stage.sum_message(reduction.layers))

    def _expected_verdict(self) -> tuple[tuple[Receive, int], ...]:
        return tuple((i, self.step) for i in self.program.verdict if isinstance(i, Receive))

    def _step_of(self, receive: Receive) -> int:
        """Between the operations, votes and verdicts are those of the step before."""
        return self.step - (receive.payload in (Payload.VOTE, Payload.VERDICT))

    def _half_way(self) -> dict[Op, Point]:
        """The operations after which the points ``forward`` and ``backward`` lie."""
        ops = [i.op for i in self.program.operations if isinstance(i, Compute)] if self.decided is None else []
        forward = [op for op in ops if op.kind is OpKind.F]
        backward = [op for op in ops if op.kind in (OpKind.B, OpKind.I)]
        marks = {}
        if forward:
            marks[forward[len(forward) // 2]] = Point.FORWARD
        if backward:
            marks[backward[len(backward) // 2]] = Point.BACKWARD
        return marks

    def _passed(self) -> tuple[Point, ...]:
        """The points of a step that is gone on with at which nothing is left to be done: they may have been missed."""
        if not self._goes_on:
            return ()
        kinds = {i.op.kind for i in self.program.operations if isinstance(i, Compute)}
        forward = (Point.FORWARD,) if OpKind.F not in kinds else ()
        backward = (Point.BACKWARD,) if kinds.isdisjoint((OpKind.B, OpKind.I)) else ()
        return (*forward, *backward, *((Point.REDUCE,) if not self.program.reductions else ()))

    def _ride(self, instruction: Instruction, previous: Verdict) -> Steps:
        """Passes on what settles the step before; the first complete vote settles it."""
        yield from self._exchange(instruction, previous)
        if not (previous.complete and previous.speculative):
            return
        if not self.stage.settle(previous.vote):
            raise StepRefused(previous.step)
        previous.speculative = False
        if self.logged or self.ties:
            yield Keep(Payload.VOTE, self.step, 0, 0, self.stage.pack_vote(previous.vote))
        self.log.forget_before(self.step)
        if self.on_settled is not None:
            yield self.on_settled

    def _exchange(self, instruction: Instruction, verdict: Verdict) -> Steps:
        """Takes or gives one vote or verdict."""
        match instruction:
            case Receive(payload=Payload.VOTE, microbatch=chain):
                received = yield Take(instruction, verdict.step)
                self._votes[chain] = self.stage.merge_votes(verdict.vote, received)
                if chain not in self._passed_on(verdict.step):
                    yield from self._complete(verdict, self._votes[chain])
            case Receive(payload=Payload.VERDICT, microbatch=chain):
                self._votes[chain] = yield Take(instruction, verdict.step)
                yield from self._complete(verdict, self._votes[chain])
            case Send(payload=Payload.VOTE | Payload.VERDICT, microbatch=chain):
                yield Give(instruction, verdict.step, self._votes.get(chain, verdict.vote))

    def _complete(self, verdict: Verdict, vote: Any) -> Steps:
        """The vote of all workers is known here, and has not been told to anybody yet."""
        if not verdict.complete:
            verdict.vote, verdict.complete = vote, True
            yield Reach(Point.VERDICT, verdict.step)

    def _passed_on(self, step: int) -> set[MicroBatch]:
        """The chains on which others come behind us, at the end of this step or on the way through it."""
        instructions = self.program.verdict if step == self.step else self.program.riding
        return {i.microbatch for i in instructions if isinstance(i, Send) and i.payload is Payload.VOTE}

    def _may_go_over(self, prepared: Plan | None) -> bool:
        """Whether we know of the generation that is prepared, and have the state of all that its plan has us hold."""
        if prepared is None:
            return False
        held = self.stage.layer_steps()
        return all(layer in held for layer in prepared.placement.held_layers(self.program.worker))

    def _close(self) -> Steps:
        """Settles the step and updates all layers."""
        for reduction in self.program.reductions:
            yield from self._finish(reduction)
        ours = self.stage.vote() if self.decided is None else self.decided
        self.verdict = verdict = Verdict(step=self.step, vote=ours, complete=self.decided is not None)
        self._votes.clear()
        if not self.closing:
            yield Expect(self._expected_verdict())
        for instruction in self.program.verdict:
            yield from self._exchange(instruction, verdict)
        yield from self._complete(verdict, verdict.vote)
        if self.asked is not None:
            yield self.asked
        self.stage.conclude(verdict.vote)
        yield from self._update(self.program.layers)

    def _stagger(self) -> Steps:
        """Updates every layer as soon as all reductions that it needs are there."""
        self.stage.speculate()
        left = list(self.program.layers)
        for index, reduction in enumerate(self.program.reductions):
            yield from self._finish(reduction)
            missing = {layer for later in self.program.reductions[index + 1 :] for layer in later.layers}
            due = [layer for layer in left if layer not in missing]
            yield from self._update(due, first=len(left) == len(self.program.layers))
            left = [layer for layer in left if layer in missing]
        self.verdict = Verdict(step=self.step, vote=self.stage.vote(), speculative=True)

    def _update(self, layers: Sequence[int], *, first: bool = True) -> Steps:
        return update(self.stage, self.step, layers, first=first and self.decided is None)


def update(stage: StepEngine, step: int, layers: Sequence[int], *, first: bool = True) -> Steps:
    """Yields the effects of updating layers with a step; ``first``: whether they are the first of it."""
    for layer in layers:
        stage.update(layer)
        if first:
            yield Reach(Point.UPDATE, step)
        stage.swap(layer)
        if first:
            yield Reach(Point.COMMIT, step)
        first = False
