"""Workers that nobody asked for: they wait for a place, and take the next one that is vacant."""

from dataclasses import replace

import pytest
from tests.processes import NODE, process_of

from holdfast.control.membership import (
    AnswerPlanned,
    Closed,
    GridState,
    Membership,
    Phase,
    Restoring,
    Tick,
    plan_recovery,
)
from holdfast.control.membership.starting import Offer
from holdfast.control.membership.watching import DETACHED_GRACE_S
from holdfast.control.messages import (
    Attached,
    CaughtUp,
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
    NodeLost,
    Preempted,
    Raised,
    Saved,
    Shutdown,
    Started,
    StartWorker,
    StateAt,
    Status,
    StepDone,
    WorkerOffer,
)
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.slots import exchanged
from holdfast.core.work import WorkPhase
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Notice, Parted, Seated

from .decided import DecidedJob

PLAN = regular_plan(2, split_evenly(3, 2), 2)
W00, W01, W10, W11 = PLAN.workers
SPARE, OTHER = WorkerId(7, 0), WorkerId(8, 0)
STEPS = 9


class Job(DecidedJob):
    """A membership, and what its last events led to."""

    def __init__(self, *, restorable=(), **what):
        super().__init__(PLAN, steps=STEPS, restoring=Restoring(restorable=restorable), **what)

    def crossed(self, step):
        """All go over into the generation that is prepared."""
        upcoming = self.state.running.upcoming
        early = [Joined(worker=w, generation=upcoming.generation) for w in sorted(self.state.roster.arriving)]
        others = [w for w in upcoming.plan.workers if w not in self.state.roster.arriving]
        return self.give(*early, *(Joined(worker=w, generation=upcoming.generation, step=step) for w in others))

    def texts(self):
        return [event.text for event in self.recorded if isinstance(event, Notice)]


def hello(worker=SPARE, number=9, **what):
    return Hello(worker=worker, process=process_of(worker, number), **what)


def died(worker, number=1):
    return Exited(worker=worker, process=process_of(worker, number), status=-9)


GONE = {
    "dies": (died(SPARE, 9),),
    "dies, its connection first": (Closed(worker=SPARE, process=process_of(SPARE, 9)), died(SPARE, 9)),
    "dies, its connection last": (died(SPARE, 9), Closed(worker=SPARE, process=process_of(SPARE, 9))),
    "leaves": (Leaving(worker=SPARE),),
}


@pytest.fixture
def job():
    return Job().begun()


@pytest.fixture
def spared(job):
    """A spare is there."""
    return job.give(hello())


@pytest.fixture
def filled(spared):
    """1.0 was lost, and the spare is to enter at its place."""
    return spared.give(died(W10)).agreed(3)


def test_it_waits_and_is_in_no_plan(job):
    before = job.state
    job.give(hello())
    assert job.told == [(SPARE, Attached())]
    assert job.texts() == ["is here as a spare, for the next place that is vacant"]
    assert job.state.roster.spares == {SPARE}
    assert (job.state.grid, job.state.running, job.state.generation) == (before.grid, before.running, 1)
    assert SPARE not in {*job.state.present, *job.state.alive, *job.state.full, *job.state.absent}


def test_it_waits_while_the_others_gather():
    job = Job().give(Hello(worker=W00, process=process_of(W00, 1)), hello())
    assert (job.state.phase, job.state.roster.spares) == (Phase.GATHERING, {SPARE})
    job.begun()
    assert job.state.running.plan == PLAN
    assert SPARE not in job.commands(Install)


@pytest.mark.parametrize("how", GONE)
def test_what_was_planned_while_it_was_there_does_not_count_without_it(spared, how):
    spared.give(AnswerPlanned(lost=frozenset({W10}), recovery=plan_recovery(spared.state, frozenset({W10}))))
    assert spared.state.prospects.planned.keys() == {frozenset({W10})}
    spared.give(*GONE[how])
    assert spared.state.prospects.planned == {}


