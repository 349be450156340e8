"""A whole job in one thread, under a virtual clock: the real protocol, the real decisions, no sockets, no waiting.

What decides, stores, sends, starts and supervises, the workers' protocol, executor, lowering and driver are the code
that trains for real; only what is around them is replaced. Every delay comes from one seeded source, so one seed is one
history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from holdfast.control.detection import Watch
from holdfast.control.membership import Closed, Membership, Restoring, Tell
from holdfast.control.messages import Ended, StateAt
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId, Process
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, costs_from_profile, unit_costs
from holdfast.core.validate import validate
from holdfast.errors import InternalError
from holdfast.planning.maker import PROVING
from holdfast.planning.replays import Logging
from holdfast.planning.training import Terms
from holdfast.recovery.rules import JobRules
from holdfast.runtime.node.supervision import RestartLimit, StartAgain, Supervisor
from holdfast.strategies.registry import strategy_named
from holdfast.testing.scenario import Pause, Scenario, VirtualResult
from holdfast.testing.virtual_agent import VirtualAgent
from holdfast.testing.virtual_coordinator import VirtualCoordinator, VirtualStore
from holdfast.testing.virtual_links import ControlLinks
from holdfast.testing.virtual_log import VirtualLog
from holdfast.testing.virtual_time import VirtualTime
from holdfast.testing.virtual_worker import HANG_S
from holdfast.testing.world import World

__all__ = ["VirtualCluster"]

_MOST_DEATHS, _WITHIN_S = 5, 10.0


class VirtualCluster:
    """Runs one job.

    Args:
        scenario: the job, and what happens to it.
    """

    def __init__(self, scenario: Scenario) -> None:
        terms = None if scenario.technique is None else _terms(scenario)
        plan = scenario.plan if terms is None else PROVING.scheduled(scenario.plan, terms)
        if (healthy := strategy_named(scenario.strategy).healthy) is not None:
            plan = healthy(plan)
            validate(plan)
        self._scenario = scenario = replace(scenario, plan=plan)
        self._time = time = VirtualTime(scenario.seed)
        self._log = VirtualLog()
        self._links = ControlLinks(
            time,
            scenario.delays.control,
            up=lambda event: self._coordinator.take(event),
            listens=lambda: self._coordinator.alive,
        )
        rules = _rules(scenario, terms)
        self._world = World(
            scenario=scenario, rules=rules, time=time, links=self._links, log=self._log, knows_agent=self._knows_agent
        )
        self._agents = [VirtualAgent(self._world, *each) for each in enumerate(scenario.begins_on)]
        self._supervisor = _supervisor(time, self._log, self._restart_coordinator)
        self._ended: Ended | None = None
        self._store = VirtualStore()
        self._begins = _begins(rules, plan)
        self._coordinator = self._make_coordinator()

    def run(self, limit_s: float = 10_000.0) -> VirtualResult:
        """Runs to the end of the job.

        Args:
            limit_s: virtual seconds after which the job counts as stuck.

        Raises:
            InternalError: nothing can happen any more though the job has not ended, or the limit has passed.
        """
        scenario, time = self._scenario, self._time
        self._coordinator.run(again=False)
        for agent in self._agents:
            agent.attach()
        for at, who in scenario.broken_streams:
            time.after(at, lambda at=at, who=who: self._break_stream(at, who))  # type: ignore[misc]
        for at, who in scenario.spares:
            time.after(at, lambda who=who: self._agents[0].start_spare(who))  # type: ignore[misc]
        if scenario.preempted_at is not None:
            time.after(scenario.preempted_at, self._agents[0].preempt)
        for at, number in scenario.agent_deaths:
            time.after(at, lambda at=at, number=number: self._kill_agent(at, number))  # type: ignore[misc]
        for at, number in scenario.leaving_agents:
            time.after(at, lambda at=at, number=number: self._tell_agent_to_go(at, number))  # type: ignore[misc]
        for at, number in scenario.broken_agents:
            time.after(at, lambda at=at, number=number: self._break_agent(at, number))  # type: ignore[misc]
        for at, offers in scenario.more_agents:
            time.after(at, lambda at=at, offers=offers: self._add_agent(at, offers))  # type: ignore[misc]
        for pause in scenario.pauses:
            time.after(pause.at, lambda pause=pause: self._pause(pause))  # type: ignore[misc]
        for at, away_s in scenario.coordinator_deaths:
            time.after(at, lambda at=at, away_s=away_s: self._kill_coordinator(at, away_s))  # type: ignore[misc]
        while self._ended is None:
            if time.now > limit_s or not time.go_on():
                raise InternalError(f"stuck at {time.now:.3f} s: {self._stuck()}")
        return self._result(self._ended)

    def _result(self, ended: Ended) -> VirtualResult:
        world, membership = self._world, self._coordinator.decider.membership
        return VirtualResult(
            outcome=ended.outcome,
            detail=ended.detail,
            seconds=self._time.now,
            step=ended.step,
            generations=ended.generations,
            digest=self._digest() if ended.outcome == "done" else "",
            events=tuple(self._log.events),
            fired=tuple(self._log.fired),
            lost=tuple(sorted(membership.roster.lost)),
            pinned=tuple(world.pinned),
            checkpoints=tuple(sorted(self._store.checkpoints.items())),
            saved=tuple(sorted(world.saved.items())),
            layers={who: worker.driver.protocol.stage.layers for who, worker in world.running.items() if worker.alive},
            effects={who: worker.effects for who, worker in world.running.items()},
        )

    def _digest(self) -> str:
        saved_by = self._coordinator.decider.membership.reports.saved
        digests = {layer: text for saved in saved_by.values() for layer, text in saved.items()}
        return hashlib.sha256("".join(digests[layer] for layer in sorted(digests)).encode()).hexdigest()

    def _stuck(self) -> str:
        return ", ".join(f"{who}: {worker.effect!r}" for who, worker in self._world.running.items() if worker.alive)

    # The coordinator, which comes and goes.

    def _make_coordinator(self) -> VirtualCoordinator:
        return VirtualCoordinator(
            self._scenario,
            self._begins,
            self._store,
            self._time,
            self._log,
            telling=self,
            ended=self._end,
        )

    def _end(self, ended: Ended) -> None:
        self._ended = ended

    def _kill_coordinator(self, at: float, away_s: float) -> None:
        if not self._coordinator.alive:
            return
        self._log.fire(f"kill-coordinator#{at}")
        self._coordinator.alive = False
        self._links.cut_all()
        for agent in self._agents:
            agent.forget()
        self._supervisor.on_ended(away_s, -9)

    def _restart_coordinator(self) -> None:
        self._coordinator = self._make_coordinator()
        self._coordinator.run(again=True)
        for agent in self._agents:
            agent.reattach()
        for process in self._world.processes.values():
            process.reattach()

    # Who speaks with whom.

    def tell(self, tell: Tell, process: Process | None) -> None:
        """See :class:`holdfast.testing.virtual_coordinator.Telling`."""
        if process is not None:
            to = self._world.processes[process]
            self._links.tell(process, lambda: to.deliver(tell.command))
            return
        for agent in self._agents:
            if tell.node is None or agent.process.node.shares_agent(tell.node):
                agent.tell(tell.command)

    def _knows_agent(self, node: NodeId) -> bool:
        return node in self._coordinator.decider.membership.contact.agents

    # What strikes besides scheduled faults.

    def _break_stream(self, at: float, worker: WorkerId) -> None:
        """A connection breaks; the process connects again."""
        running = self._world.running.get(worker)
        if running is not None and self._links.is_open(running.process):
            self._log.fire(f"break:{worker}#{at}")
            self._links.cut(running.process)
            self._coordinator.take(Closed(worker=worker, process=running.process))
            running.reattach()

    def _kill_agent(self, at: float, number: int) -> None:
        """A node dies, with all on it."""
        if self._agents[number].alive:
            self._log.fire(f"kill-agent:{number}#{at}")
            self._agents[number].kill()

    def _tell_agent_to_go(self, at: float, number: int) -> None:
        """A node is to go, as soon as the job can do without it."""
        if self._agents[number].alive:
            self._log.fire(f"leave-agent:{number}#{at}")
            self._agents[number].leave()

    def _break_agent(self, at: float, number: int) -> None:
        """An agent's connection breaks; it connects again."""
        agent = self._agents[number]
        if self._links.is_open(agent.process):
            self._log.fire(f"break-agent:{number}#{at}")
            self._links.cut(agent.process)
            self._coordinator.take(Closed(worker=None, process=agent.process))
            agent.reattach()

    def _add_agent(self, at: float, offers: int) -> None:
        """A further node is there, on which so many workers can be started."""
        self._log.fire(f"add-agent:{offers}#{at}")
        self._agents.append(VirtualAgent(self._world, len(self._agents), (), offers))
        self._agents[-1].attach()

    def _pause(self, pause: Pause) -> None:
        """Stops processes. What they would do happens when they go on; what is under way between them arrives."""
        for worker in filter(self._world.living, pause.workers):
            self._world.running[worker].asleep.fall(pause)
        if pause.coordinator:
            self._coordinator.asleep.fall(pause)


