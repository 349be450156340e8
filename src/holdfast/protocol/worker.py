"""A worker's protocol: attach, join generations, run steps, give way to newer generations, enter, leave, save, end.

Like the executor it is a generator that does no I/O, so that the whole protocol runs unchanged over sockets and under a
virtual clock. Only here are ClusterErrors turned into a recovery.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace as replace_struct

from holdfast.control.messages import (
    Activity,
    Attached,
    Audited,
    Audits,
    CaughtUp,
    Command,
    CommitVote,
    Finished,
    Hello,
    Install,
    Joined,
    Left,
    Raised,
    Refused,
    ReplayOrder,
    Resume,
    Save,
    Saved,
    Scored,
    ShardFailed,
    Shutdown,
    StateAt,
    Status,
    StepDone,
    Suspect,
    Unreadable,
    Unreplayed,
    Weighed,
)
from holdfast.core.evaluation import evaluation
from holdfast.core.faults import Point
from holdfast.core.ids import Interval, WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.lower import lower_step, lower_worker, with_audit
from holdfast.core.nodes import Process
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.program import WorkerProgram, groups
from holdfast.core.progress import StepProgress
from holdfast.core.step_plan import StepPlan
from holdfast.core.work import WorkPhase, working
from holdfast.errors import (
    ClusterError,
    InternalError,
    NotSaved,
    PeerLost,
    ReplicaDiverged,
    StaleGeneration,
    StepDisputed,
    StepRefused,
    StepVoid,
    StorageError,
)
from holdfast.protocol.auditing import StepAudit, audit_messages, audit_of, item_of
from holdfast.protocol.effects import (
    Asked,
    Attach,
    Boundary,
    Build,
    Disconnect,
    Drain,
    Fetch,
    Fetched,
    Flush,
    Listen,
    Load,
    Pin,
    Release,
    Report,
    ScoresAwaited,
    Serve,
    WorkerEffect,
    Written,
)
from holdfast.protocol.evaluating import evaluate
from holdfast.protocol.executor import Execution, Keep, Kept, Reach, StepCommitted, StepEngine, Verdict, update
from holdfast.protocol.log_filter import LogFilter
from holdfast.protocol.replaying import put_back, replay
from holdfast.protocol.snapshots import Snapshots
from holdfast.protocol.step_log import StepLog
from holdfast.protocol.stopping import report_of
from holdfast.recovery.rules import JobRules

__all__ = ["MOST_MISSED", "Engine", "WorkerProtocol", "mean_loss"]


class Engine(StepEngine, Protocol):
    """What a worker's protocol needs of a compute engine, beyond running steps."""

    def discard(self) -> None:
        """Drops everything of an unfinished step; weights and optimizer state stay."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that we hold or follow, ascending."""

    def progress(self) -> tuple[StepProgress, ...]:
        """What is kept of the steps that are not settled, without what is logged."""

    def resume(
        self, step: int, standing: Iterable[tuple[int, ...]], counted: tuple[Interval, ...] | None = None
    ) -> None:
        """Goes on with a step that was interrupted; reductions that stand were completed by some owner.

        ``counted``: the micro-batches that the others expect; None: all.
        """

    @property
    def returns(self) -> bool:
        """Whether ``take_back`` gives the very bits that there were."""

    def take_back(self, to_step: int) -> None:
        """Brings every layer that is one step ahead back to ``to_step``."""

    def remake_update(self) -> None:
        """Makes the updates of the speculative step, which did not stand when settled, again as they should be."""

    def unpack_vote(self, data: bytes) -> Any:
        """Returns what ``pack_vote`` wrote."""

    @property
    def whole(self) -> bool:
        """Whether every own layer is the state of its step, which can be saved; an exception may have broken one."""

    @property
    def omitted(self) -> bool:
        """Whether the step settled last leaves the weights as they are: a gradient was not finite."""

    norm: float | None
    """L2 norm of the mean gradient of the whole model in the step settled last, before it is clipped; None where that
    was not finite, or nobody knows."""

    def rate(self, step: int) -> float | None:
        """Returns the learning rate at a step, of the optimizer's first group; None where that is not known here."""

    def losses(self) -> list[float] | None:
        """The loss of every micro-batch of the step that was reduced last; None unless we own the last layer."""

    def save(self, layer: int, directory: Path) -> Path:
        """Writes one layer's whole state."""

    @property
    def ahead(self) -> bool:
        """Whether layers are those of the next step already, so that there is no state of before the one that runs."""

    def snapshot(self, layer: int, *, to_file: bool = False) -> Callable[[], bytes]:
        """Pins a copy of one layer's whole state; the function returned encodes it, in any thread, at any time.

        All owners give the same bytes; one that is written ``to_file`` may say more than the state, by who writes it.
        """

    def restore(self, layer: int, data: bytes) -> None:
        """Replaces one layer's whole state by what ``snapshot`` encoded; raises CorruptBlob if it is none."""

    def exact(self, layer: int) -> bool:
        """Whether one layer's bits are those of every other owner that says so; not once a step was inverted."""

    def layer_digest(self, layer: int) -> str:
        """A digest of one layer's whole state, equal on all owners that hold it exactly."""

    def evaluate(self, number: int, value: Any, layers: LayerRange) -> Any:
        """Runs layers forward on a micro-batch of the data that the job is evaluated by, as nobody trains.

        Nothing is kept of it. Returns what the next layer takes; from the last one its scores, by their names.
        """

    repeated: tuple[int, ...]
    """The steps whose micro-batches are run once more in the step behind."""
    ends: int | None
    """The step before which a script has stopped its loop, as the sums of a step told; None: it has not."""

    def sample_item(self, step: int, number: int, *, runs: bool) -> None:
        """Keeps a digest of what comes of a micro-batch of a step; ``runs``: we run it whoever else does."""

    def sampled_item(self, step: int) -> tuple[tuple[int, str], ...]:
        """What is kept of a step, under a number that is no layer's; empty if nothing is."""

    @property
    def followed(self) -> frozenset[int]:
        """Our layers whose state is still to come."""

    def follow(self, layers: Iterable[int], step: int) -> None:
        """Takes part in the reductions of some of our layers without their state: updates are kept until ``heal``."""

    def inherit(self, other: Any) -> None:
        """Takes over, between two steps, all layers of ours that another engine of the same kind holds or follows."""

    def heal(self, states: Mapping[int, bytes]) -> None:
        """Takes the state of layers before the step since when we follow them, and makes the updates since then."""