def test_it_takes_the_place_of_a_lost_worker_at_the_next_boundary(spared):
    spared.give(died(W10))
    assert spared.commands(Install).keys() == {W00, W01, W11}, "first the others recover"
    assert spared.state.roster.spares == {SPARE}
    spared.agreed(3)
    there = exchanged(PLAN, [(W10, SPARE)])
    assert spared.state.grid.baseline == there
    assert spared.recorded[-1] == Seated(worker="7.0", place="1.0")
    roster, upcoming = spared.state.roster, spared.state.running.upcoming
    assert (roster.spares, roster.arriving, roster.lost) == (frozenset(), {SPARE}, {W10})
    assert (upcoming.entering, upcoming.plan.placement.followed_by(SPARE)) == ({SPARE}, there.placement.held_by(SPARE))
    installs = spared.commands(Install)
    assert {worker: each.at_boundary for worker, each in installs.items()} == {
        W00: True, W01: True, W11: True, SPARE: False
    }  # fmt: skip


def test_it_follows_catches_up_and_computes(filled):
    filled.crossed(5).give(CaughtUp(worker=SPARE, generation=3, step=7, entered=5, bytes=9))
    assert filled.state.full == (W00, W01, W11, SPARE)
    filled.crossed(9)
    assert filled.state.running.plan == exchanged(PLAN, [(W10, SPARE)])
    assert (filled.state.roster.lost, filled.state.absent) == ({W10}, frozenset())


def test_one_that_comes_when_a_place_is_vacant_takes_it_at_once(job):
    job.give(died(W10)).agreed(3).give(hello())
    assert job.state.running.upcoming.entering == {SPARE}


def test_two_take_two_places_the_neediest_first(job):
    job.give(hello(), died(W10)).give(died(W01)).agreed(3)
    assert job.state.grid.baseline == exchanged(PLAN, [(W01, SPARE)]), "one place per spare"
    job.crossed(5).give(hello(OTHER))
    job.give(CaughtUp(worker=SPARE, generation=job.state.generation, step=7, entered=5, bytes=9)).crossed(8)
    assert job.state.grid.baseline == exchanged(PLAN, [(W01, SPARE), (W10, OTHER)])


def test_a_place_for_which_somebody_is_expected_is_left_to_that_one():
    job = Job().begun().give(WorkerOffer(worker=W10, node=NODE), died(W10)).give(hello())
    assert job.state.roster.expected == {W10}
    job.agreed(3).give(Tick(), now=1.0)
    assert (job.state.roster.spares, job.state.grid.baseline) == ({SPARE}, PLAN)


def test_once_nobody_is_expected_any_more_time_gives_it_the_place():
    job = Job().begun().give(WorkerOffer(worker=W10, node=NODE), died(W10)).give(hello()).agreed(3)
    job.give(
        Started(worker=W10, process=process_of(W10, 2)),
        died(W10, 2),
        Started(worker=W10, process=process_of(W10, 3)),
        died(W10, 3),
    )
    assert (job.state.roster.expected, job.state.roster.spares) == (frozenset(), {SPARE})
    assert job.give(Tick(), now=0.1).state.running.upcoming.entering == {SPARE}


def test_it_comes_before_a_process_that_would_have_to_be_started(spared):
    spared.give(WorkerOffer(worker=None, node=NODE), died(W10))
    assert spared.commands(StartWorker) == {}
    assert [offer.place for offer in spared.state.vacancies.offers] == [None]


def test_a_lost_worker_that_comes_back_when_its_place_is_taken_is_a_spare(filled):
    filled.give(hello(W10, 2))
    assert filled.told == [(W10, Attached())]
    assert (filled.state.roster.spares, filled.state.roster.lost) == ({W10}, frozenset())
    filled.give(died(W11)).agreed(3)
    there = exchanged(PLAN, [(W10, SPARE)])
    assert filled.state.grid.baseline == exchanged(there, [(W11, W10)])


