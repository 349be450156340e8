"""What the coordinator makes of disputed samples, and of layers that owners hold differently."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.processes import process_of

from holdfast.control.membership import Phase
from holdfast.control.messages import Audited, Computed, Exited, Expel, Install, Resume, StepDone, Weighed
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.core.progress import StepProgress
from holdfast.recovery.audit import Sampling
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Notice

from .decided import DecidedJob

PLAN = regular_plan(3, split_evenly(2, 2), 1)
A, A1, B, B1, C, C1 = PLAN.workers
SAMPLING = Sampling(seed=0, every=1)


class Job(DecidedJob):
    """Three owners of each layer; A runs the sample of step 4, of layer 0."""

    def __init__(self, **options):
        super().__init__(PLAN, **options)
        rules = replace(self.state.rules, sampling=SAMPLING, keeping=unit_costs(2))
        self.blank = self.state = replace(self.state, rules=rules)
        self.begun(4)

    def audited(self, auditor, theirs, ours, *, times=1, inputs=("i", "i"), generation=None):
        claims = [Computed(worker=A, inputs=inputs[0], output=theirs, gradients="g")] * times
        claims += [Computed(worker=auditor, inputs=inputs[1], output=ours, gradients="g")] * times
        where = {"generation": generation or self.state.generation, "step": 4, "layer": 0, "microbatch": 0}
        return Audited(worker=auditor, runner=A, claims=tuple(claims), **where)

    def weighed(self, step=4, **others):
        """All tell digests of their layers, which are equal but for those of ``others``."""
        names = {"A": A, "B": B, "C": C}
        told = {names[name]: digest for name, digest in others.items()}
        return self.give(*(self.digests(worker, step, told.get(worker, "same")) for worker in self.state.full))

    def digests(self, worker, step, digest):
        found = tuple((layer, digest) for layer in PLAN.placement.layers_of(worker))
        return Weighed(worker=worker, generation=self.state.generation, step=step, digests=found)

    def notices(self):
        return [(each.worker, each.text.rpartition(": ")[2]) for each in self.recorded if isinstance(each, Notice)]

    def disputed(self):
        """Once B had something else than A."""
        return self.give(self.audited(B, "x", "y")).agreed(4)


def test_a_disputed_step_is_run_again_whole_and_all_owners_are_told():
    job = Job().give(Job().audited(B, "x", "y"))
    assert job.state.phase is Phase.FORMING
    assert {install.audits.disputed for install in job.commands(Install).values()} == {4}
    job.statuses(4)
    assert {(resume.step, resume.rest) for resume in job.commands(Resume).values()} == {(4, None)}


def test_who_is_wrong_both_times_leaves_at_once():
    job = Job().disputed()
    job.give(job.audited(C, "x", "y", times=8))
    assert job.state.phase is Phase.RUNNING, "B has not told"
    job.give(job.audited(B, "x", "y", times=8))
    assert job.notices() == [(str(A), "wrong output (found wrong once)"), (str(A), "wrong output (found wrong twice)")]
    assert isinstance(dict(job.told).get(A), Expel)
    assert A in job.state.roster.lost
    assert job.state.audits.strikes.counts == (), "whoever takes its place begins anew"
    job.statuses(4)
    assert {resume.rest for resume in job.commands(Resume).values()} == {None}


@pytest.mark.parametrize("late", [False, True])
def test_who_was_wrong_once_stays(late):
    """Whether or not the step is committed before all have told."""
    job = Job().disputed()
    reports = [job.audited(B, "y", "y", times=8), job.audited(C, "y", "y", times=8)]
    done = StepDone(worker=A1, generation=job.state.generation, step=4, loss=0.0, omitted=False)
    job.give(*([done, *reports] if late else [*reports, done]))
    assert job.state.audits.strikes.counts == ((A, 1),)
    assert job.state.audits.disputed is None
    assert job.state.phase is Phase.RUNNING


def test_what_was_computed_of_other_inputs_proves_nothing_of_the_attempt_before():
    job = Job().give(Job().audited(B, "x", "y", inputs=("h", "h"))).agreed(4)
    job.give(job.audited(B, "y", "y", times=8), job.audited(C, "y", "y", times=8))
    assert job.state.audits.strikes.counts == ()


def test_who_was_given_other_inputs_than_all_others_is_wrong():
    job = Job().disputed()
    job.give(job.audited(B, "x", "y", times=8, inputs=("i", "j")), job.audited(C, "x", "x", times=8))
    assert job.notices() == [(str(B), "wrong input (found wrong once)")]


@pytest.mark.parametrize("whose", ["the finder's status", "a message that comes late"])
def test_a_dispute_that_is_heard_of_only_after_a_loss(whose):
    job = Job()
    found = job.audited(B, "x", "y")
    job.give(Exited(worker=C1, process=process_of(C1, 1), status=-9))
    if whose == "the finder's status":
        job.give(job.status_of(B, 4, disputed=found))
    else:
        job.give(found)
    assert job.state.audits.disputed == 4
    assert {install.audits.disputed for install in job.commands(Install).values()} == {4}


@pytest.mark.parametrize("wrong", [False, True])
def test_a_step_is_not_gone_on_with_once_weights_were_found_to_differ(wrong):
    """Sums that stand may be of wrong weights; of a step that nothing speaks against, what stands is kept."""
    job = Job()
    job.state = replace(job.state, rules=replace(job.state.rules, sampling=Sampling(seed=0, every=100)))
    assert job.state.rules.sampling.of(4, PLAN) is None, "nothing of the step itself is computed twice"
    if wrong:
        job.weighed(B="other")
        job.agreed(4)
    job.give(Exited(worker=C1, process=process_of(C1, 1), status=-9))
    kept = {
        worker: StepProgress(step=4, complete=tuple((layer,) for layer in PLAN.placement.layers_of(worker)))
        for worker in job.state.alive
    }
    job.give(*(job.status_of(worker, 4, progress=(kept[worker],)) for worker in job.state.alive))
    assert {resume.rest is None for resume in job.commands(Resume).values()} == {wrong}


def test_strikes_and_disputes_are_stored():
    job = Job().disputed()
    job.give(job.audited(B, "y", "y", times=8), job.audited(C, "y", "y", times=8))
    job.give(replace_step(job.audited(C, "y", "z"), 5))
    assert job.state.audits.disputed == 5
    assert job.restarted().state.audits == job.state.audits


def replace_step(report: Audited, step: int) -> Audited:
    return Audited(**{name: getattr(report, name) for name in report.__struct_fields__} | {"step": step})


def test_equal_weights_are_nothing_to_tell_of():
    job = Job().weighed()
    assert (job.told, job.recorded, job.state.audits.weighed) == ([], [], {})


def test_who_tells_of_later_steps_already_is_compared_with_the_others_of_each_step():
    """Messages of one worker may come long behind those of another."""
    job = Job()
    early, late = [A, A1, C, C1, B1], B
    for step in (4, 5, 6):
        job.give(*(job.digests(worker, step, "same") for worker in early))
    job.give(job.digests(late, 4, "same"))
    assert job.notices() == []
    job.give(job.digests(late, 5, "other"))
    assert job.notices() == [(str(late), "wrong weights of layer(s) 0 before step 5 (found wrong once)")]
    assert job.state.audits.weighed == {}, "what comes of it is another run of the step"


def test_what_a_lost_worker_has_told_is_not_said_of_who_takes_its_place():
    job = Job()
    job.give(job.digests(B, 4, "other"), Exited(worker=B, process=process_of(B, 1), status=-9))
    assert B not in job.state.audits.weighed.get(4, {})


def test_wrong_weights_are_compared_again_and_then_their_owner_leaves():
    job = Job().weighed(B="other")
    assert job.notices() == [(str(B), "wrong weights of layer(s) 0 before step 4 (found wrong once)")]
    assert {install.audits.weigh for install in job.commands(Install).values()} == {True}
    job.agreed(4).weighed(B="other")
    assert B in job.state.roster.lost
    job.agreed(4).weighed()
    assert not job.state.audits.weigh


def test_of_three_that_all_differ_nobody_can_tell():
    job = Job().weighed(B="other", C="third")
    assert job.state.ended.outcome == "error"
    assert "before step 4 the owners of layer(s) 0 hold other weights; nobody can tell" in job.state.ended.detail


def test_what_is_told_of_a_layer_without_another_owner():
    job = Job()
    for other in (B, C):
        job.give(Exited(worker=other, process=process_of(other, 1), status=-9))
    texts = [each.text for each in job.recorded if isinstance(each, Notice)]
    assert texts == ["no audit of layer(s) 0: each has one owner, whom nobody can contradict"]
    job.give(Exited(worker=C1, process=process_of(C1, 1), status=-9))
    assert [each for each in job.recorded if isinstance(each, Notice)] == []
