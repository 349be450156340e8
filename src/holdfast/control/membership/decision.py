"""What to do next, as a pure function of (membership, event).

The coordinator does the I/O around :func:`decide`: it stores the new membership, then sends what ``decide`` asks for.
The simulated cluster and the tests call the same function.

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

One that comes and has no place in the grid is a spare: it waits, and is arriving once it takes the place of a lost one.

``entering`` workers hold no state yet: they take part in reductions, compute nothing, and get the state from their
peers. Any failure sends them back to ``arriving``; they enter again at the next occasion.

When a layer has no owner left and there is a state to load, the job waits for workers (WAITING), or everyone who is
left loads that state as a member of a smaller grid. Otherwise what lives is saved, and the job ends. Strategies that go
back to a checkpoint after any loss wait, too, until the whole grid is there.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.checkpoint_ledger import Settled
from holdfast.control.detection import hear
from holdfast.control.membership.attaching import on_agent, on_hello, on_started
from holdfast.control.membership.auditing import is_news, on_audited, on_weighed
from holdfast.control.membership.boundary import (
    change_members,
    on_checkpointed,
    on_dormant,
    on_improved,
    on_joined,
    on_joined_upcoming,
    on_left,
    on_node_leaving,
    on_preempted,
    on_synced,
)
from holdfast.control.membership.ending import end_job, on_failure, on_saved, tell_the_end
from holdfast.control.membership.forming import relay
from holdfast.control.membership.gathering import gather
from holdfast.control.membership.losses import on_exited, on_lost, on_spare_leaving
from holdfast.control.membership.moving import on_standing
from holdfast.control.membership.progress import on_finished, on_settled, on_shard
from holdfast.control.membership.raising import on_committed, on_raised
from holdfast.control.membership.reattaching import on_parted
from holdfast.control.membership.recovering import on_unreadable, on_unreplayed
from holdfast.control.membership.refusing import on_refused
from holdfast.control.membership.running import Upcoming
from holdfast.control.membership.scoring import on_scored
from holdfast.control.membership.starting import Offer
from holdfast.control.membership.state import (
    AnswerPlanned,
    Closed,
    Decision,
    Improved,
    Membership,
    Phase,
    Tell,
    Tick,
    Unadvised,
    notice,
    prefixed,
)
from holdfast.control.membership.storing import counted
from holdfast.control.membership.vacancies import answer_offers, offered
from holdfast.control.membership.watching import on_agent_closed, on_closed, on_node_left, on_suspect, on_tick
from holdfast.control.messages import (
    Audited,
    Blob,
    CaughtUp,
    Dormant,
    Exited,
    Failure,
    Finished,
    Heartbeat,
    Hello,
    Joined,
    Leaving,
    Left,
    Message,
    NodeLeaving,
    NodeLost,
    Preempted,
    Raised,
    Refused,
    Remark,
    Saved,
    Scored,
    ShardFailed,
    ShardWritten,
    Started,
    Status,
    StepDone,
    Strike,
    Suspect,
    Unreadable,
    Unreplayed,
    Weighed,
    WorkerOffer,
)
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import Process

__all__ = ["decide", "end"]


def decide(
    state: Membership,
    event: Message | Closed | Tick | AnswerPlanned | Improved | Unadvised | Settled,
    *,
    now: float = 0.0,
) -> Decision:
    """Returns the membership after ``event`` and what is to be sent and recorded.

    Args:
        state: the membership before.
        event: a message that came in, a connection that closed, or time that passed.
        now: the coordinator's clock, in seconds: for all that is timed. It stands still while the coordinator does.

    After failure: pure, so it can be called again with the same values.
    """
    after, outputs = _decide(state, event, now)
    return counted(state, after), outputs


def end(state: Membership, detail: str) -> Decision:
    """Ends the job because of a bug of ours; for the coordinator, when ``decide`` itself or its storing failed."""
    after, outputs = end_job(state, "error", detail, state.rules.directory)
    return counted(state, after), outputs


def _decide(
    state: Membership, event: Message | Closed | Tick | AnswerPlanned | Improved | Unadvised | Settled, now: float
) -> Decision:
    if state.phase is Phase.ENDED:
        return state, tell_the_end(state, event)
    match event:
        case Hello(worker=None):
            return on_agent(state, event, now)
        case Hello(worker=WorkerId() as worker):
            return on_hello(state, worker, event)
        case Started():
            return on_started(state, event, now)
        case Exited(worker=worker, process=process, status=status):
            return on_exited(state, worker, process, status)
        case Closed(worker=None, process=Process() as process):
            return on_agent_closed(state, process.node, now)
        case Closed(worker=WorkerId() as worker, process=process) if state.roster.may_be(worker, process):
            return on_closed(state, worker, now)
        case NodeLost(node=node, workers=workers):
            return on_lost(state, dict.fromkeys(workers, f"node {node} is gone"))
        case Failure():
            return _on_failure(state, event)
        case Raised():
            return on_raised(state, event, now)
        case Heartbeat():
            return replace(state, watch=hear(state.watch, event, now)), ()
        case Tick():
            return on_tick(state, event, now)
        case AnswerPlanned(lost=lost, recovery=recovery):
            return replace(state, prospects=state.prospects.answered(lost, recovery)), ()
        case Improved():
            return on_improved(state, event)
        case Unadvised():
            return change_members(replace(state, rules=replace(state.rules, weighs=False)))
        case Leaving(worker=worker) if worker in state.present:
            return change_members(replace(state, roster=state.roster.told_to_go({worker})))
        case Leaving(worker=worker) if worker in state.roster.spares:
            return on_spare_leaving(state, worker)
        case Dormant(worker=worker, dormant=dormant) if worker in state.present | state.roster.spares:
            return on_dormant(state, worker, dormant)
        case WorkerOffer(worker=worker, node=node):
            state = offered(state, Offer(worker, node))
            return gather(state, now) if state.phase is Phase.GATHERING else answer_offers(state)
        case NodeLeaving(process=process, left=left):
            return on_node_left(state, process.node) if left else on_node_leaving(state, process.node)
        case Preempted(at_once=at_once):
            return on_preempted(state, at_once=at_once)
        case Strike(worker=worker):
            process = state.roster.processes.get(worker)
            return state, () if process is None else (Tell(to=None, node=process.node, command=event),)
        case Remark():
            return state, (Tell(to=None, command=event),)
        case Scored(worker=worker) if worker in state.present:
            return on_scored(state, event)
        case ShardWritten() | ShardFailed():
            return on_shard(state, event)
        case Settled(error=error):
            state, outputs = on_settled(state, event)
            return prefixed(outputs, (state, ()) if error else on_checkpointed(state))
        case _:
            return _on_generation_message(state, event, now)


def _on_failure(state: Membership, failure: Failure) -> Decision:
    """A member's error ends the job, unless that ends already; that of a spare, or of who tried to come, is told."""
    worker = failure.worker
    if worker not in state.grid.baseline.workers and worker not in state.roster.spares:
        return state, (notice(worker, f"could not come: {failure.error}"),)
    if worker not in state.roster.lost and state.roster.may_be(worker, failure.process):
        harmless = state.only_saves or worker in state.roster.spares
        return on_lost(state, {worker: failure.error}) if harmless else on_failure(state, failure)
    return state, (notice(worker, f"could not come: {failure.error}"),) if worker in state.roster.expected else ()


