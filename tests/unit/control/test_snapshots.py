"""Decisions of strategy `snapshots`: to which step all go back, and whose places are filled."""

from dataclasses import replace

import pytest
from tests.processes import process_of

from holdfast.control.membership import Phase
from holdfast.control.messages import Exited, Hello, Install, Resume, Save, StartWorker
from holdfast.core.placement import split_evenly
from holdfast.errors import InternalError
from holdfast.schedule.builders import adaptive_plan, regular_plan

from .decided import DecidedJob

PLAN = regular_plan(2, split_evenly(4, 2), 2)
W00, W01, W10, W11 = PLAN.workers


class Job(DecidedJob):
    """A membership that runs, and what it tells."""

    def __init__(self):
        super().__init__(PLAN, strategy="snapshots")
        self.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers)).statuses(0)

    def hold(self, held):
        """Each says at which step it is, and which snapshots it holds."""
        told = [self.status_of(worker, step, snapshots=snapshots) for worker, (step, snapshots) in held.items()]
        return self.give(*told)

    def commands(self, kind):
        return [command for _, command in self.told if isinstance(command, kind)]

    def spawned(self):
        return [command.worker for command in self.commands(StartWorker)]


def died(worker, number=1):
    return Exited(worker=worker, process=process_of(worker, number), status=-9)


def test_a_loss_is_routed_around_at_once_and_its_place_filled():
    job = Job().give(died(W11))
    assert {command.plan for command in job.commands(Install)} == {adaptive_plan(PLAN, [W11])}
    assert job.spawned() == [W11]
    assert job.state.phase is Phase.FORMING


@pytest.mark.parametrize(
    ("held", "step"),
    [
        (((7, (3, 6)), (7, (3, 6)), (7, (3, 6))), 6),
        (((6, (3, 6)), (5, (0, 3)), (5, (0, 3))), 3),
        (((6, (3, 6)), (6, (0, 3)), (6, (3, 6))), 3),
        (((7, (3, 6)), (8, (3, 6)), (3, (3,))), 3),
        (((7, (3, 6)), (8, (3, 6)), (7, ())), 7),
        (((7, (0, 3)), (7, (3, 6)), (8, (6,))), 7),
        (((2, ()), (2, ()), (3, ())), 2),
    ],
    ids=["all", "one is ahead", "one has yet to", "one went back", "a joiner", "none in common", "nobody has any"],
)
def test_the_newest_snapshot_of_all_or_the_lowest_step(held, step):
    job = Job().give(died(W11)).hold(dict(zip((W00, W01, W10), held, strict=True)))
    assert job.commands(Resume) == 3 * [Resume(generation=2, step=step)]


def test_further_apart_than_a_snapshot_can_mend_is_a_bug():
    with pytest.raises(InternalError, match="more than one step apart"):
        Job().give(died(W11)).hold({W00: (7, (3, 6)), W01: (8, (3, 6)), W10: (2, ())})


def test_what_is_saved_when_training_ends_is_the_lowest_step_not_a_snapshot():
    job = Job().give(died(W11), died(W01))
    job.hold({W00: (7, (3, 6)), W10: (8, (3, 6))})
    assert {(command.step, command.layers) for command in job.commands(Save)} == {(7, (0, 1)), (7, ())}
    assert job.spawned() == [], "nobody can help any more"


def test_saved_after_some_went_back_is_where_they_are():
    job = Job().give(died(W11), died(W01)).hold({W00: (3, (3,)), W10: (8, (3, 6))})
    assert {command.step for command in job.commands(Save)} == {3}


def test_who_is_there_or_on_its_way_is_not_started_again():
    job = Job().give(died(W11)).give(died(W00))
    assert job.spawned() == [W00]
    job = Job().give(died(W11), Hello(worker=W11, process=process_of(W11, 2))).give(died(W00))
    assert job.spawned() == [W00]


def test_a_joiner_that_dies_without_state_is_not_started_again_and_another_one_is():
    """Or a process that cannot live would send all back again and again."""
    job = Job().give(died(W11), Hello(worker=W11, process=process_of(W11, 2))).give(died(W11, number=2))
    assert job.spawned() == []
    assert job.give(died(W00)).spawned() == [W00]
    assert job.give(Hello(worker=W11, process=process_of(W11, 3))).state.roster.arriving == {W11}, (
        "who is brought there is welcome"
    )


def test_who_computed_there_since_is_replaced_again():
    job = Job().give(died(W11))
    job.state = replace(
        job.state,
        roster=replace(job.state.roster, lost=frozenset(), expected=frozenset()),
        vacancies=replace(job.state.vacancies, abandoned=frozenset({W11})),
    )
    assert job.give(died(W11)).spawned() == [W11]


def test_a_restarted_coordinator_asks_the_agent_when_it_is_back_and_only_once():
    job = Job().give(died(W11)).restarted()
    assert job.state.roster.expected == {W11}
    workers = [
        Hello(worker=w, process=process_of(w, 1), generation=2, activity="waiting", step=4) for w in (W00, W01, W10)
    ]
    assert job.give(*workers).spawned() == [], "the agent has yet to say who is coming"
    assert job.give(Hello(worker=None, process=process_of(None, 9))).spawned() == [W11]


def test_an_agent_that_has_started_it_already_is_not_asked():
    job = Job().give(died(W11)).restarted()
    assert job.give(Hello(worker=None, process=process_of(None, 9), coming=(W11,))).spawned() == []


def test_a_loss_that_only_the_agent_saw_is_answered_with_one_new_process():
    job = Job().restarted()
    running = [
        Hello(worker=w, process=process_of(w, 1), generation=1, activity="running", step=4) for w in (W00, W01, W10)
    ]
    job.give(*running).give(Hello(worker=None, process=process_of(None, 9), exits=(died(W11),)))
    assert job.spawned() == [W11]
