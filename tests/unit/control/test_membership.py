"""Each transition of the membership, one at a time."""

from dataclasses import replace

import pytest
from tests.processes import NODE, process_of

from holdfast.control.membership import (
    AnswerPlanned,
    Closed,
    GridState,
    Improved,
    Membership,
    Phase,
    Running,
    Starting,
    Tick,
    decide,
    plan_recovery,
    unplanned,
)
from holdfast.control.membership.starting import Offer
from holdfast.control.membership.watching import AGAIN_S, DETACHED_GRACE_S, MAX_REFORMATIONS, SUSPICION_GRACE_S
from holdfast.control.messages import (
    Attached,
    Blob,
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
    NodeLost,
    Progress,
    Remark,
    Resume,
    Save,
    Saved,
    Shutdown,
    Started,
    StartWorker,
    StateAt,
    Status,
    StepDone,
    Strike,
    Suspect,
    Unreadable,
    WorkerOffer,
)
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import split_evenly
from holdfast.core.slots import exchanged
from holdfast.errors import ConfigError, InternalError
from holdfast.planning.migration import Migration
from holdfast.planning.training import Rerouted
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.telemetry.events import Agreed, Detected, Installed, Migrating, Notice, Parted, Rebuilt, Suspected, Synced

from .decided import DecidedJob

PLAN = regular_plan(2, split_evenly(3, 2), 2)
W00, W01, W10, W11 = PLAN.workers
STRANGER = WorkerId(7, 7)
STEPS = 9


class Job(DecidedJob):
    """A membership, and what its last event led to."""

    def __init__(self, plan=PLAN, strategy="auto"):
        super().__init__(plan, steps=STEPS, strategy=strategy)

    def status(self, step, workers=None, ahead=(), executed=()):
        told = [self.status_of(w, step + (w in ahead), executed=executed) for w in workers or self.state.alive]
        return self.give(*told)

    def finished(self):
        return self.give(*(Finished(worker=w, generation=self.state.generation, step=STEPS) for w in self.state.alive))

    def saved(self, digests=None):
        digests = digests or {}
        return self.give(
            *(
                Saved(
                    worker=worker,
                    generation=self.state.generation,
                    digests=tuple(
                        (layer, digests.get((worker, layer), "same")) for layer in PLAN.placement.layers_of(worker)
                    ),
                )
                for worker in self.state.alive
            )
        )

    @property
    def ended(self):
        return self.commands(Ended).get(None)


def hellos(plan=PLAN):
    return [Hello(worker=worker, process=process_of(worker, 1)) for worker in plan.workers]


def died(worker):
    return Exited(worker=worker, process=process_of(worker, 1), status=-9)


@pytest.fixture
def forming():
    return Job().give(*hellos())


@pytest.fixture
def running(forming):
    return forming.status(0)


@pytest.fixture
def saving(running):
    return running.finished()


def test_gathers_until_everyone_attached():
    job = Job().give(*hellos()[:-1])
    assert job.told == [(worker, Attached()) for worker in PLAN.workers[:-1]]
    assert (job.state.phase, job.state.generation) == (Phase.GATHERING, 0)
    job.give(hellos()[-1])
    assert job.told[0] == (W11, Attached())
    assert job.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=1, plan=PLAN))
    assert job.recorded == [Installed(generation=1, workers=("0.0", "0.1", "1.0", "1.1"), strategy="", owners=2)]


def test_the_agent_attaches_without_becoming_a_member(forming):
    assert forming.give(Hello(worker=None, process=process_of(None, 1))).told == []


def test_a_stranger_that_was_told_of_a_past_is_sent_away(forming):
    (told,) = forming.give(Hello(worker=STRANGER, process=process_of(STRANGER, 1), generation=1)).told
    assert told == (STRANGER, Expel(reason="worker 7.7 is no member any more"))


def gathering(limit_s=10.0):
    job = Job()
    job.state = replace(job.state, vacancies=replace(job.state.vacancies, starting=Starting(limit_s=limit_s)))
    return job.give(*(Started(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers))


@pytest.mark.parametrize("attached", [True, False])
def test_a_worker_that_dies_while_starting_is_started_again_once(attached):
    job = gathering().give(*hellos()[: 2 if attached else 1], Exited(worker=W01, process=process_of(W01, 1), status=1))
    assert job.commands(StartWorker) == {None: StartWorker(worker=W01, first=True)}
    assert job.give(Exited(worker=W01, process=process_of(W01, 1), status=1)).told == [], "the same one, told again"
    job.give(
        Started(worker=W01, process=process_of(W01, 2)), *hellos()[2:], Hello(worker=W00, process=process_of(W00, 1))
    )
    assert job.state.phase is Phase.GATHERING
    job.give(Hello(worker=W01, process=process_of(W01, 2)))
    assert job.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=1, plan=PLAN))


@pytest.mark.parametrize("attached", [True, False])
def test_a_worker_that_dies_while_starting_twice_ends_the_job(attached):
    job = gathering().give(
        hellos()[0],
        Exited(worker=W01, process=process_of(W01, 1), status=1),
        Started(worker=W01, process=process_of(W01, 2)),
    )
    job.give(
        *[Hello(worker=W01, process=process_of(W01, 2))] * attached,
        Exited(worker=W01, process=process_of(W01, 2), status=-9),
    )
    assert job.ended.outcome == "error"
    assert job.ended.detail == "worker 0.1 was lost while starting, twice (process ended: signal 9)"
    assert job.commands(Shutdown).keys() == set(PLAN.workers)


def test_a_worker_that_hangs_while_starting_is_ended_and_started_again_once():
    job = gathering().give(*hellos()[:3])
    assert job.give(Tick(), now=9.9).told == []
    assert job.give(Tick(), now=10.1).told == [
        (None, Fence(worker=W11, process=process_of(W11, 1))),
        (None, StartWorker(worker=W11, first=True)),
    ]
    assert job.give(Started(worker=W11, process=process_of(W11, 2)), now=11.0).give(Tick(), now=20.9).told == []
    assert job.give(Tick(), now=21.1).ended.detail == (
        "worker 1.1 was lost while starting, twice (it did not start within 10 s (control.start_s))"
    )


def test_one_that_was_given_up_while_starting_cannot_come_any_more():
    job = gathering().give(*hellos()[:3], Tick(), now=10.1)
    (told,) = job.give(Hello(worker=W11, process=process_of(W11, 1))).told
    assert told == (W11, Expel(reason="worker 1.1 is no member any more"))
    assert job.give(Exited(worker=W11, process=process_of(W11, 1), status=-9)).told == []
    job.give(Hello(worker=W11, process=process_of(W11, 2)))  # before the agent could say that it was started
    assert job.state.generation == 1
    assert job.give(Started(worker=W11, process=process_of(W11, 2))).give(Tick(), now=99.0).commands(StartWorker) == {}