def test_a_process_that_was_held_for_lost_is_sent_away_whoever_has_its_place(filled):
    (told,) = filled.give(hello(W10, 1)).told
    assert told == (W10, Expel(reason="worker 1.0 is no member any more"))


def test_a_second_process_of_its_id_is_sent_away(spared):
    (told,) = spared.give(hello(number=10)).told
    assert told == (SPARE, Expel(reason="worker 7.0 is no member any more"))
    assert spared.state.roster.processes[SPARE] == process_of(SPARE, 9)


def test_one_that_was_given_up_while_starting_is_sent_away(job):
    starting = job.state.vacancies.starting.failed(SPARE, process_of(SPARE, 9))
    job.state = replace(job.state, vacancies=replace(job.state.vacancies, starting=starting))
    assert job.give(hello()).commands(Expel).keys() == {SPARE}


RAISED = Raised(
    worker=SPARE, process=process_of(SPARE, 9), generation=0, step=0, phase=WorkPhase.LOADING, kind="E", error="it"
)


@pytest.mark.parametrize(
    ("event", "how"),
    [
        (died(SPARE, 9), "process ended: signal 9"),
        (NodeLost(node=3, workers=(SPARE,)), "node 3 is gone"),
        (Failure(worker=SPARE, process=process_of(SPARE, 9), error="no disk", user_fault=True), "no disk"),
        (RAISED, "raised: worker 7.0, step 0, loading a batch: it"),
        (hello(raised=RAISED), "raised: worker 7.0, step 0, loading a batch: it"),
    ],
    ids=["exited", "node", "failure", "exception", "exception told again"],
)
def test_its_death_is_told_and_nobody_recovers(spared, event, how):
    spared.give(event)
    detected = [each for each in spared.recorded if isinstance(each, Detected)]
    assert [(each.worker, each.generation, each.spare) for each in detected] == [("7.0", 1, True)]
    assert detected[0].how.split(":")[0] == how.split(":")[0]
    assert spared.commands(Fence) == {None: Fence(worker=SPARE, process=process_of(SPARE, 9))}
    assert spared.commands(Install) == {}
    roster = spared.state.roster
    assert (spared.state.phase, spared.state.generation, roster.spares) == (Phase.RUNNING, 1, frozenset())
    assert spared.give(hello(number=10)).state.roster.spares == {SPARE}, "its id may come again, with another process"


def test_the_end_of_an_older_process_of_its_id_is_not_its_own(spared):
    assert spared.give(died(SPARE, 8)).state.roster.spares == {SPARE}


def test_one_whose_connection_stays_away_is_lost(spared):
    spared.give(Closed(worker=SPARE, process=process_of(SPARE, 9)), now=1.0)
    assert spared.give(Tick(), now=1.0 + DETACHED_GRACE_S * 0.9).state.roster.spares == {SPARE}
    spared.give(Tick(), now=1.0 + DETACHED_GRACE_S)
    assert spared.state.roster.spares == frozenset()


def test_one_without_a_connection_is_given_no_place_before_it_is_back(spared):
    spared.give(Closed(worker=SPARE, process=process_of(SPARE, 9))).give(died(W10)).agreed(3)
    assert (spared.state.roster.spares, spared.state.running.upcoming) == ({SPARE}, None)
    assert spared.give(hello()).state.running.upcoming.entering == {SPARE}


def test_the_error_of_a_process_that_is_nobodys_ends_nothing(job):
    job.give(Failure(worker=SPARE, process=process_of(SPARE, 9), error="no module named x", user_fault=True))
    assert (job.state.phase, job.texts()) == (Phase.RUNNING, ["could not come: no module named x"])


