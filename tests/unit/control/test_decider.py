"""What a coordinator does with an event, in which order, without a socket."""

from dataclasses import replace

import pytest
from tests.decisions import as_read
from tests.processes import process_of

from holdfast.control.chain.leading import Stored
from holdfast.control.decider import Decider
from holdfast.control.membership import GridState, Membership, Tell, plan_recovery, restore
from holdfast.control.messages import (
    Ended,
    Exited,
    Gathered,
    Heartbeat,
    Hello,
    Install,
    Joined,
    Leaving,
    Progress,
    Remark,
    Status,
    StepDone,
    Told,
)
from holdfast.core.excerpts import excerpts
from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.errors import CoordinatorUnavailable, StateUnavailable, StorageError
from holdfast.recovery.rules import JobRules
from holdfast.runtime.injection.coordinator import CoordinatorInjector
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Installed, Notice

PLAN = regular_plan(3, split_evenly(2, 2), 2)
A, B, C, *OTHERS = PLAN.workers


class World:
    """The store, the log and whoever is spoken to: what came to each, in one order.

    ``answer`` is what the store says at once; None: nothing, so far.
    """

    def __init__(self):
        self.now, self.answer, self.came, self.decider, self.asked = 0.0, Stored(), [], None, []
        self.numbers = []

    def store(self, decision):
        self.asked.append(decision)
        if self.answer is not None:
            self.say(self.answer)

    def say(self, stored):
        """The store answers; whoever knows that a decision is durable has it in its log of what came."""
        if stored == Stored():
            self.came.append(("stored", self.asked[-1]))
        self.decider.take([stored])

    def write(self, time, event, decision=0):
        self.came.append(("logged", event))
        self.numbers.append(decision)
        return True

    def send(self, outputs):
        self.came += [("sent", output) for output in outputs]

    def look_at(self, awake_s):
        pass

    def send_last(self, outputs, die):
        self.came += [("sent last", output) for output in outputs]

    def new(self):
        came, self.came = self.came, []
        return came


@pytest.fixture
def world():
    return World()


@pytest.fixture
def decider(world):
    """Of a job whose steps run; what came of that is forgotten."""
    rules = JobRules(steps=9, directory="out")
    made = Decider(
        membership=Membership(rules=rules, grid=GridState(baseline=PLAN)),
        log=world,
        clock=lambda: world.now,
        awake=lambda: world.now,
        outside=world,
    )
    world.decider = made
    made.take([Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers])
    states = [Status(worker=w, generation=1, layer_steps=((0, 0), (1, 0)), executed=()) for w in PLAN.workers]
    made.take([*states, *(Joined(worker=worker, generation=1) for worker in PLAN.workers)])
    world.new()
    return made


def died(worker):
    return Exited(worker=worker, process=process_of(worker, 1), status=-9)


def told(came, kind, how="sent"):
    return [each.command for what, each in came if what == how and isinstance(getattr(each, "command", None), kind)]


def test_a_decision_is_stored_then_logged_then_told(decider, world):
    decider.take([died(A)])
    kinds = [what for what, _ in world.new()]
    assert kinds[0] == "stored"
    assert sorted(kinds, key=["stored", "logged", "sent"].index) == kinds
    assert set(kinds) == {"stored", "logged", "sent"}


def test_each_worker_is_told_its_own_part_of_the_plan_that_is_stored(decider, world):
    decider.take([died(A)])
    came = world.new()
    (stored,) = (each for what, each in came if what == "stored")
    plan, orders = stored.running.plan, [each for _, each in came if isinstance(getattr(each, "command", 0), Install)]
    assert {each.to: each.command.plan for each in orders} == excerpts(plan, [B, C, *OTHERS])
    assert plan.orders.workers == (B, C, *OTHERS)
    assert {each.to: each.command.plan.orders.workers for each in orders} == {w: (w,) for w in (B, C, *OTHERS)}


def test_the_agent_hears_of_it_before_the_workers(decider, world):
    decider.take([died(A)])
    sent = [each for what, each in world.new() if what == "sent" and isinstance(each, Tell)]
    assert isinstance(sent[0].command, Told)
    assert sent[0].command.news == Detected(worker=str(A), how="process ended: signal 9", generation=1)


def test_what_is_recorded_bears_the_number_of_its_decision_and_all_else_none(decider, world):
    world.numbers.clear()
    decider.note("nothing was decided")
    decider.take([died(A)])
    number = decider.membership.revision
    assert number > 1
    assert world.numbers == [0, *[number] * (len(world.numbers) - 1)]
    assert {each.decision for each in told(world.new(), Told)} == {number}


