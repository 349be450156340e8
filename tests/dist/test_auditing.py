"""Real workers that compute wrong, or hold wrong weights, are found before that is committed; sound ones never are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from holdfast import parse_job, train
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import uniform_profile
from holdfast.errors import InternalError
from holdfast.recovery.audit import Sample, sample
from holdfast.runtime.engine.stage import layer_seed
from holdfast.telemetry.events import Agreed, Detected, Installed, Notice, StepOps, read_events

pytestmark = pytest.mark.dist

CODE = Path(__file__).with_name("auditing_model.py")
SEED, STEPS, PIPELINES, LAYERS = 9, 6, 3, 3
STAGES = [stage for stage, layers in enumerate(split_evenly(LAYERS, 2)) for _ in layers.indices]
"""That of each layer."""


def job_of(*overrides: str, **arguments):
    return parse_job(
        {
            "name": "audited",
            "model": {
                "kind": "python",
                "target": f"{CODE}:build",
                "loss": "torch.nn:CrossEntropyLoss",
                "arguments": arguments,
            },
            "data": {"kind": "digits"},
            "grid": {"pipelines": PIPELINES, "stages": 2, "microbatches": 1, "microbatch_size": 4},
            "optimizer": {"kind": "adamw", "lr": 1.0e-2},
            "train": {"steps": STEPS, "seed": SEED, "audit_every": 1},
            "control": {"hang_s": 15},
        },
        overrides,
    )


@cache
def samples() -> tuple[Sample, ...]:
    found = (sample(SEED, step, 1, LAYERS, PIPELINES) for step in range(STEPS))
    return tuple(each for each in found if each is not None)


def seeds_of(layer: int, first: int) -> list[str]:
    """Of the passes over what is sampled of a layer, from a step on: nothing else is struck."""
    found = [each for each in samples() if each.layer == layer and each.step >= first]
    return [str(layer_seed(SEED, each.step, each.microbatch, layer)) for each in found]


def events_of(summary, kind) -> list:
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return train(job_of("train.audit_every=0"), run_dir=tmp_path_factory.mktemp("healthy") / "run")


@pytest.mark.parametrize("technique", ["1f1b", "staggered"])
@pytest.mark.parametrize("what", ["activation", "gradient", "weight"])
def test_a_flipped_bit_is_found_before_it_is_committed_and_whose_it_is_leaves(healthy, tmp_path, what, technique):
    first = next(each for each in samples() if each.step >= 1)
    runner = WorkerId(first.microbatch, STAGES[first.layer])
    arguments = {"layer": first.layer, "what": what, "worker": str(runner), "seeds": seeds_of(first.layer, first.step)}
    summary = train(job_of(f"train.technique={technique}", **arguments), run_dir=tmp_path / "run")
    place = f"audit of step {first.step}, layer {first.layer}, micro-batch {first.microbatch}: "
    wrong = "gradient" if what == "gradient" else "output"
    opened, *_ = [event for event in events_of(summary, Notice) if event.text.startswith(place)]
    assert opened.text.startswith(f"{place}got {wrong} that worker {runner}, which ran it, has otherwise")
    told = [event for event in events_of(summary, Notice) if "found wrong" in event.text]
    assert {event.worker for event in told} == {str(runner)}
    weights = f"wrong weights of layer(s) {first.layer} before step {first.step}"  # compared at the same time
    wordings = [f"{place}wrong {wrong}", *([weights] if what == "weight" else [])]
    for event, times in zip(told, ("once", "twice", "3 times"), strict=False):
        assert event.text in [f"{each} (found wrong {times})" for each in wordings]
    # if the weights are found first, the sample is wrong as it was run before and as it is run again: that counts twice
    assert len(told) == 2 or (len(told) == 3 and told[0].text.startswith(weights))
    (lost,) = events_of(summary, Detected)
    assert (lost.worker, lost.how) == (str(runner), "computes wrong results, as audits have found twice")
    assert summary.weights_sha256 == healthy.weights_sha256
    assert summary.state_sha256 == healthy.state_sha256
    assert summary.final_loss == healthy.final_loss


def test_weights_that_change_behind_a_sample_are_compared(tmp_path):
    """The flipped one is multiplied by a pixel that is always black: no result shows it.

    Training does not wait for that: there are steps enough left in which it is found, and found again.
    """
    first = next(each for each in samples() if each.step >= 1 and each.layer == 0)
    owner = WorkerId(first.microbatch, STAGES[0])
    arguments = {"layer": 0, "what": "unused", "worker": str(owner), "seeds": seeds_of(0, first.step)}
    summary = train(job_of("train.steps=60", **arguments), run_dir=tmp_path / "run")
    told = [(event.worker, event.text) for event in events_of(summary, Notice) if "found wrong" in event.text]
    assert [worker for worker, _ in told] == [str(owner)] * 2
    assert all(text.startswith("wrong weights of layer(s) 0 before step") for _, text in told)
    assert [event.worker for event in events_of(summary, Detected)] == [str(owner)]


def test_a_layer_that_draws_from_numpy_is_told_and_nobody_leaves(tmp_path):
    first = next(each for each in samples() if each.step >= 1)
    summary = train(job_of(layer=first.layer, what="numpy", seeds=seeds_of(first.layer, 1)), run_dir=tmp_path / "run")
    told = [event.text for event in events_of(summary, Notice) if "does not repeat" in event.text]
    assert [text.partition(":")[0] for text in told] == [f"layer {first.layer} does not repeat"]
    assert events_of(summary, Detected) == []
    assert summary.steps == STEPS


def test_of_two_owners_nobody_can_tell_who_is_wrong(tmp_path):
    two = (sample(SEED, step, 1, LAYERS, 2) for step in range(STEPS))
    first = next(each for each in two if each is not None and each.step >= 1)
    worker = str(WorkerId(first.microbatch, STAGES[first.layer]))
    seeds = [str(layer_seed(SEED, first.step, first.microbatch, first.layer))]
    job = job_of("grid.pipelines=2", layer=first.layer, what="gradient", worker=worker, seeds=seeds)
    with pytest.raises(InternalError, match=rf"ReplicaDiverged: audit of step {first.step}, .* who is right"):
        train(job, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt", ("train.technique=decoupled", "model.checkpoint_activations=true")),
        ("bert", ()),
        ("convnet", ("train.technique=staggered",)),
        ("vit", ("grid.pipelines=1", "grid.microbatches=9", "grid.gpus_per_stage=2", "grid.workers_per_node=2")),
    ],
)
def test_sound_workers_agree(runs, name, overrides):
    """Every step has a sample, which somebody has computed a second time; and the bits are those without audits."""
    summary = runs.train(name, overrides=(*overrides, "train.audit_every=1"))
    audits = [(e.step, kind) for e in events_of(summary, StepOps) for kind, *_ in e.besides if kind == "audit"]
    assert sorted(audits) == [(step, "audit") for step in range(summary.steps)]
    assert [event.text for event in events_of(summary, Notice) if "audit" in event.text or "wrong" in event.text] == []
    assert len(events_of(summary, Installed)) == 1
    assert summary.weights_sha256 == runs.healthy(name).weights_sha256


def test_emulated_workers_agree(runs):
    """They compute integers, and those are audited."""
    summary = runs.train("small", overrides=("train.audit_every=2", "train.steps=8"), emulate=uniform_profile(4))
    audits = [kind for e in events_of(summary, StepOps) for kind, *_ in e.besides if kind == "audit"]
    assert len(audits) == 4
    assert len(events_of(summary, Installed)) == 1


def test_a_loss_in_a_step_that_is_audited(runs):
    """It is run again whole, and audited then; but one whose verdict somebody knows already is ended."""
    summary = runs.survives(
        "gpt", "kill:1.2@2:backward", overrides=("train.audit_every=1",), healthy=runs.healthy("gpt")
    )
    assert {e.step for e in events_of(summary, StepOps) for kind, *_ in e.besides if kind == "audit"} == set(range(4))
    assert not any(agreed.goes_on and not agreed.concluded for agreed in events_of(summary, Agreed))
