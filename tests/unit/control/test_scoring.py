"""What is made of what workers tell of evaluations: means in any order, and nothing that ends a job."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from tests.processes import process_of

from holdfast.control.checkpoint_ledger import WriteManifest
from holdfast.control.membership import decide, restore
from holdfast.control.membership.scoring import begun_from, unevaluated
from holdfast.control.membership.state import Record
from holdfast.control.messages import Exited, Finished, Hello, Resume, Scored, ScoresKept, ShardWritten
from holdfast.core.evaluation import Best, Evaluating
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import Evaluated, Notice

from .decided import DecidedJob

PLAN = regular_plan(2, split_evenly(4, 2), 2)
A, B = WorkerId(0, 1), WorkerId(1, 1)
EVALUATING = Evaluating(every=2, microbatches=4)


class Job(DecidedJob):
    """One that is evaluated before steps 2, 4, 6 and 7."""

    def __init__(self, strategy="auto", **what):
        super().__init__(PLAN, steps=7, strategy=strategy)
        self.blank = replace(self.blank, rules=replace(self.blank.rules, evaluating=replace(EVALUATING, **what)))
        self.state = replace(self.state, rules=self.blank.rules)

    def scored(self, worker, step, rows, names=("loss",)):
        return self.give(told(worker, step, rows, names))

    @property
    def evaluations(self):
        return [event for event in self.recorded if isinstance(event, Evaluated)]

    @property
    def kept(self):
        return {command.step for _, command in self.told if isinstance(command, ScoresKept)}


def told(worker, step, rows, names=("loss",)):
    rows = tuple((number, values if isinstance(values, tuple) else (values,)) for number, values in rows.items())
    return Scored(worker=worker, generation=1, step=step, names=names, rows=rows)


def test_it_is_told_once_all_is_there_whoever_tells_first():
    parts = [told(A, 2, {0: 0.1, 2: 0.2}), told(B, 2, {1: 1e16}), told(B, 2, {3: -1e16})]
    for order in permutations(parts):
        job = Job().begun(2)
        for each in order[:-1]:
            assert job.give(each).evaluations == []
        job.give(order[-1])
        assert job.evaluations == [Evaluated(step=2, scores=(("loss", 0.07500000000000001),), microbatches=4, of=4)]
        assert job.kept == {2}
        assert (job.state.running.evaluated, job.state.scores) == (2, {})
        assert job.stored.running.evaluated == 2, "whoever leads next knows it"
    assert job.give(parts[0]).evaluations == []
    assert job.state.scores == {}, "nothing of it is begun anew"


def test_scores_that_some_have_and_others_do_not_are_means_over_those():
    job = Job().begun(2)
    job.scored(A, 2, {0: (1.0, 5.0, None), 1: (2.0, None, 7.0)}, ("loss", "a", "b"))
    job.scored(B, 2, {2: (3.0, 9.0), 3: (4.0, 11.0)}, ("loss", "b"))
    assert job.evaluations[0].scores == (("loss", 2.5), ("a", 5.0), ("b", 9.0))


@pytest.mark.parametrize("values", [(1e308, 1e308), (float("nan"), 1.0), (float("inf"), float("-inf"))])
def test_what_has_no_finite_mean_has_none(values):
    job = Job().begun(2)
    job.scored(A, 2, {0: values[0], 1: values[1], 2: 1.7e308, 3: 1.7e308})
    assert job.evaluations[0].scores == (("loss", None),)


@pytest.mark.parametrize(
    "strange",
    [
        told(A, 3, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}),
        told(A, 8, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}),
        told(A, 2, {-1: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}),
        told(A, 2, {0: (), 1: (1.0, 2.0)}, ()),
        told(WorkerId(7, 7), 2, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}),
    ],
    ids=repr,
)
def test_what_cannot_be_is_no_evaluation(strange):
    job = Job().begun(2).give(strange)
    assert job.evaluations == []
    assert job.kept == set()
    assert job.scored(A, 2, dict.fromkeys(range(4), 3.0)).evaluations[0].scores == (("loss", 3.0),)


def test_nothing_more_comes_of_what_lies_before_one_that_is_whole():
    job = Job().begun(2).scored(A, 2, {0: 1.0, 2: 3.0}).scored(A, 4, {0: 1.0, 2: 1.0})
    job.scored(B, 4, {1: 1.0, 3: 1.0})
    assert [(each.step, each.microbatches, each.scores) for each in job.evaluations] == [
        (2, 2, (("loss", 2.0),)),
        (4, 4, (("loss", 1.0),)),
    ]
    assert job.evaluations[0].told == "evaluated before step 2: loss 2 (2 of 4 parts were lost)"


def test_what_is_lost_with_a_worker_is_asked_of_the_others():
    job = Job().begun(2).scored(B, 2, {1: 1.0})
    job.give(Exited(worker=A, process=process_of(A, 1), status=-9)).statuses(2)
    resumes = {command.evaluates for _, command in job.told if isinstance(command, Resume)}
    assert resumes == {((0, 1), (2, 4))}


def test_the_best_is_told_and_kept_with_the_one_before():
    job = Job(best="loss").begun(2)
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0)):
        job.scored(A, step, dict.fromkeys(range(4), loss))
        assert [each.best for each in job.evaluations] == [loss < 2.0 or step == 2]
    assert job.stored.running.best == (Best(step=2, score=3.0), Best(step=4, score=1.0))
    assert job.state.running.best == job.stored.running.best


def test_a_shard_is_committed_with_what_is_best():
    job = Job(best="loss").begun(2).scored(A, 2, dict.fromkeys(range(4), 3.0))
    layers = PLAN.placement.num_layers
    names = (f"layer-{layer:04d}-{'0' * 16}.safetensors" for layer in range(layers))
    shards = [Shard(layer=layer, name=name, sha256="0" * 64, size=1) for layer, name in enumerate(names)]
    for shard in shards:
        job.state, outputs = decide(job.state, ShardWritten(worker=A, generation=1, step=4, shard=shard))
    assert [each.best for each in outputs if isinstance(each, WriteManifest)] == [(Best(step=2, score=3.0),)]
    assert [each.best for each in job.state.unsettled] == [(Best(step=2, score=3.0),)]


@pytest.mark.parametrize(("higher", "steps"), [(False, [2, 6]), (True, [2, 4])])
def test_what_is_better_the_job_says(higher, steps):
    job = Job(best="a", higher=higher).begun(2)
    for step, score in ((2, 1.0), (4, 2.0), (6, 0.5)):
        job.scored(A, step, dict.fromkeys(range(4), (9.0, score)), ("loss", "a"))
    assert [each.step for each in job.state.running.best] == steps


def test_one_that_is_not_whole_or_has_no_such_score_is_never_the_best():
    job = Job(best="loss").begun(2).scored(A, 2, {0: 0.1}).scored(A, 4, dict.fromkeys(range(4), float("nan")))
    assert [(each.step, each.best) for each in job.evaluations] == [(2, False), (4, False)]
    assert job.state.running.best == ()


def test_at_the_end_it_is_said_what_is_missing():
    job = Job().begun(6).scored(B, 7, {1: 1.0})
    job.give(*(Finished(worker=worker, generation=1, step=7) for worker in PLAN.workers))
    assert [(each.step, each.microbatches) for each in job.evaluations] == [(7, 1)]
    silent = Job().begun(6)
    silent.give(*(Finished(worker=worker, generation=1, step=7) for worker in PLAN.workers))
    assert [(each.step, each.microbatches, each.scores) for each in silent.evaluations] == [(7, 0, ())]
    assert silent.evaluations[0].told == "evaluated before step 7: nothing (4 of 4 parts were lost)"


def test_who_leads_next_is_told_again_and_waits_for_all():
    """One may have told of the step behind it, before another has been heard of at all."""
    job = Job().begun(2).scored(A, 2, {0: 1.0, 2: 1.0})
    job.state = restore(job.blank, job.stored, reattach_until=60.0)
    hello = {"generation": 1, "activity": "running", "step": 4}
    ours = {
        A: (told(A, 2, {0: 1.0, 2: 1.0}), told(A, 4, dict.fromkeys(range(4), 2.0))),
        B: (told(B, 2, {1: 5.0, 3: 5.0}),),
    }
    for worker in sorted(PLAN.workers, key=lambda each: each != A):
        job.give(Hello(worker=worker, process=process_of(worker, 1), scored=ours.get(worker, ()), **hello))
        assert bool(job.evaluations) == (worker == B), "B is the last"
    assert [(each.step, each.scores) for each in job.evaluations] == [(2, (("loss", 3.0),)), (4, (("loss", 2.0),))]


@pytest.mark.parametrize(("strategy", "again"), [("auto", ()), ("rollback", ((0, 4),))])
def test_of_a_state_that_may_be_another_one_all_is_evaluated_again(strategy, again):
    job = Job(strategy).begun(2).scored(A, 2, dict.fromkeys(range(4), 1.0)).scored(A, 4, {0: 1.0})
    back, _ = begun_from(job.state, 2)
    assert unevaluated(back, 2) == again
    assert back.scores == {}
    assert unevaluated(begun_from(job.state, 4)[0], 4) == (((1, 4),) if strategy == "auto" else ((0, 4),))
    assert unevaluated(begun_from(job.state, 3)[0], 3) == ()


def worse(job, step, score):
    """The state before a step is evaluated, and all of it told."""
    return job.scored(A, step, dict.fromkeys(range(4), score))


def ends(job):
    """Before which step workers have heard that the job ends, the newest word of it."""
    return [command.ends for _, command in job.told if isinstance(command, ScoresKept)][-1]


def test_once_patience_is_out_the_job_ends_where_the_next_evaluation_is_due():
    job = Job(best="loss", patience=1).begun(2)
    assert ends(worse(job, 2, 1.0)) is None
    assert ends(worse(job, 4, 1.0)) == 6
    assert job.state.num_steps == job.stored.running.ends == 6
    (line,) = [event.text for event in job.recorded if isinstance(event, Notice)]
    assert line == "ends early, before step 6: loss was not better than before step 2 in 1 evaluations"
    assert ends(worse(job, 6, 9.0)) == 6


def test_a_better_state_begins_patience_anew_and_the_last_steps_are_not_ended_early():
    job = Job(best="loss", patience=2).begun(2)
    for step, score in ((2, 2.0), (4, 3.0), (6, 1.0)):
        assert ends(worse(job, step, score)) is None
    job = Job(best="loss", patience=3).begun(2)
    for step in (2, 4, 6):
        worse(job, step, float("nan"))
    assert ends(job) is None, "before step 8, of seven"


def test_what_can_never_be_whole_keeps_nobody_waiting():
    """A worker has taken its part of one with it, and the others are beyond that state."""
    job = Job(best="loss", patience=1).begun(2)
    job.scored(A, 2, dict.fromkeys(range(4), 1.0)).scored(A, 4, {0: 1.0, 2: 1.0})
    state, outputs = begun_from(job.state, 5)
    events = [output.event for output in outputs if isinstance(output, Record) and isinstance(output.event, Evaluated)]
    assert [(event.step, event.microbatches) for event in events] == [(4, 2)]
    assert (state.running.evaluated, state.running.ends) == (4, 6)
    state, outputs = begun_from(job.state, 4)
    assert outputs == (), "it is evaluated again"