def test_an_agent_that_comes_back_is_asked_again_for_what_it_was_not_told_of():
    job = gathering().give(*hellos()[:3], Tick(), Closed(worker=None, process=process_of(None, 0)), now=10.1)
    started = tuple(Started(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers[:3])
    again = Hello(
        worker=None,
        process=process_of(None, 1),
        exits=(Exited(worker=W11, process=process_of(W11, 1), status=-9),),
        started=started,
    )
    assert job.give(again).told == [(None, StartWorker(worker=W11, first=True))]
    told_of = Hello(
        worker=None,
        process=process_of(None, 1),
        coming=(W11,),
        started=(*started, Started(worker=W11, process=process_of(W11, 2))),
    )
    assert job.give(told_of, now=50.0).told == []
    assert job.give(Tick(), now=60.1).ended is not None, "it is waited for from when it was heard of"


def test_a_node_whose_processes_are_not_known_yet_is_started_again_and_nothing_is_fenced():
    job = Job().give(WorkerOffer(worker=W10, node=NODE), WorkerOffer(worker=W11, node=NODE))
    job.give(NodeLost(node=1, workers=(W10, W11)))
    assert [command for _, command in job.told if isinstance(command, Fence | StartWorker)] == [
        StartWorker(worker=W10, first=True),
        StartWorker(worker=W11, first=True),
    ]


def test_a_node_of_which_an_end_was_told_before_is_not_lost_twice():
    job = gathering().give(Exited(worker=W10, process=process_of(W10, 1), status=-9))
    told = job.give(NodeLost(node=1, workers=(W10, W11))).told
    assert [command for _, command in told if isinstance(command, StartWorker)] == [StartWorker(worker=W11, first=True)]
    assert job.ended is None


def test_a_node_that_is_gone_while_starting_is_started_again():
    job = gathering().give(*hellos()[:3], NodeLost(node=1, workers=(W10, W11)))
    assert [command for _, command in job.told if isinstance(command, StartWorker)] == [
        StartWorker(worker=W10, first=True),
        StartWorker(worker=W11, first=True),
    ]


def test_resumes_once_every_state_is_known(forming):
    forming.status(0, PLAN.workers[:-1])
    assert forming.told == []
    forming.status(0, [W11])
    assert forming.commands(Resume) == dict.fromkeys(PLAN.workers, Resume(generation=1, step=0))
    assert forming.recorded == [Agreed(generation=1, step=0, recomputed_microbatches=0, recomputed_at_most=0)]
    assert forming.state.phase is Phase.RUNNING


def test_resumes_from_the_lowest_step_of_any_layer(forming):
    forming.status(4, ahead=(W00, W11))
    assert set(forming.commands(Resume).values()) == {Resume(generation=1, step=4)}


def test_from_where_a_generation_runs_is_known(forming):
    """A coordinator's faults are counted from there, and so is a job that is resumed before its first step is told."""
    assert forming.status(4).state.forming.resume_step == 4


def test_what_belongs_to_a_boundary_means_nothing_where_none_is_prepared(running):
    before = running.state
    assert running.give(Left(worker=W10, process=process_of(W10, 1), generation=1, step=4)).told == []
    assert running.state == before


def test_layers_two_steps_apart_are_our_bug(forming):
    forming.status(4, [W00, W01, W10])
    with pytest.raises(InternalError, match=r"worker 1\.1 holds layer 2 at step 6, another worker is at 4"):
        forming.status(6, [W11])


def test_rebuilt_is_noted_when_all_have_joined(running):
    running.give(*(Joined(worker=w, generation=1) for w in PLAN.workers[:-1]))
    assert running.recorded == []
    assert running.give(Joined(worker=W11, generation=1)).recorded == [Rebuilt(generation=1)]


@pytest.mark.parametrize("phase", ["forming", "running", "saving"])
@pytest.mark.parametrize(
    "events",
    [[(died(W10), 0.0)], [(Closed(worker=W10, process=process_of(W10, 1)), 0.0), (Tick(), DETACHED_GRACE_S)]],
    ids=["exited", "closed"],
)
def test_a_loss_forms_a_new_generation_of_the_others(request, phase, events):
    job = request.getfixturevalue(phase)
    for event, now in events:
        job.give(event, now=now)
    plan = adaptive_plan(PLAN, [W10])
    assert job.state.phase is Phase.FORMING
    assert job.commands(Install) == dict.fromkeys([W00, W01, W11], Install(generation=2, plan=plan))
    assert job.commands(Fence) == {None: Fence(worker=W10, process=process_of(W10, 1))}
    assert [type(event) for event in job.recorded] == [Detected, Installed]
    assert job.recorded[0].generation == 1
    job.status(3)
    assert job.commands(Resume).keys() == {W00, W01, W11}


def test_how_it_was_detected_is_told(running):
    assert running.give(died(W10)).recorded[0].how == "process ended: signal 9"
    running.give(Closed(worker=W11, process=process_of(W11, 1)), now=5.0)
    assert running.give(Tick(), now=5.0 + DETACHED_GRACE_S).recorded[0].how == "connection closed for 2 s"


@pytest.mark.parametrize("again", [died(W10), Closed(worker=W10, process=process_of(W10, 1))])
def test_one_death_reported_twice_is_one(running, again):
    running.give(died(W10))
    before = running.state
    assert running.give(again).told == []
    assert running.state == before


def test_a_stranger_that_dies_changes_nothing(running):
    assert running.give(died(STRANGER)).told == []


def test_a_loss_while_forming_supersedes_that_generation(running):
    running.give(died(W10)).status(3, [W00, W01])
    running.give(died(W01))
    assert running.commands(Install).keys() == {W00, W11}
    assert running.state.generation == 3
    running.status(3, [W00])
    assert running.told == [], "what was said about generation 2 does not count"
    running.status(3, [W11])
    assert running.commands(Resume).keys() == {W00, W11}


def test_a_late_status_of_an_older_generation_is_dropped(running):
    late = Status(worker=W00, generation=1, layer_steps=((0, 0), (1, 0)), executed=())
    running.give(died(W10)).give(late)
    assert running.told == []
    assert running.state.reports.statuses == {}


def test_a_lost_worker_has_no_say(running):
    running.give(died(W10))
    for event in (
        Status(worker=W10, generation=2, layer_steps=((0, 0),), executed=()),
        Suspect(worker=W10, generation=2, peer=None, detail="?"),
        Finished(worker=W10, generation=2, step=STEPS),
        Saved(worker=W10, generation=2, digests=((0, "x"),)),
        StepDone(worker=W10, generation=2, step=1, loss=1.0, omitted=False),
    ):
        before = running.state
        assert running.give(event).told == []
        assert running.state == before


def test_a_failure_of_a_lost_worker_does_not_end_the_job(running):
    running.give(died(W10)).give(
        Failure(worker=W10, process=process_of(W10, 1), error="my socket broke", user_fault=False)
    )
    assert running.ended is None


def test_a_stranger_has_no_say(forming):
    forming.status(0, [W00, W01])
    forming.give(Status(worker=STRANGER, generation=1, layer_steps=((0, 0),), executed=()))
    assert forming.commands(Resume) == {}


def test_a_lost_worker_that_attaches_again_is_sent_away(running):
    running.give(died(W10)).give(Hello(worker=W10, process=process_of(W10, 1)))
    assert running.told == [(W10, Expel(reason="worker 1.0 is no member any more"))]
    assert W10 in running.state.roster.lost


def test_without_an_owner_of_a_layer_what_lives_is_saved(running):
    running.give(died(W01)).status(4).give(died(W11))
    assert running.commands(Install) == dict.fromkeys([W00, W10], Install(generation=3, plan=None))
    running.status(5, ahead=(W10,))
    assert running.commands(Resume) == {}
    assert running.commands(Save) == {
        W00: Save(generation=3, step=5, layers=(0, 1), directory="out"),
        W10: Save(generation=3, step=5, layers=(), directory="out"),
    }
    running.saved()
    assert running.ended == Ended(
        outcome="lost",
        detail="no living worker holds layer(s) 2",
        step=5,
        directory="out",
        generations=running.state.generations,
        lost_layers=(2,),
        members=(W00, W10),
    )


def test_a_loss_during_the_salvage_starts_it_anew(running):
    running.give(died(W01), died(W11)).status(4).give(died(W00))
    assert running.commands(Install) == {W10: Install(generation=4, plan=None)}
    assert running.status(4).commands(Save)[W10].layers == (0, 1)


def test_losing_everyone_ends_with_nothing_saved(running):
    running.give(*map(died, PLAN.workers))
    assert (running.ended.outcome, running.ended.directory) == ("lost", "")
    assert running.commands(Shutdown) == {}


def test_generations_counts_plans(running):
    running.give(*map(died, PLAN.workers))
    assert running.ended.generations == 3, "of 4 losses, the one of 0.0 and 0.1 leave a plan; then layers are lost"


def test_saves_when_all_have_finished(running):
    running.give(*(Finished(worker=w, generation=1, step=STEPS) for w in PLAN.workers[:-1]))
    assert running.told == []
    running.give(Finished(worker=W11, generation=1, step=STEPS))
    assert running.commands(Save) == {
        W00: Save(generation=1, step=STEPS, layers=(0, 1), directory="out"),
        W01: Save(generation=1, step=STEPS, layers=(2,), directory="out"),
        W10: Save(generation=1, step=STEPS, layers=(), directory="out"),
        W11: Save(generation=1, step=STEPS, layers=(), directory="out"),
    }


def test_done_when_all_have_saved(saving):
    assert saving.saved().ended == Ended(
        outcome="done", detail="", step=STEPS, directory="out", generations=1, lost_layers=(), members=PLAN.workers
    )
    assert saving.commands(Shutdown) == dict.fromkeys(PLAN.workers, Shutdown(reason="done"))
    assert saving.give(died(W00), Tick(), now=99.0).told == []


def test_a_loss_while_saving_lets_another_owner_save(saving):
    saving.give(Saved(worker=W00, generation=1, digests=((0, "same"), (1, "same"))), died(W00))
    saving.status(STEPS).finished()
    assert saving.commands(Save)[W10].layers == (0, 1)
    assert saving.saved().ended.outcome == "done"


def test_different_bits_are_never_reported_as_done(saving):
    saving.saved({(W10, 1): "other", (W10, 0): "other"})
    assert saving.ended.outcome == "error"
    assert saving.ended.detail == "owners of layer(s) 0, 1 hold different bits"


def suspect(job, worker=W00, peer=W01):
    return Suspect(worker=worker, generation=job.state.generation, peer=peer, detail="reset")


def test_a_suspicion_alone_changes_nothing_at_first(running):
    running.give(suspect(running), now=5.0)
    assert running.told == []
    assert running.recorded == [Suspected(worker="0.0", peer="0.1", generation=1, detail="reset")]
    assert running.give(Tick(), now=5.0 + SUSPICION_GRACE_S * 0.9).told == []
    assert running.state.roster.lost == frozenset()


def test_an_unexplained_suspicion_connects_the_same_members_anew(running):
    running.give(suspect(running), now=5.0).give(suspect(running, W10), now=5.9)
    running.give(Tick(), now=5.0 + SUSPICION_GRACE_S)
    assert running.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=2, plan=PLAN))
    assert running.give(Tick(), now=99.0).told == []


