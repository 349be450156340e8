"""A script that is another one when it goes on, or in whoever joins: refused by key, or accepted with effect."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from holdfast.config.load import parse_job
from holdfast.core.faults import Fault
from holdfast.errors import ConfigError
from holdfast.runtime.exporting import export
from holdfast.runtime.train import train
from holdfast.telemetry.events import Notice, read_events

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("changing_script.py")
JOB = {
    "name": "changing",
    "data": {"kind": "script"},
    "grid": {"pipelines": 2, "stages": 1, "microbatches": 1},
    "train": {"steps": 1},
    "checkpoint": {"every": 2, "synchronous": True, "keep": 9},
    "control": {"hang_s": 15},
}


def edit(folder, **changes):
    (folder / "edits.json").write_text(json.dumps(changes))


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(1)
    for index in range(8):
        torch.save(torch.randn(4, generator=generator), tmp_path / f"sample-{index}.pt")
    edit(tmp_path)
    return tmp_path


def run(folder, name, *faults, script=SCRIPT, **options):
    (folder / "rates.jsonl").unlink(missing_ok=True)
    job = {**JOB, "model": {"kind": "script", "path": str(script), "arguments": [str(folder)]}}
    return train(parse_job(job), run_dir=folder / name, faults=[Fault.parse(each) for each in faults], **options)


def rates(folder):
    return {
        step: (rate, entries)
        for step, rate, entries in map(json.loads, (folder / "rates.jsonl").read_text().splitlines())
    }


def notes(summary):
    return [event.text for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, Notice)]


def test_an_edited_script_is_refused_by_key_and_accepted_with_effect(folder):
    whole = run(folder, "a")
    assert [rate for rate, _ in rates(folder).values()] == [0.05 * 0.5**step for step in range(6)]
    assert rates(folder)[3][1] == [3.0] * 4, "the script sees its optimizer's state"
    exported, saved = export(str(folder / "a")), torch.load(folder / "saved.pt")
    assert all(torch.equal(exported.model[name], value) for name, value in saved["model"].items())
    assert exported.optimizers[0]["param_groups"] == saved["optimizer"]["param_groups"]
    for number, entries in saved["optimizer"]["state"].items():
        assert all(torch.equal(exported.optimizers[0]["state"][number][key], entries[key]) for key in entries)
    edit(folder, lr=0.8)
    with pytest.raises(ConfigError, match=r"optimizer.lr: expected 0.05, as in the checkpoint, got 0.8;.*--accept"):
        run(folder, "b", resume=f"{folder / 'a'}@4")
    faster = run(folder, "c", resume=f"{folder / 'a'}@4", accept=["optimizer.lr"])
    assert rates(folder)[4] == (pytest.approx(0.05), [4.0] * 4), "in proportion to where the schedule was"
    assert faster.weights_sha256 != whole.weights_sha256
    edit(folder, lr=0.8, kind="Adam")
    anew = run(folder, "d", resume=f"{folder / 'a'}@4", accept=["optimizer"])
    assert rates(folder)[4] == (pytest.approx(0.05), []), "without a state"
    assert rates(folder)[5] == (pytest.approx(0.025), [1.0] * 4)
    assert anew.weights_sha256 != faster.weights_sha256


def test_a_run_begins_with_what_another_one_has_saved(folder):
    first = run(folder, "a")
    shutil.copy(folder / "saved.pt", folder / "last.pt")
    second = run(folder, "b")
    assert rates(folder)[0][1] == [6.0] * 4
    assert rates(folder)[5][1] == [11.0] * 4
    shutil.copy(folder / "saved.pt", folder / "last.pt")  # as scripts do that save what they begin with
    third = run(folder, "c", "kill:1.0@5:backward", resume=f"{folder / 'b'}@4")
    assert third.report.fired == ("kill:1.0@5:backward",)
    assert first.weights_sha256 != second.weights_sha256 == third.weights_sha256
    assert second.state_sha256 == third.state_sha256


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("data", "data.length: expected 8, as in the process that tried the script, got 9"),
        ("code", "code.py: the code in its file has changed since the job was tried; expected the same in every"),
    ],
)
def test_whoever_comes_with_other_data_or_code_does_not_take_part(folder, changes, told):
    healthy = run(folder, "a")
    script = folder / "code.py"
    script.write_text(SCRIPT.read_text())
    (folder / "wait").write_text("" if changes == "data" else str(script))
    over = threading.Event()

    def beside():
        while not over.wait(0.01):
            log = folder / "b" / "events.jsonl"
            if log.exists() and told in log.read_text():
                (folder / "wait").unlink(missing_ok=True)

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        summary = run(folder, "b", "kill:1.0@1:backward", "join:1.0@2", script=script)
    finally:
        over.set()
        thread.join()
    assert sorted(summary.report.fired) == ["join:1.0@2", "kill:1.0@1:backward"]
    assert (folder / "grown").exists()
    assert any(told in text for text in notes(summary)), notes(summary)
    assert summary.weights_sha256 == healthy.weights_sha256
