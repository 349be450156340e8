"""What a simulated job is, and how it ended: values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain

from holdfast.control.membership import Handover, Membership, Stay
from holdfast.core.evaluation import Evaluating
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes
from holdfast.core.plan import Plan
from holdfast.errors import ConfigError
from holdfast.planning.migration import Migration
from holdfast.planning.planner import Technique
from holdfast.planning.reshaping import Shapes
from holdfast.planning.training import Rerouted
from holdfast.protocol.worker import Engine
from holdfast.recovery.audit import Sampling
from holdfast.recovery.rates import Rates
from holdfast.telemetry.events import Event
from holdfast.testing.raising import Raise

__all__ = ["Delays", "HeldSum", "Pause", "Scenario", "StageFactory", "VirtualPin", "VirtualResult"]

StageFactory = Callable[[WorkerId, Plan], Engine]
Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Ranges, in virtual seconds, from which every delay is drawn.

    Attributes:
        control: of a message between the coordinator and a process.
        message: of a message between workers, and of a part of a reduction.
        compute: of an operation; not drawn where a profile says how long it takes.
        detect: until a process that ended is missed.
        connect: of one worker with its peers.
        copy: of the state of all layers that a worker is given.
        start: of a worker's process.
        store: of one write to the store of checkpoints.
        put: until a decision is known to be stored.
        reattach: until a process connects to the coordinator again.
    """

    control: Range = (0.0005, 0.005)
    message: Range = (0.0001, 0.003)
    compute: Range = (0.01, 0.03)
    detect: Range = (0.001, 0.05)
    connect: Range = (0.001, 0.02)
    copy: Range = (0.001, 0.3)
    start: Range = (0.01, 0.5)
    store: Range = (0.001, 0.1)
    put: Range = (0.0005, 0.02)
    reattach: Range = (0.001, 0.06)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Some processes are stopped, and go on.

    Attributes:
        at: when they are stopped, in virtual seconds.
        lasts_s: for how long.
        workers: which.
        coordinator: whether the coordinator is, too.

    >>> str(Pause(at=1.5, lasts_s=0.2, workers=(WorkerId(0, 1),), coordinator=True))
    'pause:0.1,coordinator#1.5'
    """

    at: float
    lasts_s: float
    workers: tuple[WorkerId, ...] = ()
    coordinator: bool = False

    def __str__(self) -> str:
        who = [*map(str, self.workers), *(["coordinator"] if self.coordinator else [])]
        return f"pause:{','.join(who)}#{self.at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSum:
    """The sum of a reduction is held back from some of its owners; once all others have it, one of these dies.

    So it is known to nobody, or to some, and not to others, when the survivors say how far they are.

    Attributes:
        step: of the reduction.
        layers: of the reduction, as lowering names it.
        held: who does not get the sum, under the plan that runs first.
        killed: who has it, and dies with it.

    >>> str(HeldSum(step=1, layers=(4, 5), held=(WorkerId(0, 2),), killed=WorkerId(1, 2)))
    'hold-sum:4,5@1 from 0.2, kill:1.2'
    """

    step: int
    layers: tuple[int, ...]
    held: tuple[WorkerId, ...]
    killed: WorkerId

    def __post_init__(self) -> None:
        """Checks that whoever is killed can have the sum."""
        if not self.held or self.killed in self.held:
            raise ConfigError(f"{self}: expected somebody that the sum is held back from, and another one to be killed")

    def __str__(self) -> str:
        layers, held = ",".join(map(str, self.layers)), ",".join(map(str, self.held))
        return f"hold-sum:{layers}@{self.step} from {held}, kill:{self.killed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job, and all that happens to it. One seed is one history.

    Attributes:
        plan: of the whole grid.
        steps: of the job.
        seed: of every delay.
        faults: at named points.
        kill_at_effect: workers that die when they yield their n-th effect, wherever that is.
        held_sums: reductions that some owners complete, one of whom dies, and others do not.
        kill_joiner_at_effect: a worker whose later processes die when they yield their n-th effect.
        raises: exceptions of the user's code.
        raise_at_effect: workers in which an exception comes when they yield their n-th effect, whatever that is.
        tolerate: how many workers may be lost to exceptions within 100 steps.
        fewest: with how many workers strategy ``templates`` is to go on at least.
        supposed: how fast the coordinator takes the cluster to be; None: it goes by no prices.
        shapes: what it makes other pipelines by, where all load a checkpoint, with the planner's orders where there are
            such; None: it makes none but alike ones.
        weighs: whether ``better`` is asked before a worker that was told to go does.
        delays: ranges of the delays.
        rates: how long everything takes, in place of ``delays``; None: what is drawn, and updates, loading and saving
            take no time.
        stage: makes a worker's compute engine for its place in a plan; default an emulated one.
        broken_copies: (whose, how many): so many times, one after another, a worker gets no state from anybody.
        spares: (when it is started, whose) further processes, that nobody asked for.
        ties: the layers that share weights.
        workers_per_node: consecutive workers that fail together.
        agents: how many begin the job, each with its share of the nodes, in order; 0: those of ``more_agents`` do, with
            whomever they are asked for.
        agent_deaths: (when, which): an agent dies with all workers that it has started, in virtual seconds.
        leaving_agents: (when, which): an agent is told that its node is to go.
        broken_agents: (when, whose) connections to the coordinator break, as ``broken_streams`` do.
        more_agents: (when, how many workers it can start): a further agent comes.
        checkpoint_every: a checkpoint after so many steps; 0 for none.
        sets_interval: whether CheckFreq's rule changes that as it runs.
        synchronous: whether training stands still until a checkpoint is written.
        snapshot_every: a snapshot in every worker's memory after so many steps; 0 for none.
        strategy: what answers a loss.
        step_log: whether an interrupted step is gone on with, instead of run again whole.
        logs: whether what crosses nodes is logged, so that layers without an owner can be replayed.
        log_gaps: (whose, step): of that step a worker's log has nothing, as where a chunk is lost.
        helpers: how many workers replay lost layers besides those that take them over.
        wait_for_replacement: virtual seconds to wait for a worker when a layer has no owner left.
        coordinator_deaths: (when it dies, how long it is away), in virtual seconds; messages on their way are lost.
        broken_streams: (when, whose) connections to the coordinator break; messages on their way are lost.
        staggered: whether updates are made ahead of the verdict.
        technique: of the planner, which then makes all plans, the first one too; None: they keep to 1F1B's rules.
        scaled: which share of the steps has gradients that must be scaled.
        audit_every: one step of so many is audited; 0: none.
        evaluating: when it is evaluated; None: never.
        preempted_at: when the agent is told to end, in virtual seconds, so that a checkpoint is made; None: never.
        pauses: processes that are stopped for a while.
        better: tells a better plan for who is here, if need be once some have changed places, or None; asked five
            times a second.
    """

    plan: Plan
    steps: int
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    kill_at_effect: tuple[tuple[WorkerId, int], ...] = ()
    held_sums: tuple[HeldSum, ...] = ()
    kill_joiner_at_effect: tuple[WorkerId, int] | None = None
    raises: tuple[Raise, ...] = ()
    raise_at_effect: tuple[tuple[WorkerId, int], ...] = ()
    tolerate: int = 0
    fewest: int = 0
    supposed: Rates | None = None
    shapes: Shapes | None = None
    weighs: bool = False
    delays: Delays = Delays()
    rates: Rates | None = None
    stage: StageFactory | None = None
    broken_copies: tuple[tuple[WorkerId, int], ...] = ()
    spares: tuple[tuple[float, WorkerId], ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    workers_per_node: int = 1
    agents: int = 1
    agent_deaths: tuple[tuple[float, int], ...] = ()
    leaving_agents: tuple[tuple[float, int], ...] = ()
    broken_agents: tuple[tuple[float, int], ...] = ()
    more_agents: tuple[tuple[float, int], ...] = ()
    checkpoint_every: int = 0
    sets_interval: bool = False
    synchronous: bool = False
    snapshot_every: int = 0
    strategy: str = "auto"
    step_log: bool = True
    logs: bool = False
    log_gaps: tuple[tuple[WorkerId, int], ...] = ()
    helpers: int = 0
    wait_for_replacement: float = 0.0
    coordinator_deaths: tuple[tuple[float, float], ...] = ()
    broken_streams: tuple[tuple[float, WorkerId], ...] = ()
    staggered: bool = False
    technique: Technique | None = None
    scaled: float = 0.0
    audit_every: int = 0
    evaluating: Evaluating | None = None
    preempted_at: float | None = None
    pauses: tuple[Pause, ...] = ()
    better: Callable[[Membership], Rerouted | Migration | Handover | Stay | None] = lambda membership: None

    @property
    def nodes(self) -> tuple[tuple[WorkerId, ...], ...]:
        """The workers of each node."""
        return group_into_nodes(self.plan.workers, self.workers_per_node)

    @property
    def begins_on(self) -> list[tuple[WorkerId, ...]]:
        """The workers with which the job begins, by agent."""
        if not self.agents:
            return []
        share = -(-len(self.nodes) // self.agents)
        return [tuple(chain(*self.nodes[at : at + share])) for at in range(0, len(self.nodes), share)]

    @property
    def sampling(self) -> Sampling | None:
        """What is audited."""
        return Sampling(seed=self.seed, every=self.audit_every) if self.audit_every else None

    def __post_init__(self) -> None:
        """Takes any iterable where there are several of something; rates tell the delays."""
        if self.rates is not None:
            object.__setattr__(self, "delays", _as_delays(self.rates))
        for several in fields(self):
            if several.default == ():
                object.__setattr__(self, several.name, tuple(getattr(self, several.name)))


def _as_delays(rates: Rates) -> Delays:
    """Nothing is drawn any more; a process that ended is missed, and one that connects again does so, at once."""
    at_once = (0.0, 0.0)
    return Delays(
        control=(rates.control_s, rates.control_s),
        message=(rates.message_s, rates.message_s),
        compute=at_once,
        detect=at_once,
        connect=(rates.connect_s, rates.connect_s),
        copy=at_once,
        start=(rates.start_s, rates.start_s),
        store=at_once,
        put=at_once,
        reattach=at_once,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPin:
    """A worker pinned a layer for the checkpoint of a step."""

    worker: WorkerId
    generation: int
    step: int
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualResult:
    """How a virtual job ended.

    Attributes:
        outcome: done, lost or error.
        detail: what was wrong.
        seconds: of virtual time that it took.
        step: the last committed step number plus one.
        generations: plans installed.
        digest: over the digests of all layers, in order; empty unless done.
        events: (virtual time, event), as a real run logs them.
        fired: specs of the faults that fired; one by effect count is ``kill:WORKER#COUNT`` or ``raise:WORKER#COUNT``, a
            broken copy ``break-copy:WORKER``, a gap in a log ``lose-log:WORKER@STEP``, a sum that was held back as
            :class:`HeldSum` says, one at a time ``kill-coordinator#TIME``, ``break:WORKER#TIME`` or as
            :class:`Pause` says. What found nothing to strike, or held nothing up, is not among them.
        lost: the workers that died.
        pinned: what was pinned for checkpoints, in order.
        checkpoints: per step whose manifest was written, the digest of each layer's state.
        saved: the layers that were saved at the end, however it came, and the digest of each.
        layers: what each worker that lives at the end holds or follows.
        effects: how many effects the last process of each worker has yielded; it can be killed at any of these.
    """

    outcome: str
    detail: str
    seconds: float
    step: int
    generations: int
    digest: str
    events: tuple[tuple[float, Event], ...]
    fired: tuple[str, ...]
    lost: tuple[WorkerId, ...]
    pinned: tuple[VirtualPin, ...] = ()
    checkpoints: tuple[tuple[int, tuple[str, ...]], ...] = ()
    saved: tuple[tuple[int, str | None], ...] = ()
    layers: Mapping[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    effects: Mapping[WorkerId, int] = field(default_factory=dict)