def test_a_death_explains_a_suspicion(running):
    running.give(suspect(running, peer=W10), now=5.0).give(died(W10))
    assert running.state.generation == 2
    assert running.give(Tick(), now=99.0).told == []


def test_a_suspicion_of_whoever_has_no_connection_waits_for_its_return(running):
    """It is not known yet whether it lives: all would begin anew twice."""
    running.give(Closed(worker=W10, process=process_of(W10, 1)), now=5.0).give(suspect(running, peer=W10), now=5.1)
    running.give(Tick(), now=5.1 + SUSPICION_GRACE_S)
    assert running.told == []
    running.give(Tick(), now=5.0 + DETACHED_GRACE_S)
    assert (running.state.generation, running.state.roster.lost) == (2, {W10})
    assert running.give(Tick(), now=99.0).told == []


def test_a_damaged_checkpoint_is_not_offered_again(running):
    """Nor is any newer one: all go back to the newest before it, and if that is damaged too, before that."""
    states = tuple(StateAt(url="store", step=step) for step in (8, 6, 3))
    running.state = replace(running.state, restoring=replace(running.state.restoring, restorable=states))
    running.give(died(W01)).give(died(W11))
    for damaged, next_best in ((8, 6), (6, 3)):
        assert {install.load.step for install in running.commands(Install).values()} == {damaged}
        generation = running.state.generation
        running.give(Unreadable(worker=W00, generation=generation, step=damaged, detail="layer 2 is corrupt"))
        assert {install.load.step for install in running.commands(Install).values()} == {next_best}
        assert running.recorded[0].text == f"the checkpoint of step {damaged} cannot be used: layer 2 is corrupt"
        assert running.state.restoring.restorable[0].step == next_best, "for whatever is lost later"
    running.give(Unreadable(worker=W00, generation=running.state.generation, step=3, detail="layer 0 is missing"))
    assert running.ended.outcome == "lost"
    assert "the checkpoint of step 3 cannot be used: layer 0 is missing; there is no other" in running.ended.detail


def test_suspicions_that_do_not_end_end_the_job(running):
    for _ in range(MAX_REFORMATIONS):
        running.give(suspect(running), now=5.0).give(Tick(), now=6.0).status(0)
        assert running.commands(Resume)
    running.give(suspect(running), now=5.0).give(Tick(), now=6.0)
    assert running.ended.outcome == "error"
    assert running.ended.detail.endswith("every worker lives: 0.0: reset")


def apart(job, *pairs, begins=5.0):
    """Some workers cannot reach others, and no loss explains it."""
    job.give(*(suspect(job, worker, peer) for worker, peer in pairs), now=begins)
    return job.give(Tick(), now=begins + SUSPICION_GRACE_S)


