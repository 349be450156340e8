"""Each transition of the membership, one at a time."""

from dataclasses import replace

import pytest

from holdfast.control.membership import (
    DETACHED_GRACE_S,
    MAX_REFORMATIONS,
    SUSPICION_GRACE_S,
    Closed,
    Membership,
    Phase,
    Planned,
    Record,
    Tell,
    Tick,
    decide,
    plan_recovery,
    unplanned,
)
from holdfast.control.messages import (
    Attached,
    Blob,
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
    Progress,
    Resume,
    Save,
    Saved,
    Shutdown,
    Status,
    StepDone,
    Suspect,
)
from holdfast.core.builders import adaptive_plan, regular_plan
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import ConfigError, InternalError
from holdfast.telemetry.events import Agreed, Detected, Installed, Rebuilt, Suspected

PLAN = regular_plan(2, split_evenly(3, 2), 2)
W00, W01, W10, W11 = PLAN.workers
STRANGER = WorkerId(7, 7)
STEPS = 9


class Job:
    """A membership, and what its last event led to."""

    def __init__(self, plan=PLAN, strategy="auto"):
        self.state = Membership(healthy=plan, steps=STEPS, strategy=strategy, directory="out")
        self.told = []
        self.recorded = []

    def give(self, *events, now=0.0):
        self.told, self.recorded = [], []
        for event in events:
            self.state, outputs = decide(self.state, event, now=now)
            self.told += [(o.to, o.command) for o in outputs if isinstance(o, Tell)]
            self.recorded += [o.event for o in outputs if isinstance(o, Record)]
        return self

    def status(self, step, workers=None, ahead=(), executed=()):
        return self.give(
            *(
                Status(
                    worker=worker,
                    generation=self.state.generation,
                    layer_steps=tuple(
                        (layer, step + (worker in ahead)) for layer in PLAN.placement.layers_of(worker).indices
                    ),
                    executed=executed,
                )
                for worker in workers or self.state.alive
            )
        )

    def finished(self):
        return self.give(*(Finished(worker=w, generation=self.state.generation) for w in self.state.alive))

    def saved(self, digests=None):
        digests = digests or {}
        return self.give(
            *(
                Saved(
                    worker=worker,
                    generation=self.state.generation,
                    digests=tuple(
                        (layer, digests.get((worker, layer), "same"))
                        for layer in PLAN.placement.layers_of(worker).indices
                    ),
                )
                for worker in self.state.alive
            )
        )

    def commands(self, kind):
        return {to: command for to, command in self.told if isinstance(command, kind)}

    @property
    def ended(self):
        return self.commands(Ended).get(None)


def hellos(plan=PLAN):
    return [Hello(worker=worker, pid=1) for worker in plan.workers]


def died(worker):
    return Exited(worker=worker, pid=1, status=-9)


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
    assert job.recorded == [Installed(generation=1, workers=("0.0", "0.1", "1.0", "1.1"), strategy="")]


def test_the_agent_attaches_without_becoming_a_member(forming):
    assert forming.give(Hello(worker=None, pid=1)).told == []


def test_a_stranger_is_sent_away(forming):
    (told,) = forming.give(Hello(worker=STRANGER, pid=1)).told
    assert told == (STRANGER, Expel(reason="worker 7.7 is no member any more"))


def test_a_worker_that_dies_while_starting_ends_the_job():
    job = Job().give(hellos()[0], Exited(worker=W01, pid=1, status=1))
    assert job.ended.outcome == "error"
    assert "0.1 died while starting (process ended: exit code 1)" in job.ended.detail
    assert job.commands(Shutdown).keys() == {W00, W10, W11}


def test_resumes_once_every_state_is_known(forming):
    forming.status(0, PLAN.workers[:-1])
    assert forming.told == []
    forming.status(0, [W11])
    assert forming.commands(Resume) == dict.fromkeys(PLAN.workers, Resume(generation=1, step=0))
    assert forming.recorded == [Agreed(generation=1, step=0, recomputed_microbatches=0)]
    assert forming.state.phase is Phase.RUNNING


