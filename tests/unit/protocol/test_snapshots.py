"""Snapshots of a worker's layers in its memory: when, how many, and the way back."""

import pytest

from holdfast.core.schedule import OpKind
from holdfast.core.summing import add_up
from holdfast.errors import InternalError
from holdfast.protocol.snapshots import KEPT, Snapshots
from holdfast.runtime.engine.emulated import EmulatedStage


@pytest.fixture
def stage():
    return EmulatedStage(layers=(0, 1), num_layers=2, num_microbatches=1)


def advance(stage, step):
    """Runs one step of both layers."""
    stage.begin(step)
    stage.forward(step, 0, None)
    stage.backward(OpKind.B, step, 0, None)
    for layer in (0, 1):
        stage.accept((layer,), add_up([stage.message((layer,), 0)]))
    stage.conclude(stage.vote())
    for layer in (0, 1):
        stage.update(layer)
        stage.swap(layer)


def digests(stage):
    return [stage.layer_digest(layer) for layer in (0, 1)]


def run(stage, snapshots, start, stop):
    """Returns the digests before each step."""
    seen = {}
    for step in range(start, stop):
        if snapshots.due(step, beginning=step == start):
            snapshots.take(step, stage)
        seen[step] = digests(stage)
        advance(stage, step)
    return seen


def test_they_are_due_where_all_begin_and_at_multiples():
    due = [step for step in range(1, 10) if Snapshots(every=4).due(step, beginning=step == 1)]
    assert due == [1, 4, 8]
    assert not Snapshots().due(0, beginning=True)


def test_the_newest_two_are_held(stage):
    snapshots = Snapshots(every=2)
    run(stage, snapshots, 0, 8)
    assert snapshots.steps == (4, 6)
    assert len(snapshots.steps) == KEPT


@pytest.mark.parametrize("step", [4, 6])
def test_the_way_back_is_bitwise_however_far_and_the_steps_are_the_same_again(stage, step):
    snapshots = Snapshots(every=2)
    seen = run(stage, snapshots, 0, 8)
    snapshots.go_back(step, stage)
    assert digests(stage) == seen[step]
    assert stage.layer_steps() == {0: step, 1: step}
    assert max(snapshots.steps) == step, "what came later is run again"
    assert run(stage, snapshots, step, 8) == {at: seen[at] for at in range(step, 8)}


def test_a_snapshot_does_not_change_with_what_it_was_taken_of_and_serves_again(stage):
    snapshots = Snapshots(every=5)
    seen = run(stage, snapshots, 0, 3)
    for _ in range(2):
        snapshots.go_back(0, stage)
        assert digests(stage) == seen[0]
        run(stage, snapshots, 0, 3)


def test_without_a_snapshot_one_step_can_be_taken_back_and_no_more(stage):
    snapshots = Snapshots(every=5)
    seen = run(stage, snapshots, 0, 3)
    with pytest.raises(InternalError, match="cannot go to 1"):
        snapshots.go_back(1, stage)
    snapshots.go_back(2, stage)
    assert digests(stage) == seen[2]
    assert snapshots.steps == (0,)


def test_what_is_held_already_is_not_copied_again(stage):
    snapshots = Snapshots(every=2)
    snapshots.take(2, stage)
    assert not snapshots.due(2, beginning=True)
    snapshots.forget()
    assert snapshots.steps == ()
    assert snapshots.due(2, beginning=False)