@pytest.fixture
def on_nodes():
    """A job that runs, each pipeline of it on a node of its own."""
    nodes = [NodeId(f"node-{number}", f"{number:016x}") for number in range(2)]
    places = {worker: replace(process_of(worker, 1), node=nodes[worker.pipeline]) for worker in PLAN.workers}
    return Job().give(*(Hello(worker=worker, process=process) for worker, process in places.items())).status(0)


def test_nodes_that_cannot_reach_each_other_on_new_links_either_go_on_without_one_of_them(on_nodes):
    """At once, as one loss; the first time it may have been the links alone."""
    assert apart(on_nodes, (W00, W10), (W11, W01)).commands(Install).keys() == set(PLAN.workers)
    on_nodes.status(0).give(StepDone(worker=W01, generation=2, step=0, loss=None, omitted=False))
    apart(on_nodes, (W10, W00))
    assert on_nodes.state.roster.lost == {W10, W11}, "that a step went through says nothing: it was begun before"
    assert [each.how for each in on_nodes.recorded if isinstance(each, Detected)] == [
        "its node node-1 and node-0 cannot reach each other"
    ] * 2
    assert on_nodes.commands(Install).keys() == {W00, W01}
    assert on_nodes.state.doubts.reformations == 0
    assert on_nodes.status(0).commands(Resume).keys() == {W00, W01}


def test_nodes_whose_links_could_be_made_anew_are_kept(on_nodes):
    for begins in (5.0, 5.0 + 2 * AGAIN_S, 5.0 + 4 * AGAIN_S):
        apart(on_nodes, (W00, W10), begins=begins).status(0)
        on_nodes.give(StepDone(worker=W01, generation=on_nodes.state.generation, step=0, loss=None, omitted=False))
    assert on_nodes.state.roster.lost == frozenset()


def test_suspicions_of_an_earlier_generation_say_nothing_of_this_one(on_nodes):
    apart(on_nodes, (W00, W10)).status(0)
    apart(on_nodes, (W00, W01))
    assert on_nodes.state.roster.lost == frozenset()
    assert on_nodes.state.generation == 3, "workers of one node have no network between them: all begin anew"


def test_no_layer_is_given_up_because_nodes_cannot_reach_each_other():
    nodes = [NodeId(f"node-{number}", f"{number:016x}") for number in range(2)]
    processes = {worker: replace(process_of(worker, 1), node=nodes[worker.stage]) for worker in PLAN.workers}
    job = Job().give(*(Hello(worker=worker, process=process) for worker, process in processes.items())).status(0)
    for _ in range(MAX_REFORMATIONS):
        assert apart(job, (W00, W01)).status(0).commands(Resume).keys() == set(PLAN.workers)
    assert apart(job, (W00, W01)).ended.outcome == "error"


def test_progress_forgives_earlier_suspicions(running):
    for step in range(2 * MAX_REFORMATIONS):
        running.give(suspect(running), now=5.0).give(Tick(), now=6.0).status(step)
        running.give(StepDone(worker=W01, generation=running.state.generation, step=step, loss=None, omitted=False))
    assert running.ended is None


def test_nothing_can_be_suspected_before_the_first_generation():
    job = Job().give(hellos()[0]).give(suspect(Job()), now=0.0).give(Tick(), now=9.0)
    assert job.state.phase is Phase.GATHERING


@pytest.mark.parametrize(
    ("user_fault", "outcome", "detail"),
    [(True, "user-error", "no such file"), (False, "error", "worker 0.1: no such file\nTraceback")],
)
def test_a_failure_of_a_worker_ends_the_job(running, user_fault, outcome, detail):
    running.give(
        Failure(
            worker=W01, process=process_of(W01, 1), error="no such file", user_fault=user_fault, traceback="Traceback\n"
        )
    )
    assert (running.ended.outcome, running.ended.detail) == (outcome, detail)
    assert running.commands(Shutdown).keys() == set(PLAN.workers)


def test_steps_are_told_to_the_agent(running):
    running.give(StepDone(worker=W01, generation=1, step=3, loss=0.5, omitted=False))
    assert running.told == [(None, Progress(step=3, loss=0.5, omitted=False, alive=4, generation=1))]


def test_addresses_are_passed_on_to_those_who_live(running):
    running.give(died(W10))
    blob = Blob(worker=W00, generation=2, key="k", value=b"v", to=(W10, W11))
    assert running.give(blob).told == [(W11, blob)]


def test_work_of_the_interrupted_step_counts_as_recomputed(running):
    """The dead worker's own share is what its last heartbeat told, one operation; it may have run the other since."""
    beat = Heartbeat(worker=W10, generation=1, step=4, op=1)
    running.give(beat, died(W10)).status(4, executed=((3, 50), (4, 1)))
    known = 3 * 1 + 2
    assert running.recorded[-1] == Agreed(
        generation=2, step=4, recomputed_microbatches=known, recomputed_at_most=known + 2
    )


def test_one_that_is_stuck_has_run_nothing_since_its_last_heartbeat(running):
    beat = Heartbeat(worker=W10, generation=1, step=4, op=1, busy_s=9.0, slowest_s=0.1)
    running.give(beat, died(W10)).status(4, executed=((4, 1),))
    assert running.recorded[-1].recomputed_microbatches == running.recorded[-1].recomputed_at_most == 3 + 2


def test_who_goes_back_over_whole_steps_runs_all_of_them_again(running):
    """They had begun step 6: all 12 pairs of steps 4 and 5 are run again, though nobody tells of step 4."""
    beat = Heartbeat(worker=W10, generation=1, step=6, op=0)
    running.give(beat, died(W10)).status(4, executed=((5, 3), (6, 1)))
    assert running.recorded[-1].recomputed_microbatches == 2 * 3 * 4 + 3


def test_work_of_other_steps_is_not_recomputed(running):
    running.give(Heartbeat(worker=W10, generation=1, step=3, op=2), died(W10)).status(4, executed=((2, 7), (3, 7)))
    assert running.recorded[-1].recomputed_microbatches == 0


def test_an_unknown_strategy_is_named():
    with pytest.raises(ConfigError, match=r"resilience\.strategy: expected one of auto, adaptive, .*, got 'hope'"):
        Job(strategy="hope").give(*hellos()).give(died(W00))


def test_one_worker_alone_has_no_one_to_go_on():
    job = Job(plan=regular_plan(1, split_evenly(1, 1), 1))
    job.give(*hellos(job.state.grid.baseline)).status(0, [W00]).give(died(W00))
    assert job.ended.outcome == "lost"
    assert job.ended.lost_layers == (0,)