def _supervisor(time: VirtualTime, log: VirtualLog, restart: Callable[[], None]) -> Supervisor[float]:
    """What starts a coordinator again that has died: it is told how many seconds that takes."""

    def later(delay_s: float, again: StartAgain[float]) -> None:
        time.after(delay_s + again.spec, lambda: supervisor.again(again))

    supervisor: Supervisor[float] = Supervisor(
        start=lambda away_s: restart(),
        later=later,
        clock=lambda: time.now,
        awake=lambda: time.now,
        log=log,
        delay_s=0.0,
        patience_s=0.0,
        limit=RestartLimit(num_restarts=_MOST_DEATHS, within_s=_WITHIN_S),
    )
    return supervisor


def _terms(scenario: Scenario) -> Terms:
    """What the planner goes by."""
    assert scenario.technique is not None
    routes = scenario.plan.routes.routes
    depth = max(len(route.visits) for route in routes)
    return Terms(technique=scenario.technique, costs=_costs(scenario), in_flight=2 * depth, ties=scenario.ties)


def _costs(scenario: Scenario) -> Costs:
    """Costs per layer, by which all is planned."""
    rates = scenario.rates
    return unit_costs(scenario.plan.placement.num_layers) if rates is None else costs_from_profile(rates.profile)


def _rules(scenario: Scenario, terms: Terms | None) -> JobRules:
    """What the job says once and for all."""
    return JobRules(
        steps=scenario.steps,
        strategy=scenario.strategy,
        ties=scenario.ties,
        staggered=scenario.staggered,
        terms=terms,
        keeping=_costs(scenario) if scenario.step_log else None,
        logging=Logging(nodes=scenario.nodes, helpers=scenario.helpers) if scenario.logs else None,
        checkpoint_every=scenario.checkpoint_every,
        sets_interval=scenario.sets_interval,
        synchronous=scenario.synchronous,
        snapshot_every=scenario.snapshot_every,
        sampling=scenario.sampling,
        evaluating=scenario.evaluating,
        wait_s=scenario.wait_for_replacement,
        tolerate=scenario.tolerate,
        fewest=scenario.fewest,
        rates=scenario.supposed,
        shapes=scenario.shapes and replace(scenario.shapes, terms=terms),
        weighs=scenario.weighs,
    )


def _begins(rules: JobRules, plan: Plan) -> Membership:
    """The membership of the job before it has begun."""
    first = (StateAt(url=None, step=0),) if rules.checkpoint_every else ()
    return Membership.before(rules, plan, restoring=Restoring(restorable=first), watch=Watch(limit_s=HANG_S))
