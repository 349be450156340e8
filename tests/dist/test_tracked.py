"""Jobs that name their trackers: told of each step once, through a loss, and no part of what trains."""

from __future__ import annotations

import csv

import pytest

from holdfast.errors import ConfigError
from holdfast.telemetry.events import Notice

pytestmark = pytest.mark.dist

FAILS = """
import holdfast

class Fails(holdfast.Tracker):
    def on_step(self, step):
        raise ValueError("no room")
"""


def test_trackers_of_a_job_are_told_through_a_loss_and_one_that_fails_harms_nobody(runs, tmp_path):
    own, told = tmp_path / "own.py", []
    own.write_text(FAILS)
    summary = runs.survives(
        "gpt",
        "kill:1.2@2:backward",
        overrides=(f"track=[csv, '{own}:Fails']",),
        healthy=runs.healthy("gpt"),
        on_event=lambda event: told.append(event.text) if isinstance(event, Notice) else None,
    )
    with (summary.run_dir / "trackers" / "csv" / "steps.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(summary.steps))
    (failed,) = (text for text in told if text.startswith("trackers: "))
    assert failed.startswith(f"trackers: tracker {own}:Fails failed: ")
    assert "no room" in failed
    assert failed.endswith(f"({summary.run_dir / 'trackers.log'})")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("tensorbord", "track: tensorbord: is no tracker; expected csv, tensorboard"),
        ("csv, csv", "track: csv: there is"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_before_anything_is_made(runs, names, said):
    folder = runs.folder()
    with pytest.raises(ConfigError, match=said):
        runs.train_only("gpt", overrides=(f"track=[{names}]",), run_dir=folder)
    assert list(folder.iterdir()) == []
