"""``holdfast track``: what trackers keep of a run, whenever they are told, and whatever becomes of them."""

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.cli.test_metrics import Job
from tests.waiting import LIMIT_S, until

from holdfast.cli.main import main
from holdfast.telemetry.events import (
    Checkpointed,
    Detected,
    Evaluated,
    JobEnded,
    Judged,
    Resumed,
    StepOps,
)
from holdfast.trackers import named

OWN = """
import holdfast, json, os, signal

class Kept(holdfast.Tracker):
    def _say(self, *words):
        with (self.folder / "said.txt").open("a") as file:
            file.write(json.dumps(words) + "\\n")
    def on_start(self, job): self._say("start", job.name)
    def on_step(self, step):
        self._say("step", step.step, step.loss)
        if step.step == int(os.environ.get("RAISE_AT", -1)):
            raise RuntimeError("no more")
        if step.step == int(os.environ.get("KILL_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
    def on_evaluate(self, evaluated): self._say("evaluate", evaluated.step, dict(evaluated.scores))
    def on_failure(self, lost): self._say("failure", lost.worker)
    def on_checkpoint(self, made): self._say("checkpoint", made.step)
    def on_end(self, ended): self._say("end", ended.outcome)
    def close(self): os.environ.get("RAISE_AT") or self._say("close")

class Strange: pass
"""

STUCK = """
import holdfast, time

class Stuck(holdfast.Tracker):
    def on_start(self, job):
        (self.folder / "hangs").touch()
        time.sleep(1000)
"""


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return f"{tmp_path / 'mine.py'}:Kept"


def steps(job, number):
    for _ in range(number):
        known = {"generation": 1, "step": job.step, "omitted": False, "ops": ()}
        loss = 2.0 - job.step / 8
        job.write(StepOps(worker="0.0", loss=loss, knows_loss=True, **known), StepOps(worker="1.0", loss=None, **known))
        job.write(Judged(worker="0.0", generation=1, step=job.step, norm=0.5, rate=0.25))
        job.step += 1


def whole(job):
    """A run with one of everything."""
    job.begin()
    steps(job, 2)
    job.write(Evaluated(step=2, scores=(("loss", 1.5), ("accuracy", None)), microbatches=4, of=4, best=True))
    job.write(Checkpointed(step=2, url="u"), Detected(worker="9.9", how="h", generation=1, spare=True))
    steps(job, 2)
    job.write(JobEnded(outcome="done", step=4))


def said(job):
    return [json.loads(line) for line in (job.run_dir / "trackers/Kept/said.txt").read_text().splitlines()]


def table(job, name):
    with (job.run_dir / "trackers/csv" / name).open() as file:
        return list(csv.DictReader(file))


SAID = [
    ["start", 'a "j"'],
    ["step", 0, 2.0],
    ["step", 1, 1.875],
    ["evaluate", 2, {"loss": 1.5, "accuracy": None}],
    ["checkpoint", 2],
    ["failure", "9.9"],
    ["step", 2, 1.75],
    ["step", 3, 1.625],
    ["end", "done"],
    ["close"],
]


def test_a_run_that_has_ended_is_told(job, own, capsys):
    whole(job)
    assert main(["track", str(job.run_dir), "--to", "csv", "--to", own]) == 0
    assert capsys.readouterr().out == "4 steps; the job has ended: done\n"
    assert said(job) == SAID
    rows = table(job, "steps.csv")
    assert [(row["step"], row["loss"], row["norm"], row["rate"]) for row in rows[:2]] == [
        ("0", "2.0", "0.5", "0.25"),
        ("1", "1.875", "0.5", "0.25"),
    ]
    assert (rows[0]["samples_per_s"], float(rows[1]["samples_per_s"]) > 0, rows[1]["again"]) == ("", True, "False")
    assert table(job, "evaluations.csv") == [
        {"step": "2", "score": "loss", "value": "1.5", "best": "True"},
        {"step": "2", "score": "accuracy", "value": "", "best": "True"},
    ]


def test_what_was_told_is_not_told_again_and_tables_stay_the_same(job, own):
    whole(job)
    for _ in range(2):
        assert main(["track", str(job.run_dir), "--to", own, "--to", "csv"]) == 0
    assert said(job) == [*SAID, ["close"]]  # told nothing, the second time
    assert [row["step"] for row in table(job, "steps.csv")] == ["0", "1", "2", "3"]


def command(job, *words):
    return [sys.executable, "-m", "holdfast", "track", str(job.run_dir), *words]


