"""What to do next, as a pure function of (membership, event).

The coordinator is a shell around :func:`decide`: it stores the new membership, then sends what ``decide`` asks for. The
simulated cluster and the tests call the same function.

    GATHERING --all attached--> FORMING --all states known--> RUNNING --all finished--> SAVING --all saved--> ENDED
                                  ^ |                            |                        |
                                  | +---- a worker is lost ------+------------------------+
                                  +------ a new generation: Install to all who are left --+

    REATTACHING --all back, all run the stored generation--> RUNNING
         |  ^
         |  +-- a coordinator was started again
         +------all back, in any other state--> FORMING

A newer generation supersedes an unfinished one, so a failure during a recovery needs no rule of its own; nor does the
coordinator's own death, which loses only what a new generation asks for again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast.control.messages import (
    Attached,
    Blob,
    Command,
    Ended,
    Exited,
    Failure,
    Fence,
    Finished,
    Heartbeat,
    Hello,
    Install,
    Joined,
    Message,
    Progress,
    Resume,
    Save,
    Saved,
    Shutdown,
    Status,
    StepDone,
    Suspect,
)
from holdfast.control.store import StoredDecision
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.schedule import OpKind
from holdfast.errors import InternalError
from holdfast.recovery.actions import ClusterView, RecoveryPlan
from holdfast.recovery.strategies import strategy_named
from holdfast.telemetry.events import Agreed, Detected, Event, Installed, Reattached, Rebuilt, Suspected

__all__ = [
    "Closed",
    "Membership",
    "Output",
    "Phase",
    "Planned",
    "Record",
    "Tell",
    "Tick",
    "decide",
    "end",
    "plan_recovery",
    "restore",
    "to_store",
    "unplanned",
]

DETACHED_GRACE_S = 2.0
SUSPICION_GRACE_S = 1.0
MAX_REFORMATIONS = 3


class Phase(StrEnum):
    """Where the job is."""

    GATHERING = "gathering"
    FORMING = "forming"
    RUNNING = "running"
    SAVING = "saving"
    REATTACHING = "reattaching"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Event: a worker's control connection is gone. Its process may live, and then connects again."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Event: time passed; ``now`` in seconds of the coordinator's clock."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Output: send ``command`` to a worker, or to the agent if ``to`` is None."""

    to: WorkerId | None
    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Output: write ``event`` into the job's log."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Event: the answer to a loss that has not happened yet; ``lost`` are all workers that would be gone."""

    lost: frozenset[WorkerId]
    recovery: RecoveryPlan