def test_an_answer_prepared_ahead_is_used_and_is_the_same_as_one_made_in_time():
    state = Membership(
        grid=GridState(baseline=PLAN),
        rules=JobRules(steps=5, directory="out"),
        phase=Phase.RUNNING,
        running=Running(plan=PLAN),
    )
    state = replace(
        state,
        generation=1,
        roster=replace(state.roster, processes={worker: process_of(worker, 1) for worker in PLAN.workers}),
    )
    victim = PLAN.workers[-1]
    assert frozenset({victim}) in unplanned(state)
    recovery = plan_recovery(state, frozenset({victim}))
    prepared, outputs = decide(state, AnswerPlanned(lost=frozenset({victim}), recovery=recovery))
    assert outputs == ()
    assert frozenset({victim}) not in unplanned(prepared)
    death = Exited(worker=victim, process=process_of(victim, 1), status=-9)
    with_it, without = decide(prepared, death), decide(state, death)
    assert with_it[1] == without[1]
    assert with_it[0].running.plan is recovery.plan, "the prepared one, not one made anew"
    assert with_it[0].prospects.planned == {}, "other answers are needed now"


# Workers come and go.


def again(worker, number=2):
    return Hello(worker=worker, process=process_of(worker, number))


@pytest.fixture
def steady(running):
    """Steps are being run, and everyone is connected."""
    return running.joined()


@pytest.fixture
def short(steady):
    """1.0 was lost, the others go on."""
    return steady.give(died(W10)).status(3).joined()


@pytest.fixture
def coming(short):
    """1.0 is there again, and all are told of the generation in which it enters."""
    return short.give(again(W10))


@pytest.fixture
def entered(coming):
    """All have gone over before step 5; 1.0 has no state yet."""
    return coming.give(Joined(worker=W10, generation=3)).joined(step=5)


def test_a_new_process_of_a_lost_worker_is_greeted_and_a_generation_with_it_is_prepared(short):
    plan = short.state.running.plan
    short.give(again(W10))
    upcoming = short.state.running.upcoming
    order = Install(generation=3, plan=upcoming.plan, at_boundary=True)
    assert {worker for worker, _ in upcoming.plan.placement.followed} == {W10}
    at_once = replace_struct(order, at_boundary=False)
    assert short.told == [
        (W10, Attached()), (W00, order), (W01, order), (W11, order), (W10, at_once)
    ]  # fmt: skip
    assert (upcoming.generation, upcoming.entering) == (3, {W10})
    assert (short.state.generation, short.state.running.plan, short.state.roster.lost) == (2, plan, frozenset())
    assert W10 not in short.state.alive, "it belongs to nothing yet"


def replace_struct(struct, **changes):
    return type(struct)(**{field: getattr(struct, field) for field in struct.__struct_fields__} | changes)


def test_a_worker_that_enters_takes_part_and_computes_nothing(coming):
    plan = coming.state.running.upcoming.plan
    assert W10 in plan.workers
    assert plan.orders.of(W10) == ()


def test_nobody_enters_while_the_others_recover(running):
    running.joined().give(died(W10), again(W10))
    assert running.commands(Install).keys() == {W00, W01, W11}
    assert running.state.running.upcoming is None
    running.status(3)
    assert running.state.running.upcoming is None, "not everyone is connected"
    running.joined()
    assert running.state.running.upcoming.entering == {W10}


def test_nobody_comes_or_goes_any_more_while_the_job_saves(steady):
    steady.finished()
    assert steady.state.phase is Phase.SAVING
    steady.give(Leaving(worker=W00))
    assert steady.commands(Install) == {}
    assert steady.state.running.upcoming is None


def test_who_comes_while_a_generation_is_prepared_waits_for_the_next_one(coming):
    """Two vacancies, two joiners: one prepared generation at a time, each with a number of its own."""
    before = coming.state.running.upcoming
    coming.give(Leaving(worker=W01))
    assert coming.commands(Install) == {}
    assert coming.state.running.upcoming is before


def test_the_first_that_goes_over_takes_the_job_with_it(coming):
    coming.give(Joined(worker=W10, generation=3))
    assert coming.told == []
    assert coming.state.generation == 2
    coming.give(Joined(worker=W01, generation=3, step=5))
    assert coming.told == [(W10, Resume(generation=3, step=5))], "all others know where they are"
    assert coming.recorded == [
        Installed(generation=3, workers=("0.0", "0.1", "1.0", "1.1"), strategy="boundary", owners=1)
    ]
    assert (coming.state.generation, coming.state.generations, coming.state.phase) == (3, 3, Phase.RUNNING)
    assert coming.state.reports.joined == {W10, W01}
    coming.give(Joined(worker=W00, generation=3, step=5), Joined(worker=W11, generation=3, step=5))
    assert coming.recorded == [Rebuilt(generation=3)]
    order = Install(generation=4, plan=PLAN, at_boundary=True)
    assert coming.commands(Install) == dict.fromkeys(PLAN.workers, order), "it says itself when it can go over"


def test_without_state_it_is_a_member_and_not_an_owner(entered):
    assert entered.state.alive == PLAN.workers
    assert entered.state.full == (W00, W01, W11)


def test_who_has_caught_up_gets_work_at_the_next_boundary(entered):
    entered.give(CaughtUp(worker=W10, generation=3, step=7, entered=5, bytes=9))
    assert entered.state.full == PLAN.workers
    entered.joined(step=9)
    assert (entered.state.running.plan, entered.state.roster.entering, entered.state.running.upcoming) == (
        PLAN,
        frozenset(),
        None,
    )


def test_others_may_tell_that_it_has_caught_up_before_it_does(entered):
    """All go over only if it has, and each tells on a connection of its own."""
    entered.joined(step=9)
    assert entered.state.full == PLAN.workers
    entered.give(CaughtUp(worker=W10, generation=3, step=8, entered=5, bytes=9))
    assert entered.recorded == [Synced(worker="1.0", entered=5, step=8, bytes=9, owners=2)]
    assert entered.state.roster.synced == frozenset()


def test_only_what_it_fetched_in_this_generation_makes_it_an_owner(entered):
    """It had caught up when a loss made all begin anew, and has to enter again: that news comes late."""
    late = CaughtUp(worker=W10, generation=3, step=7, entered=5, bytes=9)
    entered.give(died(W11)).status(6).joined()
    entered.give(Joined(worker=W10, generation=entered.state.running.upcoming.generation)).joined(step=8)
    assert entered.state.roster.entering == {W10}
    entered.give(late)
    assert W10 not in entered.state.full
    entered.give(died(W00))
    assert (entered.state.running.plan, entered.state.forming.lost_layers) == (None, (0, 1)), (
        "it never had layers 0 and 1 at step 8"
    )


def test_who_has_caught_up_can_save_a_layer_whose_other_owner_dies(entered):
    entered.give(CaughtUp(worker=W10, generation=3, step=7, entered=5, bytes=9), died(W00))
    assert entered.state.running.plan.workers == (W01, W10, W11)
    assert entered.state.forming.lost_layers == ()


def test_the_job_ends_though_one_that_entered_has_no_state_yet(entered):
    """It has made no step by itself: only the others have something to save."""
    entered.give(*(Finished(worker=w, generation=3, step=STEPS) for w in (W00, W01)))
    assert entered.commands(Save) == {}
    entered.give(Finished(worker=W11, generation=3, step=STEPS))
    saves = entered.commands(Save)
    assert {layer for save in saves.values() for layer in save.layers} == {0, 1, 2}
    assert saves.get(W10, Save(generation=3, step=STEPS, layers=(), directory="out")).layers == ()


