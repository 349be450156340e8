"""Models and data that were not written for us, trained as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.data.sampler import sample_indices
from holdfast.errors import ConfigError
from holdfast.telemetry.events import StepOps, read_events

pytestmark = pytest.mark.dist


def test_a_model_from_elsewhere_survives_with_its_bits(runs):
    """Batch-norm, a layer used twice, a frozen one, an LSTM, augmentation: the run without a kill ends the same."""
    summary = runs.survives("foreign", "kill:0.1@1:backward", "kill:1.2@2:commit")
    assert summary.steps == 4


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