def test_whoever_leads_next_tells_what_was_stored_and_never_told(decider, world):
    """Its predecessor died before it knew that the decision was there."""
    world.answer = None
    decider.take([died(A)])
    assert world.new() == []
    stored, after = as_read(world.asked[-1]), World()
    begins = Membership(rules=decider.membership.rules, grid=GridState(baseline=PLAN))
    successor = Decider(
        membership=restore(begins, stored, reattach_until=9.0),
        log=after,
        clock=lambda: 1.0,
        awake=lambda: 1.0,
        outside=after,
    )
    successor.tell_again(stored.recorded)
    came = after.new()
    world.say(Stored())
    before = world.new()
    logged = [each for what, each in came if what == "logged"]
    assert [type(each) for each in logged] == [Detected, Installed]
    assert logged == [each for what, each in before if what == "logged"]
    assert after.numbers == world.numbers[-2:] == [stored.revision] * 2
    assert told(came, Told) == told(before, Told) != []


def test_who_is_missing_is_told_while_they_gather(world):
    rules = JobRules(steps=9, directory="out")
    membership = Membership(rules=rules, grid=GridState(baseline=PLAN))
    nobody = lambda: 0.0  # noqa: E731
    decider = Decider(membership=membership, log=world, clock=nobody, awake=nobody, outside=world)
    decider.take([Hello(worker=A, process=process_of(A, 1))])
    assert told(world.new(), Gathered) == [Gathered(missing=(B, C, *OTHERS), of=len(PLAN.workers), unplaced=5)]


def test_nothing_is_told_of_what_could_not_be_stored_and_all_of_it_later_in_order(decider, world):
    world.answer = Stored(away="no room")
    decider.take([died(A), Leaving(worker=B)])
    assert (world.new(), decider.membership.roster.lost, decider.waits) == ([], frozenset(), True)
    assert decider.unanswered() == ()
    decider.pass_time()
    (remark,) = told(world.new(), Remark)
    assert remark.text == f"no room; the answer to the loss of {A} waits until it can be written: training stands still"
    world.say(Stored(away="no room"))
    decider.pass_time()
    assert told(world.new(), Remark) == [], "once"
    world.answer = Stored()
    world.say(Stored())
    came = world.new()
    assert came[0][0] == "stored"
    assert [what for what, _ in came].count("stored") == 2
    assert (decider.membership.roster.lost, decider.membership.roster.leaving, decider.waits) == ({A}, {B}, False)
    assert Notice(worker="coordinator", text="decisions can be stored again") in [each for _, each in came]


def test_who_works_is_heard_while_a_decision_is_being_stored(decider, world):
    """Steps go on and are shown; the decision is the one that was stored, and knows of them, too."""
    world.answer = None
    decider.take([Leaving(worker=B)])
    (decision,) = world.asked[-1:]
    done = StepDone(worker=C, generation=1, step=0, loss=1.0, omitted=False)
    beat = Heartbeat(worker=A, generation=1, step=1, op=3, moves=4, busy_s=0.0, slowest_s=0.1)
    world.now = 7.0
    decider.take([done, beat])
    assert [each.step for each in told(world.new(), Progress)] == [0]
    assert (decider.membership.last_step, decider.membership.roster.leaving) == (0, frozenset())
    world.say(Stored())
    assert decision.roster.leaving == decider.membership.roster.leaving == {B}
    assert (decider.membership.last_step, decider.membership.watch.vitals[A].heard_at) == (0, 7.0)


def test_nobody_is_judged_while_a_decision_is_being_stored(decider, world):
    decider.pass_time()
    world.answer = None
    decider.take([Leaving(worker=B)])
    world.new()
    for world.now in (5.0, 50.0, 500.0):
        decider.pass_time()
    world.answer = Stored()
    world.say(Stored())
    decider.pass_time()
    assert decider.membership.roster.lost == frozenset(), "what was not looked at counts against nobody"
    assert not [each for what, each in world.new() if what == "logged" and isinstance(each, Detected)]


def test_an_answer_prepared_before_a_decision_is_not_kept_behind_it(decider, world):
    before, lost = decider.membership, frozenset({A})
    recovery = plan_recovery(before, lost)
    world.answer = None
    decider.take([died(B)])
    assert not decider.answer(before, lost, recovery)
    world.answer = Stored()
    world.say(Stored())
    assert decider.membership.prospects.planned == {}


