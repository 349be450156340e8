"""A whole job in virtual time: the real decisions of the coordinator, and what they cost.

Nothing is decided here. Each loss, notice and arrival goes to :func:`holdfast.control.membership.decide`, as in a real
job, and whatever that orders takes the time that its actions' prices say. Steps take what the evaluator says of the
plan that runs. So another strategy, or another price, is another simulation, without anything to change here.

What is left out: workers that hang, raise or compute wrong; logs that are behind; exchanges between the coordinator and
single workers, which are told all at once. That a worker is slow is felt, and told to nobody: no decision answers it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from holdfast.control.advice import Adviser
from holdfast.control.checkpoint_ledger import Settled, WriteManifest
from holdfast.control.detection import Watch
from holdfast.control.membership import AnswerPlanned, Improved, Membership, Output, Phase, Record, Tell, Tick, decide
from holdfast.control.membership.agreement import Restoring
from holdfast.control.membership.viewing import view_of
from holdfast.control.messages import (
    CaughtUp,
    Ended,
    Expel,
    Hello,
    Leaving,
    Message,
    NodeLost,
    ReplayOrder,
    ShardWritten,
    Shutdown,
    StartWorker,
    StateAt,
    StepDone,
    WorkerOffer,
)
from holdfast.control.reshaper import Reshaper
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.core.plan import Plan
from holdfast.core.profile import costs_from_profile
from holdfast.errors import ConfigError, InternalError
from holdfast.planning.library import PlanLibrary
from holdfast.recovery.actions import Abort, Await, InstallPlan, RecoveryPlan, ReplayLayers, SaveCommitted
from holdfast.recovery.rates import replaying_seconds
from holdfast.recovery.rules import JobRules
from holdfast.recovery.view import ClusterView
from holdfast.sim.asking import Asking
from holdfast.sim.boundary import Boundary
from holdfast.sim.clock import Clock
from holdfast.sim.diary import Diary
from holdfast.sim.holdings import Holdings
from holdfast.sim.known import FullLibrary
from holdfast.sim.ledger import Part
from holdfast.sim.machines import Machines
from holdfast.sim.remembered import RememberedPlans
from holdfast.sim.replies import crossing, joined, saved, shards, statuses
from holdfast.sim.speeds import PlanTimes, Speeds
from holdfast.sim.steps import Steps
from holdfast.sim.world import Happening, Kind, World
from holdfast.telemetry.events import Event, FaultInjected, JobEnded, WorkerReady

__all__ = ["Outcome", "Prepared", "simulate"]

_MOST_PLANS = 512
_NODE = NodeId(name="simulated", nonce=16 * "0")
_AGENT = Process(_NODE, 0, _NODE.nonce)
_UNWATCHED = Watch(limit_s=1e12)
"""Nobody is held for lost for being silent: what is simulated is heard of at once, or after ``detect_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job as it begins.

    Raises:
        ConfigError: it has something that cannot be simulated.

    Attributes:
        rules: what it says once and for all; of its steps there are as many as fit into the time.
        plan: of the whole grid.
        plans: those that were made of it so far, which serve all its runs.
        workers_per_machine: how many consecutive workers run on one machine.
        library: of better plans, which all its runs fill; None: it has none, as jobs without a planner's technique.
    """

    rules: JobRules
    plan: Plan
    workers_per_machine: int = 1
    plans: RememberedPlans = field(default_factory=RememberedPlans, compare=False)
    library: PlanLibrary | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Checks that it can be simulated."""
        if self.rules.sampling is not None:
            raise ConfigError("audits are not simulated yet: expected train.audit_every: 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job.

    Attributes:
        seconds: that were simulated.
        steps: that are committed at the end.
        healthy_s: of a step of the whole grid.
        parts: what the seconds were good for; they add up.
        failures: instants at which the job lost workers.
        generations: how often the workers went over to another plan.
        loads: how often a checkpoint was needed: all went back to it, layers were replayed from it, or the job began
            again from what was saved.
        restarts: how often of these the job had ended.
        rates: from each moment on, how many seconds a step took; None: none was run.
        events: what a real job would have written into its log, with times.
    """

    seconds: float
    steps: int
    healthy_s: float
    parts: dict[Part, float]
    failures: int
    generations: int
    loads: int
    restarts: int
    rates: tuple[tuple[float, float | None], ...]
    events: tuple[tuple[float, Event], ...] = ()

    @property
    def goodput(self) -> float:
        """The share of the steps that the whole grid would have made."""
        return self.steps * self.healthy_s / self.seconds

    @property
    def lost_s(self) -> float:
        """The seconds that the whole grid would not have needed for the steps that were made."""
        return self.seconds - self.steps * self.healthy_s


def simulate(job: Prepared, world: World, speeds: Speeds) -> Outcome:
    """Return what becomes of a job in a world.

    The same arguments give the same outcome.
    """
    return _Run(job, world, speeds).run()


class _Run:
    """One job in one world."""

    def __init__(self, job: Prepared, world: World, speeds: Speeds) -> None:
        self._job, self._world, self._speeds = job, world, speeds
        self._happenings = deque(world.happenings)
        self._clock, self._processes = Clock(), count(1)
        self._steps, self._pinned = Steps(self._clock.ledger), 0
        self._machines = Machines(room=job.workers_per_machine)
        self._unnoticed: dict[WorkerId, int] = {}  # and on which machine they were
        self._caught_up: list[tuple[WorkerId, int, int]] = []
        self._times: dict[tuple[Plan, bool, tuple[tuple[WorkerId, float], ...]], PlanTimes] = {}
        self._period_s = 0.0  # of the plan that runs
        self._told = -1  # the newest step that the coordinator heard of, of those that are kept
        self._rates: list[tuple[float, float | None]] = []
        self._diary = Diary(lambda: self._clock.now)
        self._failures = self._loads = self._restarts = self._generations = 0
        shapes = job.rules.shapes
        self._advisers: tuple[Adviser, ...] = () if shapes is None else (Reshaper(shapes, job.plans.reshaped),)
        if job.library is not None:
            self._advisers += (FullLibrary(job.library, job.plans),)
        self._asking = Asking(self._clock)
        self._answered: RecoveryPlan | None = None
        self._holdings, self._boundary = Holdings(), Boundary()
        self._replaying: dict[WorkerId, ReplayOrder] = {}
        self._copying: set[WorkerId] = set()
        self._state = self._fresh(0)
        for machine in range(world.machines):
            self._machines.hosted[machine] = set()

    # --- the course of time -------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Let all of it happen."""
        end = self._world.lasts_s
        self._begin()
        while self._clock.now < end:
            if self._advisers and self._asking.is_due(self._state):
                self._give(Tick())
                for adviser in self._advisers:
                    for better in adviser.news(self._state):
                        self._give(better)
            self._pass_until(end)
            if self._clock.now < end:
                self._happen()
        self._steps.close()
        ahead = self._state.running.staggered
        return Outcome(
            seconds=end,
            steps=self._steps.number,
            healthy_s=PlanTimes(plan=self._job.plan, speeds=self._speeds, ahead=ahead).step_s,
            parts=self._clock.ledger.closed(end),
            failures=self._failures,
            generations=self._generations + self._state.generations,
            loads=self._loads + self._restarts,
            restarts=self._restarts,
            rates=tuple(self._rates),
            events=tuple(self._diary.events),
        )

    def _happen(self) -> None:
        """All that is due now: what was ordered first, then what the world does, in its order."""
        self._clock.do_what_is_due()
        lost: list[int] = []
        while self._happenings and self._happenings[0].at_s <= self._clock.now:
            each = self._happenings.popleft()
            if each.kind is Kind.LOST:
                lost.append(each.machine)
            elif each.kind is Kind.COMES:
                self._machine_comes(each.machine)
            elif each.kind is Kind.SLOWS:
                self._machine_slows(each)
            else:
                self._machine_leaves(each)
        if lost:
            self._machines_lost(lost)

    def _pass_until(self, end: float) -> None:
        """Time passes, until something happens: what is owed is paid, then steps are run, or nothing is."""
        clock = self._clock
        happens = self._happenings[0].at_s if self._happenings else end
        while clock.now < (moment := min(clock.next_moment, happens, end)):
            left = moment - clock.now
            if clock.owes:
                clock.pay(left)
                if not clock.owes:
                    return  # whoever may know of something better is asked before all go on
            elif self._state.phase is Phase.RUNNING:
                self._run_steps(left)
            else:
                clock.advance(Part.IDLE if not self._coming() else Part.RESTART, left)

    def _coming(self) -> bool:
        """Whether somebody is waited for who is on its way."""
        return bool(self._state.roster.expected) and not self._machines.wanted

    def _run_steps(self, seconds: float) -> None:
        """Runs steps for so long, or until something is to be done between two of them."""
        steps, clock = self._steps, self._clock
        left = steps.lasts_s - steps.into_s
        if seconds < left:
            steps.into_s += seconds
            clock.now += seconds
            return
        clock.now += left
        self._tell_committed(1)
        steps.commit(self._period_s)
        if not self._between_steps() or not steps.is_first_time or self._is_counted:
            return
        whole = int(min((seconds - left) / steps.lasts_s, self._until_pinned()) - 1e-9)
        if whole > 0:
            clock.now += whole * steps.lasts_s
            self._tell_committed(whole)
            steps.commit_whole(whole)

    def _tell_committed(self, count: int) -> None:
        first = self._steps.number
        self._diary.committed(self._plan, self._state.generation, first, first + count, self._steps.lasts_s)

    @property
    def _is_counted(self) -> bool:
        """Whether it is the first step of a generation from which the coordinator counts how long steps take."""
        cadence = self._state.cadence
        return cadence is not None and (cadence.began is None or cadence.began[0] != self._state.generation)

    def _until_pinned(self) -> float:
        """How many steps are run before the next checkpoint is pinned."""
        every = self._every
        return float("inf") if not every else every - self._steps.number % every

    @property
    def _every(self) -> int:
        cadence = self._state.cadence
        return self._state.rules.checkpoint_every if cadence is None else cadence.every

    def _between_steps(self) -> bool:
        """Does what is due between two steps; returns whether nothing was."""
        for worker, entered, size in self._caught_up:
            if worker in self._state.catching_up:
                self._boundary.catch_up(self._steps.number)
                self._give(
                    CaughtUp(
                        worker=worker,
                        generation=self._state.generation,
                        step=self._steps.number,
                        entered=entered,
                        bytes=size,
                    )
                )
        self._caught_up.clear()
        every, number = self._every, self._steps.number
        if every and number % every == 0 and number > self._pinned:
            self._pin(number)
        if self._state.cadence is not None:
            self._tell_steps()
        upcoming = self._state.running.upcoming
        if upcoming is not None and self._all_go_over():
            view = self._view(self._state, self._state.absent)
            price = InstallPlan(plan=upcoming.plan, at_boundary=True).price(view, self._speeds.rates)
            self._clock.owe(Part.COPY, price.seconds, self._go_over)
        return not self._clock.owes and upcoming is None

    def _all_go_over(self) -> bool:
        state, intervals = self._state, (self._every, self._state.rules.snapshot_every)
        reached = self._boundary.lies_before(self._steps.number, intervals, staggered=state.running.staggered)
        return reached and not state.catching_up

    def _hears_late(self) -> bool:
        """Whether some worker hears only behind its first contribution to a sum of what is prepared now.

        Of a step that is gone on with, somebody has nothing left to do but to contribute.
        """
        steps, plan = self._steps, self._state.running.plan
        if steps.is_rest or plan is None:
            return steps.is_rest
        return steps.into_s + self._speeds.rates.control_s > self._times_of(plan).first_sum_s

    # --- what machines do ---------------------------------------------------------------------------------------------

    def _machine_comes(self, machine: int) -> None:
        self._machines.hosted[machine] = set()
        if self._state.phase is Phase.ENDED or not self._state.generation:
            self._begin_again()
            return
        for _ in range(self._machines.room):
            if self._machines.wanted:
                self._start(self._machines.wanted.popleft())
            else:
                self._give(WorkerOffer(worker=None, node=_NODE))

    def _machine_leaves(self, each: Happening) -> None:
        for worker in sorted(self._machines.hosted.get(each.machine, ())):
            self._strike(worker, "leave", f"machine {each.machine} goes in {each.grace_s:g} s")
            self._give(Leaving(worker=worker))
        self._clock.after(each.grace_s, lambda: self._machines_lost([each.machine]))

    def _machine_slows(self, each: Happening) -> None:
        """The next step is the first that it slows down, or does not any more."""
        self._machines.slow_down(each.machine, each.factor)
        for worker in sorted(self._machines.hosted.get(each.machine, ())):
            self._strike(worker, "slow", f"machine {each.machine} takes {each.factor:g} times as long")
        if self._state.phase is Phase.RUNNING:
            self._set_period()

    def _machines_lost(self, machines: list[int]) -> None:
        """What ran there is gone; that is noticed later."""
        gone: dict[WorkerId, int] = {}
        for machine in machines:
            for worker in sorted(self._machines.hosted.pop(machine, ())):
                gone[worker] = machine
                self._strike(worker, "kill", f"machine {machine} is lost")
        if not gone:
            return
        touched = frozenset(gone) & (frozenset(self._state.alive) | self._prepared())
        for worker in frozenset(gone) & self._state.roster.expected:  # it is started elsewhere, once there is room
            self._start(worker)
        self._unnoticed |= gone
        if self._state.phase is Phase.ENDED:
            self._unnoticed.clear()
        elif touched:
            self._failures += 1
            self._clock.forgive()  # what is under way is given up, and the time that it took stays booked
            self._clock.owe(Part.RESTART, self._speeds.detect_s, self._notice)
        else:
            self._clock.after(self._speeds.detect_s, self._notice)

    def _strike(self, worker: WorkerId, kind: str, text: str) -> None:
        event = FaultInjected(worker=str(worker), kind=kind, step=self._steps.number, point="", spec=text)
        self._diary.note(event)

    def _prepared(self) -> frozenset[WorkerId]:
        upcoming = self._state.running.upcoming
        return frozenset() if upcoming is None else frozenset(upcoming.plan.workers)

    def _notice(self) -> None:
        """The coordinator hears of all that are lost by now."""
        gone, self._unnoticed = self._unnoticed, {}
        for worker in gone:
            self._holdings.lose(worker)
        known = tuple(worker for worker in sorted(gone) if worker in self._state.roster.processes)
        if known and self._state.phase is not Phase.ENDED:
            self._give(Tick())  # from now on it is waited for somebody, if at all
            self._give(NodeLost(node=gone[known[0]], workers=known))

    # --- what is decided ----------------------------------------------------------------------------------------------

    def _fresh(self, step: int) -> Membership:
        rules = self._job.rules
        first = (StateAt(url=None if not step else "simulated", step=step),) if rules.checkpoint_every or step else ()
        restoring, maker = Restoring(restorable=first), self._job.plans
        return Membership.before(rules, self._job.plan, restoring=restoring, watch=_UNWATCHED, maker=maker)

    def _begin(self) -> None:
        """The job begins, if there are machines enough: its workers are there, and train."""
        if self._machines.places < len(self._job.plan.workers):
            return
        self._machines.host_all(self._job.plan.workers)
        self._generations += self._state.generations
        self._state, self._answered = self._fresh(self._steps.number), None
        self._give(Hello(worker=None, process=_AGENT))
        for worker in self._job.plan.workers:
            self._attach(worker)
        for _ in range(self._machines.vacant):
            self._give(WorkerOffer(worker=None, node=_NODE))

    def _attach(self, worker: WorkerId) -> None:
        number = next(self._processes)
        process = Process(_NODE, number, f"{number:016x}")
        self._diary.note(WorkerReady(worker=str(worker), pid=process.pid, nonce=process.nonce))
        self._give(Hello(worker=worker, process=process))

    def _begin_again(self) -> None:
        """A job that has ended, or never began, begins from what was saved, once there are machines enough."""
        if self._clock.owes or self._machines.places < len(self._job.plan.workers):
            return
        if self._state.phase is not Phase.ENDED:
            self._begin()
            return
        self._restarts += 1
        rates = self._speeds.rates
        placement = self._job.plan.placement
        loads = max(rates.loading_s(placement.layers_of(worker)) for worker in placement.workers)
        self._clock.owe(Part.RESTART, rates.start_s + loads, self._begin)

    def _give(self, event: Message | Tick | Settled | Improved | AnswerPlanned) -> None:
        """Has something decided, and sees to it that it is done."""
        if not isinstance(event, StepDone):
            self._tell_steps()
        before = self._state
        since_s = self._steps.into_s if isinstance(event, StepDone) else 0.0  # it was over as the one that runs began
        self._state, outputs = decide(before, event, now=self._clock.now - since_s)
        upcoming = self._state.running.upcoming
        if upcoming is not None and upcoming is not before.running.upcoming:
            self._boundary.prepare(upcoming.generation, self._steps.number, late=self._hears_late())
        for output in outputs:
            self._take(output)
        answer = self._state.forming.answer
        if answer is not self._answered:
            self._answered = answer
            if answer is not None and isinstance(answer.actions[0], Abort):
                self._recover(before, answer)

    def _give_all(self, told: Iterable[Message]) -> None:
        """Has messages of all workers decided, as long as it is still the same that they are about."""
        generation, phase = self._state.generation, self._state.phase
        for each in tuple(told):
            if (self._state.generation, self._state.phase) == (generation, phase):
                self._give(each)

    def _take(self, output: Output) -> None:
        match output:
            case Record(event=event):
                self._diary.note(event)
            case WriteManifest(step=step):
                self._clock.after(0.0, lambda: self._give(Settled(step=step, url="simulated")))
            case Tell(to=None, command=StartWorker(worker=worker)):
                self._start(worker)
            case Tell(to=WorkerId() as worker, command=ReplayOrder() as order):
                self._replaying[worker] = order
            case Tell(to=WorkerId() as worker, command=Shutdown() | Expel()):
                self._machines.leave(worker)
            case Tell(command=Ended() as ended):
                self._ended(ended)
            case _:
                pass

    def _tell_steps(self) -> None:
        """The coordinator hears of the newest step before anything else is decided."""
        newest = self._steps.number - 1
        if self._state.phase is Phase.RUNNING and newest > self._told and self._state.alive:
            first, self._told = self._state.alive[0], newest
            self._give(StepDone(worker=first, generation=self._state.generation, step=newest, loss=None, omitted=False))

    def _start(self, worker: WorkerId) -> None:
        """A process is started where there is room, or once there is."""
        machine = self._machines.host(worker)
        if machine is None:
            return

        def comes() -> None:
            here = worker in self._machines.hosted.get(machine, ())
            if here and worker in self._state.roster.expected and self._state.phase is not Phase.ENDED:
                self._attach(worker)

        self._clock.after(self._speeds.rates.start_s + 2 * self._speeds.rates.control_s, comes)

    def _recover(self, before: Membership, answer: RecoveryPlan) -> None:
        """What answers a loss is paid, as far as it goes before all have said what they hold."""
        elapsed_s, plan = self._steps.into_s, before.running.plan
        self._clock.forgive()
        self._note_rate(None)
        if plan is not None:
            here = frozenset(before.alive) - self._state.roster.lost
            self._holdings.give_up(plan, here, elapsed_s if before.phase is Phase.RUNNING else None)
        if self._state.restoring.loading is not None:
            self._holdings.drop()
        lost = before.absent | (frozenset(before.grid.baseline.workers) & self._state.roster.lost)
        view = replace(self._view(before, lost), elapsed_s=elapsed_s)
        seconds = 0.0
        for action in answer.actions:
            if action.needs_reports or isinstance(action, Await):
                break
            price = action.price(view, self._speeds.rates)
            seconds += price.seconds if price.still else 0.0
            view = action.after(view)
        self._steps.interrupt()
        if self._state.phase is not Phase.WAITING:
            self._clock.owe(Part.RESTART, seconds, self._tell_all)
            return
        self._clock.owe(Part.RESTART, seconds)
        until = self._state.forming.wait_until
        if until is not None:
            self._clock.at(until, self._waited)

    def _waited(self) -> None:
        if self._state.phase is Phase.WAITING:
            self._give(Tick())

    def _tell_all(self) -> None:
        """All have said what they hold; then they go on, save, or wait."""
        self._replaying.clear()
        self._tell(self._state.alive)

    def _tell(self, workers: Sequence[WorkerId]) -> None:
        state, number = self._state, self._steps.number
        if state.restoring.loading is not None:
            number = state.restoring.loading.step
        every = self._state.rules.snapshot_every
        snapshots = (number - number % every,) if every else ()
        costs = costs_from_profile(self._speeds.rates.profile)
        kept = self._holdings.progress(number, costs) if state.rules.keeping is not None else {}
        self._give_all(statuses(state, workers, number, self._holdings.held, kept, snapshots))
        if self._state.generation != state.generation:
            return  # it was answered anew
        if self._replaying:
            replays = {part for order in self._replaying.values() for part in order.parts}
            self._clock.owe(Part.REDO, replaying_seconds(replays, self._speeds.rates), self._replayed)
        elif self._state.phase is Phase.RUNNING:
            self._loads += state.restoring.loading is not None
            self._go_on()
        elif self._state.phase is Phase.SAVING:
            view = self._view(self._state, self._state.absent)
            price = SaveCommitted().price(view, self._speeds.rates)
            self._clock.owe(Part.CHECKPOINT, price.seconds, self._saved)

    def _replayed(self) -> None:
        """Whoever was to replay layers holds them now, and says so."""
        answer, workers = self._state.forming.answer, tuple(self._replaying)
        assert answer is not None, "it ordered the replays"
        plan = next(each.plan for each in answer.actions if isinstance(each, ReplayLayers))
        self._replaying.clear()
        self._loads += 1
        for worker in workers:
            self._holdings.take_up(worker, plan.placement.held_layers(worker))
        self._tell(workers)

    def _go_on(self) -> None:
        """All are told from where; they connect, and run."""
        forming, left_s = self._state.forming, None
        if forming.rest is not None:
            left_s = self._times_of(self._plan).remaining_s(forming.rest.lasts)
        self._set_period()
        self._steps.go_on(forming.resume_step, self._period_s, left_s)
        self._boundary.resume(forming.resume_step)
        self._told = forming.resume_step - 1
        self._holdings.drop()
        self._give_all(joined(self._state))
        self._await_copies()

    def _go_over(self) -> None:
        """All go over into the generation that was prepared."""
        upcoming = self._state.running.upcoming
        if upcoming is None:
            return
        generation, number, before = upcoming.generation, self._steps.number, self._state.alive
        for each in tuple(crossing(self._state, upcoming, number)):
            self._give(each)
        for worker in frozenset(before).difference(upcoming.plan.workers):
            self._machines.leave(worker)
        if self._state.generation < generation:
            raise InternalError(f"generation {generation} was prepared, and nobody went over into it")
        if self._state.phase is Phase.RUNNING:
            self._set_period()
            self._steps.begin(number, self._period_s)
            self._await_copies()

    def _await_copies(self) -> None:
        """Whoever follows layers is given their state meanwhile."""
        plan, entered = self._state.running.plan, self._steps.number
        if plan is None:
            return
        for worker in sorted(self._state.catching_up - self._copying):
            self._copying.add(worker)
            layers = plan.placement.followed_layers(worker)
            seconds = self._speeds.rates.copying_s(layers)
            size = self._speeds.rates.state_bytes(layers)
            self._clock.after(
                seconds, partial(self._copied, worker, entered, size, self._state.roster.processes.get(worker))
            )

    def _copied(self, worker: WorkerId, entered: int, size: int, process: Process | None) -> None:
        self._copying.discard(worker)
        if self._state.roster.processes.get(worker) == process:
            self._caught_up.append((worker, entered, size))

    def _pin(self, number: int) -> None:
        """Training stands still for a copy; the copy is written meanwhile."""
        self._pinned = number
        times = self._times_of(self._plan)
        stall, write = times.checkpoint
        waits = stall + write if self._state.rules.synchronous else stall
        self._clock.owe(Part.CHECKPOINT, waits)
        told = tuple(shards(number, self._state.generation, times.writers, stall, write))
        self._clock.after(max(waits, stall + write), lambda: self._written(told))

    def _written(self, told: Iterable[ShardWritten]) -> None:
        for each in told:
            if each.worker in self._state.present and self._state.phase is not Phase.ENDED:
                self._give(each)

    def _saved(self) -> None:
        self._give_all(saved(self._state))

    def _ended(self, ended: Ended) -> None:
        """What was saved is from where a job that begins again goes on; else the newest checkpoint is, or nothing."""
        restorable = self._state.restoring.restorable
        saved = ended.step if not ended.lost_layers else restorable[0].step if restorable else 0
        self._steps.end(saved)
        self._diary.note(JobEnded(outcome=ended.outcome, step=saved))
        self._pinned = saved
        self._clock.forgive()
        self._copying.clear()
        self._caught_up.clear()
        self._note_rate(None)
        self._machines.clear()
        self._clock.after(0.0, self._begin_again)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _view(self, state: Membership, lost: frozenset[WorkerId]) -> ClusterView:
        return replace(view_of(state, lost), step=self._steps.number)

    @property
    def _plan(self) -> Plan:
        plan = self._state.running.plan
        assert plan is not None, "steps are run by a plan"
        return plan

    def _set_period(self) -> None:
        """How long the next step takes."""
        self._period_s = self._times_of(self._plan).step_s
        self._note_rate(self._period_s)

    def _times_of(self, plan: Plan) -> PlanTimes:
        slowed = self._machines.slowed.items()
        key = plan, self._state.running.staggered, tuple(sorted(slowed)) if slowed else ()
        if key not in self._times:
            if len(self._times) >= _MOST_PLANS:
                self._times.clear()
            self._times[key] = PlanTimes(plan=plan, speeds=self._speeds, ahead=key[1], slowed=key[2])
        return self._times[key]

    def _note_rate(self, period: float | None) -> None:
        if not self._rates or self._rates[-1][1] != period:
            self._rates.append((self._clock.now, period))
