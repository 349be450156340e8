"""A worker's life: attach, join generations, run steps, give way to newer generations, save, end.

Like the executor it is a generator that does no I/O, so that the whole protocol runs unchanged over sockets and under a
virtual clock. Only here are ClusterErrors turned into a recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holdfast.control.messages import (
    Activity,
    Attached,
    Command,
    Finished,
    Hello,
    Install,
    Joined,
    Message,
    Resume,
    Save,
    Saved,
    Shutdown,
    Status,
    StepDone,
    Suspect,
)
from holdfast.core.faults import Point
from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.lower import WorkerProgram, groups, lower_worker
from holdfast.core.plan import Plan
from holdfast.core.schedule import OpKind
from holdfast.errors import ClusterError, InternalError, PeerLost, StaleGeneration
from holdfast.runtime.executor import Effect, Execution, Reach, StagePort

__all__ = ["Abort", "Attach", "Build", "LifeEffect", "LifeStage", "Listen", "Report", "WorkerLife", "mean_loss"]


class LifeStage(StagePort, Protocol):
    """What a worker's life needs of a compute engine, beyond running steps."""

    def discard(self) -> None:
        """Drops everything of an unfinished step; weights and optimizer state stay."""

    def layer_steps(self) -> dict[int, int]:
        """The step that each own layer is at."""

    def take_back(self, to_step: int) -> None:
        """Brings every layer that is one step ahead back to ``to_step``."""

    @property
    def omitted(self) -> bool:
        """Whether the step concluded last leaves the weights as they are: a gradient was not finite."""

    def losses(self) -> list[float] | None:
        """The loss of every micro-batch of the step that was reduced last; None unless we own the last layer."""

    def save(self, layer: int, directory: Path) -> Path:
        """Writes one layer's whole state."""

    def layer_digest(self, layer: int) -> str:
        """A digest of one layer's whole state, equal on all its owners."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Say hello to the coordinator, now and whenever the connection to it had to be made anew."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send this to the coordinator; never blocks."""

    message: Message


@dataclass(frozen=True, slots=True)
class Listen:
    """Wait for the coordinator's next command and return it."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the communication of whatever generation was before: it is over."""


@dataclass(frozen=True, slots=True)
class Build:
    """Connect the members of each group for ``generation``."""

    generation: int
    groups: tuple[tuple[WorkerId, ...], ...]


LifeEffect = Effect | Attach | Report | Listen | Abort | Build
Life = Generator[LifeEffect, Any, None]
Then = Generator[LifeEffect, Any, Command]