def test_it_is_told_as_it_goes_on(job, own):
    with subprocess.Popen(command(job, "--to", "csv", "--to", own), stdout=subprocess.PIPE, text=True) as process:
        try:
            job.begin()
            steps(job, 2)
            until(lambda: (job.run_dir / "trackers/Kept/told.json").is_file() and len(said(job)) == 3)
            until(lambda: len(table(job, "steps.csv")) == 2)
            steps(job, 1)
            job.write(JobEnded(outcome="lost", step=3))
            assert process.wait(LIMIT_S) == 1
        finally:
            process.kill()
    assert said(job)[-3:] == [["step", 2, 1.75], ["end", "lost"], ["close"]]


def test_a_tracker_that_was_killed_goes_on_where_it_was(job, own, monkeypatch):
    job.begin()
    steps(job, 3)
    with subprocess.Popen(command(job, "--to", own)) as process:
        until(lambda: (job.run_dir / "trackers/Kept/told.json").is_file())
        process.kill()
    before = said(job)
    assert before == [["start", 'a "j"'], ["step", 0, 2.0], ["step", 1, 1.875], ["step", 2, 1.75]]
    steps(job, 2)
    job.write(JobEnded(outcome="done", step=5))
    assert main(["track", str(job.run_dir), "--to", own]) == 0
    assert said(job) == [*before, ["start", 'a "j"'], ["step", 3, 1.625], ["step", 4, 1.5], ["end", "done"], ["close"]]


def test_what_was_not_kept_is_told_again(job, own, monkeypatch):
    whole(job)
    monkeypatch.setenv("KILL_AT", "2")
    assert subprocess.run(command(job, "--to", own), timeout=LIMIT_S).returncode == -9
    monkeypatch.delenv("KILL_AT")
    assert main(["track", str(job.run_dir), "--to", own]) == 0
    assert said(job) == [*SAID[:7], *SAID]


def test_a_tracker_that_fails_is_told_no_more_and_the_others_are(job, own, monkeypatch, capsys):
    whole(job)
    monkeypatch.setenv("RAISE_AT", "1")
    assert main(["track", str(job.run_dir), "--to", own, "--to", "csv"]) == 1
    assert f"holdfast: tracker {own} failed: RuntimeError: no more (mine.py, line 12)" in capsys.readouterr().err
    assert len(table(job, "steps.csv")) == 4
    assert said(job) == SAID[:3]
    assert main(["track", str(job.run_dir), "--to", own]) == 2
    monkeypatch.delenv("RAISE_AT")
    assert main(["track", str(job.run_dir), "--to", own]) == 0
    assert said(job)[-len(SAID) :] == SAID


def test_another_attempt_begins_anew(job, own, monkeypatch):
    whole(job)
    assert main(["track", str(job.run_dir), "--to", own, "--to", "csv"]) == 0
    (job.run_dir / "events.jsonl").rename(job.run_dir / "before.jsonl")
    (job.run_dir / "trackers").rename(job.run_dir / "before")  # as what goes on from a checkpoint does
    job.step = 1
    job.begin()
    job.write(Resumed(step=1, url="u"))
    steps(job, 1)
    job.write(JobEnded(outcome="done", step=2))
    assert main(["track", str(job.run_dir), "--to", own, "--to", "csv"]) == 0
    assert said(job) == [["start", 'a "j"'], ["step", 1, 1.875], ["end", "done"], ["close"]]


def test_a_job_that_nobody_runs_any_more_is_told_as_far_as_it_came(job, own, monkeypatch, capsys):
    from holdfast.cli import watched

    monkeypatch.setattr(watched, "_SILENT_S", 0.0)
    job.begin()
    steps(job, 2)
    assert main(["track", str(job.run_dir), "--to", own]) == 1
    assert (
        capsys.readouterr().out
        == "2 steps; the job has not ended, or was killed: no process that can be found runs it\n"
    )


def test_a_step_that_was_settled_before_all_had_swapped_is_told_though_the_job_is_killed(job, own, monkeypatch):
    from holdfast.cli import watched

    monkeypatch.setattr(watched, "_SILENT_S", 0.0)
    job.begin()
    known = {"generation": 1, "step": 0, "omitted": False, "ops": ()}
    job.write(StepOps(worker="0.0", loss=2.0, knows_loss=True, **known))
    job.write(Judged(worker="0.0", generation=1, step=0, norm=0.5, rate=0.25))
    job.write(StepOps(worker="1.0", loss=None, **known))
    assert main(["track", str(job.run_dir), "--to", own]) == 1
    assert said(job) == [*SAID[:2], ["close"]]