def test_resumes_from_the_lowest_step_of_any_layer(forming):
    forming.status(4, ahead=(W00, W11))
    assert set(forming.commands(Resume).values()) == {Resume(generation=1, step=4)}


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
    [[died(W10)], [Closed(worker=W10, pid=1), Tick(now=DETACHED_GRACE_S)]],
    ids=["exited", "closed"],
)
def test_a_loss_forms_a_new_generation_of_the_others(request, phase, events):
    job = request.getfixturevalue(phase).give(*events)
    plan = adaptive_plan(PLAN, [W10])
    assert job.state.phase is Phase.FORMING
    assert job.commands(Install) == dict.fromkeys([W00, W01, W11], Install(generation=2, plan=plan))
    assert job.commands(Fence) == {None: Fence(worker=W10, pid=1)}
    assert [type(event) for event in job.recorded] == [Detected, Installed]
    assert job.recorded[0].generation == 1
    job.status(3)
    assert job.commands(Resume).keys() == {W00, W01, W11}


def test_how_it_was_detected_is_told(running):
    assert running.give(died(W10)).recorded[0].how == "process ended: signal 9"
    running.give(Closed(worker=W11, pid=1), now=5.0)
    assert running.give(Tick(now=5.0 + DETACHED_GRACE_S)).recorded[0].how == "connection closed for 2 s"


@pytest.mark.parametrize("again", [died(W10), Closed(worker=W10, pid=1)])
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
    assert running.state.statuses == {}


def test_a_lost_worker_has_no_say(running):
    running.give(died(W10))
    for event in (
        Status(worker=W10, generation=2, layer_steps=((0, 0),), executed=()),
        Suspect(worker=W10, generation=2, peer=None, detail="?"),
        Finished(worker=W10, generation=2),
        Saved(worker=W10, generation=2, digests=((0, "x"),)),
        StepDone(worker=W10, generation=2, step=1, loss=1.0, omitted=False),
    ):
        before = running.state
        assert running.give(event).told == []
        assert running.state == before


def test_a_failure_of_a_lost_worker_does_not_end_the_job(running):
    running.give(died(W10)).give(Failure(worker=W10, pid=1, error="my socket broke", user_fault=False))
    assert running.ended is None


def test_a_stranger_has_no_say(forming):
    forming.status(0, [W00, W01])
    forming.give(Status(worker=STRANGER, generation=1, layer_steps=((0, 0),), executed=()))
    assert forming.commands(Resume) == {}


def test_a_lost_worker_that_attaches_again_is_sent_away(running):
    running.give(died(W10)).give(Hello(worker=W10, pid=1))
    assert running.told == [(W10, Expel(reason="worker 1.0 is no member any more"))]
    assert W10 in running.state.lost


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
    running.give(*(Finished(worker=w, generation=1) for w in PLAN.workers[:-1]))
    assert running.told == []
    running.give(Finished(worker=W11, generation=1))
    assert running.commands(Save) == {
        W00: Save(generation=1, step=STEPS, layers=(0, 1), directory="out"),
        W01: Save(generation=1, step=STEPS, layers=(2,), directory="out"),
        W10: Save(generation=1, step=STEPS, layers=(), directory="out"),
        W11: Save(generation=1, step=STEPS, layers=(), directory="out"),
    }


def test_done_when_all_have_saved(saving):
    assert saving.saved().ended == Ended(
        outcome="done", detail="", step=STEPS, directory="out", generations=1, lost_layers=()
    )
    assert saving.commands(Shutdown) == dict.fromkeys(PLAN.workers, Shutdown(reason="done"))
    assert saving.give(died(W00), Tick(now=99.0)).told == []


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
    assert running.give(Tick(now=5.0 + SUSPICION_GRACE_S * 0.9)).told == []
    assert running.state.lost == frozenset()


def test_an_unexplained_suspicion_connects_the_same_members_anew(running):
    running.give(suspect(running), now=5.0).give(suspect(running, W10), now=5.9)
    running.give(Tick(now=5.0 + SUSPICION_GRACE_S))
    assert running.commands(Install) == dict.fromkeys(PLAN.workers, Install(generation=2, plan=PLAN))
    assert running.give(Tick(now=99.0)).told == []


