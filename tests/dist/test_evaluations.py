"""A model that is evaluated while workers and the coordinator die: the same scores, and the same weights as without."""

from __future__ import annotations

import json

import pytest

from holdfast.cli.main import main
from holdfast.telemetry.events import Evaluated, Notice, read_events

pytestmark = pytest.mark.dist

SCORE = """
def score(output, target):
    return {"accuracy": (output.argmax(-1) == target).float().mean()}
"""
ALONE = ("grid.pipelines=1", "grid.stages=1", "grid.microbatches=9")


@pytest.fixture
def evaluated(tmp_path):
    """Overrides by which a job is evaluated before steps 2 and 4."""
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "held.txt").write_text("".join(f"{n} and what follows\n" for n in range(400)))
    data = json.dumps({"kind": "text", "path": str(tmp_path / "held.txt")})
    metrics = f"evaluate.metrics={tmp_path / 'score.py'}:score"
    return "evaluate.every=2", f"evaluate.data={data}", "evaluate.microbatches=7", metrics


def scores(run) -> list[dict]:
    found = json.loads((run.run_dir / "summary.json").read_text())["evaluations"]
    assert [(each["step"], each["microbatches"], each["of"]) for each in found] == [(2, 7, 7), (4, 7, 7)]
    return [each["scores"] for each in found]


FAULTS = [
    ("kill:1.3@2:evaluate", "kill:0.0@4:evaluate"),
    ("kill:1.3@2:evaluate", "join:1.3@2", "kill-coordinator@2:start"),
    ("leave:2.3@2:evaluate", "kill:0.1@2:commit"),
]


@pytest.mark.parametrize("faults", FAULTS, ids=" ".join)
def test_scores_and_weights_are_those_of_the_run_without_failures(runs, evaluated, faults):
    survived, whole = runs.train("gpt", *faults, overrides=evaluated), runs.train("gpt", overrides=evaluated)
    assert survived.unfired == ()
    assert scores(survived) == scores(whole)
    assert scores(whole)[0] != scores(whole)[1]
    assert set(scores(whole)[0]) == {"loss", "accuracy"}
    assert survived.weights_sha256 == whole.weights_sha256 == runs.healthy("gpt").weights_sha256


def test_one_worker_alone_has_the_same_scores(runs, evaluated):
    assert scores(runs.train("gpt", overrides=(*evaluated, *ALONE))) == scores(runs.train("gpt", overrides=evaluated))


def test_what_goes_on_from_a_checkpoint_is_evaluated_from_there(runs, evaluated):
    """Before the very step that it goes on from, too: what was told of it then, nobody knows now."""
    first = runs.train("gpt", overrides=(*evaluated, "checkpoint.every=2"))
    again = runs.train("gpt", overrides=evaluated, resume=f"{first.run_dir}@2")
    assert scores(again) == scores(first)
    assert again.weights_sha256 == first.weights_sha256


def test_the_best_state_is_kept_and_known_to_whoever_goes_on(runs, evaluated, tmp_path):
    """Its checkpoint stays, however many come; a run that goes on from a later one knows of it."""
    small = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.synchronous=true", "evaluate.every=1")
    wanted = (*evaluated, *small, "evaluate.best=loss", "evaluate.better=higher", "optimizer.lr=0.05")
    first = runs.train("gpt", "kill:1.1@3:evaluate", overrides=wanted)
    found = json.loads((first.run_dir / "summary.json").read_text())["evaluations"]
    best = max(found, key=lambda each: each["scores"]["loss"])["step"]
    assert [each["step"] for each in found if each["best"]][-1] == best
    kept = {path.name for path in (first.run_dir / "checkpoints").iterdir()}
    assert {f"step-{best:08d}", "step-00000004"} <= kept
    assert main(["export", f"{first.run_dir}@{best}", "--to", str(tmp_path / "best")]) == 0
    manifest = json.loads((first.run_dir / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert manifest["best"]["step"] in {each["step"] for each in found if each["best"]}
    again = runs.train("gpt", overrides=(*wanted, "train.steps=5"), resume=f"{first.run_dir}@4")
    told = json.loads((again.run_dir / "summary.json").read_text())["evaluations"]
    known, at = manifest["best"]["score"], manifest["best"]["step"]
    assert all(each["scores"]["loss"] > known or each["step"] == at for each in told if each["best"])


def test_batch_norm_is_that_of_training(runs, tmp_path):
    """Its running statistics are used, and do not change by it."""
    digits = ("evaluate.every=2", 'evaluate.data={"kind": "digits"}', "evaluate.microbatches=6")
    survived = runs.train("convnet", "kill:1.0@2:evaluate", overrides=digits)
    assert survived.unfired == ()
    assert survived.weights_sha256 == runs.healthy("convnet").weights_sha256
    told = [event for _, event in read_events(survived.run_dir / "events.jsonl") if isinstance(event, Evaluated)]
    assert all(event.microbatches == event.of == 6 for event in told)
    assert 1.0 < dict(told[-1].scores)["loss"] < 5.0, "of ten classes, hardly trained"


STILL = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "train.steps=12", "checkpoint.every=2")
"""Nothing gets better by it."""


@pytest.mark.parametrize(
    "faults",
    [
        (),
        ("kill:1.3@4:evaluate",),
        ("kill:0.3@4:evaluate", "kill-coordinator@4:start"),
        ("kill:1.0@5:backward", "join:1.0@5"),
    ],
    ids=" ".join,
)
def test_a_job_that_gets_no_better_ends_early_at_one_step_whoever_dies(runs, evaluated, faults):
    overrides = (*evaluated, *STILL, "evaluate.best=loss", "evaluate.patience=1")
    run = runs.train("gpt", *faults, overrides=overrides)
    assert run.unfired == ()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] == run.steps == 6
    told = [(each["step"], each["best"], each["microbatches"]) for each in summary["evaluations"]]
    assert told == [(2, True, 7), (4, False, 7), (6, False, 7)]
    lines = [event.text for _, event in read_events(run.run_dir / "events.jsonl") if isinstance(event, Notice)]
    assert "ends early, before step 6: loss was not better than before step 2 in 1 evaluations" in lines
    assert (run.run_dir / "checkpoints").is_dir()
    assert main(["export", f"{run.run_dir}@2", "--to", str(run.run_dir / "best.pt")]) == 0
    whole = runs.train("gpt", overrides=(*STILL, "train.steps=6"))
    assert run.weights_sha256 == whole.weights_sha256


def test_patience_goes_on_where_it_was(runs, evaluated):
    """Three evaluations are too many: the first in one attempt, the others in the next."""
    still = (*evaluated, *STILL, "evaluate.best=loss", "evaluate.patience=2")
    first = runs.train("gpt", overrides=(*still, "train.steps=4"))
    run = runs.train("gpt", overrides=still, resume=f"{first.run_dir}@4")
    told = [each["step"] for each in json.loads((run.run_dir / "summary.json").read_text())["evaluations"]]
    assert (run.steps, told) == (8, [4, 6, 8])
    assert run.weights_sha256 == runs.train("gpt", overrides=(*still, "train.steps=12")).weights_sha256
