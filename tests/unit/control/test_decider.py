"""What a coordinator does with an event, in which order, without a socket."""

from dataclasses import replace

import pytest
from tests.processes import process_of

from holdfast.control.decider import Decider
from holdfast.control.membership import GridState, Membership, Tell, plan_recovery
from holdfast.control.messages import Exited, Gathered, Hello, Install, Joined, Leaving, Remark, Status, Told
from holdfast.core.excerpts import excerpts
from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.errors import CoordinatorUnavailable, StateUnavailable, StoreAway
from holdfast.recovery.rules import JobRules
from holdfast.runtime.injection.coordinator import CoordinatorInjector
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Notice

PLAN = regular_plan(3, split_evenly(2, 2), 2)
A, B, C, *OTHERS = PLAN.workers


class World:
    """The store, the log and whoever is spoken to: what came to each, in one order."""

    def __init__(self):
        self.now, self.away, self.came = 0.0, None, []

    def put(self, decision):
        if self.away is not None:
            raise self.away
        self.came.append(("stored", decision))

    def write(self, time, event):
        self.came.append(("logged", event))
        return True

    def send(self, outputs):
        self.came += [("sent", output) for output in outputs]

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
        store=world,
        log=world,
        clock=lambda: world.now,
        awake=lambda: world.now,
        outside=world,
    )
    made.take([Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers])
    states = [Status(worker=w, generation=1, layer_steps=((0, 0), (1, 0)), executed=()) for w in PLAN.workers]
    made.take([*states, *(Joined(worker=worker, generation=1) for worker in PLAN.workers)])
    world.new()
    return made


def died(worker):
    return Exited(worker=worker, process=process_of(worker, 1), status=-9)


def told(came, kind, how="sent"):
    return [each.command for what, each in came if what == how and isinstance(each.command, kind)]


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


def test_who_is_missing_is_told_while_they_gather(world):
    rules = JobRules(steps=9, directory="out")
    membership = Membership(rules=rules, grid=GridState(baseline=PLAN))
    nobody = lambda: 0.0  # noqa: E731
    decider = Decider(membership=membership, store=world, log=world, clock=nobody, awake=nobody, outside=world)
    decider.take([Hello(worker=A, process=process_of(A, 1))])
    assert told(world.new(), Gathered) == [Gathered(missing=(B, C, *OTHERS), of=len(PLAN.workers))]


def test_nothing_is_told_of_what_could_not_be_stored_and_all_of_it_later_in_order(decider, world):
    world.away = StoreAway("no room")
    decider.take([died(A), Leaving(worker=B)])
    assert (world.new(), decider.membership.roster.lost, decider.waits) == ([], frozenset(), True)
    assert decider.unanswered() == ()
    decider.pass_time()
    (remark,) = told(world.new(), Remark)
    assert remark.text == f"no room; the answer to the loss of {A} waits until it can be written: training stands still"
    decider.pass_time()
    assert told(world.new(), Remark) == [], "once"
    world.away = None
    decider.pass_time()
    came = world.new()
    assert came[0][0] == "stored"
    assert (decider.membership.roster.lost, decider.membership.roster.leaving) == ({A}, {B})
    assert Notice(worker="coordinator", text="decisions can be stored again") in [each for _, each in came]


def test_one_that_does_not_lead_any_more_tells_nothing(decider, world):
    world.away = CoordinatorUnavailable("another one leads")
    decider.take([died(A)])
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
