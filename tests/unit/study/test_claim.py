"""A folder is the study of one job, and of one process at a time."""

from __future__ import annotations

import pytest

from holdfast.config.load import parse_job
from holdfast.errors import ConfigError
from holdfast.study.running import claim

TREE = {
    "model": {"kind": "nt3", "width": 4},
    "data": {"kind": "breast-cancer"},
    "grid": {"pipelines": 2, "stages": 1, "microbatches": 1},
    "train": {"steps": 3},
}


def test_a_study_is_of_one_job_and_one_process(tmp_path):
    job, out = parse_job(TREE), tmp_path / "new" / "study"
    with claim(out, job), pytest.raises(ConfigError, match=r"--out .* another holdfast"), claim(out, job):
        pass
    with claim(out, job):
        assert {each.name for each in out.iterdir()} == {"job.yaml", "lock"}
    with pytest.raises(ConfigError, match="the study of another job"), claim(out, parse_job(TREE, ["train.steps=4"])):
        pass


def test_what_was_ended_at_once_can_be_begun_again_and_what_is_another_folder_not(tmp_path):
    job = parse_job(TREE)
    (tmp_path / "lock").write_text("")
    (tmp_path / "job.part").write_text("half")
    with claim(tmp_path, job):
        pass
    (tmp_path / "job.yaml").unlink()
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="holds no study"), claim(tmp_path, job):
        pass