@pytest.mark.parametrize("begun", [False, True])
def test_one_that_dies_before_it_has_attached_is_told_and_not_started_again(begun):
    job = (Job().begun() if begun else Job()).give(Started(worker=SPARE, process=process_of(SPARE, 9)), died(SPARE, 9))
    assert (job.told, job.state.roster.expected) == ([], frozenset())
    assert job.texts() == ["was lost while starting (process ended: signal 9): there is one spare less"]
    assert job.give(died(SPARE, 9)).recorded == [], "it is told once"


def test_one_that_does_not_start_in_time_is_told_and_ended(job):
    starting = replace(job.state.vacancies.starting, limit_s=5.0)
    job.state = replace(job.state, vacancies=replace(job.state.vacancies, starting=starting))
    job.give(Started(worker=SPARE, process=process_of(SPARE, 9)), now=1.0).give(Tick(), now=6.5)
    assert job.told == [(None, Fence(worker=SPARE, process=process_of(SPARE, 9)))]
    assert job.texts() == [
        "was lost while starting (it did not start within 5 s (control.start_s)): there is one spare less"
    ]


def beats(job, *workers, now):
    """Time passes, second by second, and these give signs of life."""
    for second in range(1, now + 1):
        signs = [Heartbeat(worker=worker, generation=1, step=0, op=0, moves=second) for worker in workers]
        job.give(*signs, Tick(), now=float(second))
    return job


def test_one_that_is_silent_for_long_is_lost_and_nobody_recovers(spared):
    beats(spared, *PLAN.workers, now=30)
    assert spared.state.roster.spares == {SPARE}, "it may take as long as others in their first step"
    beats(spared, *PLAN.workers, now=40)
    assert (spared.state.roster.spares, spared.state.roster.lost) == (frozenset(), {SPARE})
    assert (spared.state.phase, spared.state.generation) == (Phase.RUNNING, 1)


def test_one_that_says_that_it_lives_is_held_against_nobody(spared):
    beats(spared, SPARE, *PLAN.workers, now=40)
    assert (spared.state.roster.spares, spared.state.roster.lost) == ({SPARE}, frozenset())


@pytest.mark.parametrize("back", [False, True])
def test_one_that_is_told_to_go_goes_at_once(job, back):
    job.give(hello(leaving=True)) if back else job.give(hello()).give(Leaving(worker=SPARE))
    assert job.commands(Shutdown) == {SPARE: Shutdown(reason="it has no place")}
    assert job.recorded == [Parted(worker="7.0", step=0)]
    assert job.give(Exited(worker=SPARE, process=process_of(SPARE, 9), status=0)).recorded == []
    assert job.state.roster.spares == frozenset()


def test_one_that_dies_as_it_enters_leaves_the_place_to_the_next(filled):
    filled.give(hello(OTHER)).give(died(SPARE, 9))
    filled.agreed(5)
    assert filled.state.grid.baseline == exchanged(PLAN, [(W10, OTHER)])
    assert (filled.state.roster.lost, filled.state.roster.arriving) == ({W10, SPARE}, {OTHER})


def test_a_loss_while_it_enters_leaves_it_its_place(filled):
    filled.give(died(W11)).agreed(5)
    assert filled.state.running.upcoming.entering == {SPARE}


def test_where_all_would_wait_it_makes_the_grid_whole_at_once():
    states = (StateAt(url="u", step=2),)
    job = Job(strategy="checkpoint-restart", wait_s=99.0, restorable=states).begun().give(hello())
    job.give(died(W10))
    assert (job.state.phase, job.commands(StartWorker)) == (Phase.FORMING, {}), "nobody has to be started"
    assert job.state.grid.baseline == exchanged(PLAN, [(W10, SPARE)])
    assert {worker: each.load.step for worker, each in job.commands(Install).items()} == dict.fromkeys(
        (W00, W01, W11, SPARE), 2
    )