def test_a_worker_without_state_is_no_owner_when_the_last_one_dies(entered):
    entered.give(died(W00))
    assert entered.state.running.plan is None
    assert entered.state.forming.lost_layers == (0, 1)


@pytest.mark.parametrize(("stage", "prepared"), [("coming", 3), ("entered", 4)])
def test_a_loss_sends_whoever_has_no_state_back_to_the_door(request, stage, prepared):
    job = request.getfixturevalue(stage).give(died(W11))
    assert job.commands(Install).keys() == {W00, W01}
    assert job.state.generation == prepared + 1, "a prepared number is never used again"
    assert (job.state.roster.arriving, job.state.roster.entering, job.state.running.upcoming) == (
        {W10},
        frozenset(),
        None,
    )
    job.status(6).joined()
    assert job.state.running.upcoming.entering == {W10}


@pytest.mark.parametrize("stage", ["coming", "entered"])
def test_a_joiner_that_dies_is_one_more_loss(request, stage):
    job = request.getfixturevalue(stage).give(Exited(worker=W10, process=process_of(W10, 2), status=-9))
    assert job.commands(Install).keys() == {W00, W01, W11}
    assert job.state.roster.lost == {W10}
    assert job.status(6).joined().state.running.upcoming is None


def test_a_joiner_that_dies_before_anybody_was_told_of_it_concerns_nobody(running):
    running.give(died(W10), again(W10)).give(Exited(worker=W10, process=process_of(W10, 2), status=-9))
    assert running.commands(Install) == {}
    assert (running.state.generation, running.state.roster.lost, running.state.roster.arriving) == (
        2,
        {W10},
        frozenset(),
    )


def test_the_end_of_the_process_before_does_not_touch_the_new_one(coming):
    before = coming.state
    for late in (died(W10), Closed(worker=W10, process=process_of(W10, 1))):
        assert coming.give(late).told == []
    assert coming.state == before


def test_addresses_of_the_prepared_generation_are_passed_on(coming):
    blob = Blob(worker=W10, generation=3, key="k", value=b"v", to=(W00, W11))
    assert coming.give(blob).told == [(W00, blob), (W11, blob)]


def test_nobody_goes_before_all_are_connected(running):
    """Whoever is still connecting would get two generations to connect for."""
    running.give(Leaving(worker=W10))
    assert (running.commands(Install), running.state.running.upcoming) == ({}, None)
    running.joined()
    assert running.commands(Install).keys() == set(PLAN.workers)


def test_who_was_told_to_go_goes_at_a_boundary(steady):
    steady.give(Leaving(worker=W10))
    plan = steady.state.running.upcoming.plan
    order = Install(generation=2, plan=plan, at_boundary=True)
    assert steady.told == [(worker, order) for worker in PLAN.workers]
    assert plan.workers == (W00, W01, W11)
    steady.give(Left(worker=W10, process=process_of(W10, 1), generation=2, step=4))
    assert steady.recorded == [
        Installed(generation=2, workers=("0.0", "0.1", "1.1"), strategy="boundary", owners=1),
        Parted(worker="1.0", step=4),
    ]
    assert steady.told == []
    assert (steady.state.roster.lost, steady.state.roster.leaving) == ({W10}, frozenset())


def test_the_orderly_end_of_who_goes_is_no_loss_whenever_it_is_seen(steady):
    over = Exited(worker=W10, process=process_of(W10, 1), status=0)
    steady.give(Leaving(worker=W10), over)
    assert (steady.recorded, steady.state.roster.lost) == ([], frozenset())
    steady.give(
        Left(worker=W10, process=process_of(W10, 1), generation=2, step=4),
        over,
        Closed(worker=W10, process=process_of(W10, 1)),
    )
    assert not [event for event in steady.recorded if isinstance(event, Detected)]


def test_who_is_killed_while_it_goes_is_lost(steady):
    steady.give(Leaving(worker=W10), died(W10))
    assert steady.state.roster.lost == {W10}
    assert (steady.state.roster.leaving, steady.state.phase) == (frozenset(), Phase.FORMING)


def test_time_passes_though_who_was_sent_away_had_lost_its_connection_before():
    plan = regular_plan(4, split_evenly(2, 2), 1)
    job = Job(plan)
    job.state = replace(job.state, restoring=replace(job.state.restoring, restorable=(StateAt(url="store", step=4),)))
    first, idle = WorkerId(0, 0), WorkerId(3, 0)
    lasts = tuple(worker for worker in plan.workers if worker.stage == 1)
    job.give(*hellos(plan), Closed(worker=idle, process=process_of(idle, 1)), NodeLost(node=0, workers=(first, *lasts)))
    assert isinstance(job.commands(Expel)[idle], Expel)
    job.give(Suspect(worker=WorkerId(1, 0), generation=2, peer=None, detail="reset"))
    job.give(Tick(), now=DETACHED_GRACE_S)
    assert (job.state.phase, job.state.generation) == (Phase.FORMING, 3)


def test_two_go_at_one_boundary(steady):
    steady.give(Leaving(worker=W10), Leaving(worker=W01))
    assert steady.state.running.upcoming.plan.workers == (W00, W01, W11), "the second was heard too late for this one"
    steady.give(Left(worker=W10, process=process_of(W10, 1), generation=2, step=4)).joined()
    assert steady.state.running.upcoming.plan.workers == (W00, W11)


def test_one_goes_and_one_comes_at_one_boundary(short):
    short.state = replace(short.state, roster=replace(short.state.roster, leaving=frozenset({W01})))
    short.give(again(W10))
    assert short.state.running.upcoming.plan.workers == (W00, W10, W11)


def test_the_last_owner_stays_and_it_is_said(short):
    short.give(Leaving(worker=W00))
    (notice,) = short.recorded
    assert notice == Notice(
        worker="0.0", text="asked to leave, but nobody else holds layer(s) 0, 1: it stays until somebody does"
    )
    assert (short.told, short.state.running.upcoming) == ([], None)
    assert short.state.roster.needed == short.state.roster.leaving == {W00}
    assert short.give(Leaving(worker=W00)).recorded == [], "it is said once"


def test_only_a_member_can_leave(short):
    before = short.state
    assert short.give(Leaving(worker=W10), Leaving(worker=STRANGER)).told == []
    assert short.state == before


def test_an_offer_for_a_vacant_place_starts_a_worker_once(short):
    assert short.give(WorkerOffer(worker=W10, node=NODE)).told == [(None, StartWorker(worker=W10))]
    assert short.give(WorkerOffer(worker=W10, node=NODE)).told == [], "it is on its way"
    short.give(again(W10))
    assert short.state.roster.expected == frozenset()


def test_an_offer_waits_until_its_place_is_vacant(steady):
    assert steady.give(WorkerOffer(worker=W10, node=NODE)).told == []
    assert steady.give(died(W10)).commands(StartWorker) == {None: StartWorker(worker=W10)}
    assert steady.state.vacancies.offers == ()