def _is_member(state: Membership, left: Left) -> bool:
    return state.is_alive(left.worker) and state.roster.processes.get(left.worker) == left.process


def _on_generation_message(state: Membership, event: object, now: float) -> Decision:
    """Handles what belongs to one generation; anything of an older one, or of a lost worker, is dropped."""
    if isinstance(event, CaughtUp) and state.is_alive(event.worker):
        return on_synced(state, event)
    if isinstance(event, Audited) and state.is_alive(event.worker):
        return on_audited(state, event)
    generation, worker = getattr(event, "generation", None), getattr(event, "worker", None)
    if isinstance(event, Left) and event.generation < state.generation and _is_member(state, event):
        return on_lost(state, {event.worker: "it left before it heard that it was needed again"})
    upcoming = state.running.upcoming
    if upcoming is not None and generation == upcoming.generation and worker in state.roster.processes:
        return _on_upcoming_message(state, upcoming, event, now)
    if generation != state.generation or state.phase is Phase.GATHERING or worker is None or not state.is_alive(worker):
        return state, ()
    match event:
        case Status(disputed=Audited() as disputed) if is_news(state, disputed):
            return on_audited(state, disputed)
        case Status():
            return on_standing(state, event)
        case Blob():
            return relay(state, event)
        case Joined(worker=worker):
            return on_joined(state, worker)
        case Suspect():
            return on_suspect(state, event, now)
        case StepDone():
            return on_committed(state, event, now)
        case Weighed():
            return on_weighed(state, event)
        case Refused():
            return on_refused(state, event)
        case Finished(worker=worker, step=step):
            return on_finished(state, worker, step)
        case Saved():
            return on_saved(state, event)
        case Unreadable():
            return on_unreadable(state, event)
        case Unreplayed() if state.phase is Phase.FORMING:
            return on_unreplayed(state, event)
    return state, ()


def _on_upcoming_message(state: Membership, upcoming: Upcoming, event: object, now: float) -> Decision:
    """Handles what comes from workers that have gone over, or wait in, the generation that was prepared."""
    if state.phase is Phase.REATTACHING:  # a new generation will follow, as not all run the stored one
        return on_parted(state, event.worker) if isinstance(event, Left) else (state, ())
    match event:
        case Blob():
            return relay(state, event)
        case Suspect():
            return on_suspect(state, event, now)
        case Joined():
            return on_joined_upcoming(state, upcoming, event)
        case Left():
            return on_left(state, upcoming, event)
    return state, ()
