"""What a script's first item tells of all: what could not be repeated elsewhere is refused before any worker starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.plain import plain

from holdfast.errors import ConfigError, InternalError
from holdfast.telemetry.events import Notice, WorkerReady

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("trying_script.py")
REFUSED = {
    "data": r"item 0 has other data when it is loaded again: .* generator of its own",
    "data-loaded": r"item 0 has other data when it is loaded again",
    "data-begun": r"item 0 has other data when it is loaded again",
    "data-beside": r"item 0 has other data when it is loaded again",
    "model": r"item 0 has another gradient of 0\.weight when it is run again: the model or the loop over items draws",
    "counter": r"item 0 has another gradient of 0\.weight .*expected step\.number and step\.item",
    "in-place": r"line \d+: step 0, item 0: the model changed its parameter '0\.weight' while an item ran.*between",
    "rebound": r"line \d+: step 0, item 0: the model changed its parameter '0\.weight' while an item ran",
    "max-norm": r"line \d+: step 0, item 0: the model changed its parameter '0\.weight' while an item ran",
    "attribute": r"Counting keeps something from one step to the next in its attribute 'count'",
    "attribute-array": r"Counting keeps something from one step to the next in its attribute 'count'",
    "renorm": r"the gradient of 0\.weight depends on the running statistics of batch-norm in train\(\) \(1: a class",
    "coupled": r"Coupled updates a parameter by what others have.*bucket_bytes=644",
    "wrapping": r"line \d+: hf\.prepare: Wrapping has another optimizer in its attribute 'inner'",
    "large-step": r"line \d+: hf\.steps: microbatches: a step of 9 items of 3 is larger than the dataset, .* at most 8",
    "raises": r"trying_script\.py, line \d+: ValueError: of the loop",
    "shape": r"trying_script\.py, line \d+: RuntimeError: mat1 and mat2 shapes",
    "left": r"left its loop over hf\.steps\(\.\.\.\) in the first step",
}


def overrides(what, *more):
    return (f"model.path={SCRIPT}", f"model.arguments={json.dumps([what])}", "grid.pipelines=2", *more)


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_be_repeated_is_refused_before_any_worker_starts(runs, what):
    told = []
    with pytest.raises(ConfigError, match=REFUSED[what]):
        runs.train_only("loop-norm", overrides=overrides(what), on_event=told.append)
    assert not any(isinstance(event, WorkerReady) for event in told)


@pytest.mark.parametrize("what", ["in-place", "rebound", "max-norm"])
def test_a_script_by_itself_may_not_change_weights_within_an_item_either(what):
    ended = plain(SCRIPT, what, check=False)
    assert ended.returncode == 1
    assert "step 0, item 0: the model changed its parameter '0.weight' while an item ran" in ended.stderr


def test_what_can_be_repeated_is_trained_and_a_first_item_that_takes_too_long_is_given_up(runs):
    for what in ("nothing", "coupled-whole", "own-norm"):
        assert runs.train_only("loop-norm", overrides=overrides(what)).steps == 4
    limits = ("control.start_s=10", "control.load_s=1", "control.compile_s=1")
    text = (
        r"the probe had not run its script's first item within 12 s \(control\.start_s, load_s and compile_s together\)"
    )
    with pytest.raises(InternalError, match=text):
        runs.train_only("loop-norm", overrides=overrides("hangs", *limits))


def test_samples_that_only_a_prepared_loader_process_has_are_known_and_trained(runs):
    """Three of them are compared between processes before any is trained; none can be read by the script itself."""
    summary = runs.train_only("loop-norm", overrides=overrides("opened"))
    assert summary.steps == 4


def test_with_fast_numerics_it_is_told(runs):
    told = []
    runs.train_only("loop-norm", overrides=overrides("data", "train.numerics=fast"), on_event=told.append)
    assert any(isinstance(event, Notice) and "has other data" in event.text for event in told)


def test_what_another_process_has_of_the_first_item_must_be_the_same(runs):
    with pytest.raises(ConfigError, match="the first item has other bits in this process than when the script was"):
        runs.train_only("loop-norm", overrides=overrides("first"))
