"""Where the parts of a study lie in its folder."""

from __future__ import annotations

from pathlib import Path

from holdfast.study.scenarios import StudyScenario

__all__ = ["baseline_file", "outcome_file", "state_folder"]


def baseline_file(out: Path, seed: int) -> Path:
    """Returns where the record of a run without failures is."""
    return out / f"seed-{seed}" / "baseline.json"


def outcome_file(out: Path, scenario: StudyScenario) -> Path:
    """Returns where what came of a scenario is."""
    return out / scenario.path


def state_folder(out: Path, seed: int, step: int) -> Path:
    """Returns where the state before a step is."""
    return out / f"seed-{seed}" / "states" / f"step-{step}"