def test_one_that_comes_while_all_wait_for_a_layer_takes_it_at_once():
    job = Job(wait_s=99.0, restorable=(StateAt(url="u", step=2),)).begun()
    job.give(died(W01)).give(died(W11))
    assert job.state.phase is Phase.WAITING
    job.give(hello())
    assert job.state.phase is Phase.FORMING
    assert set(job.commands(Install)) == {W00, W10, SPARE}


def test_who_is_there_before_all_wait_for_a_layer_loads_it_at_once():
    """It was about to enter, and has no state: nobody has to come for it."""
    job = Job(wait_s=99.0, restorable=(StateAt(url="u", step=2),)).begun()
    job.give(died(W11)).agreed(3).give(hello(W11, 5))
    assert job.state.running.upcoming.entering == {W11}
    job.give(died(W01))
    assert job.state.phase is Phase.FORMING
    installs = job.commands(Install)
    assert {worker: each.load.step for worker, each in installs.items()} == {W00: 2, W10: 2, W11: 2}


def test_one_that_raised_and_has_no_place_any_more_is_none_that_a_layer_is_left_to():
    job = Job().begun()
    smaller = regular_plan(1, split_evenly(3, 2), 4)
    report = Raised(
        worker=W10,
        process=process_of(W10, 1),
        generation=1,
        step=0,
        phase=WorkPhase.FORWARD,
        kind="E",
        error="it",
        layer=0,
        sound=True,
    )
    job.state = replace(
        job.state, grid=GridState(baseline=smaller), exceptions=replace(job.state.exceptions, raised=(report,))
    )
    job.give(died(W01))
    assert job.state.roster.lost == {W01}


@pytest.mark.parametrize("how", GONE.values(), ids=GONE)
def test_where_it_goes_before_it_has_its_place_another_process_is_started(how):
    job = Job(strategy="snapshots").begun().give(hello()).give(died(W10))
    assert job.commands(StartWorker) == {}
    started = {}
    for event in how:
        started |= job.give(event).commands(StartWorker)
    assert started == {None: StartWorker(worker=W10)}
    assert job.state.roster.spares == frozenset()


def test_where_it_dies_as_all_load_their_state_another_process_is_started_for_its_place():
    states = (StateAt(url="u", step=2),)
    job = Job(strategy="checkpoint-restart", wait_s=99.0, restorable=states).begun().give(hello()).give(died(W10))
    job.give(died(SPARE, 9))
    assert (job.state.phase, job.commands(StartWorker)) == (Phase.WAITING, {None: StartWorker(worker=SPARE)})


@pytest.mark.parametrize("wait_s", [0.0, 99.0])
def test_it_brings_a_layer_that_nobody_holds_any_more(wait_s):
    """All go back to the checkpoint, in the whole grid; nobody waits, and nothing shrinks."""
    job = Job(wait_s=wait_s, restorable=(StateAt(url="u", step=2),)).begun().give(hello())
    job.give(NodeLost(node=0, workers=(W01, W11)))
    installs = job.commands(Install)
    assert {worker: each.load.step for worker, each in installs.items()} == {W00: 2, W10: 2, SPARE: 2}
    assert job.state.grid.baseline == exchanged(PLAN, [(W01, SPARE)])
    assert (job.state.phase, job.state.roster.arriving) == (Phase.FORMING, frozenset())
    job.agreed(2)
    assert (job.state.phase, job.state.full) == (Phase.RUNNING, (W00, W10, SPARE))


def test_where_nobody_of_the_grid_is_left_spares_go_on_from_the_checkpoint():
    job = Job(restorable=(StateAt(url="u", step=2),)).begun().give(hello(), hello(OTHER))
    job.give(NodeLost(node=0, workers=PLAN.workers))
    assert job.commands(Install).keys() == {SPARE, OTHER}