Output = Tell | Record
Decision = tuple["Membership", tuple[Output, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """All that the coordinator knows.

    Attributes:
        healthy: the plan of the whole grid.
        steps: how many steps the job has; the last committed one is ``steps - 1`` at the end.
        strategy: name of the recovery strategy.
        directory: where the final (or last committed) layers are written.
        generation: version of the membership; 0 until everyone attached once.
        generations: how many of them installed a plan.
        plan: the plan of this generation; None while gathering and when no plan is possible any more.
        attached: workers that ever attached.
        lost: workers that are gone; they never come back under this generation or a later one.
        statuses: what the survivors said about this generation.
        joined: survivors whose transport of this generation stands.
        finished: survivors that ran the last step of the job.
        saved: layer digests of the survivors, once written.
        heartbeats: the last sign of progress of each worker.
        planned: answers prepared for the loss of one more worker, by all who would be gone.
        lost_work: (step, pairs run of it) of the workers lost since training last went on.
        lost_layers: layers without an owner; empty while training can go on.
        resume_step: the step from which this generation runs.
        last_step: the newest step that was reported done; -1 before the first.
        suspected_at: when the first unexplained suspicion of this generation came; None if none.
        reformations: generations begun in a row because of suspicions alone.
        detached: workers whose connection is gone, and since when.
        returned: workers that are back at a coordinator that was started again, and what they said.
        reattach_until: when those that are not back are given up.
        ended: how the job ended; None before.
    """

    healthy: Plan
    steps: int
    strategy: str
    directory: str
    phase: Phase = Phase.GATHERING
    generation: int = 0
    generations: int = 0
    plan: Plan | None = None
    attached: frozenset[WorkerId] = frozenset()
    lost: frozenset[WorkerId] = frozenset()
    statuses: Mapping[WorkerId, Status] = field(default_factory=dict)
    joined: frozenset[WorkerId] = frozenset()
    finished: frozenset[WorkerId] = frozenset()
    saved: Mapping[WorkerId, Mapping[int, str]] = field(default_factory=dict)
    heartbeats: Mapping[WorkerId, Heartbeat] = field(default_factory=dict)
    planned: Mapping[frozenset[WorkerId], RecoveryPlan] = field(default_factory=dict)
    lost_work: tuple[tuple[int, int], ...] = ()
    lost_layers: tuple[int, ...] = ()
    resume_step: int = 0
    last_step: int = -1
    suspected_at: float | None = None
    suspicion: str = ""
    reformations: int = 0
    detached: Mapping[WorkerId, float] = field(default_factory=dict)
    returned: Mapping[WorkerId, Hello] = field(default_factory=dict)
    reattach_until: float = 0.0
    ended: Ended | None = None

    @property
    def alive(self) -> tuple[WorkerId, ...]:
        """The workers of the grid that are not lost, in order."""
        return tuple(worker for worker in self.healthy.workers if worker not in self.lost)


def decide(state: Membership, event: Message | Closed | Tick | Planned, *, now: float = 0.0) -> Decision:
    """Returns the membership after ``event`` and what is to be sent and recorded.

    Args:
        state: the membership before.
        event: a message that came in, a connection that closed, or time that passed.
        now: the coordinator's clock, in seconds; only suspicions depend on it.

    After failure: pure, so it can be called again with the same values.
    """
    if state.phase is Phase.ENDED:
        return state, _tell_the_end(state, event)
    match event:
        case Hello(worker=None):
            return _on_agent(state, event)
        case Hello():
            return _on_hello(state, event)
        case Exited(worker=worker, status=status):
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            return _on_lost(state, worker, "process ended: " + how)
        case Closed(worker=worker):
            return _on_closed(state, worker, now)
        case Failure(worker=worker) if worker not in state.lost:
            return _on_failure(state, event)
        case Heartbeat(worker=worker):
            return replace(state, heartbeats={**state.heartbeats, worker: event}), ()
        case Tick(now=at):
            return _on_tick(state, at)
        case Planned(lost=lost, recovery=recovery):
            return replace(state, planned={**state.planned, lost: recovery}), ()
        case _:
            return _on_generation_message(state, event, now)


def _on_generation_message(state: Membership, event: object, now: float) -> Decision:
    """Handles what belongs to one generation; anything of an older one, or of a lost worker, is dropped."""
    current = getattr(event, "generation", None) == state.generation and state.phase is not Phase.GATHERING
    if not current or getattr(event, "worker", None) not in state.alive:
        return state, ()
    match event:
        case Status():
            return _on_status(state, event)
        case Blob(to=to):
            return state, tuple(Tell(to=peer, command=event) for peer in to if peer not in state.lost)
        case Joined(worker=worker):
            return _on_joined(state, worker)
        case Suspect():
            return _on_suspect(state, event, now)
        case StepDone():
            return _on_step_done(state, event)
        case Finished(worker=worker):
            return _on_finished(state, worker)
        case Saved(worker=worker, digests=digests):
            return _on_saved(state, worker, dict(digests))
    return state, ()


def _on_hello(state: Membership, hello: Hello) -> Decision:
    worker = hello.worker
    assert worker is not None
    if worker not in state.healthy.workers or worker in state.lost:
        return state, (Tell(to=worker, command=Shutdown(reason=f"worker {worker} is not a member")),)
    greeting = Tell(to=worker, command=Attached())
    if state.generation:
        state, outputs = _on_return(state, hello)
        return state, (greeting, *outputs)
    state = replace(state, attached=state.attached | {worker}, detached=_without(state.detached, worker))
    if state.phase is Phase.GATHERING and state.attached >= set(state.healthy.workers):
        state, outputs = _form(state, state.healthy)
        return state, (greeting, *outputs)
    return state, (greeting,)


def _on_lost(state: Membership, worker: WorkerId, how: str) -> Decision:
    """A worker is gone for good: the survivors form a new generation, or what lives is saved."""
    if worker in state.lost or worker not in state.healthy.workers:
        return state, ()
    noted: tuple[Output, ...] = (
        Record(event=Detected(worker=str(worker), how=how, generation=state.generation)),
        Tell(to=None, command=Fence(worker=worker)),
    )
    lost_work = state.lost_work + _pairs_run(state, worker)
    state = replace(state, lost=state.lost | {worker}, lost_work=lost_work, detached=_without(state.detached, worker))
    if state.phase is Phase.REATTACHING:
        state, outputs = _conclude_return(state)
        return state, (*noted, *outputs)
    if state.phase is Phase.GATHERING:
        detail = f"worker {worker} died while starting ({how})"
        ended, outputs = _end(state, "error", detail, state.directory)
        return ended, (*noted, *outputs)
    state, outputs = _recover(state)
    return state, (*noted, *outputs)


def _recover(state: Membership) -> Decision:
    """Answers the loss of all who are lost."""
    recovery = state.planned.get(state.lost) or plan_recovery(state, state.lost)
    state = replace(state, lost_layers=recovery.lost_layers, reformations=0, planned={})
    return _form(state, recovery.plan, recovery.strategy)


def plan_recovery(state: Membership, lost: frozenset[WorkerId]) -> RecoveryPlan:
    """Returns what answers the loss of all of ``lost``, which takes milliseconds: ahead of time where possible."""
    return strategy_named(state.strategy)(ClusterView(healthy=state.healthy, lost=lost))


def unplanned(state: Membership) -> tuple[frozenset[WorkerId], ...]:
    """The losses that could come next and for which no answer was prepared yet; none unless steps are being run."""
    if state.phase is not Phase.RUNNING:
        return ()
    ahead = (state.lost | {worker} for worker in state.alive)
    return tuple(lost for lost in ahead if lost not in state.planned)


def _form(state: Membership, plan: Plan | None, strategy: str = "") -> Decision:
    """Starts the next generation of the workers that are left; ``strategy`` says what answered a failure."""
    state = replace(
        state,
        phase=Phase.FORMING,
        generation=state.generation + 1,
        generations=state.generations + (plan is not None and bool(state.alive)),
        plan=plan,
        statuses={},
        joined=frozenset(),
        finished=frozenset(),
        saved={},
        suspected_at=None,
        returned={},
    )
    if not state.alive:
        return _end(state, "lost", "every worker is lost; nothing could be saved", "")
    install = Install(generation=state.generation, plan=plan)
    workers = tuple(str(worker) for worker in state.alive)
    record = Record(event=Installed(generation=state.generation, workers=workers, strategy=strategy))
    return state, (record, *(Tell(to=worker, command=install) for worker in state.alive))


def _on_status(state: Membership, status: Status) -> Decision:
    state = replace(state, statuses={**state.statuses, status.worker: status})
    if state.phase is not Phase.FORMING or not set(state.statuses) >= set(state.alive):
        return state, ()
    step = min(s for status in state.statuses.values() for _, s in status.layer_steps)
    _check_distance(state, step)
    recomputed = _recomputed(state, step)
    agreed = Record(event=Agreed(generation=state.generation, step=step, recomputed_microbatches=recomputed))
    if state.plan is None:
        state, outputs = _save(replace(state, resume_step=step), step)
        return state, (agreed, *outputs)
    state = replace(state, phase=Phase.RUNNING, resume_step=step, lost_work=())
    resume = Resume(generation=state.generation, step=step)
    return state, (agreed, *(Tell(to=worker, command=resume) for worker in state.alive))


def _check_distance(state: Membership, step: int) -> None:
    for status in state.statuses.values():
        for layer, at in status.layer_steps:
            if at > step + 1:
                raise InternalError(
                    f"worker {status.worker} holds layer {layer} at step {at}, another worker is at {step}: "
                    "more than one step apart cannot be taken back"
                )


def _recomputed(state: Membership, step: int) -> int:
    """(layer, micro-batch) pairs of ``step`` that were run before and will be run again.

    Of a lost worker, as far as its last heartbeat told.
    """
    survivors = sum(dict(status.executed).get(step, 0) for status in state.statuses.values())
    return survivors + sum(pairs for at, pairs in state.lost_work if at == step)


def _pairs_run(state: Membership, worker: WorkerId) -> tuple[tuple[int, int], ...]:
    """The step that a worker was at when it was lost, and the pairs of it that it had run."""
    beat = state.heartbeats.get(worker)
    if beat is None or state.plan is None or beat.generation != state.generation:
        return ()
    forwards = sum(op.kind is OpKind.F for op in state.plan.orders.of(worker)[: beat.op])
    return ((beat.step, forwards * len(state.plan.placement.layers_of(worker).indices)),)


def _on_joined(state: Membership, worker: WorkerId) -> Decision:
    state = replace(state, joined=state.joined | {worker})
    if state.joined >= set(state.alive):
        return state, (Record(event=Rebuilt(generation=state.generation)),)
    return state, ()


def _on_suspect(state: Membership, suspect: Suspect, now: float) -> Decision:
    record = Record(
        event=Suspected(
            worker=str(suspect.worker),
            peer=str(suspect.peer or ""),
            generation=state.generation,
            detail=suspect.detail,
        )
    )
    if state.suspected_at is None:
        state = replace(state, suspected_at=now, suspicion=f"{suspect.worker}: {suspect.detail}")
    return state, (record,)


def _on_tick(state: Membership, now: float) -> Decision:
    """Gives up one who stayed away for too long (the next tick, the next one); or else looks at suspicions."""
    if given_up := _given_up(state, now):
        return _on_lost(state, *given_up[0])
    if state.phase is Phase.REATTACHING:
        return state, ()
    return _on_suspicion_age(state, now)


def _after(outputs: tuple[Output, ...], decision: Decision) -> Decision:
    return decision[0], (*outputs, *decision[1])


def _on_suspicion_age(state: Membership, now: float) -> Decision:
    """A suspicion that no death explains: build the connections anew, with the same members, a few times."""
    if state.suspected_at is None or now - state.suspected_at < SUSPICION_GRACE_S:
        return state, ()
    if state.reformations >= MAX_REFORMATIONS:
        detail = f"communication keeps failing though every worker lives: {state.suspicion}"
        return _end(state, "error", detail, state.directory)
    return _form(replace(state, reformations=state.reformations + 1), state.plan)


def _on_step_done(state: Membership, done: StepDone) -> Decision:
    state = replace(state, last_step=max(state.last_step, done.step), reformations=0)
    progress = Progress(
        step=done.step,
        loss=done.loss,
        omitted=done.omitted,
        alive=len(state.alive),
        generation=state.generation,
    )
    return state, (Tell(to=None, command=progress),)


def _on_finished(state: Membership, worker: WorkerId) -> Decision:
    state = replace(state, finished=state.finished | {worker})
    if state.phase is not Phase.RUNNING or not state.finished >= set(state.alive):
        return state, ()
    return _save(state, state.steps)


def _save(state: Membership, step: int) -> Decision:
    """Asks the first living owner of each layer to write it, and everyone for the digests of what they hold."""
    state = replace(state, phase=Phase.SAVING, resume_step=step)
    placement = state.healthy.placement.without(state.lost)
    owned = {layer: placement.owners(layer) for layer in range(placement.num_layers)}

    def save(worker: WorkerId) -> Save:
        layers = tuple(layer for layer, owners in owned.items() if owners and owners[0] == worker)
        return Save(generation=state.generation, step=step, layers=layers, directory=state.directory)

    return state, tuple(Tell(to=worker, command=save(worker)) for worker in state.alive)


def _on_saved(state: Membership, worker: WorkerId, digests: dict[int, str]) -> Decision:
    state = replace(state, saved={**state.saved, worker: digests})
    if state.phase is not Phase.SAVING or not set(state.saved) >= set(state.alive):
        return state, ()
    diverged = _diverged(state.saved)
    if diverged:
        detail = f"owners of layer(s) {', '.join(map(str, diverged))} hold different bits"
        return _end(state, "error", detail, state.directory)
    if state.lost_layers:
        names = ", ".join(map(str, state.lost_layers))
        return _end(state, "lost", f"no living worker holds layer(s) {names}", state.directory)
    return _end(state, "done", "", state.directory)


def _diverged(saved: Mapping[WorkerId, Mapping[int, str]]) -> list[int]:
    seen: dict[int, str] = {}
    return sorted(
        {
            layer
            for digests in saved.values()
            for layer, digest in digests.items()
            if seen.setdefault(layer, digest) != digest
        }
    )


def _on_failure(state: Membership, failure: Failure) -> Decision:
    outcome = "user-error" if failure.user_fault else "error"
    detail = failure.error if failure.user_fault else f"worker {failure.worker}: {failure.error}\n{failure.traceback}"
    return _end(state, outcome, detail.rstrip(), state.directory)


def end(state: Membership, detail: str) -> Decision:
    """Ends the job because of a bug of ours; for the shell, when ``decide`` itself or its storing failed."""
    return _end(state, "error", detail, state.directory)


def _end(state: Membership, outcome: str, detail: str, directory: str) -> Decision:
    ended = Ended(
        outcome=outcome,
        detail=detail,
        step=max(state.resume_step, state.last_step + 1) if outcome in ("error", "user-error") else state.resume_step,
        directory=directory,
        generations=state.generations,
        lost_layers=state.lost_layers,
    )
    state = replace(state, phase=Phase.ENDED, ended=ended)
    shutdown = Shutdown(reason=outcome)
    return state, (*(Tell(to=worker, command=shutdown) for worker in state.alive), Tell(to=None, command=ended))


def _tell_the_end(state: Membership, event: object) -> tuple[Output, ...]:
    """Whoever comes after the end hears of it."""
    match event:
        case Hello(worker=None) if state.ended is not None:
            return (Tell(to=None, command=state.ended),)
        case Hello(worker=worker):
            return (Tell(to=worker, command=Shutdown(reason="the job has ended")),)
    return ()


# A connection, or the coordinator itself, was lost and is back.


def to_store(before: Membership, after: Membership) -> StoredDecision | None:
    """Returns what must be durable before anybody hears of it; None if ``after`` decided nothing of that kind."""
    if after.generation == before.generation and after.ended is before.ended:
        return None
    return StoredDecision(
        generation=after.generation + (after.ended is not None),
        plan=after.plan,
        lost=tuple(str(worker) for worker in sorted(after.lost)),
        generations=after.generations,
        lost_layers=after.lost_layers,
        lost_work=after.lost_work,
        ended=after.ended,
    )


def restore(state: Membership, stored: StoredDecision, *, reattach_until: float) -> Membership:
    """Returns the membership of a coordinator that was started again.

    Args:
        state: of a job that has not begun.
        stored: the newest decision.
        reattach_until: when workers that are not back are given up, in seconds of the coordinator's clock.
    """
    return replace(
        state,
        phase=Phase.REATTACHING if stored.ended is None else Phase.ENDED,
        generation=stored.generation,
        generations=stored.generations,
        plan=stored.plan,
        attached=frozenset(state.healthy.workers),
        lost=frozenset(map(WorkerId.parse, stored.lost)),
        lost_layers=stored.lost_layers,
        lost_work=stored.lost_work,
        reattach_until=reattach_until,
        ended=stored.ended,
    )


def _on_agent(state: Membership, hello: Hello) -> Decision:
    """The agent is back: what it saw meanwhile counts now, and what it may have missed is told again."""
    dead = {exit_.worker for exit_ in hello.exits}
    outputs: tuple[Output, ...] = tuple(
        Tell(to=None, command=Fence(worker=worker)) for worker in sorted(state.lost) if worker not in dead
    )
    for exit_ in hello.exits:
        state, more = decide(state, exit_)
        outputs += more
    return state, outputs


def _on_closed(state: Membership, worker: WorkerId, now: float) -> Decision:
    """A connection is gone: of a dead worker, as the agent will say at once, or of one that will be back."""
    if worker not in state.alive:
        return state, ()
    returned = {who: hello for who, hello in state.returned.items() if who != worker}
    return replace(state, detached={**state.detached, worker: now}, returned=returned), ()


def _given_up(state: Membership, now: float) -> list[tuple[WorkerId, str]]:
    """Who has been away for too long, and how that shows."""
    if state.phase is Phase.REATTACHING:
        late = [worker for worker in state.alive if worker not in state.returned]
        return [(worker, "did not come back") for worker in late if now >= state.reattach_until]
    how = f"connection closed for {DETACHED_GRACE_S:g} s"
    return [(worker, how) for worker, since in state.detached.items() if now - since >= DETACHED_GRACE_S]


def _on_return(state: Membership, hello: Hello) -> Decision:
    """A worker is back. What was on its way to it or from it may be lost, so unless it runs steps, all begin anew."""
    worker = hello.worker
    assert worker is not None
    state = replace(state, detached=_without(state.detached, worker))
    if state.phase is Phase.REATTACHING:
        return _conclude_return(replace(state, returned={**state.returned, worker: hello}))
    if state.phase is Phase.RUNNING and _runs(state, hello):
        return _on_finished(state, worker) if hello.activity == "finished" else (state, ())
    return _form(state, state.plan)


def _runs(state: Membership, hello: Hello) -> bool:
    return hello.generation == state.generation and hello.activity != "waiting"


def _conclude_return(state: Membership) -> Decision:
    """Once all who live are back: if all run the stored generation they go on, undisturbed; else all begin anew."""
    if not set(state.returned) >= set(state.alive):
        return state, ()
    hellos = [state.returned[worker] for worker in state.alive]
    planned_for = set(state.plan.workers if state.plan else state.alive)
    adopted = bool(hellos) and planned_for <= set(state.alive) and all(_runs(state, hello) for hello in hellos)
    record = Record(event=Reattached(generation=state.generation, adopted=adopted))
    if not adopted:
        return _after((record,), _recover(state) if state.lost else _form(state, state.plan))
    state = replace(
        state,
        phase=Phase.RUNNING,
        joined=frozenset(state.alive),
        finished=state.finished | {who for who, hello in state.returned.items() if hello.activity == "finished"},
        resume_step=min(hello.step for hello in hellos),
        last_step=max(state.last_step, *(hello.step - 1 for hello in hellos)),
        returned={},
    )
    return _after((record,), _save(state, state.steps) if state.finished >= set(state.alive) else (state, ()))


def _without(times: Mapping[WorkerId, float], worker: WorkerId) -> Mapping[WorkerId, float]:
    return {who: at for who, at in times.items() if who != worker}
