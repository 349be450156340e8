"""A scheduler of torch's: workers die, a job goes on from a checkpoint, and no bit of any learning rate is lost."""

from __future__ import annotations

import pytest

from holdfast.telemetry.events import Judged, read_events

pytestmark = pytest.mark.dist

STEPS = (
    "optimizer.schedule=torch.optim.lr_scheduler:StepLR",
    "optimizer.schedule_arguments={step_size: 2, gamma: 0.5}",
    "optimizer.warmup_steps=1",
    "train.steps=8",
)


def rates(run):
    told = [event for _, event in read_events(run.run_dir / "events.jsonl") if isinstance(event, Judged)]
    return {event.step: event.rate for event in told}


def test_rates_are_those_of_the_step_whoever_dies(runs):
    survived = runs.train("gpt", "kill:1.1@3:backward", overrides=STEPS)
    assert survived.unfired == ()
    healthy = runs.healthy("gpt", STEPS)
    assert survived.weights_sha256 == healthy.weights_sha256
    assert survived.weights_sha256 != runs.healthy("gpt", ("train.steps=8",)).weights_sha256
    assert {step: rates(survived)[step] for step in (0, 1, 2, 3, 5, 7)} == pytest.approx(
        {0: 1e-3, 1: 1e-3, 2: 1e-3, 3: 5e-4, 5: 2.5e-4, 7: 1.25e-4}
    )


def test_a_job_that_goes_on_has_the_rates_of_its_steps(runs):
    first = runs.train("gpt", overrides=(*STEPS[:3], "train.steps=4", "checkpoint.every=4"))
    further = runs.train("gpt", overrides=(*STEPS, "checkpoint.every=4"), resume=str(first.run_dir))
    assert further.weights_sha256 == runs.healthy("gpt", STEPS).weights_sha256
