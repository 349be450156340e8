"""What workers, agents and the coordinator say to each other: typed values, encoded as msgpack.

Every message is a tagged struct that refuses unknown fields, so nothing but these values can come in from the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

import msgspec

from holdfast.core.ids import Interval, WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.core.plan import Plan
from holdfast.core.progress import StepProgress
from holdfast.core.replay import Replay
from holdfast.core.step_plan import StepPlan
from holdfast.core.work import Busy, WorkPhase
from holdfast.errors import HoldfastError
from holdfast.parsing import parsing
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry import events

__all__ = [
    "LONGEST_PARCEL",
    "Activity",
    "Attached",
    "Audited",
    "Audits",
    "BeginAnew",
    "Blob",
    "CaughtUp",
    "Command",
    "Computed",
    "CoordinatorsAt",
    "Ended",
    "Exited",
    "Expel",
    "Failure",
    "Fence",
    "Finished",
    "Gathered",
    "Heartbeat",
    "Hello",
    "Here",
    "Install",
    "Joined",
    "Leave",
    "Leaving",
    "Left",
    "NodeLeaving",
    "Meet",
    "Message",
    "News",
    "NodeLost",
    "Obsolete",
    "Peer",
    "Preempted",
    "Progress",
    "Pulse",
    "Raised",
    "Refused",
    "Remark",
    "ReplayOrder",
    "Resume",
    "Save",
    "Saved",
    "Scored",
    "ScoresKept",
    "ShardFailed",
    "ShardWritten",
    "Shutdown",
    "StandBy",
    "StandingBy",
    "Pulsed",
    "StartWorker",
    "Started",
    "StateAt",
    "Status",
    "StepDone",
    "Strike",
    "Suspect",
    "CommitVote",
    "Told",
    "Unreadable",
    "Unreplayed",
    "Weighed",
    "WorkerOffer",
    "decode_command",
    "decode_message",
    "encode",
    "may_say",
    "pack",
    "parcels",
    "unpack",
]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages: immutable, closed."""


# From workers and agents to the coordinator.


class Exited(_Wire, frozen=True, tag=True, kw_only=True):
    """The agent saw a worker's process end. ``status``: exit code, or minus the signal's number."""

    worker: WorkerId
    process: Process
    status: int


class Raised(_Wire, frozen=True, tag=True, kw_only=True):
    """An exception came in a worker, which has stopped and keeps its state: its fault, or the program's?

    ``phase``, ``layer``, ``item`` (of the data) and ``microbatch`` (its global number) say what it did in ``step``, as
    far as that is known; ``kind`` is the class of the exception. ``sound``: its layers are states that can be saved.
    """

    worker: WorkerId
    process: Process
    generation: int
    step: int
    phase: WorkPhase
    kind: str
    error: str
    layer: int | None = None
    item: int | None = None
    microbatch: int | None = None
    traceback: str = ""
    sound: bool = True


class Started(_Wire, frozen=True, tag=True, kw_only=True):
    """The agent has started a worker's process."""

    worker: WorkerId
    process: Process


Activity = Literal["waiting", "running", "finished"]


