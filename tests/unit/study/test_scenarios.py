"""What a study compares, and what it refuses."""

from __future__ import annotations

import pytest

from holdfast.config.load import parse_job
from holdfast.errors import ConfigError
from holdfast.study.scenarios import STRATEGIES, StudyScenario, plan_study

JOB = {
    "model": {"kind": "nt3", "width": 4},
    "data": {"kind": "breast-cancer"},
    "grid": {"pipelines": 8, "stages": 1, "microbatches": 1},
    "train": {"steps": 300, "seed": 4},
}


def test_what_is_compared_unless_told():
    study = plan_study(parse_job(JOB))
    assert (study.strategies, study.progress, study.survivors) == (STRATEGIES, (25, 50, 75), (2, 4, 6))
    assert (study.at, study.seeds) == ((12, 100, 200), (4,))
    assert len(study.every) == 3 * (3 + 9 + 3 + 3 + 1)
    assert len({each.path for each in study.every}) == len(study.every)


def test_only_what_makes_a_difference_is_varied():
    study = plan_study(parse_job(JOB), progress=(50,), survivors=(2,), at=(3,))
    assert [(each.strategy, each.progress, each.survivors) for each in study.every] == [
        ("adaptive", None, 2),
        ("lossy-forward", 50, 2),
        ("rollback", 50, None),
        ("skip", 50, None),
        ("checkpoint-restart", None, None),
    ]


def test_names_and_files_of_scenarios():
    lossy = StudyScenario(seed=1, at=20, strategy="lossy-forward", progress=50, survivors=4)
    assert (lossy.name, lossy.path) == ("lossy-forward 50 % 4", "seed-1/step-20/lossy-forward-50-4.json")
    restart = StudyScenario(seed=1, at=20, strategy="checkpoint-restart")
    assert (restart.name, restart.path) == ("checkpoint-restart", "seed-1/step-20/checkpoint-restart.json")


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_few_workers_have_fewer_numbers_of_survivors(workers):
    study = plan_study(parse_job(JOB, [f"grid.pipelines={workers}"]))
    assert study.survivors
    assert all(0 < each < workers for each in study.survivors)


@pytest.mark.parametrize(
    ("overrides", "asked", "message"),
    [
        ((), {"strategies": ("hope",)}, "--strategies: there is no 'hope'; expected some of adaptive"),
        ((), {"progress": (50, 101)}, "--progress: expected 0 to 100 percent of the gradients, got 101"),
        ((), {"progress": (-1,)}, "got -1"),
        ((), {"survivors": (9,)}, "there are 8 workers .*, of which 9 cannot survive"),
        ((), {"survivors": (0,)}, "--survivors: adaptive needs survivors; expected 1 or more, got 0"),
        (
            (),
            {"survivors": (0,), "strategies": ("skip", "lossy-forward")},
            "--survivors: lossy-forward needs survivors",
        ),
        ((), {"survivors": ()}, "--survivors: .* expected at least one number"),
        ((), {"strategies": ()}, "--strategies: expected at least one"),
        ((), {"progress": ()}, "--progress: expected at least one"),
        ((), {"at": ()}, "--at: expected at least one"),
        ((), {"seeds": ()}, "--seeds: expected at least one"),
        (
            ("grid={layout: [{stages: [5], microbatches: 2}, {stages: [5], microbatches: 1}]}",),
            {},
            "grid.layout: .* the same number of micro-batches each; expected one, got 2, 1",
        ),
        ((), {"at": (300,)}, "--at: step 300 is beyond the end; with train.steps 300 steps are 0 to 299"),
        ((), {"at": (3, 3)}, "--at: expected each once, got 3,3"),
        (("grid.stages=2",), {}, "grid.stages: 16 workers in pipelines of 2 stages"),
        (
            ("grid.gpus_per_stage=2", "grid.microbatches=2", "grid.workers_per_node=2"),
            {},
            "expected pipelines of one stage, each one worker",
        ),
        (("grid.pipelines=1",), {}, "grid.pipelines: .* expected at least 2, got 1"),
        (("model={kind: script, path: a.py}", "data={kind: script}"), {}, "expected another kind than script"),
    ],
)
def test_what_cannot_be_compared_is_refused(overrides, asked, message):
    with pytest.raises(ConfigError, match=message):
        plan_study(parse_job(JOB, overrides), **asked)
