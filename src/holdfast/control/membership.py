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

Workers come and go between two steps without any of this. While steps are run, the next generation is prepared
(``upcoming``): everyone is told of it, and all go over after the first step in which every owner of every layer said
that it knows (they agree on that among themselves, in the step's own messages). A worker of the grid is

    lost --attached again--> arriving --a generation with it--> entering --caught up--> member --(leaving)--> lost

``entering`` workers hold no state yet: they take part in reductions, compute nothing, and get the state from their
peers. Any failure sends them back to ``arriving``; they enter again at the next occasion.

When a layer has no owner left and there is a state to load, the job waits for workers (WAITING), or everyone who is
left loads that state as a member of a smaller grid. Otherwise what lives is saved, and the job ends. Strategies that go
back to a checkpoint after any loss wait, too, until the whole grid is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

import msgspec

from holdfast.control.checkpoint_ledger import CheckpointLedger, Commit, Settled, note_shard, settle
from holdfast.control.detection import Watch, deadlocked, forget, hear, overdue, pass_time
from holdfast.control.messages import (
    Attached,
    Blob,
    Command,
    Ended,
    Exited,
    Expel,
    Failure,
    Fence,
    Finished,
    Heartbeat,
    Hello,
    Install,
    Joined,
    Leaving,
    Left,
    Message,
    NodeLost,
    Offer,
    Progress,
    Resume,
    Save,
    Saved,
    ShardFailed,
    ShardWritten,
    Shutdown,
    Spawn,
    StateAt,
    Status,
    StepDone,
    Strike,
    Suspect,
    Synced,
    Unreadable,
)
from holdfast.control.store import StoredDecision, StoredUpcoming
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.schedule import OpKind
from holdfast.errors import InternalError
from holdfast.recovery.actions import ClusterView, RecoveryPlan
from holdfast.recovery.strategies import adaptive, at_boundary, strategy_named
from holdfast.telemetry.events import Agreed, Detected, Event, Installed, Notice, Parted, Reattached, Rebuilt, Suspected
from holdfast.telemetry.events import Synced as SyncedEvent

__all__ = [
    "Closed",
    "Membership",
    "Output",
    "Phase",
    "Planned",
    "Record",
    "Tell",
    "Tick",
    "Upcoming",
    "decide",
    "end",
    "plan_recovery",
    "restore",
    "to_store",
    "unplanned",
]

DETACHED_GRACE_S = 2.0
SUSPICION_GRACE_S = 1.0
MAX_RESTORABLE = 8
MAX_REFORMATIONS = 3


class Phase(StrEnum):
    """Where the job is."""

    GATHERING = "gathering"
    FORMING = "forming"
    RUNNING = "running"
    WAITING = "waiting"
    SAVING = "saving"
    REATTACHING = "reattaching"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Event: the control connection of a worker's process is gone. The process may live, and then connects again."""

    worker: WorkerId
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Event: time passed; ``now`` in seconds of the coordinator's clock."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Output: send ``command`` to a worker (its process ``pid``, if given), or to the agent if ``to`` is None."""

    to: WorkerId | None
    command: Command
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Output: write ``event`` into the job's log."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Event: the answer to a loss that has not happened yet; ``lost`` are all workers that would be gone."""

    lost: frozenset[WorkerId]
    recovery: RecoveryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcoming:
    """A generation that is prepared while another one runs.

    Attributes:
        generation: its number.
        plan: its plan.
        entering: workers that enter in it; those that entered before have caught up by then, or it waits for them.
    """

    generation: int
    plan: Plan
    entering: frozenset[WorkerId]


Output = Tell | Record | Commit
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
        pids: the process of each worker that attached.
        lost: workers that are gone.
        arriving: workers that attached to the running job and are in no generation yet.
        entering: members of this generation without state.
        synced: those of ``entering`` that have caught up.
        leaving: members that were told to go.
        upcoming: the generation that is prepared; None if none is.
        expected: lost workers for which a new process is being started.
        abandoned: vacant places whose newcomer died without state; nobody is started there again unasked.
        offers: places (None: any) for which a new worker could be started and that were not vacant so far.
        watch: who was heard of when.
        statuses: what the survivors said about this generation.
        joined: members whose transport of this generation stands.
        joined_early: workers that entered whose transport of the prepared generation stands.
        finished: survivors that ran the last step of the job.
        saved: layer digests of the survivors, once written.
        planned: answers prepared for the loss of one more worker, by all who would be gone.
        lost_work: (step, pairs run of it) of the workers lost since training last went on.
        lost_layers: layers without an owner; empty while training can go on.
        restorable: states that everyone could load, the newest first.
        wait_s: how long to wait for workers when a layer has no owner.
        wait_until: when that ends, however often those who come die again; None once a step was done since.
        wait_for_all: whether what is waited for is the whole grid; False unless waiting.
        loading: what everyone was told to load, until all have; whoever has not heard of it must be told again.
        resume_step: the step from which this generation runs.
        last_step: the newest step that was reported done; -1 before the first.
        suspected_at: when the first unexplained suspicion of this generation came; None if none.
        reformations: generations begun in a row because of suspicions alone.
        checkpoints: what is written of checkpoints.
        revision: how many changes there were that a coordinator which is started again must know of.
        detached: workers whose process has no connection, and since when.
        returned: workers that are back at a coordinator that was started again, and what they said.
        reattach_until: when those that are not back are given up.
        agent_away: whether a coordinator that was started again has yet to hear from the agent.
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
    pids: Mapping[WorkerId, int] = field(default_factory=dict)
    lost: frozenset[WorkerId] = frozenset()
    arriving: frozenset[WorkerId] = frozenset()
    entering: frozenset[WorkerId] = frozenset()
    synced: frozenset[WorkerId] = frozenset()
    leaving: frozenset[WorkerId] = frozenset()
    upcoming: Upcoming | None = None
    expected: frozenset[WorkerId] = frozenset()
    abandoned: frozenset[WorkerId] = frozenset()
    offers: tuple[WorkerId | None, ...] = ()
    watch: Watch = field(default_factory=Watch)
    statuses: Mapping[WorkerId, Status] = field(default_factory=dict)
    joined: frozenset[WorkerId] = frozenset()
    joined_early: frozenset[WorkerId] = frozenset()
    finished: frozenset[WorkerId] = frozenset()
    saved: Mapping[WorkerId, Mapping[int, str]] = field(default_factory=dict)
    planned: Mapping[frozenset[WorkerId], RecoveryPlan] = field(default_factory=dict)
    lost_work: tuple[tuple[int, int], ...] = ()
    lost_layers: tuple[int, ...] = ()
    restorable: tuple[StateAt, ...] = ()
    wait_s: float = 0.0
    wait_until: float | None = None
    loading: StateAt | None = None
    wait_for_all: bool = False
    resume_step: int = 0
    last_step: int = -1
    suspected_at: float | None = None
    suspicion: str = ""
    reformations: int = 0
    checkpoints: CheckpointLedger = field(default_factory=CheckpointLedger)
    revision: int = 0
    detached: Mapping[WorkerId, float] = field(default_factory=dict)
    returned: Mapping[WorkerId, Hello] = field(default_factory=dict)
    reattach_until: float = 0.0
    agent_away: bool = False
    ended: Ended | None = None

    @property
    def present(self) -> frozenset[WorkerId]:
        """Everyone who is not lost, in this generation or on the way to one."""
        return frozenset(self.healthy.workers) - self.lost

    @property
    def full(self) -> tuple[WorkerId, ...]:
        """The members that hold their layers' state, in order: whoever can compute and recover."""
        absent = self.lost | self.arriving | (self.entering - self.synced)
        return tuple(worker for worker in self.healthy.workers if worker not in absent)

    @property
    def alive(self) -> tuple[WorkerId, ...]:
        """The members of this generation, in order: full ones and those that are entering."""
        absent = self.lost | self.arriving
        return tuple(worker for worker in self.healthy.workers if worker not in absent)


def decide(state: Membership, event: Message | Closed | Tick | Planned | Settled, *, now: float = 0.0) -> Decision:
    """Returns the membership after ``event`` and what is to be sent and recorded.

    Args:
        state: the membership before.
        event: a message that came in, a connection that closed, or time that passed.
        now: the coordinator's clock, in seconds; only suspicions depend on it.

    After failure: pure, so it can be called again with the same values.
    """
    after, outputs = _decide(state, event, now)
    return _counted(state, after), outputs


def _decide(state: Membership, event: Message | Closed | Tick | Planned | Settled, now: float) -> Decision:
    if state.phase is Phase.ENDED:
        return state, _tell_the_end(state, event)
    match event:
        case Hello(worker=None):
            return _on_agent(state, event)
        case Hello(worker=WorkerId() as worker):
            return _on_hello(state, worker, event)
        case Exited(worker=worker, pid=pid, status=status):
            return _on_exited(state, worker, pid, status)
        case Closed(worker=worker, pid=pid) if state.pids.get(worker, pid) == pid:
            return _on_closed(state, worker, now)
        case NodeLost(node=node, workers=workers):
            return _on_lost(state, dict.fromkeys(workers, f"node {node} is gone"))
        case Failure(worker=worker) if worker not in state.lost:
            return _on_failure(state, event)
        case Heartbeat(worker=worker):
            return replace(state, watch=hear(state.watch, event, now)), ()
        case Tick(now=at):
            return _on_tick(state, at)
        case Planned(lost=lost, recovery=recovery):
            return replace(state, planned={**state.planned, lost: recovery}), ()
        case Leaving(worker=worker) if worker in state.full:
            return _change_members(replace(state, leaving=state.leaving | {worker}))
        case Offer(worker=worker):
            return _on_offer(state, worker)
        case Strike():
            return state, (Tell(to=None, command=event),)
        case ShardWritten() | ShardFailed():
            return _on_shard(state, event)
        case Settled():
            return _on_settled(state, event)
        case _:
            return _on_generation_message(state, event, now)


def _on_generation_message(state: Membership, event: object, now: float) -> Decision:
    """Handles what belongs to one generation; anything of an older one, or of a lost worker, is dropped."""
    if isinstance(event, Synced) and event.worker in state.alive:
        return _on_synced(state, event)
    generation, worker = getattr(event, "generation", None), getattr(event, "worker", None)
    upcoming = state.upcoming
    if upcoming is not None and generation == upcoming.generation and worker in state.pids:
        return _on_upcoming(state, upcoming, event, now)
    if generation != state.generation or state.phase is Phase.GATHERING or worker not in state.alive:
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
        case Unreadable():
            return _on_unreadable(state, event)
    return state, ()


def _on_hello(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    if _is_over(state, worker, hello.pid):
        reason = f"worker {worker} is no member any more"
        return state, (Tell(to=worker, pid=hello.pid, command=Expel(reason=reason)),)
    again = tuple(Tell(to=None, command=Strike(worker=worker, spec=spec)) for spec in hello.strikes)
    return _after((Tell(to=worker, pid=hello.pid, command=Attached()), *again), _admit(state, worker, hello))


def _is_over(state: Membership, worker: WorkerId, pid: int) -> bool:
    """Whether this process is none that may take part: it was held for lost, or another one has taken its place."""
    if worker not in state.healthy.workers:
        return True
    return (state.pids.get(worker, pid) == pid) if worker in state.lost else (state.pids.get(worker, pid) != pid)


def _admit(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    new = worker in state.lost
    state = replace(
        state,
        pids={**state.pids, worker: hello.pid},
        lost=state.lost - {worker},
        arriving=state.arriving | ({worker} if new else frozenset()),
        expected=state.expected - {worker},
        detached=_without(state.detached, worker),
        watch=forget(state.watch, (worker,)),
        planned={} if new else state.planned,
    )
    if state.generation:
        return _on_return(state, worker, hello)
    if set(state.pids) >= set(state.healthy.workers):
        return _form(state, state.healthy)
    return state, ()


def _on_exited(state: Membership, worker: WorkerId, pid: int, status: int) -> Decision:
    if state.pids.get(worker, pid) != pid:
        return _on_exited_early(state, worker)
    if worker in state.leaving and status == 0:  # it went in order, and has told or will tell so, if anybody is there
        return _on_parted(state, worker) if state.phase is Phase.REATTACHING else (state, ())
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return _on_lost(state, {worker: "process ended: " + how})


def _on_exited_early(state: Membership, worker: WorkerId) -> Decision:
    """An earlier process of this worker, whose loss is known; or one that was to come, and never attached."""
    if worker not in state.expected:
        return state, ()
    text = "was started to come into the running job and ended before it had attached"
    state = replace(state, expected=state.expected - {worker})
    state, outputs = _recover(state) if state.wait_for_all else (state, ())
    return state, (Record(event=Notice(worker=str(worker), text=text)), *outputs)


def _on_lost(state: Membership, how: Mapping[WorkerId, str]) -> Decision:
    """Workers are gone, in one event: the survivors form a new generation, or what lives is saved."""
    news = {worker: text for worker, text in how.items() if worker in state.present}
    if not news:
        return state, ()
    noted = tuple(output for worker, text in news.items() for output in _expel(state, worker, text))
    lost_work = state.lost_work + tuple(work for worker in news for work in _pairs_run(state, worker))
    touched = _in_generation(state) & frozenset(news)
    gone = frozenset(news)
    state = replace(
        state,
        abandoned=(state.abandoned | gone) - frozenset(state.full),
        lost=state.lost | gone,
        arriving=state.arriving - gone,
        leaving=state.leaving - gone,
        lost_work=lost_work,
        detached=_without(state.detached, *gone),
        returned=_without(state.returned, *gone),
        watch=forget(state.watch, gone),
    )
    if state.phase is Phase.REATTACHING:
        return _after(noted, _conclude_return(state))
    if state.phase is Phase.GATHERING:
        worker, text = next(iter(news.items()))
        ended, outputs = _end(state, "error", f"worker {worker} died while starting ({text})", state.directory)
        return ended, (*noted, *outputs)
    state, outputs = _recover(state) if touched else (state, ())
    state, more = _answer_offers(state)
    return state, (*noted, *outputs, *more)


def _in_generation(state: Membership) -> frozenset[WorkerId]:
    """Whose loss concerns this generation, or the one that is prepared or waited for."""
    prepared = state.upcoming.plan.workers if state.upcoming is not None else ()
    awaited = state.arriving if state.wait_for_all else ()
    return frozenset((*state.alive, *prepared, *awaited))


def _expel(state: Membership, worker: WorkerId, how: str) -> tuple[Output, ...]:
    return (
        Record(event=Detected(worker=str(worker), how=how, generation=state.generation)),
        Tell(to=worker, pid=state.pids.get(worker), command=Expel(reason=f"held for lost: {how}")),
        Tell(to=None, command=Fence(worker=worker, pid=state.pids.get(worker, 0))),
    )


def _recover(state: Membership) -> Decision:
    """Answers the loss of members: whoever was entering has to enter again."""
    state = replace(
        state,
        generation=_newest(state),
        arriving=state.arriving | (state.entering - state.synced - state.lost),
        entering=frozenset(),
        synced=frozenset(),
        upcoming=None,
    )
    absent = frozenset(state.healthy.workers) - frozenset(state.full)
    recovery = state.planned.get(absent) or plan_recovery(state, absent)
    if recovery.plan is None:
        recovery = _last_resort(state, waiting=state.wait_s > 0)
    return _carry_out(replace(state, lost_layers=recovery.lost_layers, reformations=0, planned={}), recovery)


def _last_resort(state: Membership, *, waiting: bool) -> RecoveryPlan:
    """What answers the loss of all owners of a layer, with what can be loaded and whoever is here without state."""
    view = ClusterView(
        healthy=state.healthy,
        lost=frozenset(state.healthy.workers) - frozenset(state.full),
        entering=state.arriving,
        checkpoint=state.restorable[0].step if state.restorable else None,
        wait_s=state.wait_s if waiting else 0.0,
    )
    return strategy_named(state.strategy)(view)


def _carry_out(state: Membership, recovery: RecoveryPlan) -> Decision:
    if recovery.awaits_s > 0:
        until = _after_now(state, recovery.awaits_s) if state.wait_until is None else state.wait_until
        state, outputs = _form(state, None, recovery.strategy)
        if state.phase is Phase.ENDED:
            return state, outputs
        state = replace(state, phase=Phase.WAITING, wait_until=until, wait_for_all=recovery.awaits_everyone)
        state, spawned = _spawn(state, recovery.spawns)
        return state, (*outputs, *spawned)
    if recovery.loads is None or recovery.plan is None:
        state, outputs = _form(state, recovery.plan, recovery.strategy)
        state, spawned = _spawn(state, tuple(place for place in recovery.spawns if place not in state.abandoned))
        return state, (*outputs, *spawned)
    return _shrink(state, recovery.plan, recovery.strategy)


def _after_now(state: Membership, seconds: float) -> float | None:
    """None if we have just been started and know no time yet: the next tick will."""
    return None if state.watch.now is None else state.watch.now + seconds


def _spawn(state: Membership, places: tuple[WorkerId, ...]) -> Decision:
    """Has the agent start a worker for each of these places, unless one is there or on its way already.

    An agent that is away is asked when it is back: then it says which are coming, and no place is filled twice.
    """
    missing = tuple(place for place in places if place in state.lost and place not in state.expected)
    state = replace(state, expected=state.expected | frozenset(missing))
    asked = () if state.agent_away else missing
    return state, tuple(Tell(to=None, command=Spawn(worker=place)) for place in asked)


def _shrink(state: Membership, plan: Plan, strategy: str) -> Decision:
    """Everyone who has a place in the smaller grid loads it; the others end."""
    here = [worker for worker in state.healthy.workers if worker not in state.lost]
    idle = [worker for worker in here if worker not in plan.workers]
    reason = f"the grid shrinks to {len(plan.workers)} workers, which need no further one"
    sent_away = tuple(Tell(to=worker, command=Expel(reason=reason)) for worker in idle)
    noted = tuple(Record(event=Notice(worker=str(worker), text=reason)) for worker in idle)
    state = replace(
        state,
        healthy=plan,
        lost=frozenset(),
        arriving=frozenset(),
        leaving=state.leaving & frozenset(plan.workers),
        wait_until=None,
        wait_for_all=False,
        watch=forget(state.watch, idle),
    )
    state, outputs = _form(state, plan, strategy, load=state.restorable[0])
    return state, (*noted, *outputs, *sent_away)


def _restore_if_whole(state: Membership) -> Decision:
    """Once every layer has somebody again, or every place if all are waited for, all load the last checkpoint."""
    missing = state.lost if state.wait_for_all else state.healthy.placement.without(state.lost).unowned_layers()
    if missing:
        return state, ()
    recovery = adaptive(ClusterView(healthy=state.healthy, lost=state.lost))
    strategy = state.strategy if state.wait_for_all else "fallback"
    state = replace(state, arriving=frozenset(), wait_for_all=False)
    return _form(state, recovery.plan, strategy, load=state.restorable[0])


def _on_unreadable(state: Membership, message: Unreadable) -> Decision:
    """The state that everyone was to load is damaged: the one before it, if there is one."""
    left = tuple(each for each in state.restorable if each.step < message.step)
    text = f"the checkpoint of step {message.step} cannot be used: {message.detail}"
    notice = Record(event=Notice(worker=str(message.worker), text=text))
    state = replace(state, restorable=left)
    if not left:
        ended, outputs = _end(state, "lost", f"{text}; there is no other", "")
        return ended, (notice, *outputs)
    state, outputs = _form(state, state.plan, "fallback", load=left[0])
    return state, (notice, *outputs)


def _newest(state: Membership) -> int:
    """The highest number that any generation has been given."""
    told = (number for hello in state.returned.values() for number in (hello.generation, hello.prepared))
    return max(state.generation, state.upcoming.generation if state.upcoming is not None else 0, *told, 0)


def _change_members(state: Membership) -> Decision:
    """Prepares the next generation if somebody is to come or go and nothing else is under way."""
    if state.phase is not Phase.RUNNING or state.upcoming is not None or len(state.joined) < len(state.alive):
        return state, ()
    if not (state.arriving or state.entering or state.leaving):
        return state, ()
    entering = state.arriving
    full = frozenset(state.alive) - state.leaving  # nobody goes over before whoever is entering now has caught up
    view = ClusterView(healthy=state.healthy, lost=frozenset(state.healthy.workers) - full, entering=entering)
    recovery = at_boundary(view)
    if recovery.plan is None:
        layers = ", ".join(map(str, recovery.lost_layers))
        text = f"asked to leave, but nobody else holds layer(s) {layers}: it stays until somebody does"
        notices = tuple(Record(event=Notice(worker=str(worker), text=text)) for worker in sorted(state.leaving))
        return _after(notices, _change_members(replace(state, leaving=frozenset())))
    generation = state.generation + 1
    upcoming = Upcoming(generation=generation, plan=recovery.plan, entering=entering)
    order = Install(generation=generation, plan=recovery.plan, at_boundary=True, entering=tuple(sorted(entering)))
    at_once = msgspec.structs.replace(order, at_boundary=False)
    told = [Tell(to=worker, command=order) for worker in state.alive]
    told += [Tell(to=worker, command=at_once) for worker in sorted(state.arriving)]
    return replace(state, upcoming=upcoming), tuple(told)


def _on_upcoming(state: Membership, upcoming: Upcoming, event: object, now: float) -> Decision:
    """Handles what comes from workers that have gone over, or wait in, the generation that was prepared."""
    if state.phase is Phase.REATTACHING:  # a new generation will follow, as not all run the stored one
        return _on_parted(state, event.worker) if isinstance(event, Left) else (state, ())
    match event:
        case Blob(to=to):
            return state, tuple(Tell(to=peer, command=event) for peer in to if peer not in state.lost)
        case Suspect():
            return _on_suspect(state, event, now)
        case Joined(worker=worker, step=int(step)) | Left(worker=worker, step=step):
            state, outputs = _go_over(state, upcoming, step)
            state, more = _on_joined(state, worker) if isinstance(event, Joined) else (state, ())
            return state, (*outputs, *more)
        case Joined(worker=worker):
            return replace(state, joined_early=state.joined_early | {worker}), ()
    return state, ()


def _go_over(state: Membership, upcoming: Upcoming, step: int) -> Decision:
    """The workers have crossed: what was prepared is what runs."""
    gone = state.leaving - frozenset(upcoming.plan.workers)
    arrived = state.arriving & upcoming.entering
    state = replace(
        state,
        generation=upcoming.generation,
        generations=state.generations + 1,
        plan=upcoming.plan,
        lost=state.lost | gone,
        leaving=state.leaving - gone,
        arriving=state.arriving - upcoming.entering,
        entering=upcoming.entering,
        synced=state.synced & upcoming.entering,
        joined=state.joined_early,
        joined_early=frozenset(),
        finished=frozenset(),
        upcoming=None,
        planned={},
        resume_step=step,
        suspected_at=None,
        watch=forget(state.watch, gone),
    )
    workers = tuple(str(worker) for worker in state.alive)
    record = Record(event=Installed(generation=state.generation, workers=workers, strategy="boundary"))
    parted = tuple(Record(event=Parted(worker=str(worker), step=step)) for worker in sorted(gone))
    resume = Resume(generation=state.generation, step=step)
    return state, (record, *parted, *(Tell(to=worker, command=resume) for worker in sorted(arrived)))


def _on_synced(state: Membership, synced: Synced) -> Decision:
    """Whoever has caught up holds its state, and keeps nobody from the next boundary; others may tell of that first."""
    worker = synced.worker
    event = SyncedEvent(worker=str(worker), entered=synced.entered, step=synced.step, bytes=synced.bytes)
    if synced.generation == state.generation and worker in state.entering:
        state = replace(state, synced=state.synced | {worker})
    return state, (Record(event=event),)


_NO_PLACES = (Phase.GATHERING, Phase.REATTACHING, Phase.ENDED)


def _on_offer(state: Membership, worker: WorkerId | None) -> Decision:
    return _answer_offers(replace(state, offers=(*state.offers, worker)))


def _answer_offers(state: Membership) -> Decision:
    """Asks the agent to start workers for vacant places, as far as it offered."""
    vacant = set(state.lost - state.expected)
    kept: list[WorkerId | None] = []
    spawned: list[WorkerId] = []
    for offer in state.offers if state.phase not in _NO_PLACES else ():
        place = offer if offer is not None else _neediest(state, vacant)
        if place is None or place not in vacant:
            kept.append(offer)
            continue
        vacant.discard(place)
        spawned.append(place)
    state = replace(state, offers=tuple(kept), expected=state.expected | frozenset(spawned))
    return state, tuple(Tell(to=None, command=Spawn(worker=worker)) for worker in spawned)


def _neediest(state: Membership, vacant: set[WorkerId]) -> WorkerId | None:
    """The vacant place whose layers have the fewest owners left."""
    placement = state.healthy.placement
    left = placement.without(frozenset(placement.workers) - frozenset(state.full))

    def owners(worker: WorkerId) -> int:
        return len(left.owners(placement.layers_of(worker).start))

    return min(sorted(vacant), key=owners, default=None)


def plan_recovery(state: Membership, lost: frozenset[WorkerId]) -> RecoveryPlan:
    """Returns what answers the loss of all of ``lost``, which takes milliseconds: ahead of time where possible."""
    return strategy_named(state.strategy)(ClusterView(healthy=state.healthy, lost=lost))


def unplanned(state: Membership) -> tuple[frozenset[WorkerId], ...]:
    """The losses that could come next and for which no answer was prepared yet; none unless steps are being run."""
    if state.phase is not Phase.RUNNING:
        return ()
    absent = frozenset(state.healthy.workers) - frozenset(state.full)
    ahead = (absent | {worker} for worker in state.full)
    return tuple(lost for lost in ahead if lost not in state.planned)


def _form(state: Membership, plan: Plan | None, strategy: str = "", load: StateAt | None = None) -> Decision:
    """Starts the next generation of the workers that are left; ``strategy`` says what answered a failure."""
    load = load or (state.loading if plan is not None else None)  # else whatever comes next says what to load
    state = replace(
        state,
        phase=Phase.FORMING,
        generation=state.generation + 1,
        generations=state.generations + (plan is not None and bool(state.alive)),
        plan=plan,
        statuses={},
        joined=frozenset(),
        joined_early=frozenset(),
        finished=frozenset(),
        saved={},
        loading=load,
        suspected_at=None,
        returned={},
    )
    if not state.alive:
        return _end(state, "lost", "every worker is lost; nothing could be saved", "")
    install = Install(generation=state.generation, plan=plan, load=load)
    workers = tuple(str(worker) for worker in state.alive)
    record = Record(event=Installed(generation=state.generation, workers=workers, strategy=strategy))
    return state, (record, *(Tell(to=worker, command=install) for worker in state.alive))


def _on_status(state: Membership, status: Status) -> Decision:
    state = replace(state, statuses={**state.statuses, status.worker: status})
    if state.phase is not Phase.FORMING or not set(state.statuses) >= set(state.alive):
        return state, ()
    step = _step_to_go_back_to(state)
    _check_distance(state, step)
    recomputed = _recomputed(state, step)
    agreed = Record(event=Agreed(generation=state.generation, step=step, recomputed_microbatches=recomputed))
    if state.plan is None:
        state, outputs = _save(replace(state, resume_step=step), step)
        return state, (agreed, *outputs)
    state = replace(state, phase=Phase.RUNNING, resume_step=step, lost_work=(), loading=None)
    resume = Resume(generation=state.generation, step=step)
    return state, (agreed, *(Tell(to=worker, command=resume) for worker in state.alive))


def _step_to_go_back_to(state: Membership) -> int:
    """The newest snapshot that all hold, if they are to run on; else the lowest step of any layer."""
    common = frozenset.intersection(*(frozenset(status.snapshots) for status in state.statuses.values()))
    if common and state.plan is not None:
        return max(common)
    return min(at for status in state.statuses.values() for _, at in status.layer_steps)


def _check_distance(state: Membership, step: int) -> None:
    for status in state.statuses.values():
        for layer, at in status.layer_steps:
            if at > step + 1 and step not in status.snapshots:
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
    vital = state.watch.vitals.get(worker)
    beat = None if vital is None else vital.beat
    if beat is None or worker not in state.full or state.plan is None or beat.generation != state.generation:
        return ()
    forwards = sum(op.kind is OpKind.F for op in state.plan.orders.of(worker)[: beat.op])
    return ((beat.step, forwards * len(state.plan.placement.layers_of(worker).indices)),)


def _on_joined(state: Membership, worker: WorkerId) -> Decision:
    state = replace(state, joined=state.joined | {worker})
    if not state.joined >= set(state.alive):
        return state, ()
    state, outputs = _change_members(state)
    return state, (Record(event=Rebuilt(generation=state.generation)), *outputs)


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
    """Whoever is away for too long, or hung, is lost; any suspicion that no loss explains: all connect anew."""
    if given_up := _given_up(state, now):
        return _on_lost(state, given_up)
    if state.phase in (Phase.GATHERING, Phase.REATTACHING):
        return state, ()
    members = tuple(worker for worker in state.alive if worker not in state.detached)
    state = replace(state, watch=pass_time(state.watch, members, now))
    if state.phase is Phase.WAITING and state.wait_until is None:
        state = replace(state, wait_until=now + state.wait_s)
    if state.phase is Phase.WAITING and state.wait_until is not None and now >= state.wait_until:
        return _carry_out(replace(state, wait_until=None), _last_resort(state, waiting=False))
    running = state.phase in (Phase.FORMING, Phase.RUNNING)
    hung = overdue(state.watch, members, running=running)
    if hung:
        return _on_lost(state, hung)
    suspected = state.suspected_at is not None and now - state.suspected_at >= SUSPICION_GRACE_S
    stuck = running and not state.detached and deadlocked(state.watch, members)
    if not (suspected or stuck):
        return state, ()
    reason = state.suspicion if suspected else "all workers wait for one another"
    return _reform(state, reason)


def _reform(state: Membership, reason: str) -> Decision:
    if state.reformations >= MAX_REFORMATIONS:
        detail = f"communication keeps failing though every worker lives: {reason}"
        return _end(state, "error", detail, state.directory)
    reformations = state.reformations + 1
    state, outputs = _recover(replace(state, watch=forget(state.watch, state.alive)))
    return replace(state, reformations=reformations), outputs


def _on_step_done(state: Membership, done: StepDone) -> Decision:
    state = replace(state, last_step=max(state.last_step, done.step), reformations=0, wait_until=None)
    progress = Progress(
        step=done.step,
        loss=done.loss,
        omitted=done.omitted,
        alive=len(state.alive),
        generation=state.generation,
        checkpoint=state.checkpoints.newest,
    )
    return state, (Tell(to=None, command=progress),)


def _on_finished(state: Membership, worker: WorkerId) -> Decision:
    state = replace(state, finished=state.finished | {worker})
    if state.phase is not Phase.RUNNING or not state.finished >= set(state.full):
        return state, ()
    return _save(state, state.steps)


def _save(state: Membership, step: int) -> Decision:
    """Asks the first living owner of each layer to write it, and everyone for the digests of what they hold."""
    state = replace(state, phase=Phase.SAVING, resume_step=step)
    placement = state.healthy.placement.without(frozenset(state.healthy.workers) - frozenset(state.full))
    owned = {layer: placement.owners(layer) for layer in range(placement.num_layers)}

    def save(worker: WorkerId) -> Save:
        layers = tuple(layer for layer, owners in owned.items() if owners and owners[0] == worker)
        return Save(generation=state.generation, step=step, layers=layers, directory=state.directory)

    return state, tuple(Tell(to=worker, command=save(worker)) for worker in state.full)


def _on_saved(state: Membership, worker: WorkerId, digests: dict[int, str]) -> Decision:
    return _end_if_saved(replace(state, saved={**state.saved, worker: digests}))


def _on_shard(state: Membership, message: ShardWritten | ShardFailed) -> Decision:
    """What a worker wrote stays written, whatever became of the worker and its generation."""
    ledger, follows = note_shard(state.checkpoints, message, state.healthy.placement.num_layers)
    state = replace(state, checkpoints=ledger)
    if follows is None:
        return state, ()
    return state, (follows if isinstance(follows, Commit) else Record(event=follows),)


def _on_settled(state: Membership, settled: Settled) -> Decision:
    ledger, told = settle(state.checkpoints, settled)
    if not settled.error:
        older = tuple(each for each in state.restorable if each.url is not None and each.step != settled.step)
        found = sorted((*older, StateAt(url=settled.url, step=settled.step)), key=lambda each: -each.step)
        state = replace(state, restorable=tuple(found[:MAX_RESTORABLE]))
    state, outputs = _end_if_saved(replace(state, checkpoints=ledger))
    return state, (*(Record(event=event) for event in told), *outputs)


def _end_if_saved(state: Membership) -> Decision:
    """Ends the job when all survivors have saved, and no manifest is being written any more."""
    if state.phase is not Phase.SAVING or not set(state.saved) >= set(state.full) or state.checkpoints.committing:
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
    after, outputs = _end(state, "error", detail, state.directory)
    return _counted(state, after), outputs


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
    told = (Tell(to=worker, command=shutdown) for worker in sorted(state.present))
    return state, (*told, Tell(to=None, command=ended))


def _tell_the_end(state: Membership, event: object) -> tuple[Output, ...]:
    """Whoever comes after the end hears of it."""
    match event:
        case Hello(worker=None) if state.ended is not None:
            return (Tell(to=None, command=state.ended),)
        case Hello(worker=worker, pid=pid):
            return (Tell(to=worker, pid=pid, command=Shutdown(reason="the job has ended")),)
    return ()


def _after(outputs: tuple[Output, ...], decision: Decision) -> Decision:
    return decision[0], (*outputs, *decision[1])


# What a coordinator that is started again must know.


def _durable(state: Membership) -> tuple[object, ...]:
    """Whatever of these changes must be stored before anybody hears of it."""
    members = (state.lost, state.arriving, state.entering, state.synced, state.leaving, state.expected, state.pids)
    layers = (state.healthy, state.restorable, state.loading)
    return (state.generation, state.generations, state.plan, state.upcoming, *members, *layers, state.ended)


def _counted(before: Membership, after: Membership) -> Membership:
    """Before the first generation there is nothing to remember: everyone attaches anew."""
    unborn = after.generation == 0 and after.ended is None
    if unborn or _durable(before) == _durable(after):
        return after
    return replace(after, revision=before.revision + 1)


def to_store(before: Membership, after: Membership) -> StoredDecision | None:
    """Returns what must be durable before anybody hears of it; None if ``after`` decided nothing of that kind."""
    if after.revision == before.revision:
        return None
    return StoredDecision(
        revision=after.revision,
        generation=after.generation,
        healthy=after.healthy,
        plan=after.plan,
        restorable=after.restorable,
        loading=after.loading,
        lost=tuple(sorted(after.lost)),
        generations=after.generations,
        lost_layers=after.lost_layers,
        lost_work=after.lost_work,
        upcoming=_stored_upcoming(after.upcoming),
        arriving=tuple(sorted(after.arriving)),
        entering=tuple(sorted(after.entering)),
        synced=tuple(sorted(after.synced)),
        leaving=tuple(sorted(after.leaving)),
        expected=tuple(sorted(after.expected)),
        pids=tuple(sorted(after.pids.items())),
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
        revision=stored.revision,
        generation=stored.generation,
        generations=stored.generations,
        healthy=stored.healthy,
        plan=stored.plan,
        restorable=stored.restorable,
        loading=stored.loading,
        lost=frozenset(stored.lost),
        lost_layers=stored.lost_layers,
        lost_work=stored.lost_work,
        upcoming=_restored_upcoming(stored.upcoming),
        arriving=frozenset(stored.arriving),
        entering=frozenset(stored.entering),
        synced=frozenset(stored.synced),
        leaving=frozenset(stored.leaving),
        expected=frozenset(stored.expected),
        pids=dict(stored.pids),
        reattach_until=reattach_until,
        agent_away=True,
        ended=stored.ended,
    )


def _stored_upcoming(upcoming: Upcoming | None) -> StoredUpcoming | None:
    if upcoming is None:
        return None
    entering = tuple(sorted(upcoming.entering))
    return StoredUpcoming(generation=upcoming.generation, plan=upcoming.plan, entering=entering)


def _restored_upcoming(stored: StoredUpcoming | None) -> Upcoming | None:
    if stored is None:
        return None
    return Upcoming(generation=stored.generation, plan=stored.plan, entering=frozenset(stored.entering))


# A connection, or the coordinator itself, was lost and is back.


def _on_agent(state: Membership, hello: Hello) -> Decision:
    """The agent is back: what it saw meanwhile counts now, and what it may have missed is told again."""
    dead = {(exit_.worker, exit_.pid) for exit_ in hello.exits}
    fenced = [(worker, state.pids.get(worker, 0)) for worker in sorted(state.lost)]
    outputs: tuple[Output, ...] = tuple(
        Tell(to=None, command=Fence(worker=worker, pid=pid)) for worker, pid in fenced if (worker, pid) not in dead
    )
    for exit_ in hello.exits:
        if state.pids.get(exit_.worker, exit_.pid) == exit_.pid:
            state, more = _on_exited(state, exit_.worker, exit_.pid, exit_.status)
            outputs += more
    if state.phase is Phase.ENDED:
        return state, outputs
    unheard = state.expected - frozenset(hello.coming)
    state = replace(state, offers=hello.offers, expected=state.expected - unheard, agent_away=False)
    state, spawned = _spawn(state, tuple(sorted(unheard & _to_fill(state)))) if unheard else (state, ())
    return _after((*outputs, *spawned), _answer_offers(state))


def _to_fill(state: Membership) -> frozenset[WorkerId]:
    """The places for which processes are started without anybody's offer."""
    if state.wait_for_all:
        return state.lost
    absent = frozenset(state.healthy.workers) - frozenset(state.full)
    return frozenset(plan_recovery(state, absent).spawns) - state.abandoned


def _on_closed(state: Membership, worker: WorkerId, now: float) -> Decision:
    """A connection is gone: of a dead worker, as the agent will say at once, or of one that will be back."""
    if worker not in state.present:
        return state, ()
    return replace(state, detached={**state.detached, worker: now}, returned=_without(state.returned, worker)), ()


def _given_up(state: Membership, now: float) -> dict[WorkerId, str]:
    """Who has been away for too long, and how that shows."""
    if state.phase is Phase.REATTACHING:
        late = state.present - set(state.returned)
        return dict.fromkeys(sorted(late), "did not come back") if now >= state.reattach_until else {}
    how = f"connection closed for {DETACHED_GRACE_S:g} s"
    return {worker: how for worker, since in state.detached.items() if now - since >= DETACHED_GRACE_S}


def _on_return(state: Membership, worker: WorkerId, hello: Hello) -> Decision:
    """A worker is back. What was on its way to it or from it may be lost, so if that can matter, all begin anew."""
    if hello.leaving and worker in state.full:
        state = replace(state, leaving=state.leaving | {worker})
    if _caught_up(state, worker, hello):
        state = replace(state, synced=state.synced | {worker})
    if state.phase is Phase.REATTACHING:
        return _conclude_return(replace(state, returned={**state.returned, worker: hello}))
    if not _undisturbed(state, worker, hello):
        return _recover(state)
    if worker in state.arriving:
        return _restore_if_whole(state) if state.phase is Phase.WAITING else _change_members(state)
    state, outputs = _change_members(replace(state, joined=state.joined | {worker}))
    return _after(outputs, _on_finished(state, worker) if hello.activity == "finished" else (state, ()))


def _caught_up(state: Membership, worker: WorkerId, hello: Hello) -> bool:
    """Whether a worker that entered holds its state by now, though we may not have heard so."""
    return worker in state.entering and hello.has_state and _runs(state, hello)


def _runs(state: Membership, hello: Hello) -> bool:
    return hello.generation == state.generation and hello.activity != "waiting"


def _undisturbed(state: Membership, worker: WorkerId, hello: Hello) -> bool:
    """Whether everything can go on as if this worker had never been away."""
    if worker in state.arriving:  # nothing is asked of it before a generation with it is prepared
        return state.upcoming is None or worker not in state.upcoming.entering
    return state.phase is Phase.RUNNING and _settled(state) and _runs(state, hello) and not hello.prepared


def _settled(state: Membership) -> bool:
    """Whether nobody is between two generations."""
    return state.upcoming is None and not state.entering


def _conclude_return(state: Membership) -> Decision:
    """Once all who live are back: if all run the stored generation they go on, undisturbed; else all begin anew."""
    if not set(state.returned) >= state.present:
        return state, ()
    hellos = {worker: state.returned[worker] for worker in state.alive}
    members = set(state.plan.workers) if state.plan is not None else set()
    runs = all(_runs(state, hello) and not hello.prepared for hello in hellos.values())
    adopted = bool(hellos) and members == set(hellos) and _settled(state) and runs
    record = Record(event=Reattached(generation=state.generation, adopted=adopted))
    state, outputs = _adopt(state, hellos) if adopted else _recover(state)
    return _after((record, *outputs), _answer_offers(state))


def _adopt(state: Membership, hellos: Mapping[WorkerId, Hello]) -> Decision:
    """Goes on with what all members run."""
    done = frozenset(worker for worker, hello in hellos.items() if hello.activity == "finished")
    state = replace(
        state,
        phase=Phase.RUNNING,
        joined=frozenset(hellos),
        finished=state.finished | done,
        resume_step=min(hello.step for hello in hellos.values()),
        last_step=max(state.last_step, *(hello.step - 1 for hello in hellos.values())),
        lost_work=(),
        returned={},
    )
    return _save(state, state.steps) if state.finished >= set(state.full) else _change_members(state)


def _on_parted(state: Membership, worker: WorkerId) -> Decision:
    """A worker has left in order while there was no coordinator."""
    step = max((hello.step for hello in state.returned.values()), default=0)
    state = replace(
        state,
        lost=state.lost | {worker},
        leaving=state.leaving - {worker},
        returned=_without(state.returned, worker),
        detached=_without(state.detached, worker),
    )
    return _after((Record(event=Parted(worker=str(worker), step=step)),), _conclude_return(state))


_V = TypeVar("_V")


def _without(values: Mapping[WorkerId, _V], *workers: WorkerId) -> Mapping[WorkerId, _V]:
    return {worker: value for worker, value in values.items() if worker not in workers}
