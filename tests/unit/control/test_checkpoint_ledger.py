"""Which reports make a checkpoint, alone and within the membership."""

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import process_of

from holdfast.control.checkpoint_ledger import CheckpointLedger, Settled, WriteManifest, note_shard, settle
from holdfast.control.membership import GridState, Membership, Phase, Record, Tell, decide
from holdfast.control.messages import (
    Ended,
    Exited,
    Finished,
    Hello,
    Joined,
    Obsolete,
    Progress,
    Saved,
    ShardFailed,
    ShardWritten,
    Status,
    StepDone,
)
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.planning.replays import Logging
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import Checkpointed, CheckpointFailed, Notice

W = WorkerId(0, 0)
LAYERS = 3


def shard(layer, bits=b""):
    digest = hashlib.sha256(bits).hexdigest()
    return Shard(layer=layer, name=f"layer-{layer:04d}-{digest[:16]}.safetensors", sha256=digest, size=len(bits))


def written(layer, step=4, generation=1, bits=b""):
    return ShardWritten(worker=W, generation=generation, step=step, shard=shard(layer, bits))


def failed(step=4, generation=1):
    return ShardFailed(worker=W, generation=generation, step=step, detail="no space")


def feed(*messages, ledger=None):
    """The ledger after some reports, and what followed from each that had a consequence."""
    ledger, outputs = ledger or CheckpointLedger(), []
    for message in messages:
        ledger, output = note_shard(ledger, message, LAYERS)
        outputs += [] if output is None else [output]
    return ledger, outputs


@pytest.mark.parametrize("order", list(itertools.permutations(range(LAYERS))))
def test_all_layers_make_a_checkpoint_in_any_order(order):
    *first, last = [written(layer) for layer in order]
    ledger, outputs = feed(*first)
    assert outputs == []
    ledger, outputs = feed(last, ledger=ledger)
    assert outputs == [WriteManifest(step=4, shards=(shard(0), shard(1), shard(2)))]
    assert ledger.unsettled == tuple(outputs)
    assert ledger.written == {}


def test_a_report_that_comes_twice_counts_once():
    _, outputs = feed(written(0), written(0), written(1), written(1))
    assert outputs == []


def test_two_generations_are_never_mixed():
    ledger, outputs = feed(written(0), written(1), written(2, generation=2), written(0, generation=2, bits=b"x"))
    assert outputs == []
    _, outputs = feed(written(1, generation=2), ledger=ledger)
    assert outputs == [WriteManifest(step=4, shards=(shard(0, b"x"), shard(1), shard(2)))]


def test_a_late_report_of_the_older_generation_still_counts_for_it():
    _, outputs = feed(written(0), written(1), written(0, generation=2), written(2))
    assert outputs == [WriteManifest(step=4, shards=(shard(0), shard(1), shard(2)))]


def test_a_failure_is_told_once_and_ends_that_checkpoint():
    ledger, outputs = feed(written(0), failed(), failed(), written(1), written(2), written(0))
    assert outputs == [CheckpointFailed(step=4, worker="0.0", detail="no space")]
    assert ledger.written == {}
    _, outputs = feed(*(written(layer, generation=2) for layer in range(LAYERS)), ledger=ledger)
    assert [type(output) for output in outputs] == [WriteManifest], "the next generation may succeed"


def test_what_is_superseded_is_forgotten():
    ledger, _ = feed(written(0, step=4), failed(step=2), *(written(layer, step=8) for layer in range(LAYERS)))
    ledger, told = settle(ledger, Settled(step=8, url="u"))
    assert told == (Checkpointed(step=8, url="u"),)
    assert ledger == CheckpointLedger(newest=8)
    after, outputs = feed(*(written(layer, step=4) for layer in range(LAYERS)), ledger=ledger)
    assert (after, outputs) == (ledger, [])


def test_a_manifest_that_could_not_be_written_is_told_and_changes_nothing_else():
    ledger, _ = feed(*(written(layer, step=8) for layer in range(LAYERS)), written(0, step=12))
    after, told = settle(ledger, Settled(step=8, url="u", error="no space"))
    assert told == (CheckpointFailed(step=8, worker="", detail="no space"),)
    assert after.newest == 0
    assert after.written == ledger.written


def test_what_could_not_be_deleted_is_told():
    _, told = settle(CheckpointLedger(), Settled(step=8, url="u", untidy="busy"))
    assert told == (
        Checkpointed(step=8, url="u"),
        Notice(worker="coordinator", text="older checkpoints could not be deleted: busy"),
    )


REPORTS = st.builds(
    lambda layer, step, generation, fails: failed(step, generation) if fails else written(layer, step, generation),
    st.integers(0, LAYERS - 1),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 9).map(lambda n: n == 0),
)


