"""How often checkpoints are made by what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.control.membership.cadence import Cadence, CheckpointCost, note_step, note_written, reconsider
from holdfast.control.messages import ShardWritten
from holdfast.core.ids import WorkerId
from holdfast.storage.checkpoints import Shard

SHARD = Shard(layer=0, name="layer-0000-0000000000000000.safetensors", sha256="0" * 64, size=1)
TEN = Cadence(every=10, wanted=10)


def written(step, stall_s, write_s):
    return ShardWritten(worker=WorkerId(0, 0), generation=1, step=step, shard=SHARD, stall_s=stall_s, write_s=write_s)


def test_a_step_takes_what_the_steps_of_this_generation_took_on_average():
    cadence = TEN
    for step, now in ((3, 100.0), (4, 100.5), (5, 101.0)):
        cadence = note_step(cadence, 1, step, now)
    assert cadence.step_s == 0.5
    recovered = note_step(note_step(cadence, 2, 5, 109.0), 2, 6, 109.25)
    assert recovered.step_s == 0.25, "the recovery counts for no step"


def test_the_slowest_worker_counts_and_the_newest_checkpoint():
    cadence = TEN
    for message in (written(10, 0.1, 2.0), written(10, 0.3, 1.0), written(9, 9.0, 9.0)):
        cadence = note_written(cadence, message)
    assert (cadence.of, cadence.newest) == (10, CheckpointCost(stall_s=0.3, write_s=2.0))
    cadence = note_written(cadence, written(20, 0.2, 0.5))
    assert (cadence.of, cadence.newest) == (20, CheckpointCost(stall_s=0.2, write_s=0.5))


@pytest.mark.parametrize(
    ("stall_s", "write_s", "wanted"),
    [
        (0.07, 0.5, 20),  # 3.5 % of 20 steps of 0.1 s
        (0.0, 5.0, 50),  # no more than one is under way
        (0.0, 0.05, 1),
        (0.035, 0.5, 10),
        (0.0385, 0.5, 10),  # eleven would be right, and not worth a generation
        (0.02, 0.5, 10),  # six would be, too
    ],
)
def test_the_rule_is_that_of_checkfreq(stall_s, write_s, wanted):
    measured = replace(TEN, step_s=0.1, newest=CheckpointCost(stall_s=stall_s, write_s=write_s))
    assert reconsider(measured).wanted == wanted


@pytest.mark.parametrize(("between_s", "wanted"), [(3600.0, 190), (360.0, 60), (1.0, 10)])
def test_where_it_follows_failures_the_rule_is_youngs(between_s, wanted):
    """The root of 2 x 0.05 x 3600, over 0.1; half as long is not worth a generation."""
    measured = replace(TEN, step_s=0.1, newest=CheckpointCost(stall_s=0.05, write_s=0.5))
    assert reconsider(measured, between_s).wanted == wanted
    assert reconsider(measured).wanted == 15, "by CheckFreq's, whatever fails"


def test_nothing_is_wanted_before_anything_is_measured():
    assert reconsider(TEN) == TEN
    assert reconsider(replace(TEN, step_s=0.1)).wanted == 10
    assert reconsider(replace(TEN, newest=CheckpointCost(write_s=0.1))).wanted == 10


def test_one_slow_checkpoint_among_many_changes_little():
    usual = CheckpointCost(stall_s=0.035, write_s=0.5)
    cadence = reconsider(replace(TEN, step_s=0.1, usual=usual, newest=CheckpointCost(stall_s=0.05, write_s=0.5)))
    assert cadence.wanted == 10
    assert cadence.usual.stall_s == pytest.approx(0.035 + 0.25 * 0.015)
