"""Decisions of the strategies that fill every place again and go back to a checkpoint."""

from dataclasses import replace

from tests.processes import process_of

from holdfast.control.membership import Phase, Restoring, Tick
from holdfast.control.membership.viewing import view_of
from holdfast.control.messages import Exited, Hello, Install, StartWorker, StateAt, StepDone
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan

from .decided import DecidedJob

PLAN = regular_plan(2, split_evenly(4, 2), 2)
W00, W01, W10, W11 = PLAN.workers
NEWEST = StateAt(url="store", step=4)
LIMIT_S = 30.0


class Job(DecidedJob):
    """A membership that runs, and what it tells."""

    def __init__(self):
        restoring = Restoring(restorable=(NEWEST, StateAt(url=None, step=0)))
        super().__init__(PLAN, strategy="checkpoint-restart", wait_s=LIMIT_S, restoring=restoring)
        self.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers)).statuses(0)

    def spawned(self):
        return [command.worker for to, command in self.told if to is None and isinstance(command, StartWorker)]

    def installs(self):
        return self.commands(Install)


def died(worker, number=1):
    return Exited(worker=worker, process=process_of(worker, number), status=-9)


def test_all_stop_and_every_lost_place_is_filled():
    job = Job().give(died(W11))
    assert (job.state.phase, job.state.forming.wait_for_all) == (Phase.WAITING, True)
    assert job.spawned() == [W11]
    assert {to: install.plan for to, install in job.installs().items()} == {W00: None, W01: None, W10: None}


def test_another_loss_starts_only_what_is_not_on_its_way():
    job = Job().give(died(W11)).give(died(W00))
    assert job.spawned() == [W00]
    assert job.state.roster.expected == {W00, W11}


def test_all_load_the_newest_state_once_the_grid_is_whole_and_not_before():
    job = Job().give(died(W11), died(W00)).give(Hello(worker=W11, process=process_of(W11, 2)))
    assert (job.state.phase, job.installs()) == (Phase.WAITING, {}), "every layer has an owner, but one place is empty"
    job.give(Hello(worker=W00, process=process_of(W00, 2)))
    assert {to: (i.load, i.plan) for to, i in job.installs().items()} == dict.fromkeys(PLAN.workers, (NEWEST, PLAN))
    assert (job.state.phase, job.state.forming.wait_for_all) == (Phase.FORMING, False)
    assert job.statuses(4).state.phase is Phase.RUNNING


def test_steps_that_were_gone_back_behind_are_not_counted_as_done():
    """What answers the next loss is weighed by where all are, not by where they once were."""
    job = Job()
    job.give(StepDone(worker=W01, generation=job.state.generation, step=9, loss=1.0, omitted=False))
    assert view_of(job.state, frozenset()).step == 10
    job.give(died(W11)).give(Hello(worker=W11, process=process_of(W11, 2))).statuses(4)
    assert (job.state.last_step, view_of(job.state, frozenset()).step) == (3, 4)


def test_who_dies_while_waited_for_is_started_again():
    job = Job().give(died(W11), died(W00)).give(Hello(worker=W11, process=process_of(W11, 2))).give(died(W11, number=2))
    assert job.spawned() == [W11]


def test_who_dies_before_it_has_attached_is_started_again():
    job = Job().give(died(W11)).give(died(W11, number=2))
    assert job.spawned() == [W11]


def test_the_limit_counts_from_the_loss_and_a_step_ends_it():
    job = Job().give(Tick(), now=100.0).give(died(W11))
    until = job.state.forming.wait_until
    assert until == 100.0 + LIMIT_S
    job.give(Tick(), now=110.0).give(Hello(worker=W11, process=process_of(W11, 2))).give(died(W11, number=2))
    assert job.state.forming.wait_until == until, "those who come and die again do not move it"
    job.give(Hello(worker=W11, process=process_of(W11, 3))).statuses(4)
    done = StepDone(worker=W01, generation=job.state.generation, step=4, loss=1.0, omitted=False)
    assert job.give(done).state.forming.wait_until is None


def test_after_the_limit_whoever_is_there_goes_on():
    job = Job().give(Tick(), now=100.0).give(died(W11))
    job.state = replace(job.state, watch=replace(job.state.watch, limit_s=1e9))  # nobody is heard of here
    job.give(Tick(), now=100.0 + LIMIT_S)
    assert job.state.phase is Phase.FORMING
    assert W11 not in job.state.grid.baseline.workers
    assert {install.load for install in job.installs().values()} == {NEWEST}


def test_the_limit_does_not_strike_while_steps_are_run():
    job = Job().give(Tick(), now=100.0).give(died(W11)).give(Hello(worker=W11, process=process_of(W11, 2))).statuses(4)
    job.state = replace(job.state, watch=replace(job.state.watch, limit_s=1e9))
    job.give(Tick(), now=101.0 + LIMIT_S)
    assert (job.state.phase, job.state.grid.baseline) == (Phase.RUNNING, PLAN)


def test_who_has_not_loaded_yet_is_told_again_when_another_is_lost_meanwhile():
    job = Job()
    job.state = replace(job.state, rules=replace(job.state.rules, strategy="adaptive"))
    job.give(died(W01), died(W11)).give(Hello(worker=W11, process=process_of(W11, 2)))
    assert {to: install.load for to, install in job.installs().items()} == dict.fromkeys((W00, W10, W11), NEWEST)
    job.give(died(W10))
    assert {to: install.load for to, install in job.installs().items()} == dict.fromkeys((W00, W11), NEWEST)
    assert job.statuses(4).state.restoring.loading is None, "by now all have"
