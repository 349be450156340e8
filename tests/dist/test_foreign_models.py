"""Models and data that were not written for us, trained as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.data.sampler import sample_indices
from holdfast.errors import ConfigError
from holdfast.telemetry.events import Notice, StepOps, read_events

pytestmark = pytest.mark.dist


def test_a_model_from_elsewhere_survives_with_its_bits(runs):
    """Batch-norm, a layer used twice, a frozen one, an LSTM, augmentation: the run without a kill ends the same."""
    summary = runs.survives("foreign", "kill:0.1@1:backward", "kill:1.2@2:commit")
    assert summary.steps == 4


WAITING = """

class Waiting(Augmented):
    reads = 0

    def __getitem__(self, index):
        Waiting.reads += 1
        while Waiting.reads > 150 and pathlib.Path({wait!r}).exists():
            time.sleep(0.01)
        return super().__getitem__(index)


def dataset():
    return Waiting(-1)
"""


def test_whoever_comes_with_edited_code_does_not_take_part(runs, tmp_path):
    """The others go on, and do not come to their end before it has said so."""
    beside, code, wait, edited, told = "beside_foreign_models.py", tmp_path / "code.py", tmp_path / "wait", [], []
    shutil.copy(Path(__file__).with_name(beside), tmp_path / beside)
    text = Path(__file__).with_name("foreign_models.py").read_text()
    code.write_text(
        text.replace("import beside", "import pathlib\nimport time\n\nimport beside") + WAITING.format(wait=str(wait))
    )
    overrides = (f"model.target={code}:build", f"data.target={code}:dataset", "train.steps=60")
    healthy = runs.healthy("foreign", overrides)
    wait.touch()

    def edit(progress):
        if progress.step >= 3 and not edited:
            edited.append(code.write_text(f"{code.read_text()}# edited, whatever it is\n"))

    def hear(event):
        if isinstance(event, Notice) and "the code in its file has changed since the job was tried" in event.text:
            told.append(event.text)
            wait.unlink(missing_ok=True)

    faults = ("kill:0.1@1:backward", "join:0.1@8")
    summary = runs.train("foreign", *faults, overrides=overrides, on_progress=edit, on_event=hear)
    assert edited
    assert len(summary.report.fired) == 2
    assert "model.target, data.target: the code in its file" in told[0]
    assert summary.weights_sha256 == healthy.weights_sha256


def test_an_item_unlike_the_others_ends_the_job_by_its_number(runs, tmp_path):
    """It is found when its turn comes: the probe read others."""
    job = runs.job("foreign")
    seen = [i for m in range(job.global_microbatches) for i in sample_indices(5, 2, m, job.global_microbatches, 3, 90)]
    short = next(index for index in seen if index not in (0, 45, 89))
    with pytest.raises(ConfigError) as caught:
        runs.train("foreign", overrides=(f"data.arguments.short={short}",), run_dir=tmp_path / "run")
    assert str(caught.value).startswith(
        f"data: the input of item {short} is float32 [1, 5, 6], others are float32 [1, 6, 6]"
    )
    done = {event.step for _, event in read_events(Path(tmp_path, "run", "events.jsonl")) if isinstance(event, StepOps)}
    assert done <= {0, 1}
    assert done, "two steps went well before"