class Here(_Wire, frozen=True, kw_only=True):
    """Where a worker's process listens for its peers, ``host:port``, and a number of 16 bytes that it has drawn."""

    address: Annotated[str, msgspec.Meta(max_length=300, pattern=r"^[^\s]+:[0-9]{1,5}$")]
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Hello(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker (or, with ``worker`` empty, the node's agent) attaches, for the first time or again.

    It repeats whatever may have been lost with an earlier connection. Of a worker: ``generation``, ``activity`` and
    ``step`` say where it stands (it waits until it was told to run steps, and again from when it gives them up);
    ``prepared`` is the generation that it is to go over to, 0 if there is none; ``here``: where it listens, if it has
    links; ``has_state``: it is not following its peers without any state; ``leaving``: it was told to go; ``dormant``:
    to compute nothing; ``raised``: why it has stopped; ``strikes``: faults that the agent is to carry out for it;
    ``scored``: what it has evaluated, as far as it has not heard that it is kept.
    Of the agent: ``generation`` is the newest that ran a step; ``exits`` are all that it has seen; ``offers`` those not
    yet taken up; ``coming`` the workers whose newest process was started on demand, and lives; ``started`` the
    processes that live; ``preempted``: see Preempted; ``leaving``: see NodeLeaving; ``coordinators``: the addresses of
    those that it has started.
    """

    worker: WorkerId | None
    process: Process
    generation: int = 0
    activity: Activity = "waiting"
    step: int = 0
    prepared: int = 0
    here: Here | None = None
    has_state: bool = True
    leaving: bool = False
    dormant: bool = False
    raised: Raised | None = None
    strikes: tuple[str, ...] = ()
    scored: tuple[Scored, ...] = ()
    exits: tuple[Exited, ...] = ()
    offers: tuple[WorkerId | None, ...] = ()
    coming: tuple[WorkerId, ...] = ()
    started: tuple[Started, ...] = ()
    preempted: bool = False
    coordinators: tuple[str, ...] = ()


class CommitVote(_Wire, frozen=True, kw_only=True):
    """What a worker knows of the verdict over a step; ``complete``: what all workers do. Passed on unread."""

    step: int
    complete: bool
    value: bytes


class Computed(_Wire, frozen=True, kw_only=True):
    """What a worker says that it computed of a sample, and of what: digests.

    ``inputs``: of the layer's input and of the gradient of its output; ``output``: of that; ``gradients``: of those of
    its input and its weights, before they are added to any sum.
    """

    worker: WorkerId
    inputs: str
    output: str
    gradients: str


class Audited(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker has computed a second time what ``runner`` ran of a layer in ``step``, and does not commit it yet.

    ``microbatch``: its global number. ``claims``: the runner's, and then the worker's own, as often as either computed
    it. Told if they differ; and of a step that is disputed already, whatever they are.
    """

    worker: WorkerId
    generation: int
    step: int
    layer: int
    microbatch: int
    runner: WorkerId
    claims: tuple[Computed, ...]

    @property
    def agreed(self) -> bool:
        """Whether all say the same."""
        return len({(each.inputs, each.output, each.gradients) for each in self.claims}) == 1


class Weighed(_Wire, frozen=True, tag=True, kw_only=True):
    """Digests of the layers that a worker holds, as they are before ``step``: owners are to have the same."""

    worker: WorkerId
    generation: int
    step: int
    digests: tuple[tuple[int, str], ...]


class Scored(_Wire, frozen=True, tag=True, kw_only=True):
    """What came of micro-batches that the state before ``step`` is evaluated by, and that this worker ran to their end.

    ``rows``: the number of each, and its values, by ``names``; the loss is the first. None: it has no such score.
    """

    worker: WorkerId
    generation: int
    step: int
    names: tuple[str, ...]
    rows: tuple[tuple[int, tuple[float | None, ...]], ...]


class Status(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker has aborted everything older than ``generation`` and says where its layers are.

    ``executed``: (step, number of (layer, micro-batch) pairs that it had begun), of its last steps. ``snapshots``: the
    steps at which it holds all its layers besides. ``votes``: of its last steps. ``unsettled``: the step that its
    layers were updated with ahead of the verdict, if that has not come. ``follows``: the layers whose state it has yet
    to get. ``progress``: what it keeps of the steps that are not settled. ``refuses``: it knows that updates made
    ahead of a verdict do not stand. ``returns``: its layers can go back to the step before bitwise. ``disputed``: what
    it found out about the step that it does not commit. ``ends``: the step before which the script's loop was stopped.
    """

    worker: WorkerId
    generation: int
    layer_steps: tuple[tuple[int, int], ...]
    executed: tuple[tuple[int, int], ...]
    snapshots: tuple[int, ...] = ()
    votes: tuple[CommitVote, ...] = ()
    unsettled: int | None = None
    follows: tuple[int, ...] = ()
    progress: tuple[StepProgress, ...] = ()
    refuses: bool = False
    returns: bool = True
    disputed: Audited | None = None
    ends: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it holds; if it holds none, those that it follows."""
        return tuple(layer for layer, _ in self.layer_steps) or self.follows


class Blob(_Wire, frozen=True, tag=True, kw_only=True):
    """A value for the members ``to`` of ``generation``; the coordinator passes it on unread."""

    worker: WorkerId
    generation: int
    key: str
    value: bytes
    to: tuple[WorkerId, ...]


class Joined(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker's transport for ``generation`` stands; it came from the boundary before ``step``, if at a boundary."""

    worker: WorkerId
    generation: int
    step: int | None = None


class Leaving(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker was told to go (SIGTERM); it works on until a plan without it is installed."""

    worker: WorkerId


class Dormant(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker was told to compute nothing (SIGUSR1), or to compute again (SIGUSR2); it takes part in sums always."""

    worker: WorkerId
    dormant: bool


class Left(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker has gone over into ``generation``, which does without it, before ``step``; its process ends."""

    worker: WorkerId
    process: Process
    generation: int
    step: int


class CaughtUp(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker has caught up: from ``step`` on it holds the layers that it followed, with the state of their owners.

    It began to follow them before step ``entered`` and was given ``bytes`` of state.
    """

    worker: WorkerId
    generation: int
    step: int
    entered: int
    bytes: int


class NodeLeaving(_Wire, frozen=True, tag=True, kw_only=True):
    """The node of an agent is to go: its workers leave, and no more are started there; ``left``: none is there now."""

    process: Process
    left: bool = False


class WorkerOffer(_Wire, frozen=True, tag=True, kw_only=True):
    """The agent of ``node`` can start a worker: in the place of ``worker``, or in any; also one to begin with."""

    worker: WorkerId | None
    node: NodeId


class Preempted(_Wire, frozen=True, tag=True, kw_only=True):
    """The job is told to end: a checkpoint is to be made at once, and then it does; ``at_once``: without one."""

    at_once: bool = False


class Strike(_Wire, frozen=True, tag=True, kw_only=True):
    """A scheduled fault that the agent has to carry out is due; passed on to it."""

    worker: WorkerId
    spec: str


class Remark(_Wire, frozen=True, tag=True, kw_only=True):
    """Something that stops nothing, and that the user should hear of; passed on to agents.

    ``kind``: of several of one kind, whoever they are from, only the first is told. ``worker``: None: the coordinator.
    """

    worker: WorkerId | None
    kind: str
    text: str


class Suspect(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker's communication failed: a suspicion, not a verdict; the coordinator decides."""

    worker: WorkerId
    generation: int
    peer: WorkerId | None
    detail: str


class Refused(_Wire, frozen=True, tag=True, kw_only=True):
    """The verdict over ``step`` refuses updates that were made ahead of it.

    ``omitted``: a gradient was not finite; else the gradients have to be scaled.
    """

    worker: WorkerId
    generation: int
    step: int
    omitted: bool


class Heartbeat(_Wire, frozen=True, tag=True, kw_only=True):
    """A sign of life, and of progress.

    ``step``, ``op``: the step and the operation index that the worker is at. ``moves``: everything that it has done so
    far, counted. ``busy_s``: seconds since it last did something, 0 while it waits for others. ``doing``: what keeps it
    busy. ``slowest_s``: the longest that it ever took for one thing of that kind; 0 until it has done a whole step.
    """

    worker: WorkerId
    generation: int
    step: int
    op: int
    moves: int = 0
    busy_s: float = 0.0
    slowest_s: float = 0.0
    doing: Busy = Busy.COMPUTING


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
    """A worker has run the last step of the job: the one before ``step``."""

    worker: WorkerId
    generation: int
    step: int


class Saved(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker wrote the layers that it was asked to; ``digests`` are of all layers that it holds bitwise."""

    worker: WorkerId
    generation: int
    digests: tuple[tuple[int, str], ...]


class ShardWritten(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker wrote one layer's state at ``step`` into the checkpoint store; ``generation``: when it pinned it.

    ``stall_s``: how long its training waited for the copies; ``write_s``: from then on until this layer was written.
    """

    worker: WorkerId
    generation: int
    step: int
    shard: Shard
    stall_s: float = 0.0
    write_s: float = 0.0


class ShardFailed(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker could not write its part of the checkpoint of ``step``; training goes on."""

    worker: WorkerId
    generation: int
    step: int
    detail: str


class Unreadable(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker was told to load a state that cannot be read; an older one may be."""

    worker: WorkerId
    generation: int
    step: int
    detail: str


class Unreplayed(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker cannot replay layers: what it needs was not logged, is damaged, or is not what it computes."""

    worker: WorkerId
    generation: int
    detail: str


class Failure(_Wire, frozen=True, tag=True, kw_only=True):
    """A worker ends for a reason that no recovery cures; see Raised for those that may be its own fault."""

    worker: WorkerId
    process: Process
    error: str
    user_fault: bool
    traceback: str = ""


class NodeLost(_Wire, frozen=True, tag=True, kw_only=True):
    """All workers of a node are gone at once: one event."""

    node: int
    workers: tuple[WorkerId, ...]


class Pulsed(_Wire, frozen=True, tag=True, kw_only=True):
    """The answer to a Pulse, of an agent: when that was sent, and what time it is here.

    ``clock``: see :func:`holdfast.telemetry.clocks.this_clock`; times are seconds, each of its machine's own.
    """

    process: Process
    clock: str
    sent_s: float
    now_s: float


class StandingBy(_Wire, frozen=True, tag=True, kw_only=True):
    """The agent was told to start a coordinator, and it listens at ``address``; "": none does, nor can one here."""

    process: Process
    address: str


# From the coordinator.


class Attached(_Wire, frozen=True, tag=True, kw_only=True):
    """The coordinator accepted the connection."""


class StateAt(_Wire, frozen=True, kw_only=True):
    """The state before ``step``: in the checkpoints at ``url``; no url: as the model's seed makes it, before step 0."""

    url: str | None
    step: int


class Audits(_Wire, frozen=True, kw_only=True):
    """How audits go on.

    ``disputed``: the step whose sample is computed again by all owners; None: one of them is asked. ``unsteady``:
    layers that do not repeat and are not audited any more, sorted. ``weigh``: the owners' layers are compared at once.
    """

    disputed: int | None = None
    unsteady: tuple[int, ...] = ()
    weigh: bool = False


class Install(_Wire, frozen=True, tag=True, kw_only=True):
    """Stop everything older, join ``generation`` with ``plan``; no plan: nothing can be trained for now.

    ``at_boundary``: not at once, but after the first step in which all workers were found to know of it. Whoever is to
    follow layers is given their state by those who hold them. ``load``: everyone gives up what it holds, and loads the
    layers that ``plan`` gives it. ``staggered``: updates are made ahead of the verdict. ``pins``: everyone pins its
    part of a checkpoint at the boundary. ``checkpoint_every``: from now on a checkpoint after so many steps; 0: as
    before. ``keeps``: whatever is there of the interrupted step is kept, and nobody connects before it is told what is
    left of it. ``audits``: None if the job makes none. ``stateless``: the worker has come and holds nothing yet,
    whatever it was built with. ``repeated``: see :class:`Resume`.
    """

    generation: int
    plan: Plan | None
    at_boundary: bool = False
    load: StateAt | None = None
    staggered: bool = False
    pins: bool = False
    checkpoint_every: int = 0
    keeps: bool = False
    audits: Audits | None = None
    stateless: bool = False
    repeated: tuple[int, ...] = ()


class Resume(_Wire, frozen=True, tag=True, kw_only=True):
    """Everyone's state is known: take back whatever is ahead of ``step`` and run from there.

    ``votes``: together they settle the step before, for those who have updated with it ahead of its verdict. ``rest``:
    what the worker does of what is left of ``step``, of whose beginning all keep what they have. ``concluded``: the
    verdict over ``step``, whose sums everyone has: nothing is left of it but updates, and the step behind it is the
    next. ``repeated``: the steps whose micro-batches are run once more in the step behind, so that the job has so many
    steps more. ``ends``: the step before which it ends all the same; None: the job says it. ``evaluates``: numbers of
    micro-batches that the state is evaluated by before all else; of later steps, it is by all. ``scored``: the newest
    step before which an evaluation is kept.
    """

    generation: int
    step: int
    votes: tuple[bytes, ...] = ()
    rest: StepPlan | None = None
    concluded: bytes | None = None
    repeated: tuple[int, ...] = ()
    ends: int | None = None
    evaluates: tuple[Interval, ...] = ()
    scored: int = 0


class ReplayOrder(_Wire, frozen=True, tag=True, kw_only=True):
    """Load layers as they were at ``state``, and run their steps since then again from what was logged.

    ``num_layers``: of the model. ``parts`` are run one after another; in each, ``vote`` settles the last step, over
    which no log may have the verdict yet; None if there is no such step.
    """

    generation: int
    state: StateAt
    num_layers: int
    parts: tuple[Replay, ...]
    vote: bytes | None = None


class ScoresKept(_Wire, frozen=True, tag=True, kw_only=True):
    """Evaluations of the states before steps up to this one need not be told of again.

    ``ends``: the step before which the job ends by them; None: it does not, as far as they tell.
    """

    step: int
    ends: int | None = None


class Obsolete(_Wire, frozen=True, tag=True, kw_only=True):
    """A checkpoint of ``step`` is complete: what was logged of the steps before it is not needed any more."""

    step: int


class Save(_Wire, frozen=True, tag=True, kw_only=True):
    """Take back to ``step`` and write ``layers`` into ``directory``; ``votes`` as in Resume."""

    generation: int
    step: int
    layers: tuple[int, ...]
    directory: str
    votes: tuple[bytes, ...] = ()


class Expel(_Wire, frozen=True, tag=True, kw_only=True):
    """This process is no member any more: it must end at once and touch nothing."""

    reason: str


class Peer(_Wire, frozen=True, kw_only=True):
    """Another worker's process: where it listens, and the key that it and the process that is told share."""

    worker: WorkerId
    here: Here
    key: bytes


class Meet(_Wire, frozen=True, tag=True, kw_only=True):
    """With whom a worker may have to connect; what was said of others before still holds."""

    peers: tuple[Peer, ...]


class StartWorker(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: start a process for this worker, which comes into a running job.

    ``first``: the job has not begun, the worker begins with it.
    """

    worker: WorkerId
    first: bool = False


class BeginAnew(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: nothing that it has started is of use any more; it ends that, and offers all its room again."""

    reason: str


class StandBy(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: start a coordinator that stands by; StandingBy follows."""


class CoordinatorsAt(_Wire, frozen=True, tag=True, kw_only=True):
    """Where all coordinators of the job listen, whichever of them leads; ``leaving``: those whose nodes are to go."""

    addresses: tuple[str, ...]
    leaving: tuple[str, ...] = ()


class Pulse(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent, whose host acknowledges what comes a few times a second, or is known to be gone.

    ``seen``: whoever leads can give signs of life where decisions are, too. ``sent_s``: by the coordinator's clock.
    """

    seen: bool = True
    sent_s: float = 0.0


class Shutdown(_Wire, frozen=True, tag=True, kw_only=True):
    """The job is over: exit."""

    reason: str


class Progress(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: a step was done. ``checkpoint``: the step of the newest checkpoint; 0 if there is none."""

    step: int
    loss: float | None
    omitted: bool
    alive: int
    generation: int
    checkpoint: int = 0


class Gathered(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: of ``of`` workers, all but those ``missing`` have attached; the job begins when none is.

    ``unplaced``: for so many no agent has offered room so far; nobody is started before there is room for all.
    """

    missing: tuple[WorkerId, ...]
    of: int
    unplaced: int = 0


News = (
    events.Detected
    | events.Seated
    | events.Parted
    | events.Synced
    | events.HandingOver
    | events.Migrating
    | events.Evaluated
    | events.Notice
)
"""What is told to people, besides being logged."""


class Told(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: something happened to a worker that the user should hear of.

    ``decision``: the number of the one that records it; it may be told again by the next coordinator. 0: of none.
    """

    news: News
    decision: int = 0


class Fence(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: this process of a worker is no member any more; see to it that it is gone."""

    worker: WorkerId
    process: Process


class Leave(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: the workers of its node are to leave."""


class Ended(_Wire, frozen=True, tag=True, kw_only=True):
    """For the agent: how the job ended. ``outcome``: done, lost, too-few, program, preempted, user-error, error,
    interrupted or superseded (by another attempt). ``leader``: the node whose coordinator says so.

    Preempted: ``step`` is that of the checkpoint; ``detail`` says why there is none, empty if there is one.
    ``members``: the workers that were in it to the end; others were on their way.
    """

    outcome: str
    detail: str
    step: int
    directory: str
    generations: int
    lost_layers: tuple[int, ...]
    members: tuple[WorkerId, ...] = ()
    leader: NodeId | None = None


Message = (
    Hello
    | Status
    | Blob
    | Joined
    | Leaving
    | Dormant
    | Left
    | CaughtUp
    | WorkerOffer
    | Preempted
    | Strike
    | Remark
    | Suspect
    | Audited
    | Weighed
    | Scored
    | Heartbeat
    | StepDone
    | Refused
    | ShardWritten
    | ShardFailed
    | Finished
    | Saved
    | Unreadable
    | Unreplayed
    | Raised
    | Failure
    | Started
    | Exited
    | NodeLost
    | NodeLeaving
    | StandingBy
    | Pulsed
)
Command = (
    Attached
    | Install
    | Resume
    | ReplayOrder
    | Obsolete
    | ScoresKept
    | Blob
    | Save
    | Expel
    | Meet
    | Shutdown
    | Progress
    | BeginAnew
    | StandBy
    | CoordinatorsAt
    | Pulse
    | Fence
    | StartWorker
    | Strike
    | Remark
    | Gathered
    | Told
    | Leave
    | Ended
)

LONGEST_PARCEL = 8 << 20
"""Bytes of the longest parcel that the coordinator takes."""
MOST_IN_PARCEL = 16_384
"""Messages, each of which takes memory of its own."""
_USUAL_PARCEL = 1 << 20

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_parcel: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_IN_PARCEL)]
)
_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(value: Message | Command) -> bytes:
    """Returns the wire form of a message or command."""
    return _encoder.encode(value)


def pack(encoded: list[bytes]) -> bytes:
    """Returns one parcel of several encoded messages: what waits to be sent travels together."""
    return _encoder.encode([msgspec.Raw(each) for each in encoded])


def parcels(encoded: list[bytes]) -> Iterator[bytes]:
    """Yields parcels of several encoded messages, in order; no such parcel is refused, unless one message alone is."""
    size, some = 0, list[bytes]()
    for each in encoded:
        if some and (size + len(each) > _USUAL_PARCEL or len(some) == MOST_IN_PARCEL):
            yield pack(some)
            size, some = 0, []
        size += len(each)
        some.append(each)
    if some:
        yield pack(some)


def may_say(worker: WorkerId | None, process: Process | None, message: Message) -> bool:
    """Whether a message may come from this process of a worker, or (``worker`` None) of an agent.

    ``process`` is None only of who says that it has failed before it had one. Everyone speaks for itself; what happened
    to processes, and that new ones can be had, is for the agent of their node to say; which emulated nodes are gone, is
    for any agent.
    """
    match message:
        case Started(process=its) | Exited(process=its):
            return worker is None and process is not None and its.node.shares_agent(process.node)
        case StandingBy(process=its) | Pulsed(process=its) | NodeLeaving(process=its):
            return worker is None and process == its
        case WorkerOffer(node=node):
            return worker is None and process is not None and node == process.node
        case NodeLost() | Preempted():
            return worker is None
        case Hello(raised=Raised() as raised) if not may_say(worker, process, raised):
            return False
        case Hello(worker=None):
            told: tuple[Exited | Started, ...] = (*message.exits, *message.started)
            return worker is None and message.process == process and all(may_say(None, process, each) for each in told)
    return message.worker == worker and getattr(message, "process", process) == process


def unpack(parcel: bytes) -> list[msgspec.Raw]:
    """Returns the encoded messages of a parcel; raises msgspec.DecodeError if it is none."""
    return _decoded(_parcel, parcel)


def decode_message(data: bytes | msgspec.Raw) -> Message:
    """Reads what a worker or agent sent; raises msgspec.ValidationError on anything else."""
    return _decoded(_message, data)


def decode_command(data: bytes | msgspec.Raw) -> Command:
    """Reads what the coordinator sent; raises msgspec.ValidationError on anything else."""
    return _decoded(_command, data)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes | msgspec.Raw) -> _T:
    try:
        with parsing(msgspec.ValidationError):
            return decoder.decode(data)
    except HoldfastError as error:  # a value that no worker or plan can have
        raise msgspec.ValidationError(str(error)) from None