def test_two_are_not_given_the_same_layers_while_nobody_has_others():
    plan = regular_plan(2, split_evenly(3, 3), 2)
    job = Job(restorable=(StateAt(url="u", step=2),))
    job.state = job.blank = replace(job.state, grid=GridState(baseline=plan))
    job.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in plan.workers)).agreed(0).give(
        hello(), hello(OTHER)
    )
    job.give(NodeLost(node=0, workers=(W00, W10, WorkerId(1, 1), WorkerId(0, 1))))
    assert job.state.grid.baseline == exchanged(plan, [(W00, SPARE), (W01, OTHER)])
    assert set(job.commands(Install)) == {WorkerId(0, 2), WorkerId(1, 2), SPARE, OTHER}


def test_a_place_whose_layers_are_being_brought_already_is_less_needy():
    plan = regular_plan(4, split_evenly(2, 2), 1)
    job = Job()
    job.state = job.blank = replace(job.state, grid=GridState(baseline=plan))
    job.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in plan.workers)).agreed(0)
    lasts = tuple(WorkerId(pipeline, 1) for pipeline in (1, 2, 3))
    job.give(NodeLost(node=0, workers=(W00, W10, WorkerId(2, 0), *lasts))).agreed(3)
    job.give(hello()).give(hello(OTHER))
    assert job.state.grid.baseline == exchanged(plan, [(W00, SPARE)])
    job.crossed(5).give(Tick(), now=0.2)
    job.give(CaughtUp(worker=SPARE, generation=job.state.generation, step=7, entered=5, bytes=9)).crossed(8)
    assert job.state.grid.baseline == exchanged(plan, [(W00, SPARE), (W11, OTHER)])


def test_without_a_checkpoint_it_can_bring_nothing():
    job = Job().begun().give(hello()).give(NodeLost(node=0, workers=(W01, W11)))
    assert (job.commands(Install).keys(), job.state.roster.spares) == ({W00, W10}, {SPARE})
    assert job.state.forming.lost_layers == (2,)


@pytest.mark.parametrize("how", GONE.values(), ids=GONE)
def test_where_it_goes_what_was_offered_for_its_place_is_taken_up(how):
    job = Job().begun().give(hello()).give(died(W10)).give(WorkerOffer(worker=None, node=NODE))
    assert (job.commands(StartWorker), job.state.vacancies.offers) == ({}, (Offer(None, NODE),))
    started = {}
    for event in how:
        started |= job.give(event).commands(StartWorker)
    assert started == {None: StartWorker(worker=W10)}
    assert job.state.vacancies.offers == ()


def test_the_place_of_one_that_raised_is_not_given_away_before_that_is_judged(spared):
    report = {"generation": 1, "step": 3, "phase": WorkPhase.FORWARD, "kind": "E", "error": "it", "layer": 0}
    spared.give(Raised(worker=W10, process=process_of(W10, 1), sound=False, **report)).give(died(W10)).agreed(3)
    spared.give(Tick(), now=0.2)
    assert spared.state.roster.spares == {SPARE}
    spared.give(StepDone(worker=W11, generation=2, step=3, loss=1.0, omitted=False)).give(Tick(), now=0.4)
    assert spared.state.running.upcoming.entering == {SPARE}


@pytest.mark.parametrize("ending", ["done", "preempted", "program"])
def test_it_is_told_to_end_as_everybody_is(spared, ending):
    if ending == "done":
        spared.give(*(Finished(worker=w, generation=1, step=STEPS) for w in PLAN.workers))
        spared.give(*(Saved(worker=w, generation=1, digests=()) for w in PLAN.workers))
    elif ending == "preempted":
        spared.state = replace(spared.state, phase=Phase.WAITING)
        spared.give(Preempted())
    else:
        spared.give(Failure(worker=W00, process=process_of(W00, 1), error="no such file", user_fault=True))
    assert spared.state.phase is Phase.ENDED
    assert SPARE in spared.commands(Shutdown)


def test_who_told_it_to_end_wants_nobody_more(spared):
    spared.give(died(W10)).give(Preempted()).agreed(3).give(Tick(), now=1.0)
    assert spared.state.roster.spares == {SPARE}


