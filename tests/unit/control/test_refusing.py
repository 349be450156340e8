"""Updates ahead of the verdict: what settles them when a generation ends, and when the job stops making them."""

import dataclasses

import pytest
from tests.processes import process_of

from holdfast.control.membership import GridState, Membership, Phase, Running, restore, to_store
from holdfast.control.messages import CommitVote, Exited, Hello, Install, Refused, Resume, Save
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import MadeAgain, Notice

from .decided import DecidedJob

PLAN = regular_plan(2, split_evenly(3, 2), 2)
W00, W01, W10, W11 = PLAN.workers


class Job(DecidedJob):
    """A staggered job in its first generation, and what its last event led to."""

    def __init__(self):
        super().__init__(PLAN, steps=99, running=Running(staggered=True))
        self.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers))
        self.statuses(0)

    def statuses(self, step, complete=(), unsettled=True):
        """Everyone is at ``step``, by an update of the one before whose verdict only ``complete`` know."""
        last = step - 1
        return self.give(
            *(
                self.status_of(
                    worker,
                    step,
                    votes=(CommitVote(step=last, complete=worker in complete, value=str(worker).encode()),),
                    unsettled=last if unsettled and worker not in complete else None,
                )
                for worker in self.state.alive
            )
        )

    def refuse(self, step, *, omitted=False, worker=W01):
        return self.give(Refused(worker=worker, generation=self.state.generation, step=step, omitted=omitted))


def test_a_refusal_is_one_more_generation_of_the_same_members_and_plan():
    job = Job().refuse(4)
    installed = job.commands(Install)
    assert set(installed) == set(PLAN.workers)
    assert all(each.plan == PLAN and each.staggered and not each.at_boundary for each in installed.values())
    assert isinstance(job.recorded[0], MadeAgain)
    assert job.state.generation == 2


def test_of_several_refusals_of_one_step_the_first_counts():
    job = Job()
    job.give(*(Refused(worker=worker, generation=1, step=4, omitted=False) for worker in (W01, W11)))
    assert job.state.generation == 2
    assert job.state.running.refusals == (4,)


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.SAVING, Phase.REATTACHING])
def test_a_refusal_is_of_no_interest_where_no_steps_are_run(phase):
    job = Job()
    job.state = dataclasses.replace(job.state, phase=phase)
    assert job.refuse(4).told == []
    assert job.state.generation == 1


def test_one_complete_vote_settles_the_step_for_all():
    resumes = Job().refuse(4).statuses(5, complete=(W01, W11)).commands(Resume)
    assert set(resumes) == set(PLAN.workers)
    assert {(each.step, each.votes) for each in resumes.values()} == {(5, (b"0.1",))}


def test_without_one_the_votes_of_all_do():
    resumes = Job().give(Exited(worker=W10, process=process_of(W10, 1), status=-9)).statuses(5).commands(Resume)
    assert set(resumes) == {W00, W01, W11}
    assert {(each.step, each.votes) for each in resumes.values()} == {(5, (b"0.0", b"0.1", b"1.1"))}


def test_what_is_settled_needs_no_vote():
    resumes = (
        Job()
        .give(Exited(worker=W10, process=process_of(W10, 1), status=-9))
        .statuses(5, unsettled=False)
        .commands(Resume)
    )
    assert {(each.step, each.votes) for each in resumes.values()} == {(5, ())}


def test_when_a_layer_is_lost_a_step_that_cannot_be_settled_is_given_up():
    job = (
        Job()
        .give(
            Exited(worker=W10, process=process_of(W10, 1), status=-9),
            Exited(worker=W00, process=process_of(W00, 1), status=-9),
        )
        .statuses(5)
    )
    assert {(each.step, each.votes) for each in job.commands(Save).values()} == {(4, ())}


def test_when_a_layer_is_lost_a_step_whose_verdict_is_known_is_saved():
    job = Job().give(
        Exited(worker=W10, process=process_of(W10, 1), status=-9),
        Exited(worker=W00, process=process_of(W00, 1), status=-9),
    )
    saves = job.statuses(5, complete=(W11,)).commands(Save)
    assert {(each.step, each.votes) for each in saves.values()} == {(5, (b"1.1",))}


def refuse_often(*steps, omitted=False):
    job = Job()
    for step in steps:
        job.refuse(step, omitted=omitted).statuses(step + 1, complete=(W01,))
    return job


def test_frequent_scaling_ends_updates_ahead_of_the_verdict():
    job = refuse_often(4, 9)
    assert job.state.running.staggered
    job.refuse(20)
    assert not job.state.running.staggered
    assert not any(each.staggered for each in job.commands(Install).values())
    assert any(isinstance(event, Notice) and "4, 9, 20" in event.text for event in job.recorded)
    stored = to_store(Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=99, directory="out")), job.state)
    blank = Membership(
        grid=GridState(baseline=PLAN),
        rules=JobRules(steps=99, directory="out"),
        running=Running(staggered=True),
    )
    restored = restore(blank, stored, reattach_until=0.0)
    assert (restored.running.staggered, restored.running.refusals) == (False, (4, 9, 20))


def test_rare_scaling_and_steps_left_out_do_not():
    assert refuse_often(4, 30, 60, 90).state.running.staggered
    assert refuse_often(4, 5, 6, 7, omitted=True).state.running.staggered


def test_a_refusal_of_a_stranger_or_an_older_generation_is_dropped():
    job = Job()
    stale = Refused(worker=W01, generation=0, step=4, omitted=False)
    stranger = Refused(worker=WorkerId(7, 7), generation=1, step=4, omitted=False)
    assert job.give(stale, stranger).told == []