def test_two_offers_for_one_place_start_one_worker_there(steady):
    """The second waits until the place is vacant again."""
    steady.give(WorkerOffer(worker=W10, node=NODE), WorkerOffer(worker=W10, node=NODE), died(W10))
    assert [command for _, command in steady.told if isinstance(command, StartWorker)] == [StartWorker(worker=W10)]
    assert steady.state.vacancies.offers == (Offer(W10, NODE),)


def test_a_loss_is_counted_once(steady):
    """A node may be told of whose workers are known to be lost."""
    steady.state = replace(steady.state, prospects=replace(steady.state.prospects, began=0.0))
    steady.give(died(W10), NodeLost(node=0, workers=(W10,)))
    assert (steady.state.roster.lost, steady.state.prospects.losses) == ({W10}, 1)


def test_a_worker_for_any_place_goes_where_the_fewest_owners_are(steady):
    steady.give(WorkerOffer(worker=None, node=NODE))
    assert steady.commands(StartWorker) == {}
    job = Job(plan=THREE).give(*hellos(THREE))
    job.state = replace(job.state, phase=Phase.RUNNING)
    for worker in (WorkerId(0, 0), WorkerId(1, 1), WorkerId(2, 1)):
        job.give(died(worker))
    assert job.give(WorkerOffer(worker=None, node=NODE)).told == [(None, StartWorker(worker=WorkerId(1, 1)))]
    assert job.give(WorkerOffer(worker=None, node=NODE)).told == [(None, StartWorker(worker=WorkerId(2, 1)))]
    assert job.give(WorkerOffer(worker=None, node=NODE)).told == [(None, StartWorker(worker=WorkerId(0, 0)))]


THREE = regular_plan(3, split_evenly(2, 2), 1)


def test_a_started_worker_that_never_attaches_is_started_again_once_then_its_place_is_vacant_again(short):
    short.give(WorkerOffer(worker=W10, node=NODE), Exited(worker=W10, process=process_of(W10, 7), status=1))
    assert short.commands(StartWorker) == {None: StartWorker(worker=W10)}
    assert short.give(Exited(worker=W10, process=process_of(W10, 7), status=1)).told == []
    (notice,) = short.give(Exited(worker=W10, process=process_of(W10, 8), status=1)).recorded
    assert "lost before it had attached (process ended: exit code 1)" in notice.text
    assert short.give(WorkerOffer(worker=W10, node=NODE)).commands(StartWorker) == {None: StartWorker(worker=W10)}
    assert short.give(Exited(worker=W10, process=process_of(W10, 9), status=1)).commands(StartWorker) == {
        None: StartWorker(worker=W10)
    }


def test_a_started_worker_that_hangs_is_ended_and_started_again_once_then_its_place_is_vacant_again(short):
    short.state = replace(short.state, vacancies=replace(short.state.vacancies, starting=Starting(limit_s=10.0)))
    short.give(WorkerOffer(worker=W10, node=NODE), Started(worker=W10, process=process_of(W10, 7)), now=50.0)
    assert short.give(Tick(), now=59.9).told == []
    short.give(Tick(), now=60.1)
    assert [c for _, c in short.told if isinstance(c, Fence | StartWorker)] == [
        Fence(worker=W10, process=process_of(W10, 7)),
        StartWorker(worker=W10),
    ]
    short.give(Started(worker=W10, process=process_of(W10, 8)), now=61.0).give(Tick(), now=71.1)
    assert [command for _, command in short.told if isinstance(command, Fence | StartWorker)] == [
        Fence(worker=W10, process=process_of(W10, 8))
    ]
    assert short.give(WorkerOffer(worker=W10, node=NODE)).commands(StartWorker) == {None: StartWorker(worker=W10)}


def test_a_node_is_lost_in_one_event(steady):
    steady.give(NodeLost(node=1, workers=(W10, W11)))
    assert [(event.worker, event.how) for event in steady.recorded if isinstance(event, Detected)] == [
        ("1.0", "node 1 is gone"),
        ("1.1", "node 1 is gone"),
    ]
    assert steady.commands(Install) == dict.fromkeys([W00, W01], Install(generation=2, plan=steady.state.running.plan))
    assert [command.worker for _, command in steady.told if isinstance(command, Fence)] == [W10, W11]
    before = steady.state
    assert steady.give(died(W10), died(W11), NodeLost(node=1, workers=(W10, W11))).told == []
    assert steady.state == before, "nor does it count as another loss"


def test_of_a_node_only_who_is_still_there_is_lost(short):
    short.give(NodeLost(node=1, workers=(W10, W11)))
    assert [event.worker for event in short.recorded if isinstance(event, Detected)] == ["1.1"]


def beats(job, **changes):
    common = {"generation": job.state.generation, "step": 3, "op": 0, "moves": 5, "slowest_s": 0.1}
    return [Heartbeat(worker=worker, **(common | changes)) for worker in job.state.alive]


def test_a_connection_that_a_pause_of_everybody_kept_away_has_its_grace_after_it(steady):
    steady.give(Tick(), now=10.0).give(*beats(steady), now=10.1).give(
        Closed(worker=W11, process=process_of(W11, 1)), now=10.2
    )
    others = [beat for beat in beats(steady) if beat.worker != W11]
    steady.give(Tick(gap_s=9.0), now=12.1)
    for at in (12.5, 13.0, 13.5, 14.0):
        steady.give(*others, now=at).give(Tick(), now=at)
        assert steady.state.roster.lost == set()
    assert steady.give(*others, now=14.2).give(Tick(), now=14.2).state.roster.lost == {W11}


def test_a_silent_worker_is_told_that_it_is_out_and_is_fenced(steady):
    steady.give(Tick(), now=10.0).give(*beats(steady), now=10.1)
    for at in (10.5, 11.0, 11.5, 12.0):
        steady.give(Tick(), now=at).give(*[beat for beat in beats(steady) if beat.worker != W11], now=at)
    assert steady.give(Tick(), now=12.3).recorded[0] == Detected(
        worker="1.1", how="no sign of life for 2.2 s", generation=1
    )
    assert steady.commands(Expel) == {W11: Expel(reason="held for lost: no sign of life for 2.2 s")}
    assert steady.commands(Fence) == {None: Fence(worker=W11, process=process_of(W11, 1))}
    assert steady.commands(Install).keys() == {W00, W01, W10}


def hear(job, until, busy, start=10.0):
    """Every fifth of a second all say what ``busy`` tells of them; returns who was told what of it."""
    at, notices = start, []
    while at < until:
        job.give(*(beat for beat in beats(job) if beat.worker not in busy), now=at)
        told = {"generation": job.state.generation, "step": 3, "op": 0, "moves": 5, "slowest_s": 0.1}
        job.give(*(Heartbeat(worker=worker, busy_s=at - since, **told) for worker, since in busy.items()), now=at)
        job.give(Tick(), now=at)
        notices += [event for event in job.recorded if isinstance(event, Notice)]
        remarks = list(job.commands(Remark).values())
        assert [each.text for each in remarks] == [each.text for each in job.recorded if "waiting" in str(each)]
        at += 0.2
    return notices


