"""A connection, or the whole coordinator, is lost and comes back: what is adopted, and what begins anew."""

from dataclasses import replace

import pytest
from tests.processes import NODE, process_of

from holdfast.control.checkpoint_ledger import Settled
from holdfast.control.membership import (
    Closed,
    Phase,
    Tick,
)
from holdfast.control.membership.cadence import Cadence, CheckpointCost
from holdfast.control.membership.watching import DETACHED_GRACE_S, SUSPICION_GRACE_S
from holdfast.control.messages import (
    Attached,
    Ended,
    Exited,
    Expel,
    Failure,
    Fence,
    Finished,
    Hello,
    Install,
    Joined,
    Resume,
    Save,
    Saved,
    Shutdown,
    StartWorker,
    Suspect,
    WorkerOffer,
)
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.telemetry.events import Reattached

from .decided import DecidedJob

PLAN = regular_plan(2, split_evenly(3, 2), 2)
W00, W01, W10, W11 = PLAN.workers
STEPS = 9


class Job(DecidedJob):
    """A membership whose coordinator can die: what it stored is all that is left then."""

    def __init__(self):
        super().__init__(PLAN, steps=STEPS)

    def back(self, *workers, activity="running", step=3, generation=None, prepared=0):
        generation = self.state.generation if generation is None else generation
        return self.give(
            *(
                Hello(
                    worker=w,
                    process=process_of(w, 1),
                    generation=generation,
                    activity=activity,
                    step=step,
                    prepared=prepared,
                )
                for w in workers
            )
        )


def died(worker):
    return Exited(worker=worker, process=process_of(worker, 1), status=-9)


@pytest.fixture
def running():
    return Job().give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers)).statuses()


@pytest.fixture
def restarted(running):
    return running.restarted()


def test_before_the_first_generation_there_is_nothing_to_remember():
    job = Job().give(Hello(worker=W00, process=process_of(W00, 1)))
    assert job.stored is None
    job.restarted().give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers))
    assert job.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=1, plan=PLAN))


def test_all_run_the_stored_generation_so_it_is_adopted(restarted):
    restarted.back(W00, W01, W10)
    assert restarted.state.phase is Phase.REATTACHING
    assert all(isinstance(command, Attached) for _, command in restarted.told)
    restarted.back(W11, step=4)
    assert restarted.told == [(W11, Attached())], "nobody is interrupted"
    assert restarted.recorded == [Reattached(generation=1, adopted=True)]
    assert (restarted.state.phase, restarted.state.generation) == (Phase.RUNNING, 1)
    assert (restarted.state.generations, restarted.state.last_step) == (1, 3)


@pytest.mark.parametrize(
    ("activity", "generation"), [("waiting", 1), ("running", 0), ("waiting", 0)], ids=["waits", "older", "at start"]
)
def test_one_that_does_not_run_it_makes_all_begin_anew(restarted, activity, generation):
    restarted.back(W00, W01, W10).back(W11, activity=activity, generation=generation)
    assert restarted.recorded[0] == Reattached(generation=1, adopted=False)
    assert restarted.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=2, plan=PLAN))
    assert restarted.state.generations == 2


def test_all_finished_while_it_was_away_so_they_save(restarted):
    restarted.back(*PLAN.workers, activity="finished", step=STEPS)
    assert set(restarted.commands(Save)) == set(PLAN.workers)
    assert restarted.commands(Save)[W00] == Save(generation=1, step=STEPS, layers=(0, 1), directory="out")


def test_some_finished_while_it_was_away_and_the_rest_says_so_later(restarted):
    restarted.back(W00, W10, activity="finished", step=STEPS).back(W01, W11)
    assert restarted.commands(Save) == {}
    restarted.give(*(Finished(worker=worker, generation=1, step=STEPS) for worker in (W01, W11)))
    assert set(restarted.commands(Save)) == set(PLAN.workers)


def test_one_that_finishes_before_the_rest_is_back_is_not_forgotten(restarted):
    restarted.back(W00).give(Finished(worker=W00, generation=1, step=STEPS))
    restarted.back(W01, W10, W11, activity="finished", step=STEPS)
    assert set(restarted.commands(Save)) == set(PLAN.workers)


