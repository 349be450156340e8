"""Padded texts on a grid: inputs by name, and modules that are cut at their blocks; workers die, no bit is lost."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.conftest import PADDED
from tests.dist.padded_models import build, pairs

from holdfast.cli.main import main
from holdfast.telemetry.events import Replaying, read_events

pytestmark = pytest.mark.dist

ALONE = ("grid.pipelines=1", "grid.stages=1", "grid.microbatches=4")
FAULTS = ("kill:1.1@3:backward", "join:1.1@5")
EVALUATED = (
    f"evaluate={{every: 4, data: {{kind: python, target: '{PADDED}:pairs', arguments: {{samples: 24}}}}, "
    f"metrics: '{PADDED}:right'}}",
)


def evaluated(run):
    return json.loads((run.run_dir / "summary.json").read_text())["evaluations"]


def test_a_module_is_cut_at_its_blocks_and_survives_with_the_bits_of_one_worker(runs, tmp_path):
    survived = runs.train("padded", *FAULTS, overrides=EVALUATED)
    assert survived.unfired == ()
    alone = runs.train("padded", overrides=(*EVALUATED, *ALONE))
    assert survived.weights_sha256 == alone.weights_sha256
    scores = evaluated(survived)
    assert scores == evaluated(alone)
    assert [each["step"] for each in scores] == [4, 8]
    assert scores[0]["scores"]["accuracy"] < scores[1]["scores"]["accuracy"]
    assert main(["export", str(survived.run_dir), "--to", str(tmp_path / "made")]) == 0
    module = build()
    module.load_state_dict(load_file(tmp_path / "made" / "model.safetensors"))
    inputs, _ = pairs()[0]
    module.eval()
    assert torch.isfinite(module(**{name: each[None] for name, each in inputs.items()})).all()


def test_audits_and_replays_hold_for_several_inputs(runs):
    """A second worker computes what one has computed, and what was lost is computed again from logs."""
    alone = runs.train("padded", overrides=ALONE)
    audited = runs.train("padded", overrides=("train.audit_every=1", "model.checkpoint_activations=true"))
    assert audited.weights_sha256 == alone.weights_sha256
    one = (
        "grid.pipelines=1",
        "grid.microbatches=4",
        "logging.use=on",
        "checkpoint.every=3",
        "checkpoint.synchronous=true",
    )
    replayed = runs.train("padded", "kill:0.1@5:backward", overrides=one)
    assert replayed.unfired == ()
    assert [event for _, event in read_events(replayed.run_dir / "events.jsonl") if isinstance(event, Replaying)]
    assert replayed.weights_sha256 == alone.weights_sha256


def test_a_module_as_one_layer_is_trained_by_pipelines_of_one(runs):
    whole = ("model.split=none", "grid.stages=1", "model.checkpoint_activations=true")
    survived = runs.train("padded", "kill:1.0@3:backward", overrides=whole)
    assert survived.unfired == ()
    assert survived.weights_sha256 == runs.train("padded", overrides=("model.split=none", *ALONE)).weights_sha256


def test_a_classifier_of_transformers_is_read_by_it(runs, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
    survived = runs.train("classified", *FAULTS)
    assert survived.unfired == ()
    assert (
        survived.weights_sha256
        == runs.train("classified", overrides=(*ALONE[:2], "grid.microbatches=8")).weights_sha256
    )
    assert main(["export", str(survived.run_dir), "--to", str(tmp_path / "made")]) == 0
    read = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "made")
    assert read.config.num_labels == 3
