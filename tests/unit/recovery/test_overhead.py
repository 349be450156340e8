"""What a failure costs in data-parallel training, by formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import ConfigError
from holdfast.recovery.overhead import MODELLED, DataParallel, per_failure, per_run, work_again

RESNET = DataParallel(
    minibatch_s=0.17,
    minibatches_per_epoch=390,
    minibatches=35100,
    workers=8,
    microbatches=8,
    state_bytes=91 << 20,
    checkpoint_s=0.48,
    restart_s=4.09,
    init_s=3.0,
    mtbf_s=2700.0,
)
"""ResNet-50 in Table I of Nicolae et al., and a failure every 45 minutes."""


def test_a_replay_is_the_mini_batches_since_the_epoch_began_half_of_it_on_average():
    assert per_failure("checkpoint-restart", RESNET, 100).replay_s == pytest.approx(17.0)
    assert per_failure("checkpoint-restart", RESNET).replay_s == pytest.approx(33.15)
    assert per_failure("checkpoint-restart", RESNET, 0).seconds == pytest.approx(3.0 + 4.09)


def test_a_rollback_starts_workers_and_makes_one_mini_batch_again():
    cost = per_failure("rollback", replace(RESNET, bandwidth=91 << 20, detection_s=2.0))
    assert (cost.detection_s, cost.start_s, cost.replay_s) == pytest.approx((2.0, 4.0, 0.17))
    assert cost.seconds == pytest.approx(6.17)


@pytest.mark.parametrize("strategy", ["lossy-forward", "skip"])
def test_going_forward_costs_what_it_takes_to_know(strategy):
    assert per_failure(strategy, replace(RESNET, detection_s=0.5)).seconds == 0.5


@pytest.mark.parametrize(("microbatches", "again_s"), [(8, 0.17), (56, 0.17 / 7), (64, 2 * 0.17 / 8)])
def test_the_others_share_what_the_lost_worker_had(microbatches, again_s):
    assert per_failure("adaptive", replace(RESNET, microbatches=microbatches)).seconds == pytest.approx(again_s)


def test_work_is_that_of_all_workers_whoever_waits_by_the_clock():
    assert work_again("adaptive", RESNET, 2) == pytest.approx(0.17 * 2 / 8)
    assert work_again("rollback", RESNET, 8) == pytest.approx(0.17)
    assert work_again("checkpoint-restart", RESNET, 8, 100) == pytest.approx(17.0)
    assert work_again("lossy-forward", RESNET, 2) == work_again("skip", RESNET, 8) == 0


@pytest.mark.parametrize("since", [-1, 391])
def test_an_epoch_has_no_such_mini_batch(since):
    with pytest.raises(ConfigError, match=f"since_epoch: expected 0 to 390 mini-batches, got {since}"):
        per_failure("checkpoint-restart", RESNET, since)


def test_a_run_has_as_many_failures_as_fit_and_checkpoints_besides():
    failures = 35100 * 0.17 / 2700
    assert per_run("checkpoint-restart", RESNET) == pytest.approx(failures * (7.09 + 33.15) + 90 * 0.48)
    assert per_run("rollback", RESNET) == pytest.approx(failures * 3.17)
    assert per_run("lossy-forward", replace(RESNET, detection_s=1.0)) == pytest.approx(failures)
    assert per_run("skip", replace(RESNET, mtbf_s=float("inf"))) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"minibatch_s": -1.0},
        {"init_s": float("nan")},
        {"workers": 1},
        {"microbatches": 7},
        {"minibatches_per_epoch": 0},
        {"bandwidth": 0.0},
    ],
)
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ConfigError, match="expected"):
        replace(RESNET, **wrong)


def test_other_strategies_have_no_formula():
    assert set(MODELLED) == {"adaptive", "lossy-forward", "skip", "rollback", "checkpoint-restart"}
    with pytest.raises(ConfigError, match="no formula for 'hope'"):
        per_failure("hope", RESNET)
