"""A job that says how many workers there are, and is told which pipelines these are to be."""

import pytest
import yaml

from holdfast.config.load import dump_job, load_job, parse_job
from holdfast.config.profiles import save_profile
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError
from holdfast.settings.planning import healthy_plan, profile_of

LAYERS = 8


@pytest.fixture
def tree(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(uniform_profile(LAYERS, forward_s=1, backward_input_s=1, backward_weight_s=1), path)
    return {
        "model": {"kind": "gpt", "layers": LAYERS - 2, "width": 8, "heads": 2, "context": 8},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"workers": 7, "global_microbatches": 16},
        "train": {"steps": 4, "profile": str(path)},
        "resilience": {"smallest_pipeline": 2},
    }


def test_so_many_workers_are_the_fastest_pipelines_of_any_number_each(tree):
    job = parse_job(tree)
    assert (job.num_workers, job.global_microbatches) == (7, 16)
    assert sorted(job.grid.depths) == [2, 2, 3], "as short as they may be"
    plan = healthy_plan(job, LAYERS, profile_of(job, LAYERS))
    assert len(plan.workers) == 7
    assert parse_job({**tree, "resilience": {"smallest_pipeline": 4}}).grid.depths == (7,)


def test_how_many_are_to_be_lost_leaves_more_pipelines(tree):
    job = parse_job({**tree, "resilience": {"smallest_pipeline": 1, "tolerate": 3}})
    assert len(job.grid.depths) >= 4


def test_the_file_that_a_run_leaves_says_which_they_are(tree):
    job = parse_job(tree)
    assert parse_job(yaml.safe_load(dump_job(job))) == job


@pytest.mark.parametrize(
    ("before", "total"),
    [
        ({"pipelines": 4, "stages": 2, "microbatches": 4}, 16),
        ({"layout": [{"stages": [8], "microbatches": 5}, {"stages": [4, 4], "microbatches": 7}]}, 12),
        ({"workers": 3, "global_microbatches": 9}, 9),
    ],
)
def test_told_for_once_it_keeps_the_batch_of_the_file(tree, before, total):
    job = parse_job({**tree, "grid": {**before, "microbatch_size": 2}}, ["grid.workers=5"])
    assert (job.num_workers, job.global_microbatches, job.grid.microbatch_size) == (5, total, 2)


@pytest.mark.parametrize(
    ("grid", "more", "told"),
    [
        ({"workers": 7}, {}, "Expected workers and global_microbatches; missing: global_microbatches"),
        ({"global_microbatches": 7}, {}, "Expected workers and global_microbatches; missing: workers"),
        ({"workers": 7, "global_microbatches": 9, "stages": 2}, {}, "got both: stages"),
        ({"workers": 7, "global_microbatches": 9, "gpus_per_stage": 2}, {}, "got both: gpus_per_stage"),
        ({}, {"train": {"steps": 4}}, "grid.workers: which pipelines are the fastest a profile of the layers tells"),
        ({}, {"resilience": {}}, "grid.workers: how short pipelines may be is a matter of memory"),
        ({"workers": 1, "global_microbatches": 9}, {}, "grid.workers: 1 nodes and 9 micro-batches do not make 1"),
        ({"workers": 11, "global_microbatches": 1}, {}, "grid.workers: "),
        (
            {"workers": 10**9, "global_microbatches": 9},
            {},
            "grid: 1000000000 workers with 9 micro-batches are more than",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_told(tree, grid, more, told):
    with pytest.raises(ConfigError) as caught:
        parse_job({**tree, **({"grid": grid} if grid else {}), **more})
    assert told.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_a_file_is_enough(tree, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert load_job(path, ["grid.workers=4"]).grid.depths == (2, 2)