def test_one_that_is_stuck_is_given_up_and_was_told_to_be_slow_before(steady):
    steady.give(Tick(), now=9.9)
    assert hear(steady, 11.9, {W11: 9.9}) == [Notice(worker="1.1", text="is slow: computing in step 3 for 1.1 s")]
    assert steady.state.roster.lost == frozenset()
    hear(steady, 12.2, {W11: 9.9}, start=12.0)
    assert steady.state.roster.lost == {W11}
    assert steady.recorded[0] == Detected(worker="1.1", how="stuck in step 3 for 2.1 s", generation=1)


def test_when_all_owners_of_a_layer_are_stuck_they_are_waited_for_and_that_is_told_once(steady):
    steady.give(Tick(), now=9.9)
    notices = hear(steady, 60.0, {W01: 9.9, W11: 10.3})
    assert steady.state.roster.lost == frozenset()
    assert [(each.worker, each.text.partition(":")[0]) for each in notices[:2]] == [
        ("0.1", "is slow"),
        ("1.1", "is slow"),
    ]
    assert [each.text for each in notices[2:3]] == [
        "waiting for worker 0.1 (computing in step 3 for 2.1 s): nobody else holds all of its layers and surely works"
    ]
    assert [each.text.count("worker") for each in notices[3:]] == [2], "and once the other one is stuck, too"
    assert steady.give(*beats(steady, moves=6), now=60.1).give(Tick(), now=60.2).recorded == []
    assert len(hear(steady, 63.0, {W01: 60.2, W11: 60.2}, start=60.4)) == 3, "another time is told again"
    assert steady.state.generation == 1


def test_a_sole_owner_is_waited_for_however_long_it_is_busy(short):
    """1.0 is lost already: nobody else holds the layers of 0.0."""
    short.give(Tick(), now=9.9)
    hear(short, 100.0, {W00: 9.9})
    assert short.state.roster.lost == {W10}
    hear(short, 103.0, {W00: 9.9, W11: 100.2}, start=100.2)
    assert short.state.roster.lost == {W10, W11}


def test_all_waiting_for_one_another_are_connected_anew(steady):
    at = 10.0
    while steady.state.generation == 1:
        steady.give(*beats(steady), now=at).give(Tick(), now=at)
        at += 0.5
        assert at < 20.0
    assert steady.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=2, plan=PLAN))
    assert (steady.state.roster.lost, steady.state.doubts.reformations) == (frozenset(), 1)


def test_a_strike_is_passed_on_to_the_agent(steady):
    strike = Strike(worker=W10, spec="kill-node:1@3:start")
    assert steady.give(strike).told == [(None, strike)]


def test_the_closed_connection_of_one_that_has_left_keeps_nobody_else_from_being_judged(running):
    """It is told between the vote and the boundary; later ticks must not stumble over a worker that is gone."""
    running.joined().give(Leaving(worker=W10)).give(Closed(worker=W10, process=process_of(W10, 1)), now=1.0)
    running.joined(step=5).give(Tick(), now=1.0)
    assert (running.state.roster.lost, running.state.contact.detached) == ({W10}, {})
    running.give(Closed(worker=W11, process=process_of(W11, 1)), now=1.5)
    for at in (2.0, 2.5, 3.0, 3.5):
        assert running.state.roster.lost == {W10}
        running.give(Tick(), now=at)
    assert running.state.roster.lost == {W10, W11}


def test_one_that_enters_and_is_told_to_go_does_so_when_it_has_caught_up(entered):
    entered.give(Leaving(worker=W10))
    assert entered.state.running.upcoming.plan == PLAN, "first all go over to where it computes"
    entered.joined(step=7)
    assert W10 not in entered.state.running.upcoming.plan.workers
    entered.joined(step=8)
    assert (entered.state.roster.lost, entered.state.roster.leaving) == ({W10}, frozenset())


def test_the_error_of_a_process_whose_place_has_another_ends_nothing(entered):
    entered.give(Failure(worker=W10, process=process_of(W10, 1), error="late", user_fault=False))
    assert (entered.state.phase, entered.told, entered.recorded) == (Phase.RUNNING, [], [])


def test_the_error_of_one_that_was_to_come_is_told(short):
    short.give(WorkerOffer(worker=W10, node=NODE)).give(
        Failure(worker=W10, process=process_of(W10, 2), error="no module named x", user_fault=True)
    )
    assert short.state.phase is Phase.RUNNING
    assert short.recorded == [Notice(worker="1.0", text="could not come: no module named x")]


def test_what_the_agent_is_asked_while_it_is_away_is_asked_once(short):
    """A command to start it that waits for it and its offer that comes back would be two processes for one place."""
    short.give(Closed(worker=None, process=process_of(None, 0))).give(WorkerOffer(worker=W10, node=NODE))
    assert short.commands(StartWorker) == {}
    short.give(Hello(worker=None, process=process_of(None, 0), offers=(W10,)))
    assert short.commands(StartWorker) == {None: StartWorker(worker=W10)}
    short.give(Closed(worker=None, process=process_of(None, 0))).give(
        Hello(worker=None, process=process_of(None, 0), coming=(W10,))
    )
    assert (short.commands(StartWorker), short.state.roster.expected) == ({}, {W10})


def test_workers_that_change_places_enter_there_and_what_was_promised_follows():
    """Two of stage 0 are lost: 0.1 takes the place of one of them, and gets its state there."""
    job = Job(SIX).give(*hellos(SIX)).status(0).joined()
    for lost in (WorkerId(0, 0), WorkerId(1, 0)):
        job.give(died(lost)).status(3).joined()
    worker, place, absent = WorkerId(0, 1), WorkerId(0, 0), job.state.absent
    baseline = exchanged(SIX, [(worker, place)])
    meanwhile = Rerouted(plan=adaptive_plan(baseline, absent | {worker}), period=3.0)
    afterwards = Rerouted(plan=adaptive_plan(baseline, absent), period=1.0)
    migration = Migration(
        moves=((worker, place),),
        baseline=baseline,
        meanwhile=meanwhile,
        afterwards=afterwards,
        before_s=2.0,
        copy_s=0.1,
    )
    job.give(Improved(lost=absent, offer=migration))
    prepared = job.state.generation + 1
    told = Migrating(generation=prepared, moves=(("0.1", "0.0"),), before=2.0, meanwhile=3.0, period=1.0)
    assert job.recorded[0] == told
    upcoming = job.state.running.upcoming
    assert (upcoming.generation, upcoming.entering, upcoming.baseline) == (prepared, {worker}, baseline)
    assert upcoming.plan.orders.of(worker) == (), "it computes nothing before it has its state"
    job.joined(step=5)
    assert job.state.grid.baseline == baseline
    assert (job.state.running.upcoming.plan, job.state.running.upcoming.period) == (afterwards.plan, afterwards.period)


SIX = regular_plan(3, split_evenly(4, 2), 2)