def test_two_do_not_write_to_one_place(job, own):
    job.begin()
    steps(job, 1)
    with subprocess.Popen(command(job, "--to", own)) as process:
        until(lambda: (job.run_dir / "trackers/Kept/told.json").is_file())
        second = subprocess.run(command(job, "--to", own), capture_output=True, text=True, timeout=LIMIT_S)
        process.kill()
    assert second.returncode == 2
    assert "another `holdfast track` writes there; expected --out" in second.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_whoever_ends_it_closes_trackers(job, own, number, code):
    job.begin()
    steps(job, 1)
    with subprocess.Popen(command(job, "--to", own)) as process:
        until(lambda: (job.run_dir / "trackers/Kept/told.json").is_file())
        process.send_signal(number)
        assert process.wait(LIMIT_S) == code
    assert said(job)[-1] == ["close"]


def test_what_has_happened_by_then_is_told_before_it_ends(job, own):
    """A job that is preempted ends it at once."""
    job.begin()
    steps(job, 1)
    with subprocess.Popen(command(job, "--to", own)) as process:
        until(lambda: (job.run_dir / "trackers/Kept/told.json").is_file())
        steps(job, 2)
        job.write(JobEnded(outcome="preempted", step=3))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 1, "it has seen that the job is not done"
    assert [words[1] for words in said(job) if words[0] == "step"] == [0, 1, 2]
    assert said(job)[-2:] == [["end", "preempted"], ["close"]]


def test_one_that_hangs_is_ended_by_a_second_signal(job, own, tmp_path):
    stuck = tmp_path / "stuck.py"
    stuck.write_text(STUCK)
    job.begin()
    steps(job, 1)
    with subprocess.Popen(command(job, "--to", f"{stuck}:Stuck")) as process:
        until(lambda: (job.run_dir / "trackers/Stuck/hangs").is_file())
        until(lambda: process.poll() is not None or process.send_signal(signal.SIGTERM))
        assert process.returncode in (143, -signal.SIGTERM), "the latter on its way out"


def test_tensorboard_reads_what_it_is_told(job):
    from tensorboardX.proto.event_pb2 import Event

    whole(job)
    for _ in range(2):
        assert main(["track", str(job.run_dir), "--to", "tensorboard"]) == 0
    (path,) = (job.run_dir / "trackers/tensorboard").glob("events.out.tfevents.*")
    found = {}
    for record in records(path):
        event = Event.FromString(record)
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, round(value.simple_value, 6)))
    assert found["train/loss"] == [(0, 2.0), (1, 1.875), (2, 1.75), (3, 1.625)]
    assert found["train/learning_rate"] == [(n, 0.25) for n in range(4)]
    assert found["evaluation/loss"] == [(2, 1.5)]
    assert "evaluation/accuracy" not in found
    assert [step for step, _ in found["failures/text_summary"]] == [1]


def records(path: Path):
    """The records of a file of TensorBoard's: a length, its checksum, what it is of, and the checksum of that."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--to", "excel"), "--to excel: is no tracker; expected csv, tensorboard, wandb, mlflow, or file.py:Class"),
        (("--to", "csv", "--to", "csv"), "--to csv: there is a tracker of this name already"),
        (("--to", "{own}:Strange"), "is no class of trackers; expected one that is made of holdfast.Tracker"),
        (("--to", "{own}:Kep"), "has no function 'Kep'; did you mean Kept?"),
        (("--to", "nowhere.py:X"), "--to: nowhere.py: No such file"),
    ],
)
def test_what_is_no_tracker_is_said(words, line, job, own, capsys):
    file = own.rpartition(":")[0]
    assert main(["track", str(job.run_dir), *(word.format(own=file) for word in words)]) == 2
    assert line in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_says_how_it_is(job, capsys, monkeypatch):
    monkeypatch.setattr(named, "find_spec", lambda name: None)
    assert main(["track", str(job.run_dir), "--to", "wandb"]) == 2
    assert "wandb is not installed; expected pip install 'holdfast[wandb]'" in capsys.readouterr().err


def test_a_place_that_cannot_be_read_is_said(job, own, capsys):
    whole(job)
    assert main(["track", str(job.run_dir), "--to", own]) == 0
    (job.run_dir / "trackers/Kept/told.json").write_text("{")
    assert main(["track", str(job.run_dir), "--to", own]) == 2
    assert "remove it to tell all again" in capsys.readouterr().err
