"""The store is empty, or of no use: what lives is saved by whoever holds it."""

from dataclasses import replace

import pytest
from tests.processes import process_of

from holdfast.control.membership import (
    Closed,
    Contact,
    GridState,
    Membership,
    Phase,
    Record,
    Tell,
    Tick,
    decide,
    to_store,
)
from holdfast.control.membership.forgotten import gone_before
from holdfast.control.messages import (
    Ended,
    Exited,
    Expel,
    Heartbeat,
    Hello,
    Install,
    Remark,
    Save,
    Saved,
    Shutdown,
    StartWorker,
    Status,
)
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Parted, WorkerReady

PLAN = regular_plan(2, split_evenly(4, 2), 2)
W00, W01, W10, W11 = PLAN.workers
BLANK = Membership(
    grid=GridState(baseline=PLAN),
    rules=JobRules(steps=9, directory="out", job="j"),
    contact=Contact(reattach_until=60.0),
)
GENERATION = 5
WHY = "the store of decisions is empty, though some were made"


def hello(worker, number=1, **more):
    more = {"generation": GENERATION, "activity": "running", "step": 3, **more}
    return Hello(worker=worker, process=process_of(worker, number), **more)


def agent(*exits, **more):
    return Hello(worker=None, process=process_of(None, 9), exits=tuple(exits), **{"generation": GENERATION, **more})


def holds(worker, *layers, generation, step=3):
    return Status(
        worker=worker, generation=generation, layer_steps=tuple((layer, step) for layer in layers), executed=()
    )


class Job:
    """What is decided by a coordinator that was started again; that nothing of it is stored is checked throughout."""

    def __init__(self, state=BLANK):
        self.state, self.told, self.recorded = state, [], []

    def give(self, *events, now=0.0):
        for event in events:
            before = self.state
            self.state, outputs = decide(before, event, now=now)
            self.told += [(o.to, o.command) for o in outputs if isinstance(o, Tell)]
            self.recorded += [o.event for o in outputs if isinstance(o, Record)]
            if self.state.past_lost:
                assert to_store(before, self.state) is None
        return self

    def commands(self, kind):
        return [(to, command) for to, command in self.told if isinstance(command, kind)]


def test_an_empty_store_is_noticed_by_the_first_worker_and_all_that_live_save():
    job = Job().give(hello(W00))
    assert (job.state.phase, job.state.past_lost) == (Phase.REATTACHING, WHY)
    ((to, remark),) = job.commands(Remark)
    assert (to, remark.text) == (None, f"{WHY}: what lives is saved, and the job ends")
    job.give(agent(), hello(W01), hello(W10), hello(W11))
    installs = dict(job.commands(Install))
    assert set(installs) == set(PLAN.workers)
    assert {(each.plan, each.generation) for each in installs.values()} == {(None, GENERATION + 1)}
    new = GENERATION + 1
    job.give(*(holds(w, *PLAN.placement.layers_of(w), generation=new) for w in PLAN.workers))
    assert {to: each.layers for to, each in job.commands(Save)} == {W00: (0, 1), W01: (2, 3), W10: (), W11: ()}
    job.give(*(Saved(worker=w, generation=new, digests=()) for w in PLAN.workers))
    ((_, ended),) = job.commands(Ended)
    assert (ended.outcome, ended.detail, ended.step, ended.directory) == ("forgotten", WHY, 3, "out")
    assert {to for to, _ in job.commands(Shutdown)} == set(PLAN.workers)


def test_whoever_holds_a_layer_saves_it_wherever_the_plan_of_the_beginning_had_it():
    """1.0 and 1.1 had died, and 0.1 had taken the place of 0.0, who is newly back in that of 0.1."""
    dead = (
        Exited(worker=W10, process=process_of(W10, 1), status=-9),
        Exited(worker=W11, process=process_of(W11, 1), status=-9),
    )
    job = Job().give(agent(*dead), hello(W01), hello(W00))
    new = GENERATION + 1
    job.give(holds(W01, 0, 1, generation=new), holds(W00, 2, generation=new))
    assert {to: each.layers for to, each in job.commands(Save)} == {W01: (0, 1), W00: (2,)}
    job.give(*(Saved(worker=w, generation=new, digests=()) for w in (W00, W01)))
    ((_, ended),) = job.commands(Ended)
    assert (ended.outcome, ended.lost_layers) == ("forgotten", (3,))


def test_the_agent_knows_that_there_was_more_and_its_dead_are_not_the_end_of_a_beginning():
    job = Job().give(agent(Exited(worker=W10, process=process_of(W10, 1), status=-9)))
    assert (job.state.phase, job.state.past_lost) == (Phase.REATTACHING, WHY)
    assert not job.commands(Ended)


@pytest.mark.parametrize("agent_first", [True, False])
def test_a_later_process_of_a_worker_that_had_died_is_let_in(agent_first):
    events = [agent(Exited(worker=W10, process=process_of(W10, 1), status=-9)), hello(W10, number=2)]
    job = Job().give(*(events if agent_first else events[::-1]))
    assert [each.reason for _, each in job.commands(Expel)] == ["held for lost: process ended: signal 9"] * agent_first
    assert W10 not in job.state.roster.lost
    job.give(hello(W00), hello(W01), hello(W11))
    assert {to for to, _ in job.commands(Install)} == set(PLAN.workers)


