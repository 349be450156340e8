"""Membership as a state machine: whatever comes in, in whatever order, some things always hold."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.decisions import as_read
from tests.processes import NODE, named
from tests.processes import process_of as process_here

from holdfast.control.membership import (
    Closed,
    GridState,
    Membership,
    Phase,
    Record,
    Tell,
    Tick,
    decide,
    restore,
    to_store,
)
from holdfast.control.messages import (
    Attached,
    CaughtUp,
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
    NodeLeaving,
    NodeLost,
    Preempted,
    Progress,
    Raised,
    Remark,
    Resume,
    Save,
    Saved,
    Shutdown,
    StartWorker,
    Status,
    StepDone,
    Suspect,
    WorkerOffer,
)
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import split_evenly
from holdfast.core.validate import validate
from holdfast.core.work import Busy, WorkPhase
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Installed, Parted

STEPS = 9
DURABLE = ("generation", "generations", "grid", "roster", "running", "restoring", "exceptions", "ended")
OUTSIDERS = (WorkerId(8, 0), WorkerId(9, 1))
OTHER = NodeId(name="there", nonce=16 * "b")
NODES = (NODE, OTHER)
FOR_THE_AGENT = (Progress, Fence, StartWorker, Ended, Remark)


def process_of(worker, number):
    """A process of a worker; those of every other pipeline are on another node."""
    process = process_here(worker, number)
    return process if worker is None else replace(process, node=NODES[worker.pipeline % 2])


class Cluster(RuleBasedStateMachine):
    """Feeds events to ``decide``; workers say what a worker could say, at any time, also when they are long gone."""

    @initialize(
        pipelines=st.integers(1, 4),
        stages=st.integers(1, 3),
        more=st.integers(0, 2),
        microbatches=st.integers(1, 2),
        begun=st.integers(0, 9),
        agents=st.integers(0, 2),
    )
    def start(self, pipelines, stages, more, microbatches, begun, agents):
        plan = regular_plan(pipelines, split_evenly(stages + more, stages), microbatches)
        self.workers = plan.workers
        """Everyone who ever came, or is to come at first."""
        self.blank = self.state = Membership(
            grid=GridState(baseline=plan), rules=JobRules(steps=STEPS, directory="final")
        )
        self.stored = None
        self.now = 0.0
        self.front = 0
        """Every layer is at this step or one ahead; the same for all statuses of one generation."""
        self.heard: dict = {}
        self.finished: set = set()
        self.processes = dict.fromkeys(self.workers, 1)
        """The newest process of each worker."""
        self.fenced: list = []
        self.expelled: set = set()
        self.parted: set = set()
        self.plans: dict = {}
        """Every plan that was ever told, by its generation."""
        self.ended: list = []
        self.preempted = False
        for node in NODES[:agents]:
            self.an_agent_attaches(node)
        if begun:
            self.everyone_attaches()
            self.things_go_on_further()

    # What is checked after every event.

    def give(self, event):
        before = self.state
        copy = replace(
            before,
            reports=replace(before.reports, statuses=dict(before.reports.statuses), saved=dict(before.reports.saved)),
            roster=replace(before.roster, processes=dict(before.roster.processes)),
        )
        after, outputs = decide(before, event, now=self.now)
        assert decide(before, event, now=self.now) == (after, outputs)
        assert before == copy
        self.note(before, event)
        self.state = after
        self.stored = to_store(before, after) or self.stored
        if after.generation != before.generation:
            self.heard, self.finished = {}, set()
        tells = [output for output in outputs if isinstance(output, Tell)]
        self.check_change(before, after)
        self.check_places(after)
        self.check_records(before, after, outputs)
        self.check_recipients(event, before, after, tells)
        self.check_generation(before, after, tells)
        self.check_boundary(before, after, tells)
        self.check_resume(before, after, tells)
        self.check_save(before, after, tells)
        if before.phase is not Phase.ENDED:
            self.ended += [tell for tell in tells if isinstance(tell.command, Ended)]

    def note(self, before, event):
        """What a worker that is a member said about this generation."""
        if getattr(event, "generation", None) != before.generation or event.worker not in before.alive:
            return
        if isinstance(event, Hello) and event.activity == "finished":
            self.finished.add(event.worker)
        if isinstance(event, Status):
            self.heard[event.worker] = event
        if isinstance(event, Finished):
            self.finished.add(event.worker)

    def check_change(self, before, after):
        if before.generation:  # until then, whoever dies is as if it had never come
            assert after.roster.processes.keys() >= before.roster.processes.keys()
        if after.last_step < before.last_step:  # all go on from an older step
            assert (before.phase, after.phase) == (Phase.FORMING, Phase.RUNNING)
            assert after.last_step == after.forming.resume_step - 1
        self.check_baseline(before, after)
        if before.phase is Phase.ENDED:
            assert after == before
        self.check_stored(before, after)

    def check_baseline(self, before, after):
        """It stays as it is, but that spares take the places of the lost; nobody is expected to come for these."""
        if after.grid == before.grid:
            return
        old, new = set(before.grid.baseline.workers), set(after.grid.baseline.workers)
        assert len(old) == len(new)
        assert old - new <= after.roster.lost - before.roster.expected - before.roster.kept
        if not after.past_lost:
            assert new - old <= after.roster.arriving
            assert after.phase is Phase.RUNNING

    def check_stored(self, before, after):
        """What a restart must know is stored whenever it changes, and comes back as it was."""
        stored = to_store(before, after)
        unchanged = all(getattr(before, name) == getattr(after, name) for name in DURABLE)
        unchanged = unchanged and before.checkpoints.committing == after.checkpoints.committing
        unborn = after.generation == 0 and after.ended is None
        assert (stored is None) == (unchanged or unborn)
        if stored is not None:
            assert stored.revision == before.revision + 1
            restored = restore(self.blank, stored, reattach_until=0.0)
            for state in (restored, restore(self.blank, as_read(stored), reattach_until=0.0)):
                assert state.checkpoints.committing == after.checkpoints.committing
                assert [getattr(state, name) for name in DURABLE] == [getattr(after, name) for name in DURABLE]

    def check_places(self, after):
        """Everyone is at exactly one place, and nobody without state counts as an owner."""
        without_state = after.roster.entering - after.roster.synced
        places = [after.missing, after.roster.arriving, without_state, frozenset(after.full)]
        ids = after.grid.baseline.workers
        assert sorted(worker for place in places for worker in place) == sorted(ids)
        assert not after.roster.spares & {*ids, *after.roster.lost}
        assert after.roster.lost | after.roster.spares | set(ids) <= set(self.workers)
        assert after.roster.synced <= after.roster.entering
        assert after.roster.needed <= after.roster.leaving <= after.present
        assert frozenset(after.contact.detached) <= after.present | after.roster.spares
        unborn = after.generation == 0  # then nobody is lost, and who did not come is started again
        asked = after.vacancies.starting.again | after.roster.where.keys()
        assert after.roster.expected <= (asked if unborn else after.missing)
        assert after.roster.where.keys() <= after.roster.expected
        assert set(after.roster.where.values()) <= set(after.contact.agents) or not after.contact.agents
        assert after.roster.kept <= after.roster.lost
        assert not (after.exceptions.blame and after.roster.kept), "who has stopped is back, to save what it holds"
        for plan in (after.running.plan, after.running.upcoming and after.running.upcoming.plan):
            idle = (
                after.running.upcoming.entering
                if after.running.upcoming and plan is after.running.upcoming.plan
                else without_state
            )
            for worker in idle if plan is not None and after.phase is not Phase.GATHERING else ():
                assert plan.orders.of(worker) == ()
        if after.running.plan is not None and after.phase in (Phase.RUNNING, Phase.FORMING):
            assert after.grid.baseline.placement.unowned_layers(after.absent) == ()

    def check_recipients(self, event, before, after, tells):
        if before.phase is Phase.ENDED:
            answers = [Shutdown, Ended] if isinstance(event, Hello) else []
            assert all(type(tell.command) in answers and tell.to == event.worker for tell in tells)
            return
        for tell in tells:
            farewell = isinstance(tell.command, Expel) and tell.node is not None
            assert (tell.to is None) == (isinstance(tell.command, FOR_THE_AGENT) or farewell)
            if isinstance(tell.command, StartWorker):
                assert tell.node in after.contact.here, "only who is there is asked"
                assert after.phase is Phase.ENDED or after.roster.where[tell.command.worker] == tell.node
            if isinstance(tell.command, Fence):
                assert tell.node == tell.command.process.node
            if tell.to in after.roster.lost:
                stopped = after.roster.kept | before.roster.spares | {each.worker for each in before.unjudged}
                assert isinstance(tell.command, (Attached, Shutdown, Expel) if tell.to in stopped else Expel)
            elif tell.to is not None:
                assert tell.to in self.workers
            if isinstance(tell.command, Expel) and tell.to is not None:
                self.expelled.add((tell.to, tell.process))
        members = {
            (worker, after.roster.processes[worker])
            for worker in after.roster.processes
            if worker not in after.roster.lost
        }
        assert not members & self.expelled, "nobody who was sent away is a member"
        told = [(tell.command.worker, tell.command.process) for tell in tells if isinstance(tell.command, Fence)]
        if isinstance(event, Hello) and event.worker is None:
            lost = set(after.roster.lost - after.roster.kept)
            its = {worker for worker in lost if after.roster.processes[worker].node == event.process.node}
            assert {worker for worker, _ in told} == its, "an agent that is back hears of all that were on its node"
            told = [each for each in told if each not in self.fenced]
        self.fenced += told
        assert len(set(self.fenced)) == len(self.fenced), "each process is fenced once"
        gone = {(worker, after.roster.processes[worker]) for worker in after.roster.lost - after.roster.kept}
        assert gone <= set(self.fenced) | self.parted, "whoever is lost is fenced or has gone by itself"

    def check_generation(self, before, after, tells):
        assert after.generation >= before.generation
        assert after.running.upcoming is None or after.running.upcoming.generation > after.generation
        installs = [tell.command for tell in tells if isinstance(tell.command, Install)]
        for command in installs:
            assert self.plans.setdefault(command.generation, command.plan) is command.plan, "one number, one plan"
        formed = after.generation != before.generation and after.phase is Phase.FORMING
        if not formed:
            return
        assert {tell.to for tell in tells if isinstance(tell.command, Install)} == set(after.alive) == set(after.full)
        assert before.running.upcoming is None or after.generation > before.running.upcoming.generation
        assert (after.running.upcoming, after.roster.entering) == (None, frozenset())
        for command in installs:
            assert (command.generation, command.at_boundary) == (after.generation, False)
            assert command.plan is None or not command.plan.placement.followed
            self.check_plan(after, command.plan)

    def check_plan(self, after, plan):
        unowned = after.grid.baseline.placement.unowned_layers(after.absent)
        assert after.running.plan is plan
        assert after.forming.lost_layers == unowned
        stops = bool(unowned or after.exceptions.blame)
        assert (plan is None) == stops, "training goes on exactly while every layer lives, and the program works"
        if plan is not None:
            assert plan.placement.unowned_layers() == ()
            assert plan.workers == after.alive
            validate(plan)

    def check_boundary(self, before, after, tells):
        """What is prepared is told once, to all members and all who come, and not while something else is prepared."""
        told = {tell.to: tell.command for tell in tells if isinstance(tell.command, Install)}
        if not any(command.at_boundary for command in told.values()):
            return
        assert before.running.upcoming is None or before.generation != after.generation
        assert after.phase is Phase.RUNNING
        entering = after.running.upcoming.entering
        assert entering == (frozenset() if after.preempted else after.roster.arriving), (
            "who told it to end wants nobody more"
        )
        assert set(told) == set(after.alive) | entering
        for worker, command in told.items():
            assert command.generation == after.running.upcoming.generation
            assert command.plan is after.running.upcoming.plan
            assert command.at_boundary == (worker not in after.roster.arriving)
            assert {follower for follower, _ in command.plan.placement.followed} == entering
        validate(after.running.upcoming.plan)

    def check_resume(self, before, after, tells):
        resumes = {tell.to: tell.command for tell in tells if isinstance(tell.command, Resume)}
        if not resumes:
            return
        if before.phase is Phase.RUNNING:
            assert set(resumes) == before.roster.arriving & before.running.upcoming.entering
            assert set(resumes.values()) == {Resume(generation=after.generation, step=after.forming.resume_step)}
            return
        assert set(resumes) == set(after.alive) == set(self.heard)
        step = min(at for status in self.heard.values() for _, at in status.layer_steps)
        assert set(resumes.values()) == {Resume(generation=after.generation, step=step)}

    def check_save(self, before, after, tells):
        saves = {tell.to: tell.command for tell in tells if isinstance(tell.command, Save)}
        if not saves:
            return
        assert before.phase is not Phase.SAVING
        assert set(saves) == set(after.full)
        assert self.finished >= set(after.full) or after.forming.lost_layers or after.exceptions.blame
        placement = after.grid.baseline.placement
        written = sorted(layer for command in saves.values() for layer in command.layers)
        assert written == [layer for layer in range(placement.num_layers) if layer not in after.forming.lost_layers]
        for worker, command in saves.items():
            assert set(command.layers) <= set(placement.layers_of(worker))
            assert (command.generation, command.step) == (after.generation, after.forming.resume_step)
            assert command.step == STEPS or after.forming.lost_layers or after.exceptions.blame

    def check_records(self, before, after, outputs):
        events = [output.event for output in outputs if isinstance(output, Record)]
        found = [event.worker for event in events if isinstance(event, Detected | Parted)]
        assert sorted(found) == sorted(str(worker) for worker in after.roster.lost - before.roster.lost)
        how = [event.how for event in events if isinstance(event, Detected)]
        if how and all(each.startswith("stuck") for each in how):
            held = [state.grid.baseline.placement.unowned_layers(state.absent) for state in (before, after)]
            assert held[0] == held[1], "whoever is only busy is not given up where nobody else has its layers"
        left = {event.worker for event in events if isinstance(event, Parted)}
        self.parted |= {(worker, after.roster.processes[worker]) for worker in self.workers if str(worker) in left}
        for event in events:
            if isinstance(event, Installed):
                assert event.workers == tuple(str(worker) for worker in after.alive)

    @invariant()
    def ended_once(self):
        if hasattr(self, "state"):
            assert len(self.ended) == (self.state.phase is Phase.ENDED)

    # What can happen.

    def anyone(self, data):
        return data.draw(st.sampled_from(self.workers))

    def some_generation(self, data, *, current=0.8):
        """Mostly the current one, else an older one; a newer one than the coordinator's own cannot exist."""
        old = st.integers(0, self.state.generation)
        return self.state.generation if data.draw(st.floats(0, 1)) < current else data.draw(old)

    def layers_of(self, worker):
        placement = self.state.grid.baseline.placement
        return placement.layers_of(worker) if worker in placement.workers else ()

    def status(self, worker, generation, ahead):
        layers = self.layers_of(worker)
        steps = tuple((layer, min(STEPS, self.front + (layer in ahead))) for layer in layers)
        return Status(worker=worker, generation=generation, layer_steps=steps, executed=((self.front, 1),))

    @rule()
    def everyone_attaches(self):
        for worker in self.workers:
            self.give(Hello(worker=worker, process=process_of(worker, self.processes[worker])))

    @rule(data=st.data())
    def hello(self, data):
        activity = data.draw(st.sampled_from(["waiting", "running", "finished"]))
        self.give(self.standing(self.anyone(data), self.some_generation(data), activity))

    def standing(self, worker, generation, activity):
        step = STEPS if activity == "finished" else self.front
        return Hello(
            worker=worker,
            process=process_of(worker, self.processes[worker]),
            generation=generation,
            activity=activity,
            step=step,
        )

    @rule()
    def the_coordinator_is_started_again(self):
        """What it had not stored is forgotten; a loss that it had not decided on is found out again."""
        self.heard, self.finished = {}, set()
        if self.stored is None:  # who did not come is forgotten; only those that were started instead still live
            for worker, number in map(named, self.state.vacancies.starting.spent):
                self.processes[worker] = max(self.processes[worker], number + 1)
            for worker in self.state.roster.lost:  # spares: they were ended
                self.processes[worker] += 1
        self.state = self.blank
        if self.stored is not None:
            self.state = restore(self.blank, self.stored, reattach_until=self.now + 1.0)
            assert self.state.generation == self.stored.generation

    @precondition(lambda self: self.state.phase is Phase.REATTACHING)
    @rule(activity=st.sampled_from(["waiting", "running", "finished"]))
    def all_come_back(self, activity):
        before = self.state
        for worker in self.workers:
            self.give(self.standing(worker, before.generation, activity))
        if (
            activity != "waiting"
            and not before.contact.returned
            and before.running.upcoming is None
            and not before.roster.entering
            and before.alive
            and not before.roster.spares  # one that is to enter by then, and connects again, does so anew
            and set(before.running.plan.workers if before.running.plan else ()) == set(before.alive)
        ):
            assert self.state.generation == before.generation, "they all run it: nothing is interrupted"

    @precondition(lambda self: self.state.roster.lost)
    @rule(data=st.data(), further=st.booleans())
    def a_lost_worker_has_a_new_process(self, data, further):
        if further:
            self.things_go_on_further()
        worker = data.draw(st.sampled_from(sorted(self.state.roster.lost)))
        self.processes[worker] += 1
        self.give(Hello(worker=worker, process=process_of(worker, self.processes[worker])))

    @rule(data=st.data(), further=st.booleans())
    def a_spare_comes(self, data, further):
        """A process of an id that nobody knows; or of one whose process before is gone, or was never heard of."""
        if further:
            self.things_go_on_further()
        spare = data.draw(st.sampled_from(OUTSIDERS))
        if spare in self.state.roster.spares or spare in self.state.present:
            return
        if spare not in self.workers:
            self.workers += (spare,)
        self.processes[spare] = self.processes.get(spare, 0) + 1
        self.give(Hello(worker=spare, process=process_of(spare, self.processes[spare])))
        if self.state.phase is not Phase.ENDED:
            assert spare in self.state.roster.spares | self.state.roster.arriving

    @precondition(lambda self: self.state.phase is Phase.GATHERING and self.state.roster.expected)
    @rule(data=st.data())
    def one_that_did_not_start_has_a_new_process(self, data):
        worker = data.draw(st.sampled_from(sorted(self.state.roster.expected)))
        self.processes[worker] += 1
        self.give(Hello(worker=worker, process=process_of(worker, self.processes[worker])))

    @rule()
    @precondition(lambda self: self.state.generation)
    def things_go_on(self):
        """Whatever comes next if nothing goes wrong; without it, hardly any course would get far."""
        state = self.state
        if state.phase is Phase.FORMING:
            for worker in state.alive:
                self.give(self.status(worker, state.generation, set()))
        elif state.phase is Phase.RUNNING and state.running.upcoming is not None:
            for worker in (*state.roster.arriving, *state.alive):
                self.cross(worker, state.running.upcoming)
        elif state.phase is Phase.RUNNING and state.reports.joined < set(state.alive):
            self.all_joined()
        elif state.phase is Phase.RUNNING:
            for worker in state.roster.entering - state.roster.synced:
                self.give(CaughtUp(worker=worker, generation=state.generation, step=self.front, entered=0, bytes=1))

    @rule()
    @precondition(lambda self: self.state.generation)
    def things_go_on_further(self):
        for _ in range(3):
            self.things_go_on()

    @rule(data=st.data())
    def leaving(self, data):
        self.give(Leaving(worker=self.anyone(data)))

    @rule(data=st.data())
    def node_leaving(self, data):
        node = data.draw(st.sampled_from(NODES))
        self.give(NodeLeaving(process=replace(process_of(None, 1), node=node)))

    @rule(data=st.data())
    def offer(self, data):
        node = data.draw(st.sampled_from(NODES))
        self.give(WorkerOffer(worker=data.draw(st.none() | st.sampled_from(self.workers)), node=node))

    @rule(data=st.data())
    def synced(self, data):
        worker = data.draw(st.sampled_from(sorted(self.state.roster.entering) or self.workers))
        self.give(CaughtUp(worker=worker, generation=self.some_generation(data), step=self.front, entered=0, bytes=1))

    @rule()
    def all_joined(self):
        for worker in self.workers:
            self.give(Joined(worker=worker, generation=self.state.generation))

    def cross(self, worker, upcoming):
        """What a worker that has gone over says: that it is connected there, or gone."""
        if worker in self.state.roster.arriving:
            self.give(Joined(worker=worker, generation=upcoming.generation))
        elif worker in upcoming.plan.workers:
            self.give(Joined(worker=worker, generation=upcoming.generation, step=self.front))
        else:
            self.give(
                Left(
                    worker=worker,
                    process=self.state.roster.processes[worker],
                    generation=upcoming.generation,
                    step=self.front,
                )
            )

    @precondition(lambda self: self.state.running.upcoming)
    @rule(data=st.data())
    def one_goes_over(self, data):
        self.cross(
            data.draw(st.sampled_from([*self.state.alive, *self.state.roster.arriving])), self.state.running.upcoming
        )

    @precondition(lambda self: self.state.running.upcoming)
    @rule(data=st.data())
    def all_go_over(self, data):
        upcoming = self.state.running.upcoming
        for worker in data.draw(st.permutations([*self.state.alive, *self.state.roster.arriving])):
            self.cross(worker, upcoming)

    @rule(node=st.sampled_from(NODES))
    def an_agent_attaches(self, node):
        self.give(Hello(worker=None, process=replace(process_of(None, 1), node=node), preempted=self.preempted))

    @rule(node=st.sampled_from(NODES))
    def an_agent_is_gone(self, node):
        if node in self.state.contact.here:
            self.give(Closed(worker=None, process=replace(process_of(None, 1), node=node)))

    @rule(node=st.sampled_from(NODES))
    def a_node_is_gone(self, node):
        """All that was connected from there, too, and does not come back."""
        workers, here = self.state.roster.on(node), self.state.contact.here
        for worker in workers:
            self.give(Closed(worker=worker, process=self.state.roster.processes[worker]))
        self.an_agent_is_gone(node)
        self.tick(0.1)
        if here == tuple(sorted(NODES)) and self.state.phase is not Phase.ENDED:
            assert node not in self.state.contact.agents
            assert self.state.generation == 0 or not set(workers) - self.state.roster.lost
            assert node not in self.state.roster.where.values()
            assert node not in {offer.node for offer in self.state.vacancies.offers}

    @precondition(lambda self: self.state.generation and not self.preempted)
    @rule(chance=st.integers(0, 4))
    def the_agent_is_told_to_end(self, chance):
        if chance == 3:
            self.preempted = True
            self.give(Preempted())

    @precondition(lambda self: self.state.generation)
    @rule(data=st.data(), ahead=st.sets(st.integers(0, 4)))
    def all_tell_their_status(self, data, ahead):
        for worker in data.draw(st.permutations(self.workers)):
            self.give(self.status(worker, self.state.generation, ahead))

    @rule(data=st.data(), ahead=st.sets(st.integers(0, 4)))
    def one_tells_its_status(self, data, ahead):
        self.give(self.status(self.anyone(data), self.some_generation(data), ahead))

    @rule(data=st.data())
    def joined(self, data):
        self.give(Joined(worker=self.anyone(data), generation=self.some_generation(data)))

    @rule(data=st.data())
    def heartbeat(self, data):
        generation = self.some_generation(data)
        busy_s, slowest_s = data.draw(st.sampled_from([(0.0, 0.0), (0.0, 0.1), (0.0, 0.1), (5.0, 0.1), (900.0, 0.1)]))
        beat = {"busy_s": busy_s, "slowest_s": slowest_s, "doing": data.draw(st.sampled_from(Busy))}
        self.give(Heartbeat(worker=self.anyone(data), generation=generation, step=self.front, op=1, **beat))

    @precondition(lambda self: self.state.generation)
    @rule(data=st.data())
    def suspect(self, data):
        peer = data.draw(st.none() | st.sampled_from(self.workers))
        generation = data.draw(st.integers(1, self.state.generation))
        self.give(Suspect(worker=self.anyone(data), generation=generation, peer=peer, detail="broken"))

    @precondition(lambda self: self.state.phase is Phase.RUNNING)
    @rule(data=st.data())
    def step_done(self, data):
        self.give(
            StepDone(
                worker=self.anyone(data),
                generation=self.some_generation(data),
                step=self.front,
                loss=1.0,
                omitted=False,
            )
        )

    @precondition(lambda self: self.state.phase is Phase.RUNNING)
    @rule()
    def training_goes_on(self):
        self.front = min(STEPS, self.front + 1)

    @precondition(lambda self: self.state.phase is not Phase.RUNNING or self.front == STEPS)
    @rule(data=st.data())
    def one_finished(self, data):
        self.give(Finished(worker=self.anyone(data), generation=self.some_generation(data), step=self.state.num_steps))

    @precondition(lambda self: self.state.phase is Phase.RUNNING and self.front == STEPS)
    @rule()
    def all_finished(self):
        for worker in self.workers:
            self.give(Finished(worker=worker, generation=self.state.generation, step=self.state.num_steps))

    @rule(data=st.data(), digest=st.sampled_from(["a", "a", "a", "b"]))
    def one_saved(self, data, digest):
        worker = self.anyone(data)
        digests = tuple((layer, digest) for layer in self.layers_of(worker))
        self.give(Saved(worker=worker, generation=self.some_generation(data), digests=digests))

    @precondition(lambda self: self.state.phase is Phase.SAVING)
    @rule()
    def all_saved(self):
        for worker in self.workers:
            digests = tuple((layer, "a") for layer in self.layers_of(worker))
            self.give(Saved(worker=worker, generation=self.state.generation, digests=digests))

    @rule(data=st.data(), how=st.sampled_from(["exited", "closed", "node", "in order"]))
    def lost(self, data, how):
        """One rule for all, or hardly any course would get far."""
        worker = self.anyone(data)
        number = data.draw(st.integers(1, self.processes[worker]))
        if how == "closed":
            self.give(Closed(worker=worker, process=process_of(worker, number)))
        elif how == "node" and self.state.generation:
            start = self.workers.index(worker)
            self.give(NodeLost(node=0, workers=self.workers[start : start + 2]))
        else:
            self.give(Exited(worker=worker, process=process_of(worker, number), status=0 if how == "in order" else -9))

    @precondition(lambda self: self.state.alive)
    @rule(data=st.data(), chance=st.integers(0, 49))
    def failure(self, data, chance):
        if chance == 7:
            worker = data.draw(st.sampled_from(self.state.alive))
            self.give(Failure(worker=worker, process=process_of(worker, 1), error="no such file", user_fault=True))

    @precondition(lambda self: self.state.alive)
    @rule(data=st.data(), layer=st.integers(0, 2), sound=st.sampled_from([True, True, False]), often=st.booleans())
    def raised(self, data, layer, sound, often):
        if not often:
            return
        worker = data.draw(st.sampled_from(self.state.alive))
        self.give(
            Raised(
                worker=worker,
                process=process_of(worker, self.processes[worker]),
                generation=self.state.generation,
                step=self.front,
                phase=WorkPhase.FORWARD,
                kind="ValueError",
                error="it",
                layer=layer,
                sound=sound,
            )
        )

    @rule(passed=st.sampled_from([0.1, 0.6, 1.1]))
    def tick(self, passed):
        self.now += passed
        self.give(Tick())


Cluster.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestCluster = Cluster.TestCase