@given(st.lists(REPORTS | st.integers(1, 3), max_size=60))
def test_only_what_was_written_by_one_generation_is_committed(events):
    """Reports in any order, and manifests that are written (a number) at any time."""
    ledger, seen = CheckpointLedger(), []
    for event in events:
        if isinstance(event, int):
            if event in ledger.committing:
                ledger, _ = settle(ledger, Settled(step=event, url="u"))
            continue
        seen.append(event)
        before = ledger.newest
        ledger, output = note_shard(ledger, event, LAYERS)
        if isinstance(output, WriteManifest):
            of_step = [e for e in seen if isinstance(e, ShardWritten) and e.step == output.step]
            generation = event.generation
            assert {e.shard.layer for e in of_step if e.generation == generation} == set(range(LAYERS))
            assert output.step >= before


PLAN = regular_plan(2, split_evenly(LAYERS, 2), 2)
STEPS = 4


class Job:
    """A membership that runs, and what its last event led to."""

    def __init__(self, **rules):
        self.state = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=STEPS, directory="out", **rules))
        self.give(*(Hello(worker=worker, process=process_of(worker, 1)) for worker in PLAN.workers))
        for worker in PLAN.workers:
            steps = tuple((layer, 0) for layer in PLAN.placement.layers_of(worker))
            self.give(Status(worker=worker, generation=1, layer_steps=steps, executed=()))
            self.give(Joined(worker=worker, generation=1))

    def give(self, *events):
        self.outputs = []
        for event in events:
            self.state, outputs = decide(self.state, event)
            self.outputs += outputs
        return self.outputs

    def save(self):
        self.give(*(Finished(worker=worker, generation=1, step=STEPS) for worker in PLAN.workers))
        assert self.state.phase is Phase.SAVING
        return self.give(*(Saved(worker=worker, generation=1, digests=()) for worker in PLAN.workers))


def test_the_membership_asks_for_the_manifest_and_records_how_it_went():
    job = Job()
    assert job.give(*(written(layer) for layer in range(LAYERS))) == [
        WriteManifest(step=4, shards=(shard(0), shard(1), shard(2)))
    ]
    assert job.give(Settled(step=4, url="u")) == [Record(event=Checkpointed(step=4, url="u"))]
    (told,) = job.give(StepDone(worker=W, generation=1, step=4, loss=1.0, omitted=False))
    assert isinstance(told.command, Progress)
    assert told.command.checkpoint == 4


@pytest.mark.parametrize("lost", [False, True])
def test_logs_before_a_checkpoint_are_let_go_unless_a_loss_is_being_answered(lost):
    """Whoever replays may need them: an older checkpoint may be the one that is gone back to."""
    job = Job(logging=Logging())
    job.give(*(written(layer) for layer in range(LAYERS)))
    if lost:
        job.give(Exited(worker=WorkerId(1, 1), process=process_of(WorkerId(1, 1), 1), status=-9))
        assert job.state.phase is Phase.FORMING
    told = {(each.to, each.command) for each in job.give(Settled(step=4, url="u")) if isinstance(each, Tell)}
    assert told == (set() if lost else {(worker, Obsolete(step=4)) for worker in PLAN.workers})


def test_a_failure_is_recorded_and_training_goes_on():
    job = Job()
    record, told = job.give(failed())
    assert record == Record(event=CheckpointFailed(step=4, worker="0.0", detail="no space"))
    assert told.to is None
    said = "checkpoint of step 4 could not be written by worker 0.0: no space; training goes on"
    assert (told.command.kind, told.command.text) == ("checkpoint", said)
    assert job.state.phase is Phase.RUNNING


@pytest.mark.parametrize("error", ["", "no space"])
def test_the_job_ends_only_after_the_manifest_that_is_being_written(error):
    job = Job()
    job.give(*(written(layer) for layer in range(LAYERS)))
    assert job.save() == []
    *_, last = job.give(Settled(step=4, url="u", error=error))
    assert isinstance(last, Tell)
    assert isinstance(last.command, Ended)
    assert last.command.outcome == "done"


def test_without_a_manifest_under_way_it_ends_at_once():
    job = Job()
    job.give(written(0), written(1))
    assert isinstance(job.save()[-1].command, Ended)


def test_the_newest_step_is_written_again_by_a_recovery_that_runs_from_it_and_older_ones_are_not():
    """Its own shards lead to what it has itself pinned, whatever became of the first ones."""
    ledger = CheckpointLedger(newest=4)
    _, outputs = feed(*(written(layer, step=4, generation=2) for layer in range(LAYERS)), ledger=ledger)
    assert [output.step for output in outputs] == [4]
    after, outputs = feed(*(written(layer, step=3, generation=2) for layer in range(LAYERS)), ledger=ledger)
    assert (after, outputs) == (ledger, [])