def test_whoever_has_no_state_saves_nothing():
    job = Job().give(
        agent(),
        hello(W00, generation=0, step=0, activity="waiting"),
        hello(W01),
        hello(W10),
        hello(W11, has_state=False),
    )
    assert {to for to, _ in job.commands(Install)} == {W01, W10}
    new = GENERATION + 1
    job.give(holds(W01, 2, 3, generation=new), holds(W10, 0, 1, generation=new))
    assert {to: each.layers for to, each in job.commands(Save)} == {W10: (0, 1), W01: (2, 3)}
    job.give(*(Saved(worker=w, generation=new, digests=()) for w in (W01, W10)))
    assert job.commands(Ended)[0][1].outcome == "forgotten"
    assert {to for to, _ in job.commands(Shutdown)} == set(PLAN.workers), "nobody waits for ever"


def test_whoever_does_not_come_back_is_not_waited_for_beyond_the_limit():
    job = Job().give(agent(), hello(W00), hello(W01), hello(W10)).give(Tick(), now=59.0)
    assert not job.commands(Install)
    job.give(Tick(), now=61.0)
    assert {to for to, _ in job.commands(Install)} == {W00, W01, W10}


def test_a_death_while_all_save_begins_that_anew_and_starts_nobody():
    job = Job().give(agent(offers=(None,)), *(hello(w) for w in PLAN.workers))
    job.give(Exited(worker=W00, process=process_of(W00, 1), status=-9))
    assert {each.generation for _, each in job.commands(Install)} == {GENERATION + 1, GENERATION + 2}
    assert not job.commands(StartWorker)
    new = GENERATION + 2
    job.give(*(holds(w, *PLAN.placement.layers_of(w), generation=new) for w in (W01, W10, W11)))
    assert {to: each.layers for to, each in job.commands(Save)} == {W01: (2, 3), W10: (0, 1), W11: ()}


def test_all_dead_is_told_as_that():
    job = Job().give(agent(*(Exited(worker=w, process=process_of(w, 1), status=-9) for w in PLAN.workers)))
    ((_, ended),) = job.commands(Ended)
    assert (ended.outcome, ended.detail) == ("lost", "every worker is lost; nothing could be saved")


def test_who_was_away_is_not_judged_by_its_silence_meanwhile():
    job = Job().give(agent(), hello(W00), hello(W01), hello(W10), hello(W11))
    beat = Heartbeat(worker=W10, generation=GENERATION, step=3, op=0, moves=1, busy_s=0.0, slowest_s=0.1)
    job.give(beat, now=1.0).give(Closed(worker=W10, process=process_of(W10, 1)), now=1.5).give(hello(W10), now=9.0)
    assert W10 not in job.state.watch.vitals


def test_a_job_that_has_not_begun_knows_no_past():
    job = Job().give(agent(generation=0), *(hello(w, generation=0, step=0, activity="waiting") for w in PLAN.workers))
    assert job.state.past_lost == ""
    assert {each.plan for _, each in job.commands(Install)} == {PLAN}


def test_who_was_told_to_be_gone_before_the_decisions_were_lost_is_not_told_again():
    """1.0 had died, 1.1 had left in order; 0.1, whose second process this is, died while nobody was there to tell."""
    told = [
        *(WorkerReady(worker=str(worker), pid=7, nonce=process_of(worker, 1).nonce) for worker in PLAN.workers),
        Detected(worker=str(W10), how="process ended: signal 9", generation=1),
        Parted(worker=str(W11), step=3),
        Detected(worker=str(W01), how="no sign of life", generation=2),
        WorkerReady(worker=str(W01), pid=7, nonce=process_of(W01, 2).nonce),
    ]
    assert gone_before(told) == {process_of(worker, 1).nonce for worker in (W10, W11, W01)}
    exits = [(W10, 1, -9), (W11, 1, 0), (W01, 2, -9)]
    job = Job(replace(BLANK, contact=replace(BLANK.contact, told_gone=gone_before(told))))
    job.give(
        hello(W00),
        agent(*(Exited(worker=w, process=process_of(w, number), status=status) for w, number, status in exits)),
    )
    assert [(e.worker, e.how) for e in job.recorded if isinstance(e, Detected)] == [
        (str(W01), "process ended: signal 9")
    ]
    assert job.state.roster.lost == {W01, W10, W11}
    assert {to for to, _ in job.commands(Install)} == {W00}, "and nobody waits for them"


def test_a_spare_without_state_that_comes_late_does_not_begin_the_saving_anew():
    spare = WorkerId(7, 0)
    job = Job().give(agent(), *(hello(w) for w in PLAN.workers))
    job.give(hello(spare, generation=0, step=0, activity="waiting", has_state=False))
    assert {each.generation for _, each in job.commands(Install)} == {GENERATION + 1}
    assert spare in job.state.roster.spares
    assert spare not in job.state.contact.returned
    job.give(hello(WorkerId(8, 0)))
    assert {each.generation for _, each in job.commands(Install)} == {GENERATION + 1, GENERATION + 2}, (
        "who has state does"
    )