def test_whoever_has_no_place_in_a_smaller_grid_is_still_sent_away():
    plan = regular_plan(4, split_evenly(2, 2), 1)
    rules = JobRules(steps=STEPS, directory="out")
    job = Job()
    restoring = Restoring(restorable=(StateAt(url="u", step=4),))
    job.state = Membership(grid=GridState(baseline=plan), rules=rules, restoring=restoring)
    lasts = tuple(worker for worker in plan.workers if worker.stage == 1)
    job.give(
        *(Hello(worker=worker, process=process_of(worker, 1)) for worker in plan.workers),
        NodeLost(node=0, workers=(W00, *lasts)),
    )
    assert job.commands(Expel).keys() >= {WorkerId(3, 0)}
    assert job.give(hello(WorkerId(3, 0), 1)).commands(Expel).keys() == {WorkerId(3, 0)}
    assert job.give(hello(WorkerId(3, 0), 2)).state.roster.spares == {WorkerId(3, 0)}


def test_a_coordinator_that_is_started_again_knows_of_it(spared):
    spared.give(died(W10)).restarted()
    assert spared.state.roster.spares == {SPARE}
    workers = [
        Hello(worker=w, process=process_of(w, 1), generation=2, activity="waiting", step=3) for w in (W00, W01, W11)
    ]
    spared.give(*workers)
    assert spared.state.phase is Phase.FORMING, "nobody waits for a spare"
    spared.agreed(3)
    assert spared.state.roster.spares == {SPARE}, "it is not there"
    assert spared.give(hello()).state.running.upcoming.entering == {SPARE}


def test_one_that_does_not_come_back_to_it_is_lost(spared):
    spared.give(died(W10)).restarted()
    spared.give(
        *(Hello(worker=w, process=process_of(w, 1), generation=2, activity="running", step=3) for w in (W00, W01, W11))
    )
    assert spared.give(Tick(), now=60.0).state.roster.spares == {SPARE}
    spared.give(Tick(), now=60.0 + DETACHED_GRACE_S)
    assert [event.how for event in spared.recorded] == ["connection closed for 2 s"]
    assert (spared.state.roster.spares, spared.state.roster.lost) == (frozenset(), {W10, SPARE})


def test_one_with_a_place_is_waited_for_when_the_coordinator_is_back(filled):
    filled.restarted()
    assert (filled.state.grid.baseline, filled.state.roster.arriving) == (exchanged(PLAN, [(W10, SPARE)]), {SPARE})
    filled.give(
        *(Hello(worker=w, process=process_of(w, 1), generation=2, activity="running", step=3) for w in (W00, W01, W11))
    )
    assert filled.state.phase is Phase.REATTACHING
    filled.give(hello(generation=3, activity="waiting")).agreed(3)
    assert filled.state.running.upcoming.entering == {SPARE}


def test_where_the_past_is_not_known_it_saves_what_it_holds():
    """It had the place of 1.0, of which nobody knows any more."""
    job = Job()
    job.give(
        *(Hello(worker=w, process=process_of(w, 1), generation=4, activity="running", step=6) for w in (W00, W01, W11))
    )
    assert job.state.past_lost
    job.give(hello(generation=4, activity="running", step=6), hello(OTHER))
    assert job.state.roster.spares == {SPARE, OTHER}
    job.give(NodeLost(node=0, workers=(W10,)))
    assert set(job.commands(Install)) == {W00, W01, W11, SPARE}
    held = {W00: (), W01: (2,), W11: (2,), SPARE: (0, 1)}
    for worker, layers in held.items():
        status = tuple((layer, 6) for layer in layers)
        job.give(Status(worker=worker, generation=job.state.generation, layer_steps=status, executed=()))
    assert job.state.phase is Phase.SAVING
    assert job.state.forming.lost_layers == ()