@dataclass(slots=True, kw_only=True)
class WorkerLife:
    """The protocol of one worker.

    Attributes:
        worker: who we are.
        stage: the compute engine.
        steps: how many steps the job has.
        microbatches: micro-batches per pipeline of the healthy grid.
        ties: the layers that share a weight, each a tuple of layer indices.
        pid: our process.
        generation: the generation that we are in; 0 before the first.
        program: our instructions under this generation's plan.
        execution: the step that runs, or ran last.
        executed: (layer, micro-batch) pairs begun, of the step that ran last and the one before.
        standing: the generation that we are in and what we do in it, in one value: other threads read it.
    """

    worker: WorkerId
    stage: LifeStage
    steps: int
    microbatches: int
    ties: tuple[tuple[int, ...], ...]
    pid: int
    generation: int = 0
    program: WorkerProgram | None = None
    execution: Execution | None = None
    executed: dict[int, int] = field(default_factory=dict)
    standing: tuple[int, Activity] = (0, "waiting")
    _number: Callable[[MicroBatch], int] = field(init=False)

    def __post_init__(self) -> None:
        microbatches = self.microbatches
        self._number = lambda microbatch: microbatch.number(microbatches)

    def run(self) -> Life:
        """Yields what the worker does until it is told to shut down.

        Raises:
            HoldfastError: anything but a ClusterError ends the worker; the shell reports it.
        """
        yield Attach()
        command = yield Listen()
        while not isinstance(command, Shutdown):
            try:
                command = yield from self._obey(command)
            except StaleGeneration:
                self._stand("waiting")
                command = yield Listen()
            except ClusterError as error:
                self._stand("waiting")
                yield Report(self._suspicion(error))
                command = yield Listen()

    def hello(self) -> Hello:
        """Who we are and where we stand, for a coordinator that may know nothing of it."""
        generation, activity = self.standing
        step = self.steps if activity == "finished" else self._step()
        return Hello(worker=self.worker, pid=self.pid, generation=generation, activity=activity, step=step)

    def _stand(self, activity: Activity) -> None:
        self.standing = (self.generation, activity)

    def _suspicion(self, error: ClusterError) -> Suspect:
        peer = WorkerId.parse(error.worker) if isinstance(error, PeerLost) and error.worker else None
        return Suspect(worker=self.worker, generation=self.generation, peer=peer, detail=str(error))

    def _obey(self, command: Command) -> Then:
        match command:
            case Install(generation=generation, plan=plan):
                yield from self._join(generation, plan)
                return (yield from self._train(plan))
            case Save():
                yield from self._save(command)
            case Attached() | Resume():
                pass
            case _:
                raise InternalError(f"worker {self.worker} does not understand {type(command).__name__}")
        next_command: Command = yield Listen()
        return next_command

    def _join(self, generation: int, plan: Plan | None) -> Life:
        """Leaves the old generation, says where our layers are, connects to the new one."""
        first, self.generation = self.generation == 0, generation
        self._stand("waiting")
        if not first:
            yield Reach(Point.DETECT, self._step())
        yield Abort()
        self._count_executed()
        self.stage.discard()
        yield Report(self._status())
        if plan is None:
            return
        yield Reach(Point.INSTALL, self._step())
        self.program = lower_worker(plan, self.worker, self.ties)
        yield Build(generation, groups([self.program]))
        yield Report(Joined(worker=self.worker, generation=generation))

    def _step(self) -> int:
        return self.execution.step if self.execution else 0

    def _status(self) -> Status:
        return Status(
            worker=self.worker,
            generation=self.generation,
            layer_steps=tuple(sorted(self.stage.layer_steps().items())),
            executed=tuple(sorted(self.executed.items())),
        )

    def _count_executed(self) -> None:
        """Notes how many (layer, micro-batch) pairs were begun of the step that ran last; keeps the one before too."""
        if self.execution is None:
            return
        forwards = sum(op.kind is OpKind.F for op in self.execution.ops)
        step = self.execution.step
        before = {step - 1: self.executed[step - 1]} if step - 1 in self.executed else {}
        self.executed = {**before, step: forwards * len(self.stage.layer_steps())}

    def _forget_executed(self) -> None:
        """What this recovery has counted is not told to the next one again."""
        self.executed = {}
        if self.execution is not None:
            self.execution.ops.clear()

    def _train(self, plan: Plan | None) -> Then:
        """Runs steps from where everyone agrees to the end; returns the command that comes next."""
        command: Command = yield Listen()
        if plan is None or not isinstance(command, Resume):
            return command
        self._forget_executed()
        self.stage.take_back(command.step)
        if self.generation > 1 and command.step == self._step():
            yield Reach(Point.REPLAY, command.step)
        assert self.program is not None
        self._stand("running")
        for step in range(command.step, self.steps):
            self.execution = Execution(program=self.program, stage=self.stage, step=step, number=self._number)
            yield from self.execution.run()
            self._count_executed()
            if self.worker == plan.placement.owners(plan.placement.num_layers - 1)[0]:
                yield Report(self._done(step))
        self._stand("finished")
        yield Report(Finished(worker=self.worker, generation=self.generation))
        following: Command = yield Listen()
        return following

    def _done(self, step: int) -> StepDone:
        loss, omitted = mean_loss(self.stage), self.stage.omitted
        return StepDone(worker=self.worker, generation=self.generation, step=step, loss=loss, omitted=omitted)

    def _save(self, save: Save) -> Life:
        self.stage.take_back(save.step)
        for layer in save.layers:
            self.stage.save(layer, Path(save.directory))
        digests = tuple((layer, self.stage.layer_digest(layer)) for layer in sorted(self.stage.layer_steps()))
        yield Report(Saved(worker=self.worker, generation=self.generation, digests=digests))


def mean_loss(stage: LifeStage) -> float | None:
    """The float64 mean over a step's micro-batches, added in their order; None unless we own the last layer."""
    losses = stage.losses()
    return sum(losses) / len(losses) if losses else None