def test_a_worker_that_died_meanwhile_is_handled_as_soon_as_the_others_are_back(restarted):
    restarted.give(Hello(worker=None, process=process_of(None, 1), exits=(died(W10),)))
    assert restarted.commands(Fence) == {None: Fence(worker=W10, process=process_of(W10, 1))}
    assert restarted.commands(Install) == {}, "a plan would be lost on those who are not here yet"
    restarted.back(W00, W01, W11)
    plan = adaptive_plan(PLAN, [W10])
    assert restarted.commands(Install) == dict.fromkeys([W00, W01, W11], Install(generation=2, plan=plan))


def test_the_last_one_awaited_has_died(restarted):
    restarted.back(W00, W01, W11).give(died(W10))
    assert restarted.commands(Install).keys() == {W00, W01, W11}


def test_who_does_not_come_back_in_time_is_lost(restarted):
    restarted.back(W00, W01, W11)
    assert restarted.give(Tick(), now=59.9).told == []
    restarted.give(Tick(), now=60.0)
    assert restarted.recorded[0].how == "did not come back"
    assert restarted.commands(Install).keys() == {W00, W01, W11}
    assert restarted.back(W10).commands(Expel).keys() == {W10}


def test_a_loss_that_was_stored_is_remembered_and_told_again(running):
    job = running.give(died(W10)).restarted()
    assert job.state.roster.lost == {W10}
    job.give(Hello(worker=None, process=process_of(None, 1)))
    assert job.told == [(None, Fence(worker=W10, process=process_of(W10, 1)))], (
        "the first time may have been lost on the way"
    )
    assert job.give(Hello(worker=None, process=process_of(None, 1), exits=(died(W10),))).told == []
    job.back(W00, W01, W11, activity="waiting", generation=1)
    plan = adaptive_plan(PLAN, [W10])
    assert job.commands(Install) == dict.fromkeys([W00, W01, W11], Install(generation=3, plan=plan))


def test_lost_layers_stay_lost(running):
    job = running.give(died(W00), died(W10)).restarted()
    assert job.state.forming.lost_layers == (0, 1)
    job.back(W01, W11, activity="waiting")
    assert job.commands(Install) == dict.fromkeys([W01, W11], Install(generation=4, plan=None))


def test_one_that_went_away_again_is_awaited_again(restarted):
    restarted.back(W00, W01, W10).give(Closed(worker=W10, process=process_of(W10, 1))).back(W11)
    assert restarted.state.phase is Phase.REATTACHING
    assert restarted.back(W10).state.phase is Phase.RUNNING


def test_the_end_is_remembered_and_told_to_whoever_comes(running):
    running.give(*(Finished(worker=worker, generation=1, step=STEPS) for worker in PLAN.workers))
    layers = PLAN.placement.layers_of
    saved = [Saved(worker=w, generation=1, digests=tuple((i, "same") for i in layers(w))) for w in PLAN.workers]
    ended = running.give(*saved).commands(Ended)[None]
    job = running.restarted()
    assert job.state.phase is Phase.ENDED
    assert job.give(Hello(worker=None, process=process_of(None, 1))).told == [(None, ended)]
    assert job.back(W00).commands(Shutdown).keys() == {W00}
    assert job.give(*map(died, PLAN.workers)).told == [], "they ended because they were told to"


@pytest.mark.parametrize(("generation", "prepared"), [(1, 5), (5, 0), (2, 5)])
def test_a_number_that_a_worker_has_heard_of_is_never_given_to_another_generation(restarted, generation, prepared):
    """The coordinator died before it had stored what it told: two generations of one number would share messages."""
    restarted.back(W00, W01, W10).back(W11, generation=generation, prepared=prepared)
    assert {install.generation for install in restarted.commands(Install).values()} == {6}
    assert restarted.recorded[0] == Reattached(generation=1, adopted=False)


def test_all_have_finished_but_one_that_comes_is_not_back_yet(running):
    """The job is saved once it is known who is there, not before."""
    running.give(*(Joined(worker=w, generation=1) for w in PLAN.workers)).give(died(W10)).statuses()
    running.give(Hello(worker=W10, process=process_of(W10, 2))).restarted().back(W00, W01, W11, generation=2)
    running.give(*(Finished(worker=worker, generation=2, step=STEPS) for worker in (W00, W01, W11)))
    assert (running.state.phase, running.commands(Save)) == (Phase.REATTACHING, {})
    running.give(Tick(), now=60.0)
    assert running.commands(Save).keys() | running.commands(Install).keys() == {W00, W01, W11}


