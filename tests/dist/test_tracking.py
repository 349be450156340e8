"""What trackers are told of runs whose workers and coordinators die: of each step the same as without, and once."""

import csv
import json
import subprocess
from pathlib import Path

import pytest
from tests.unit.cli.test_track import command, job, steps, whole
from tests.waiting import LIMIT_S, until

from holdfast.cli.main import main
from holdfast.telemetry.events import Evaluated, JobEnded

pytestmark = pytest.mark.dist
__all__ = ["job"]

FAULTS = {
    ("kill:1.2@1:backward",): (),
    ("kill:1.2@1:commit", "join:1.2@2", "kill-coordinator@2:start"): (),
    ("kill:0.3@1:verdict", "kill:1.3@2:update"): (1, 2),
}
"""And the steps whose verdict whoever tells it may not have told before it died."""


def told(run):
    assert main(["track", str(run.run_dir), "--to", "csv"]) == 0
    with (run.run_dir / "trackers/csv/steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    assert {row["again"] for row in rows} == {"False"}
    assert all(int(row["memory"]) > 0 for row in rows)
    return [(row["loss"], row["norm"], row["rate"]) for row in rows]


@pytest.mark.parametrize("technique", ["1f1b", "staggered"])
@pytest.mark.parametrize("faults", FAULTS, ids=" ".join)
def test_losses_norms_and_rates_are_those_of_the_run_without_failures(runs, faults, technique):
    overrides = (f"train.technique={technique}", "optimizer.schedule=cosine", "optimizer.warmup_steps=2")
    survived, whole = runs.train("gpt", *faults, overrides=overrides), runs.train("gpt", overrides=overrides)
    assert survived.unfired == ()
    found = told(whole)
    assert len(found) == whole.steps == 4
    assert all(loss and norm and rate for loss, norm, rate in found)
    assert len({norm for _, norm, _ in found}) == 4
    assert len({rate for *_, rate in found}) > 2
    for step, (with_them, without) in enumerate(zip(told(survived), found, strict=True)):
        untold = (without[0], "", "")
        assert with_them in ((without, untold) if step in FAULTS[faults] else (without,))


def test_steps_behind_a_checkpoint_are_told_again_as_such(runs):
    """All owners of a layer are lost: the job goes back, and does a step once more."""
    faults = tuple(f"kill:{pipeline}.3@3:start" for pipeline in range(3))
    overrides = ("checkpoint.every=2", "checkpoint.synchronous=true", "train.steps=6")
    run = runs.train("gpt", *faults, overrides=overrides)
    assert run.unfired == ()
    assert main(["track", str(run.run_dir), "--to", "csv"]) == 0
    with (run.run_dir / "trackers/csv/steps.csv").open() as file:
        rows = [(int(row["step"]), row["again"]) for row in csv.DictReader(file)]
    assert [step for step, again in rows if again == "False"] == [0, 1, 2, 3, 4, 5]
    assert (2, "True") in rows


def test_mlflow_has_what_it_is_told(job, monkeypatch):
    from mlflow.tracking import MlflowClient

    job.begin()
    steps(job, 2)
    with subprocess.Popen(command(job, "--to", "mlflow")) as process:
        until(lambda: (job.run_dir / "trackers/mlflow/told.json").is_file(), 2 * LIMIT_S)
        process.kill()
    steps(job, 1)
    job.write(Evaluated(step=2, scores=(("loss", 1.5),), microbatches=4, of=4, best=True))
    job.write(JobEnded(outcome="done", step=3))
    assert main(["track", str(job.run_dir), "--to", "mlflow"]) == 0
    client = MlflowClient(tracking_uri=(job.run_dir / "trackers/mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name('a "j"').experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(0, 2.0), (1, 1.875), (2, 1.75)]
    assert run.info.status == "FINISHED"
    assert run.data.tags["holdfast.outcome"] == "done"
    assert run.data.params == {"workers": "2", "steps": "10", "samples_per_step": "8"}


def parcels(path: Path):
    """The records of a file of W&B's: behind 7 bytes those of a log of LevelDB, without what is cut at its end."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_weights_and_biases_has_what_it_is_told(job):
    from wandb.proto.wandb_internal_pb2 import Record

    whole(job)
    assert subprocess.run(command(job, "--to", "wandb"), timeout=2 * LIMIT_S).returncode == 0
    (path,) = (job.run_dir / "trackers/wandb").rglob("*.wandb")
    found = []
    for record in map(Record.FromString, parcels(path)):
        if record.HasField("history"):
            found.append(
                {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            )
    assert [(row["step"], row["train/loss"]) for row in found if "train/loss" in row] == [
        (0, 2.0),
        (1, 1.875),
        (2, 1.75),
        (3, 1.625),
    ]
    assert [row["evaluation/loss"] for row in found if "evaluation/loss" in row] == [1.5]