@pytest.mark.parametrize("answers", [[Stored()], [Stored(away="no room"), Stored(away="no room"), Stored()]])
def test_what_comes_while_decisions_are_stored_ends_in_the_same_state(decider, world, answers):
    """One after another, each stored before the next is made: as if the store had answered at once."""
    other, quick = World(), None
    quick = other.decider = Decider(
        membership=decider.membership, log=other, clock=lambda: 0.0, awake=lambda: 0.0, outside=other
    )
    events = [
        died(A),
        Leaving(worker=B),
        died(C),
        StepDone(worker=OTHERS[0], generation=1, step=0, loss=1.0, omitted=False),
    ]
    quick.take(events)
    world.answer = None
    decider.take(events[:1])
    decider.take(events[1:])
    while decider.waits:
        for answer in answers:
            world.say(answer)
    assert world.asked[1:] == other.asked
    assert decider.membership.roster == quick.membership.roster
    assert [each for what, each in world.new() if what == "stored"] == other.asked


def test_the_end_is_told_though_it_cannot_be_stored(decider, world):
    *others, last = PLAN.workers
    decider.take([died(worker) for worker in others])
    assert not decider.over
    world.answer = Stored(away="no room")
    decider.take([died(last)])
    assert decider.over
    assert told(world.new(), Ended)
    world.say(Stored())
    assert told(world.new(), Ended) == [], "once"


def test_what_the_store_refuses_for_good_ends_the_job(decider, world):
    world.answer = Stored(error=StorageError("too large"))
    decider.take([died(A)])
    (ended,) = told(world.new(), Ended)
    assert (ended.outcome, ended.detail) == ("error", "coordinator: StorageError: too large")
    assert (decider.over, decider.waits) == (True, False)


def test_one_that_does_not_lead_any_more_tells_nothing(decider, world):
    world.answer = Stored(error=CoordinatorUnavailable("another one leads"))
    decider.take([died(A), died(B)])
    assert world.new() == [("logged", Notice(worker="coordinator", text="another one leads"))]
    assert (decider.resigned, decider.over) == (True, True)


def test_one_that_is_to_die_while_it_tells_a_plan_tells_half_of_it_and_the_news_before(decider, world):
    faults = (Fault.parse("kill-coordinator@0:install"),)
    CoordinatorInjector(faults, world, lambda: 0.0).put_around(decider)
    decider.take([died(A)])
    came = world.new()
    assert [each.command.news.worker for what, each in came if what == "sent"] == [str(A)]
    last = [each for what, each in came if what == "sent last"]
    assert [type(each.command) for each in last] == [Install] * ((len(PLAN.workers) - 1) // 2)
    assert came[-len(last) :] == [("sent last", each) for each in last]


def test_one_that_heard_of_no_step_yet_dies_in_the_recovery_from_what_a_fault_has_noted(decider, world):
    noted = [-1]
    faults = (Fault.parse("kill-coordinator@2:install"),)
    CoordinatorInjector(faults, world, lambda: 0.0, lambda: noted[0]).put_around(decider)
    decider.take([died(A)])
    assert not [each for what, each in world.new() if what == "sent last"], "a recovery of the first step, so far"
    noted = [2]
    decider.take([died(B)])
    assert [each for what, each in world.new() if what == "sent last"]


def test_an_answer_that_was_prepared_is_kept_while_it_is_asked_for(decider):
    before, lost = decider.membership, frozenset({A})
    assert lost in decider.unanswered()
    recovery = plan_recovery(before, lost)
    assert decider.answer(before, lost, recovery)
    assert decider.membership.prospects.planned == {lost: recovery}
    assert lost not in decider.unanswered()
    decider.take([died(B)])
    assert not decider.answer(before, frozenset({C}), plan_recovery(before, frozenset({C}))), "others are needed now"


def test_a_loss_without_an_answer_is_told_once_and_not_asked_for_again(decider, world):
    before, lost = decider.membership, frozenset({A})
    assert decider.answer(before, lost, StateUnavailable((0,)))
    (_, event), *others = world.new()
    assert (others, event.text.startswith(f"no answer could be prepared for the loss of {A}: ")) == ([], True)
    assert lost not in decider.unanswered()
    decider.membership = replace(before, generation=before.generation + 1)
    assert lost in decider.unanswered(), "in another generation it may be another matter"