# The coordinator lives, a connection breaks.


def test_a_worker_that_runs_is_not_interrupted_by_a_broken_connection(running):
    running.give(*(Joined(worker=worker, generation=1) for worker in PLAN.workers))
    running.give(Closed(worker=W10, process=process_of(W10, 1)), now=1.0).back(W10)
    assert running.told == [(W10, Attached())]
    assert running.state.reports.joined == set(PLAN.workers), (
        "better plans are gone over to only where all are connected"
    )
    assert running.give(Tick(), now=99.0).told == []


def test_one_that_is_to_go_over_to_what_nobody_has_prepared_makes_all_begin_anew(running):
    """It would dissent from every boundary, or cross one alone."""
    running.give(Closed(worker=W10, process=process_of(W10, 1)), now=1.0).back(W10, prepared=4)
    assert running.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=2, plan=PLAN))


def test_what_was_on_its_way_to_a_worker_that_waits_may_be_lost_so_all_begin_anew(running):
    running.give(died(W10)).give(Closed(worker=W11, process=process_of(W11, 1)), now=1.0).back(
        W11, activity="running", generation=1
    )
    assert running.commands(Install).keys() == {W00, W01, W11}
    assert running.state.generation == 3


def test_finishing_is_not_lost_with_a_connection(running):
    running.give(*(Finished(worker=worker, generation=1, step=STEPS) for worker in (W00, W01, W10)))
    running.give(Closed(worker=W11, process=process_of(W11, 1))).back(W11, activity="finished", step=STEPS)
    assert set(running.commands(Save)) == set(PLAN.workers)


def test_nobody_is_taken_up_once_the_last_to_come_back_says_that_all_is_over(running):
    """Until it was back, nothing could be prepared for whoever has come meanwhile."""
    running.give(died(W10)).statuses()
    members = (W00, W01, W11)
    running.give(*(Joined(worker=worker, generation=2) for worker in (W00, W01)))
    running.give(*(Finished(worker=worker, generation=2, step=STEPS) for worker in (W00, W01)))
    running.give(Closed(worker=W11, process=process_of(W11, 1)), Hello(worker=W10, process=process_of(W10, 2)))
    assert running.commands(Install) == {}
    running.back(W11, activity="finished", step=STEPS, generation=2)
    assert (set(running.commands(Save)), running.commands(Install)) == (set(members), {})


def test_a_worker_without_a_connection_is_lost_after_a_while(running):
    running.give(Closed(worker=W10, process=process_of(W10, 1)), now=5.0)
    assert running.give(Tick(), now=4.9 + DETACHED_GRACE_S).told == []
    running.give(Tick(), now=5.0 + DETACHED_GRACE_S)
    assert running.commands(Fence) == {None: Fence(worker=W10, process=process_of(W10, 1))}
    assert running.commands(Install).keys() == {W00, W01, W11}


def test_a_suspicion_outlives_a_connection_that_is_back(running):
    suspicion = Suspect(worker=W00, generation=running.state.generation, peer=W10, detail="reset")
    running.give(Closed(worker=W10, process=process_of(W10, 1)), now=5.0).give(suspicion, now=5.1)
    assert running.give(Tick(), now=5.1 + SUSPICION_GRACE_S).told == []
    running.back(W10)
    running.give(Tick(), now=5.2 + SUSPICION_GRACE_S)
    assert running.commands(Install).keys() == set(PLAN.workers)


def test_the_agent_tells_of_a_death_at_once_though_the_connection_was_seen_to_close_first(running):
    running.give(Closed(worker=W10, process=process_of(W10, 1)), now=5.0).give(died(W10), now=5.001)
    assert running.commands(Install).keys() == {W00, W01, W11}
    running.statuses(3)
    assert running.commands(Resume).keys() == {W00, W01, W11}
    assert running.give(Tick(), now=99.0).told == []


