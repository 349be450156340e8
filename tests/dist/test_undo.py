"""Real processes, really killed, whose steps are taken back by inverting them: the end is within a stated tolerance.

While nothing fails the bits are those of ``shadow``. A step that was inverted and made again leaves all weights
together within a relative L2 distance of ONE_STEP of the run in which nothing failed, if it was the last one. What
follows is as sensitive to that as to any rounding: after up to three more steps, LATER. The loss keeps within ten times
that.
"""

from __future__ import annotations

import pytest
from tests.soak import some

from holdfast import Fault, Summary
from holdfast.telemetry.events import Agreed, read_events

pytestmark = pytest.mark.dist

ONE_STEP, LATER = 1e-7, 1e-6
UNDO = "resilience.commit=undo"
WHOLE = "resilience.step_log=false"
"""A step that a loss interrupts is run again whole: others have to go back for it."""
OPTIMIZERS = {
    "default": (),
    "momentum": ("optimizer.kind=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.nesterov=true"),
    "adam": ("optimizer.kind=adam",),
    "lamb": ("optimizer.kind=lamb", "optimizer.lr=0.01"),
}


def survives(runs, name, *faults, overrides=(), within=ONE_STEP) -> Summary:
    """One run with faults that all fired, close to the run without."""
    healthy = runs.healthy(name, overrides)
    summary = runs.train(name, *faults, overrides=(*overrides, UNDO, WHOLE))
    assert summary.unfired == ()
    assert sorted(summary.report.fired) == sorted(str(Fault.parse(text)) for text in faults)
    assert summary.generations == 1 + len(faults)
    assert summary.steps == healthy.steps
    assert summary.final_loss == pytest.approx(healthy.final_loss, rel=10 * within)
    assert runs.distance(summary, healthy) <= within
    return summary


def agreed(summary: Summary) -> Agreed:
    """What the survivors of the last failure were told."""
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    return [event for event in events if isinstance(event, Agreed)][-1]


@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_without_failures_the_bits_are_those_of_shadow(runs, name):
    undo, shadow = runs.healthy(name, (UNDO,)), runs.healthy(name)
    assert undo.weights_sha256 == shadow.weights_sha256
    assert undo.state_sha256 == shadow.state_sha256


@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_where_the_step_is_kept_others_go_forward_and_the_bits_are_those_of_shadow(runs, name):
    """By the verdict that somebody knows, or by what is left of the step: nothing is inverted.

    Unless a sum had not left the victim yet, which others lack then: they must go back.
    """
    healthy = runs.healthy(name)
    summary = runs.train(name, "kill:0.1@3:verdict", overrides=(UNDO,))
    assert (summary.unfired, summary.steps) == ((), healthy.steps)
    if agreed(summary).goes_on:
        assert summary.weights_sha256 == healthy.weights_sha256
        assert summary.state_sha256 == healthy.state_sha256
    else:
        assert runs.distance(summary, healthy) <= ONE_STEP


IN_THE_VERDICT = [(name, worker) for name in ("gpt", "convnet") for worker in ("0.1", "0.2")]


@pytest.mark.parametrize(("name", "worker"), some(IN_THE_VERDICT, [IN_THE_VERDICT[0], IN_THE_VERDICT[3]]))
def test_a_kill_in_the_middle_of_the_verdict_makes_others_go_back(runs, name, worker):
    """Stages before the victim have committed, those behind it have not heard of the verdict."""
    summary = survives(runs, name, f"kill:{worker}@3:verdict")
    assert agreed(summary).step == 3
    assert summary.state_sha256 != runs.healthy(name).state_sha256, "a step was inverted, not swapped back"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_back(runs, optimizer):
    overrides = OPTIMIZERS[optimizer]
    summary = survives(runs, "gpt", "kill:0.1@3:verdict", overrides=overrides)
    assert agreed(summary).step == 3
    assert summary.state_sha256 != runs.healthy("gpt", overrides).state_sha256


IN_THE_UPDATE = [(name, point) for name in ("gpt", "convnet") for point in ("update", "commit")]


@pytest.mark.parametrize(("name", "point"), some(IN_THE_UPDATE, [IN_THE_UPDATE[0], IN_THE_UPDATE[3]]))
def test_a_kill_in_the_middle_of_the_update(runs, name, point):
    """Mostly all others have committed by then, and nobody needs to go back."""
    survives(runs, name, f"kill:1.2@2:{point}")


def test_the_first_step_goes_back_to_no_state(runs):
    summary = survives(runs, "gpt", "kill:0.1@0:verdict", within=LATER)
    assert agreed(summary).step == 0


def test_two_steps_go_back_in_one_run(runs):
    survives(runs, "gpt", "kill:1.1@1:verdict", "kill:0.2@3:verdict", within=LATER)


def test_clipping_and_a_schedule(runs):
    overrides = ("train.clip_norm=0.05", "optimizer.schedule=cosine", "optimizer.warmup_steps=2")
    summary = survives(runs, "gpt", "kill:0.1@3:verdict", overrides=overrides)
    assert agreed(summary).step == 3


def test_a_kill_that_leaves_nothing_to_invert_is_bitwise(runs):
    """At `forward` every layer is at the same step, unless somebody has not heard of the verdict on the one before."""
    summary = survives(runs, "gpt", "kill:1.2@2:forward")
    same = summary.state_sha256 == runs.healthy("gpt").state_sha256
    assert same is (agreed(summary).step == 2), "only who was ahead of the others has inverted anything"