def test_a_death_explains_a_suspicion(running):
    running.give(suspect(running, peer=W10), now=5.0).give(died(W10))
    assert running.state.generation == 2
    assert running.give(Tick(now=99.0)).told == []


def test_suspicions_that_do_not_end_end_the_job(running):
    for _ in range(MAX_REFORMATIONS):
        running.give(suspect(running), now=5.0).give(Tick(now=6.0)).status(0)
        assert running.commands(Resume)
    running.give(suspect(running), now=5.0).give(Tick(now=6.0))
    assert running.ended.outcome == "error"
    assert running.ended.detail.endswith("every worker lives: 0.0: reset")


def test_progress_forgives_earlier_suspicions(running):
    for step in range(2 * MAX_REFORMATIONS):
        running.give(suspect(running), now=5.0).give(Tick(now=6.0)).status(step)
        running.give(StepDone(worker=W01, generation=running.state.generation, step=step, loss=None, omitted=False))
    assert running.ended is None


def test_nothing_can_be_suspected_before_the_first_generation():
    job = Job().give(hellos()[0]).give(suspect(Job()), now=0.0).give(Tick(now=9.0))
    assert job.state.phase is Phase.GATHERING


@pytest.mark.parametrize(
    ("user_fault", "outcome", "detail"),
    [(True, "user-error", "no such file"), (False, "error", "worker 0.1: no such file\nTraceback")],
)
def test_a_failure_of_a_worker_ends_the_job(running, user_fault, outcome, detail):
    running.give(Failure(worker=W01, pid=1, error="no such file", user_fault=user_fault, traceback="Traceback\n"))
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
    """The dead worker's own share is what its last heartbeat told: two operations, of which one or two are forwards."""
    beat = Heartbeat(worker=W10, generation=1, step=4, op=2)
    forwards = sum(op.kind == "F" for op in PLAN.orders.of(W10)[:2])
    running.give(beat, died(W10)).status(4, executed=((3, 50), (4, 5)))
    assert running.recorded[-1] == Agreed(generation=2, step=4, recomputed_microbatches=3 * 5 + forwards * 2)


def test_work_of_other_steps_is_not_recomputed(running):
    running.give(Heartbeat(worker=W10, generation=1, step=3, op=2), died(W10)).status(4, executed=((3, 7), (5, 7)))
    assert running.recorded[-1].recomputed_microbatches == 0


def test_an_unknown_strategy_is_named():
    with pytest.raises(ConfigError, match=r"resilience\.strategy: unknown 'hope'; known: auto, adaptive"):
        Job(strategy="hope").give(*hellos()).give(died(W00))


def test_one_worker_alone_has_no_one_to_go_on():
    job = Job(plan=regular_plan(1, split_evenly(1, 1), 1))
    job.give(*hellos(job.state.healthy)).status(0, [W00]).give(died(W00))
    assert job.ended.outcome == "lost"
    assert job.ended.lost_layers == (0,)


def test_an_answer_prepared_ahead_is_used_and_is_the_same_as_one_made_in_time():
    state = Membership(healthy=PLAN, steps=5, strategy="auto", directory="out", phase=Phase.RUNNING, plan=PLAN)
    state = replace(state, generation=1, pids=dict.fromkeys(PLAN.workers, 1))
    victim = PLAN.workers[-1]
    assert frozenset({victim}) in unplanned(state)
    recovery = plan_recovery(state, frozenset({victim}))
    prepared, outputs = decide(state, Planned(lost=frozenset({victim}), recovery=recovery))
    assert outputs == ()
    assert frozenset({victim}) not in unplanned(prepared)
    death = Exited(worker=victim, pid=1, status=-9)
    with_it, without = decide(prepared, death), decide(state, death)
    assert with_it[1] == without[1]
    assert with_it[0].plan is recovery.plan, "the prepared one, not one made anew"
    assert with_it[0].planned == {}, "other answers are needed now"