def test_who_has_caught_up_and_gone_over_meanwhile_is_an_owner(running):
    """Its only peer dies before the coordinator is back: the layers are not lost."""
    running.give(*(Joined(worker=w, generation=1) for w in PLAN.workers)).give(died(W10)).statuses()
    running.give(*(Joined(worker=w, generation=2) for w in (W00, W01, W11))).give(
        Hello(worker=W10, process=process_of(W10, 2))
    )
    prepared = running.state.running.upcoming.generation
    running.give(Joined(worker=W10, generation=prepared))
    running.give(*(Joined(worker=w, generation=prepared, step=4) for w in PLAN.workers))
    assert running.state.roster.entering == {W10}
    over = running.state.running.upcoming.generation
    running.restarted().give(
        Hello(worker=W10, process=process_of(W10, 2), generation=over, activity="running", step=7, has_state=True)
    )
    running.back(W01, W11, generation=over, step=7).give(
        Hello(worker=None, process=process_of(None, 0), exits=(died(W00),))
    )
    assert running.state.forming.lost_layers == ()
    assert running.state.running.plan.workers == (W01, W10, W11)


def test_who_is_lost_while_it_enters_is_entering_no_more(running):
    """Nor while the others are awaited: the next process in its place comes from outside."""
    running.give(*(Joined(worker=w, generation=1) for w in PLAN.workers)).give(died(W10)).statuses()
    running.give(*(Joined(worker=w, generation=2) for w in (W00, W01, W11))).give(
        Hello(worker=W10, process=process_of(W10, 2))
    )
    prepared = running.state.running.upcoming.generation
    running.give(Joined(worker=W10, generation=prepared))
    running.give(*(Joined(worker=w, generation=prepared, step=4) for w in PLAN.workers)).restarted()
    assert running.state.roster.entering == {W10}
    running.give(Exited(worker=W10, process=process_of(W10, 2), status=-9))
    assert (running.state.roster.lost, running.state.roster.entering) == ({W10}, frozenset())
    running.give(Hello(worker=W10, process=process_of(W10, 3)))
    assert (running.state.roster.arriving, running.state.roster.entering) == ({W10}, frozenset())


def test_when_the_job_has_ended_nobody_is_waited_for():
    job = Job().give(Hello(worker=W00, process=process_of(W00, 1)), died(W01))
    assert job.state.roster.expected == {W01}
    job.give(Failure(worker=W00, process=process_of(W00, 1), error="e", user_fault=True))
    assert job.restarted().state.ended is not None
    assert job.state.roster.expected == frozenset()


def test_an_end_right_after_a_restart_knows_the_last_step(restarted):
    restarted.back(W00, step=7).give(Failure(worker=W00, process=process_of(W00, 1), error="e", user_fault=True))
    assert restarted.commands(Ended)[None].step == 7


def test_an_offer_that_comes_before_all_are_back_is_kept(running):
    running.give(died(W10)).statuses().restarted().give(
        Hello(worker=None, process=process_of(None, 0)), WorkerOffer(worker=W10, node=NODE)
    )
    assert running.commands(StartWorker) == {}
    running.back(W00, W01, W11)
    assert running.commands(StartWorker) == {None: StartWorker(worker=W10)}


@pytest.fixture
def other_interval(running):
    """A checkpoint tells that one after each 40 steps is right, not after each 10, as the job began with."""
    running.blank = replace(running.blank, cadence=Cadence(every=10, wanted=10))
    measured = Cadence(every=10, wanted=10, step_s=0.1, newest=CheckpointCost(stall_s=0.14, write_s=0.5))
    running.state = replace(running.state, cadence=measured)
    running.give(*(Joined(worker=worker, generation=1) for worker in PLAN.workers))
    running.give(Settled(step=4, url="store"))
    assert {each.checkpoint_every for each in running.commands(Install).values()} == {40}
    return running


def go_over(job):
    return job.give(*(Joined(worker=worker, generation=2, step=5) for worker in PLAN.workers))


def test_how_often_checkpoints_are_made_outlives_the_coordinator(other_interval):
    job = go_over(other_interval).restarted().back(*PLAN.workers, step=6)
    assert job.recorded == [Reattached(generation=2, adopted=True)]
    assert (job.state.cadence.every, job.state.interval) == (40, 40), "as all workers have it"
    job.give(died(W00))
    assert {each.checkpoint_every for each in job.commands(Install).values()} == {40}


def test_so_does_what_all_were_about_to_go_over_to(other_interval):
    job = other_interval.restarted()
    assert (job.state.cadence.every, job.state.cadence.wanted) == (10, 40)
    job.back(*PLAN.workers, prepared=2)
    assert {each.checkpoint_every for each in job.commands(Install).values()} == {40}
    assert job.state.cadence.every == 40