_MOST_UNTOLD = 16
"""So many evaluations are told of again, the newest."""
MOST_MISSED = 100
"""Whoever follows layers keeps the sums of so many steps at most, until their state comes."""


Script = Generator[WorkerEffect, Any, None]
Then = Generator[WorkerEffect, Any, Command]


@dataclass(slots=True, kw_only=True)
class WorkerProtocol:
    """The protocol of one worker.

    Attributes:
        worker: who we are.
        stage: the compute engine.
        rules: what the job says once and for all.
        process: ours.
        checkpoint_every: a checkpoint after so many steps; 0 for none.
        snapshots: of our layers, in our memory.
        generation: the generation that we are in; 0 before the first.
        plan: its plan.
        program: our instructions under this generation's plan.
        rest: those for what is left of an interrupted step; None: it is run whole.
        log: what we have handed on in the last steps.
        execution: the step that runs, or ran last.
        staggered: whether updates are made ahead of the verdict in this generation.
        verdicts: over the last steps that were reduced, the newest last.
        loss: the mean loss of the step that was updated ahead of its verdict; None if it is not known here.
        executed: (layer, micro-batch) pairs begun, of the step that ran last and the one before.
        entered: the step before which we began to follow layers the last time; meaningless if we never did.
        raised: the exception that has stopped us; None while we live as we should.
        pins_at: the step of a checkpoint that was asked for, at the boundary before it; None if none was.
        log_filter: what is logged for whoever runs layers of ours, or beside ours, again; None: nothing.
        aside: our own engine, while another one replays lost layers.
        agreed: the step up to which was replayed, and the votes that settle the one before.
        replayed: engines that have replayed some; whoever is to hold these layers takes them from there.
        refuses: whether updates that were made ahead of their verdict do not stand, and the step behind was not run
            since: others may have begun it on them.
        standing: the generation that we are in and what we do in it, in one value: other threads read it.
        audits: how that goes on in this generation.
        disputed: what we found out about the step that we did not contribute to; None if nothing.
        asked: whether somebody's loop asks for each step, which does not begin before.
        repeated: the steps whose micro-batches are run once more in the step behind.
        unevaluated: a step, and by which micro-batches alone the state before it is yet to be evaluated.
        scored: what came of evaluations here, as far as it was not known to be kept as the last one was made. Other
            threads read it.
        scores_kept: the newest step before which an evaluation is known to be kept. Another thread writes it, too.
        stops: the step before which evaluations end the job, as far as is known. Another thread writes it.
        evaluates: the step before which the state is being evaluated; None: none is.
    """

    worker: WorkerId
    stage: Engine
    rules: JobRules
    process: Process
    checkpoint_every: int = field(init=False)
    snapshots: Snapshots = field(init=False)
    generation: int = 0
    plan: Plan | None = None
    program: WorkerProgram | None = None
    rest: WorkerProgram | None = None
    log: StepLog = field(init=False)
    execution: Execution | None = None
    staggered: bool = False
    verdicts: tuple[Verdict, ...] = ()
    loss: float | None = None
    executed: dict[int, int] = field(default_factory=dict)
    entered: int = 0
    raised: Raised | None = None
    pins_at: int | None = None
    log_filter: LogFilter | None = field(init=False)
    aside: Engine | None = None
    agreed: tuple[int, tuple[bytes, ...]] = (0, ())
    replayed: dict[tuple[int, ...], Engine] = field(default_factory=dict)
    refuses: bool = False
    standing: tuple[int, Activity] = (0, "waiting")
    audits: Audits | None = None
    disputed: Audited | None = None
    asked: bool = False
    repeated: tuple[int, ...] = ()
    unevaluated: tuple[int, tuple[Interval, ...]] = (0, ())
    scored: tuple[Scored, ...] = ()
    scores_kept: int = 0
    stops: int | None = None
    evaluates: int | None = None
    _lowered: tuple[Plan, WorkerProgram] | None = None

    def __post_init__(self) -> None:
        """Nothing is kept yet."""
        rules = self.rules
        self.checkpoint_every, self.snapshots = rules.checkpoint_every, Snapshots(every=rules.snapshot_every)
        self.log = StepLog(most_bytes=rules.step_log_bytes if rules.keeping is not None else 0)
        self.log_filter = None if rules.logging is None else LogFilter(node_of=rules.logging.node_of)

    def run(self) -> Script:
        """Yields what the worker does until it is told to shut down.

        Raises:
            HoldfastError: anything but a ClusterError ends this; what then follows may be :meth:`stopped`.
        """
        yield Attach()
        command = yield Listen()
        while not isinstance(command, Shutdown):
            try:
                command = yield from self._obey(command)
            except StaleGeneration:
                self._stand("waiting")
                command = yield Listen()
            except StepRefused as error:
                self.refuses = True
                self._stand("waiting")
                yield Report(self._refused(error))
                command = yield Listen()
            except StepDisputed as error:
                self._stand("waiting")
                self.disputed = error.found
                yield Report(error.found)
                command = yield Listen()
            except ClusterError as error:
                self._stand("waiting")
                yield Report(self._suspicion(error))
                command = yield Listen()
            except (StorageError, ReplicaDiverged) as error:
                yield Report(self._unreadable(command, error))
                command = yield Listen()

    @property
    def awaits_scores(self) -> bool:
        """Whether it ever waits for an evaluation to be kept."""
        return self.rules.evaluating is not None and self.rules.evaluating.patience > 0

    @property
    def num_steps(self) -> int:
        """How many steps there are, with those that are run once more; fewer where a script or scores have ended it."""
        steps = self.rules.steps + len(self.repeated) if self.stage.ends is None else self.stage.ends
        return steps if self.stops is None else min(steps, self.stops)

    def _repeat(self, steps: tuple[int, ...]) -> None:
        self.repeated = self.stage.repeated = steps

    @property
    def programs(self) -> tuple[WorkerProgram, ...]:
        """All that tells what others may send us in this generation."""
        known = (self.program, self.rest, self._evaluation(None))
        return tuple(program for program in known if program is not None)

    def stopped(self, error: BaseException) -> Script:
        """Yields what a worker does once an exception has ended its work: it says so, and keeps its state.

        It takes part in nothing any more, but saves what it holds if told to, until it is told to go.

        Args:
            error: what was raised.
        """
        self._stand("waiting")
        put_back(self)
        evaluates, self.evaluates = self.evaluates, None
        self.raised = report_of(
            error,
            worker=self.worker,
            process=self.process,
            generation=self.generation,
            step=self._step() if evaluates is None else evaluates,
            whole=self.stage.whole,
        )
        yield Report(self.raised)
        command = yield Listen()
        while not isinstance(command, Shutdown):
            if isinstance(command, Install) and command.plan is None:
                yield from self._join(command)
            elif isinstance(command, Save):
                yield from self._save(command)
            command = yield Listen()

    def _unreadable(self, command: Command, error: StorageError | ReplicaDiverged) -> Unreadable | Unreplayed:
        """Only a state that we were told to load is read from a store, and what is to be replayed."""
        if isinstance(command, ReplayOrder):
            return Unreplayed(worker=self.worker, generation=self.generation, detail=str(error))
        if not isinstance(command, Install) or command.load is None or isinstance(error, ReplicaDiverged):
            raise error
        step = command.load.step
        return Unreadable(worker=self.worker, generation=self.generation, step=step, detail=str(error))

    def hello(
        self,
        newest: int = 0,
        prepared: Install | None = None,
        *,
        leaving: bool = False,
        dormant: bool = False,
        strikes: tuple[str, ...] = (),
    ) -> Hello:
        """Who we are and where we stand, for a coordinator that may know nothing of it.

        Args:
            newest: the newest generation that our driver has heard of: we wait, if that is yet to reach us.
            prepared: the order that is to be gone over to; None if there is none.
            leaving: whether we were told to go.
            dormant: whether we were told to compute nothing.
            strikes: faults that the agent was asked to carry out.
        """
        generation, activity = self.standing
        ours = self.stage if self.aside is None else self.aside
        return Hello(
            worker=self.worker,
            process=self.process,
            generation=generation,
            activity=activity if newest <= generation else "waiting",
            step=self.num_steps if activity == "finished" else self._step(),
            prepared=prepared.generation if prepared is not None else 0,
            has_state=len(ours.followed) < len(ours.layers),
            leaving=leaving,
            dormant=dormant,
            raised=self.raised,
            strikes=strikes,
            scored=self.untold,
        )

    @property
    def untold(self) -> tuple[Scored, ...]:
        """What came of evaluations here and is not known to be kept; in any thread."""
        return tuple(each for each in self.scored if each.step > self.scores_kept)

    def _stand(self, activity: Activity) -> None:
        self.standing = (self.generation, activity)

    def _suspicion(self, error: ClusterError) -> Suspect:
        peer = WorkerId.parse(error.worker) if isinstance(error, PeerLost) and error.worker else None
        return Suspect(worker=self.worker, generation=self.generation, peer=peer, detail=str(error))

    def _refused(self, error: StepRefused) -> Refused:
        omitted = self.stage.omitted
        return Refused(worker=self.worker, generation=self.generation, step=error.step, omitted=omitted)

    def _obey(self, command: Command) -> Then:
        match command:
            case Install():
                yield from self._join(command)
                return (yield from self._train(command))
            case Save():
                yield from self._save(command)
            case ReplayOrder():
                self._stand("running")
                yield from replay(self, command)
                self._stand("waiting")
                yield Report(self._status())
            case Attached() | Resume():
                pass
            case _:
                raise InternalError(f"worker {self.worker} does not understand {type(command).__name__}")
        next_command: Command = yield Listen()
        return next_command

    def _join(self, install: Install) -> Script:
        """Leaves the old generation, says where our layers are, connects to the new one."""
        first, self.generation, self.plan = self.generation == 0, install.generation, install.plan
        self.staggered, self.pins_at, self.audits = install.staggered, None, install.audits
        self.checkpoint_every = install.checkpoint_every or self.checkpoint_every
        self._stand("waiting")
        if not first:
            yield Reach(Point.DETECT, self._step())
        yield Disconnect()
        yield Release(())
        put_back(self)
        self._count_executed()
        self._forget_ops()
        self._note_verdict()
        if install.stateless:
            self.stage.follow(self.stage.layers, 0)  # it holds no state yet
        elif install.plan is not None and install.load is not None:
            yield from self._load(install.plan, install.load)
        elif install.plan is not None and (first or install.plan.placement.followed_by(self.worker)):
            self._forget_open()
            yield from self._fit(install.plan, self._step())
            self.stage.follow(install.plan.placement.followed_layers(self.worker), self._step())
        elif install.plan is not None:
            yield from self._take_replayed(install.plan)
        if install.plan is not None:
            self.replayed = {}
        if not install.keeps:
            yield from self._drop_steps("it is run again")
        if self.log_filter is not None and install.plan is None:
            yield Flush()
        yield Report(self._status())
        if install.plan is None:
            return
        yield Reach(Point.INSTALL, self._step())
        if not install.keeps:
            yield from self._connect(install.plan)
            yield Report(Joined(worker=self.worker, generation=self.generation))

    def _drop_steps(self, why: str = "") -> Script:
        """All that was computed of steps that are not settled is given up; ``why``, if that is so of what is logged."""
        self.stage.discard()
        self.log.forget_from(0)
        if why and self.log_filter is not None and self.execution is not None and not self.execution.updated:
            yield Kept(self.execution.step, why)

    def _unlog(self, step: int) -> Script:
        """What was logged of the steps from one on does not count: they are run again from there."""
        if self.log_filter is not None and self.execution is not None:
            for each in range(step, self.execution.step + 1):
                yield Kept(each, "it is run again")

    def _load(self, plan: Plan, state: StateAt) -> Script:
        """Gives up all that we hold, for the layers that a plan gives us."""
        yield from self._unlog(state.step)
        self.stage = yield Load(plan, state)
        self.verdicts, self.refuses = (), False
        self._forget_open()
        self.snapshots.forget()
        self.replayed = {}

    def _take_replayed(self, plan: Plan) -> Script:
        """Takes up layers that a plan gives us and that we have replayed.

        Of what we held it keeps the state alone, at the step that the others are at, too.
        """
        engines, self.replayed = self.replayed, {}
        held = self.stage.layer_steps()
        ours = {layer for layer in plan.placement.held_layers(self.worker) if layer not in held}
        there = {self.agreed[0]}
        useful = [
            engine
            for layers, engine in engines.items()
            if not ours.isdisjoint(layers) and set(engine.layer_steps().values()) == there
        ]
        if not useful:
            return
        if held:
            yield from self._go_back(*self.agreed)
        self.stage = yield Load(plan, None)
        for engine in useful:
            self.stage.inherit(engine)
        self.snapshots.forget()

    def _fit(self, plan: Plan, step: int) -> Script:
        """Takes layers up and gives others up, where a plan has us hold or follow others than so far; keeps the rest.

        This is before ``step``, nothing of what came before being open. Those that are to be followed are from the
        first moment on: should we be interrupted, nobody takes them for layers that we hold.
        """
        before = frozenset(self.stage.layers)
        if plan.placement.layers_of(self.worker) != self.stage.layers:
            self.stage = yield Load(plan, None)
            self.snapshots.forget()
            if new := [layer for layer in plan.placement.followed_layers(self.worker) if layer not in before]:
                self.stage.follow(new, step)

    def _connect(self, plan: Plan, step: int | None = None, rest: StepPlan | None = None) -> Script:
        """Connects with all whom our programs, of whole steps and of the rest of one, have us talk to."""
        audits = self.rules.sampling is not None and self.rules.sampling.layers
        self.program = replace(
            lower_worker(plan, self.worker, self.rules.ties),
            besides=audit_messages(plan.placement, self.worker) if audits else (),
        )
        if self.log_filter is not None:
            self.log_filter.follow(plan, self.program, self.rules.ties)
        self.rest = None if rest is None else lower_step(rest)
        yield Build(self.generation, groups(self.programs), _neighbours(plan, self.worker), step)

    def _step(self) -> int:
        return self.execution.step if self.execution else 0

    def _status(self) -> Status:
        return Status(
            worker=self.worker,
            generation=self.generation,
            layer_steps=tuple(sorted(self.stage.layer_steps().items())),
            executed=tuple(sorted(self.executed.items())),
            snapshots=self.snapshots.steps,
            votes=tuple(
                CommitVote(step=known.step, complete=known.complete, value=self.stage.pack_vote(known.vote))
                for known in self.verdicts
            ),
            unsettled=self._unsettled(),
            follows=tuple(sorted(self.stage.followed)),
            refuses=self.refuses,
            returns=self.stage.returns,
            disputed=self.disputed,
            progress=tuple(replace(each, logged=self.log.of(each.step)) for each in self.stage.progress()),
            ends=self.stage.ends,
        )

    def _open(self) -> Verdict | None:
        """Over the step that was updated ahead of its verdict, and that is not known to stand."""
        if self.execution is None:
            return None
        verdict = self.execution.verdict or self.execution.previous
        return verdict if verdict is not None and verdict.speculative else None

    def _unsettled(self) -> int | None:
        verdict = self._open()
        return None if verdict is None or verdict.complete or not self.stage.layer_steps() else verdict.step

    def _forget_open(self) -> None:
        verdict = self._open()
        if verdict is not None:
            verdict.speculative = False

    def _note_verdict(self) -> None:
        """Remembers what is known of the verdict over the step that ran last: a recovery may need that of two steps."""
        verdict = self.execution.verdict if self.execution is not None else None
        if verdict is not None and all(verdict is not known for known in self.verdicts):
            self.verdicts = (*self.verdicts[-1:], verdict)

    def _go_back(self, step: int, votes: tuple[bytes, ...]) -> Script:
        """Goes back to ``step``; what is speculative of the step before is settled by all votes together."""
        verdict = self._open()
        self._forget_open()
        self.snapshots.go_back(step, self.stage)
        yield from self._drop_steps()
        yield from self._unlog(step)
        self.verdicts = tuple(known for known in self.verdicts if known.step < step)
        yield from self._settle(verdict, step, votes)

    def _settle(
        self, verdict: Verdict | None, step: int, votes: tuple[bytes, ...]
    ) -> Generator[WorkerEffect, Any, bool]:
        """Settles what is speculative of the step before ``step``; returns whether its updates stand.

        If they do not, they are made again, and whatever was computed of ``step`` is dropped.
        """
        if verdict is None or verdict.step != step - 1:
            return True
        for vote in votes:
            verdict.vote = self.stage.merge_votes(verdict.vote, self.stage.unpack_vote(vote))
        verdict.complete = True
        stands = self.stage.settle(verdict.vote)
        if not stands:
            self.refuses = True
            self.stage.remake_update()
        if self.plan is not None and self._reports():
            yield Report(self._done(verdict.step, self.loss))
        return stands

    def _go_on(self, resume: Resume, rest: StepPlan) -> Generator[WorkerEffect, Any, bool]:
        """Keeps what we have of an interrupted step; returns whether what is left of it is to be run.

        Not if it began ahead of a verdict that refuses the updates before it: all find that alike, and run it whole.
        """
        verdict = self._open()
        self._forget_open()
        self.verdicts = tuple(known for known in self.verdicts if known.step < resume.step)
        stands = yield from self._settle(verdict, resume.step, resume.votes)
        if stands:
            standing = (each.layers for each in rest.standing)
            self.stage.resume(resume.step, standing, rest.counted)
            self.log.forget_from(resume.step + 1)
        else:
            yield from self._drop_steps("it began ahead of a verdict that refuses it")
        return stands

    def _conclude(self, step: int, vote: bytes) -> Script:
        """Ends a step of which somebody knows the verdict, wherever that has not been done: all sums are here."""
        verdict = self._open()
        self._forget_open()
        yield from self._settle(verdict, step + 1, (vote,))
        behind = [layer for layer, at in self.stage.layer_steps().items() if at == step]
        if behind:
            yield from self._await_loop(step)
            self.stage.conclude(self.stage.unpack_vote(vote))
            yield from update(self.stage, step, behind)
        execution = self.execution
        if execution is not None and execution.step == step and not execution.committed:
            self.loss = mean_loss(self.stage)
            if self.log_filter is not None and self.log_filter.any and not execution.updated:
                execution.updated = True
                yield Kept(step)
            yield StepCommitted(step, tuple(execution.ops), whole=False)
        yield from self._drop_steps()
        known = Verdict(step=step, vote=self.stage.unpack_vote(vote), complete=True)
        self.verdicts = (*(each for each in self.verdicts if each.step != step), known)[-2:]
        if self._reports():
            yield Report(self._done(step, self.loss))

    def _count_executed(self) -> None:
        """Notes how many (layer, micro-batch) pairs were run of the step that ran last; keeps the one before too."""
        if self.execution is None:
            return
        step = self.execution.step
        before = {step - 1: self.executed[step - 1]} if step - 1 in self.executed else {}
        self.executed = {**before, step: self.execution.pairs}

    def _forget_ops(self) -> None:
        """What was run by the order of another generation is none of this one's operations, in heartbeats."""
        if self.execution is not None:
            self.execution.ops = []

    def _forget_executed(self) -> None:
        """What this recovery has counted is not told to the next one again."""
        self.executed = {}
        if self.execution is not None:
            self.execution.pairs = 0

    def _train(self, install: Install) -> Then:
        """Runs steps from where everyone agrees to the end; returns the command that comes next."""
        command: Command = yield Listen()
        if install.plan is None or not isinstance(command, Resume):
            return command
        self._forget_executed()
        self._repeat(command.repeated)
        self._forget_scores(command)
        self.stage.ends = command.ends if self.stage.ends is None else self.stage.ends
        try:
            leaves = yield from self._take_part(install, install.plan, command)
        except StepVoid:
            yield from self._drop_steps("the loop was stopped before it")
            leaves = False
        return Shutdown(reason="left") if leaves else (yield from self._finish())

    def _take_part(self, install: Install, plan: Plan, command: Resume) -> Generator[WorkerEffect, Any, bool]:
        """Runs steps from where everyone agrees to the end; returns whether we have left before it.

        Raises:
            StepVoid: the script has stopped its loop before a step that has begun.
        """
        enters = bool(plan.placement.followed_by(self.worker))
        start, rest = command.step + (command.concluded is not None), command.rest
        if enters:
            yield from self._follow(plan, command.step)
        elif command.concluded is not None:
            yield from self._conclude(command.step, command.concluded)
        elif rest is not None:
            rest = rest if (yield from self._go_on(command, rest)) else None
        else:
            yield from self._go_back(command.step, command.votes)
            yield from self._fit(plan, command.step)
        if install.keeps:
            yield from self._connect(plan, rest=command.rest)
            yield Report(Joined(worker=self.worker, generation=self.generation))
        if not enters and self.generation > 1 and start <= self._step():
            yield Reach(Point.REPLAY, start)
        return (yield from self._run_steps(start, recovering=self.generation > 1 and not enters, rest=rest is not None))

    def _follow(self, plan: Plan, step: int) -> Script:
        """Begins to take part in the updates of layers without their state, which their owners give us meanwhile."""
        self.entered = step
        layers = plan.placement.followed_layers(self.worker)
        self.stage.follow(layers, step)
        self._forget_open()
        self.snapshots.forget()
        yield Fetch(self.generation, {layer: plan.placement.owners(layer) for layer in layers})
        yield Reach(Point.COPY, step)

    def _run_steps(self, start: int, *, recovering: bool, rest: bool = False) -> Generator[WorkerEffect, Any, bool]:
        self._stand("running")
        self._repeat(self.repeated)  # the engine may be another one since
        self.disputed = None
        for step in itertools.takewhile(lambda step: step < self.num_steps, itertools.count(start)):
            yield from self._heal(step)
            if not rest:  # what is left of a step concerns others, too: they are not kept waiting for sums
                yield from self._await_loop(step)
            if (yield from self._await_scores(step)):
                break
            yield from self._before(step, beginning=step == start)
            self._sample_item(step)
            closing = self._closes(step, after_recovery=recovering and step == start)
            execution = self._execution(step, closing=closing, rest=rest)
            rest = False
            yield from execution.run()
            self.refuses = False
            self._count_executed()
            self._note_verdict()
            self.loss = mean_loss(self.stage)
            if execution.closed and self._reports():
                yield Report(self._done(step, self.loss))
            if execution.closed and self.stage.unanimous and step + 1 < self.num_steps:
                yield from self._await_loop(step + 1)
                install: Install = yield Boundary()
                if not (yield from self._go_over(install, step + 1)):
                    return True
                self._stand("running")
        return False

    def _finish(self) -> Then:
        yield from self._await_loop(self.num_steps)
        yield from self._checkpoint(self.num_steps)
        yield from self._evaluate(self.num_steps)
        self._stand("finished")
        yield Report(Finished(worker=self.worker, generation=self.generation, step=self.num_steps))
        following: Command = yield Listen()
        return following

    def _await_loop(self, step: int) -> Script:
        """Until the loop waits for items of the step, its state may change. Without state of ours it does not begin."""
        if self.asked and not self.stage.followed:
            yield self._ask(step)

    def _ask(self, step: int) -> Asked:
        return Asked(step, self.repeated, begins=step < self.num_steps)

    def _closes(self, step: int, *, after_recovery: bool) -> bool:
        """Whether a step is settled at its end: if something needs the settled state then.

        Also the first one after a recovery: else one whose verdict refuses what was speculative could be interrupted by
        that, before all have updated, over and over again.
        """
        after = step + 1
        if not self.staggered or after == self.num_steps or after_recovery:
            return True
        return any(every and after % every == 0 for every in self._intervals)

    @property
    def _intervals(self) -> tuple[int, ...]:
        """So many steps lie between two moments at which something needs the settled state; 0: there are none."""
        sampling, evaluating = self.rules.sampling, self.rules.evaluating
        others = (0 if each is None else each.every for each in (sampling, evaluating))
        return self.checkpoint_every, self.snapshots.every, *others

    def _execution(self, step: int, *, closing: bool, rest: bool = False) -> Execution:
        program, audit = self.rest if rest else self.program, None if rest else self._audit_of(step)
        assert program is not None
        if audit is not None:
            program = with_audit(program, audit.plan)
        last = self.execution
        before = last if self.staggered else None
        if before is not None and before.generation != self.generation:  # what ran in one before does not ride on us
            before = None
        told = Report(self._done(step - 1, self.loss)) if self._open() is not None and self._reports() else None
        self.execution = Execution(
            program=program,
            generation=self.generation,
            log=self.log,
            asked=self._ask(step) if self.asked and not self.stage.followed else None,
            begun=rest and last is not None and last.step == step and last.started,
            audit=audit,
            stage=self.stage,
            step=step,
            closing=closing,
            previous=before.verdict if before is not None else None,
            on_settled=told,
            logged=frozenset() if self.log_filter is None else self.log_filter.ends,
            ties={} if self.log_filter is None else self.log_filter.sums,
        )
        return self.execution

    def _audit_of(self, step: int) -> StepAudit | None:
        """Of a step that is run whole; what is left of an interrupted one is not audited."""
        if self.rules.sampling is None or self.audits is None or self.plan is None:
            return None
        return audit_of(self.rules.sampling, step, self.plan, self.audits, self.generation, Report)

    def _before(self, step: int, *, beginning: bool) -> Script:
        """What is done with the state that all layers have before a step, if that is settled."""
        if self._open() is not None:
            return
        yield from self._keep_verdict(step)
        if self.stage.ahead:  # it was told, pinned and copied as this step first began
            yield from self._lack(step)
            return
        self._take_snapshot(step, beginning=beginning)
        yield from self._checkpoint(step)
        yield from self._weigh(step, beginning=beginning)
        yield from self._evaluate(step)

    def _await_scores(self, step: int) -> Generator[WorkerEffect, Any, bool]:
        """Where scores may end the job, waits before each evaluation until the one before is told; whether it ends."""
        evaluating = self.rules.evaluating
        if evaluating is not None and self._open() is None and (awaited := evaluating.awaited(step, self.num_steps)):
            yield ScoresAwaited(awaited)
        return step >= self.num_steps

    def _evaluate(self, step: int) -> Script:
        """Evaluates the state before a step, if it is time to: by what a recovery says, or by all."""
        evaluating = self.rules.evaluating
        if evaluating is None or not evaluating.due(step, self.num_steps):
            return
        at, missing = self.unevaluated
        program = self._evaluation(missing if at == step else None)
        self.evaluates = step
        try:
            rows = () if program is None else (yield from evaluate(program, step))
        except ClusterError:  # whatever else comes out of it is told as of this step
            self.evaluates = None
            raise
        self.evaluates = None
        if rows:
            names = tuple(dict.fromkeys(name for _, scores in rows for name in scores))
            told = tuple((number, tuple(map(scores.get, names))) for number, scores in rows)
            scored = Scored(worker=self.worker, generation=self.generation, step=step, names=names, rows=told)
            self.scored = (*self.untold[1 - _MOST_UNTOLD :], scored)
            yield Report(scored)

    def _forget_scores(self, resume: Resume) -> None:
        """Of the state that all go on from, what is evaluated again is not told again; nor is all of later ones."""
        start, self.evaluates = resume.step + (resume.concluded is not None), None
        self.unevaluated = start, resume.evaluates
        again = {number for first, stop in resume.evaluates for number in range(first, stop)}
        kept = (
            replace_struct(each, rows=tuple(row for row in each.rows if each.step < start or row[0] not in again))
            for each in self.untold
            if each.step <= start
        )
        self.scored = tuple(each for each in kept if each.rows)
        self.scores_kept = max(min(self.scores_kept, start - bool(again)), resume.scored)

    def _evaluation(self, numbers: tuple[Interval, ...] | None) -> WorkerProgram | None:
        """What we run of an evaluation, by these micro-batches, or by all; None if nothing is evaluated."""
        evaluating, plan = self.rules.evaluating, self.plan
        if plan is None or evaluating is None:
            return None
        if numbers is not None:
            return evaluation(plan, self.worker, (each for start, stop in numbers for each in range(start, stop)))
        if self._lowered is None or self._lowered[0] is not plan:
            self._lowered = plan, evaluation(plan, self.worker, range(evaluating.microbatches))
        return self._lowered[1]

    def _lack(self, step: int) -> Script:
        """Tells that the state before a step is gone here, where it is to be written once more."""
        if self._pinned_here(step):
            detail = f"its weights are those of step {step + 1} already, as it had ended the step that is gone on with"
            yield Report(ShardFailed(worker=self.worker, generation=self.generation, step=step, detail=detail))

    def _sample_item(self, step: int) -> None:
        """Notes which micro-batch of the step two workers run, and whether we are the one beside its runner."""
        if self.rules.sampling is None or self.plan is None:
            return
        if (found := item_of(self.rules.sampling, step, self.plan)) is not None:
            number, beside = found
            self.stage.sample_item(step, number, runs=beside == self.worker)

    def _weigh(self, step: int, *, beginning: bool) -> Script:
        """Tells digests of our layers, once in so many steps and whenever those of the owners were found to differ."""
        if self.rules.sampling is None or self.audits is None:
            return
        due = step > 0 and self.rules.sampling.weighs(step - 1)
        if due or (beginning and self.audits.weigh):
            digests = (*self._digests(), *self.stage.sampled_item(step - 1))
            yield Report(Weighed(worker=self.worker, generation=self.generation, step=step, digests=digests))

    def _digests(self) -> tuple[tuple[int, str], ...]:
        """Of the layers that we hold bitwise."""
        return tuple(
            (layer, self.stage.layer_digest(layer))
            for layer in sorted(self.stage.layer_steps())
            if self.stage.exact(layer)
        )

    def _keep_verdict(self, step: int) -> Script:
        """Logs the verdict that has led to this step, with the step."""
        known = self.verdicts[-1] if self.verdicts else None
        if self.log_filter is not None and self.log_filter.any and known is not None and known.step == step - 1:
            yield Keep(Payload.VOTE, step, 0, 0, self.stage.pack_vote(known.vote))

    def _heal(self, step: int) -> Script:
        """Takes the state of what we follow once it is there. All wait for us if we keep too much until then."""
        if not self.stage.followed:
            return
        wait = self.asked or step - self.entered >= MOST_MISSED  # nobody can make up for what a loop has missed
        states: Mapping[int, bytes] | None = yield Fetched(wait)
        while wait and states is None:
            states = yield Fetched(wait)
        if states is not None:
            self.stage.heal(states)
            self.snapshots.forget()
            yield Report(self._synced(step, states))

    def _take_snapshot(self, step: int, *, beginning: bool) -> None:
        """Before a step, all layers are at it, but for those that we follow."""
        if self.stage.layer_steps() and self.snapshots.due(step, beginning=beginning):
            self.snapshots.take(step, self.stage)

    def _synced(self, step: int, states: Mapping[int, bytes]) -> CaughtUp:
        return CaughtUp(
            worker=self.worker,
            generation=self.generation,
            step=step,
            entered=self.entered,
            bytes=sum(len(state) for state in states.values()),
        )

    def _go_over(self, install: Install, step: int) -> Generator[WorkerEffect, Any, bool]:
        """Goes over into a prepared generation before ``step``; returns whether we are a member of it.

        All workers do so before the same step: in the one before, every owner of every layer was found to be ready.
        """
        assert install.plan is not None
        assert self.plan is not None
        followers = _new_followers(self.plan, install.plan)
        self.generation, self.plan, self.staggered = install.generation, install.plan, install.staggered
        self.audits = install.audits
        self.pins_at = step if install.pins else None
        self.checkpoint_every = install.checkpoint_every or self.checkpoint_every
        self._stand("waiting")
        yield Release(tuple(sorted({worker for worker, _ in install.plan.placement.followed})))
        if self.worker not in install.plan.workers:
            yield Drain()
            yield Report(Left(worker=self.worker, process=self.process, generation=self.generation, step=step))
            return False
        snapshots = self._snapshots_for(install.plan, followers)
        for target in followers:
            wanted = install.plan.placement.followed_layers(target)
            if served := {layer: snapshots[layer] for layer in wanted if layer in snapshots}:
                inexact = frozenset(layer for layer in served if not self.stage.exact(layer))
                yield Serve(self.generation, step, target, served, inexact)
        yield Drain()
        yield from self._fit(install.plan, step)
        yield from self._connect(install.plan, step)
        yield Report(Joined(worker=self.worker, generation=self.generation, step=step))
        if self.worker in followers:
            yield from self._follow(install.plan, step)
        elif followers:
            yield Reach(Point.COPY, step)
        return True

    def _snapshots_for(self, plan: Plan, followers: tuple[WorkerId, ...]) -> dict[int, Callable[[], bytes]]:
        """Copies of the layers that we hold and that some of them are to be given."""
        held = set(plan.placement.held_layers(self.worker))
        wanted = {layer for follower in followers for layer in plan.placement.followed_layers(follower)}
        return {layer: self.stage.snapshot(layer) for layer in sorted(held & wanted)}

    def _reports(self) -> bool:
        """Whether it is we who tell of finished steps: the first owner of the last layer."""
        assert self.plan is not None
        return self.worker == self.plan.placement.owners(self.plan.placement.num_layers - 1)[0]

    def _checkpoint(self, step: int) -> Script:
        """Before a step, all layers are at it: pins those that are ours to write.

        A recovery that runs from this very step does so again, since whoever died may not have written its part. One
        that was asked for is never left out because earlier ones are not written yet: those are waited for.
        """
        if layers := self._pinned_here(step):
            if step == self.pins_at:
                yield Written()
            yield Pin(self.generation, step, layers)
            if self.rules.synchronous:
                yield Written()

    def _pinned_here(self, step: int) -> tuple[int, ...]:
        """The layers that are ours to write before a step."""
        due = self.checkpoint_every and step and step % self.checkpoint_every == 0
        if self.plan is None or not (due or step == self.pins_at):
            return ()
        return tuple(layer for layer in self.stage.layer_steps() if self.plan.writer_of(layer) == self.worker)

    def _done(self, step: int, loss: float | None) -> StepDone:
        omitted = self.stage.omitted
        return StepDone(worker=self.worker, generation=self.generation, step=step, loss=loss, omitted=omitted)

    def _save(self, save: Save) -> Script:
        yield from self._go_back(save.step, save.votes)
        for layer in save.layers:
            with working(WorkPhase.SAVING, layer=layer), _writing(save.directory):
                self.stage.save(layer, Path(save.directory))
        saved = Saved(worker=self.worker, generation=self.generation, digests=self._digests())
        yield Report(saved, when_written=True)


@contextlib.contextmanager
def _writing(directory: str) -> Iterator[None]:
    """What the disk refuses would be refused to everybody: it says nothing of this worker.

    Raises:
        NotSaved: the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise NotSaved(f"the trained layers cannot be written to {directory}: {error.strerror or error}") from None


def _new_followers(before: Plan, after: Plan) -> tuple[WorkerId, ...]:
    """Returns, sorted, who begins to follow layers when all go over to another plan; it is given all of them then."""
    known = frozenset(before.placement.followed)
    return tuple(sorted({row[0] for row in after.placement.followed if row not in known}))


def _neighbours(plan: Plan, worker: WorkerId) -> tuple[WorkerId, ...]:
    """Returns, sorted, who has layers of a worker, or layers beside them."""
    members = plan.placement.members_by_layer
    layers = {layer + by for layer in plan.placement.layers_of(worker) for by in (-1, 0, 1)}
    found = {other for layer in layers if 0 <= layer < len(members) for other in members[layer]}
    return tuple(sorted(found - {worker}))


def mean_loss(stage: Engine) -> float | None:
    """The float64 mean over a step's micro-batches, added in their order; None unless we own the last layer."""
    losses = stage.losses()
    return sum(losses) / len(losses) if losses else None
