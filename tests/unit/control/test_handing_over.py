"""Layers are handed from worker to worker: what is decided about it, event by event."""

from dataclasses import replace

import pytest
from tests.processes import process_of

from holdfast.control.membership import Handover, Improved, Phase, Tick
from holdfast.control.membership.watching import SUSPICION_GRACE_S
from holdfast.control.messages import CaughtUp, Hello, Install, Joined, Leaving, Remark, Suspect
from holdfast.core.faults import Fault, Point
from holdfast.core.ids import Batch
from holdfast.core.placement import LayerRange, home_placement
from holdfast.runtime.injection.coordinator import CoordinatorInjector
from holdfast.schedule.builders import home_plan
from holdfast.telemetry.events import HandingOver, Notice, Reattached

from .decided import DecidedJob


def plan_of(*cuts):
    """A pipeline of four layers per number, of two stages that are cut there."""
    return home_plan(
        home_placement([[LayerRange(0, cut), LayerRange(cut, 4)] for cut in cuts]), Batch((2,) * len(cuts))
    )


BEFORE, AFTER = plan_of(2, 2), plan_of(3, 2)
W00, W01, W10, W11 = BEFORE.workers
WANTED = Improved(lost=frozenset(), offer=Handover(grid=AFTER))
REASON = "layers could not be handed over: 0.0: nobody gives layer 2"
TEXT = f"the grid stays as it is: {REASON}"


@pytest.fixture
def asked():
    """A job of which a handover was asked: the generation in which 0.0 follows layer 2 is prepared."""
    return DecidedJob(BEFORE, steps=99).begun().give(WANTED)


@pytest.fixture
def taking(asked):
    """0.0 follows layer 2, and the generation in which it holds it is prepared."""
    return asked.joined(step=3)


def suspected(job, now=10.0):
    """0.0 could not get its layer, and no loss explains that."""
    generation = job.state.generation
    job.give(Suspect(worker=W00, generation=generation, peer=None, detail="nobody gives layer 2"), now=now)
    return job.give(Tick(), now=now + SUSPICION_GRACE_S)


def texts(job):
    return [event.text for event in job.recorded if isinstance(event, Notice)]


def remarks(job):
    return [command.text for to, command in job.told if to is None and isinstance(command, Remark)]


def test_it_takes_two_boundaries(asked):
    assert [event.takes for event in asked.recorded if isinstance(event, HandingOver)] == [(("0.0", "2:3"),)]
    asked.joined(step=3)
    assert asked.state.running.plan.placement.followed == ((W00, LayerRange(2, 3)),)
    assert asked.commands(Install)[W00].plan.placement == AFTER.placement
    asked.joined(step=5)
    assert (asked.state.grid.baseline, asked.state.grid.target) == (AFTER, None)


def test_who_takes_layers_over_is_catching_up_until_it_says_so(taking):
    assert taking.state.catching_up == {W00}
    assert taking.state.full == BEFORE.workers, "it holds and runs what it held before"
    taking.give(CaughtUp(worker=W00, generation=taking.state.generation, step=4, entered=3, bytes=9))
    assert taking.state.catching_up == frozenset()
    taking.joined(step=5)
    assert (taking.state.catching_up, taking.state.roster.synced) == (frozenset(), frozenset())


def test_the_coordinator_can_be_struck_while_state_is_copied(asked):
    injector = CoordinatorInjector((Fault.parse("kill-coordinator@0:copy"),), None, lambda: 0.0)
    struck = [injector.due(Point.COPY, asked.state)]
    struck.append(injector.due(Point.COPY, asked.joined(step=3).state))
    caught_up = CaughtUp(worker=W00, generation=asked.state.generation, step=4, entered=3, bytes=9)
    struck.append(injector.due(Point.COPY, asked.give(caught_up).state))
    assert [fault is not None for fault in struck] == [False, True, False]


def test_a_coordinator_that_was_away_while_layers_were_offered_makes_all_begin_anew(asked):
    """Offers that were on their way through it are lost, and whoever waits for them would do so for ever."""
    (first, *_) = asked.state.running.upcoming.plan.workers
    generation = asked.state.running.upcoming.generation
    asked.give(Joined(worker=first, generation=generation, step=3))
    assert asked.state.running.upcoming is None, "they have gone over, and not all are connected"
    hellos = [
        Hello(worker=w, process=process_of(w, 1), generation=generation, activity="running", step=4)
        for w in BEFORE.workers
    ]
    asked.restarted().give(Hello(worker=None, process=process_of(None, 0)), *hellos)
    assert [event.adopted for event in asked.recorded if isinstance(event, Reattached)] == [False]


def test_one_that_fails_is_given_up_and_told_once(taking):
    suspected(taking)
    assert taking.state.phase is Phase.FORMING, "all connect anew"
    assert taking.state.grid.target == AFTER, "some may have gone over: what they hold will tell"
    taking.statuses(4).joined()
    assert (taking.state.phase, taking.state.grid.target, taking.state.running.upcoming) == (Phase.RUNNING, None, None)
    assert (texts(taking), remarks(taking)) == ([TEXT], [TEXT])
    taking.give(WANTED)
    assert (taking.recorded, taking.told, taking.state.grid.target) == ([], [], None), "nothing has changed"


def test_one_that_failed_is_tried_again_once_the_membership_has_changed(taking):
    suspected(taking).statuses(4).joined()
    taking.give(Leaving(worker=W11)).joined(step=6)
    assert taking.state.absent == {W11}
    taking.give(replace(WANTED, lost=frozenset({W11})))
    assert (taking.state.grid.target, texts(taking)) == (AFTER, [])


def test_another_grid_may_be_asked_for_at_once(taking):
    other = plan_of(1, 2)
    suspected(taking).statuses(4).joined().give(replace(WANTED, offer=Handover(grid=other)))
    assert taking.state.grid.target == other


def test_one_that_failed_when_all_had_gone_over_is_done(taking):
    """Each says that it holds what the new grid gives it: then nothing is given up."""
    suspected(taking)
    for worker in AFTER.workers:
        held = tuple((layer, 4) for layer in AFTER.placement.layers_of(worker))
        taking.statuses(workers=[worker], layer_steps=held)
    assert (taking.state.grid.baseline, taking.state.grid.target) == (AFTER, None)
