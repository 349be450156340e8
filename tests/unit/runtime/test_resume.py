"""Which checkpoint a job goes on from, and which it refuses."""

import copy

import msgspec
import pytest

from holdfast.config.load import dump_job, parse_job
from holdfast.errors import ConfigError
from holdfast.runtime.processes import Found, ResumeFrom
from holdfast.runtime.resume import checkpoints_url, differences, find, parse_resume
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints, Facts, Rejected

JOB = {
    "model": {"kind": "gpt", "layers": 1, "width": 8, "heads": 2},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 1, "stages": 1, "microbatches": 2},
    "train": {"steps": 20},
    "checkpoint": {"every": 4},
}
FACTS = Facts(
    job="job",
    holdfast="0",
    seed=0,
    layers=2,
    microbatches=2,
    microbatch_size=1,
    optimizer="adamw",
    model="m",
    data="d",
)


def job(**sections):
    return parse_job({**copy.deepcopy(JOB), **sections})


def make(folder, *steps, facts=FACTS):
    checkpoints = Checkpoints(LocalStore(folder), keep=9)
    for step in steps:
        shards = [checkpoints.write_shard(step, layer, b"%d" % layer) for layer in range(2)]
        checkpoints.commit(step, shards, facts)


def find_in(folder, step=None, *, of=None, url=None):
    resume = ResumeFrom(url=str(folder), step=step)
    return find(of or job(), resume, url or str(folder.parent / "new"), FACTS)


def test_the_newest_is_found_or_the_one_named(tmp_path):
    make(tmp_path / "a", 4, 8)
    assert find_in(tmp_path / "a") == Found(step=8, rejected=())
    assert find_in(tmp_path / "a", 4) == Found(step=4, rejected=())


def test_without_resume_there_is_nothing_to_find(tmp_path):
    assert find(job(), None, str(tmp_path), FACTS) is None


def test_a_damaged_one_is_told_and_the_one_before_is_taken(tmp_path):
    make(tmp_path / "a", 4, 8)
    next((tmp_path / "a" / "step-00000008").glob("layer-0001*")).unlink()
    found = find_in(tmp_path / "a")
    assert found.step == 4
    (rejected,) = found.rejected
    assert rejected.step == 8
    assert isinstance(rejected, Rejected)
    with pytest.raises(ConfigError, match=r"--resume .*a@8: .*layer-0001.* does not exist"):
        find_in(tmp_path / "a", 8)


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match=r"--resume .*: .* holds no checkpoint"):
        find_in(tmp_path / "a")
    with pytest.raises(ConfigError, match="ftp://x: unknown scheme ftp"):
        find(job(), ResumeFrom(url="ftp://x", step=None), "", FACTS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seed": 7}, "train.seed: expected 7, as in the checkpoint, got 0"),
        ({"layers": 3}, "the number of the model's layers: expected 3, as in the checkpoint, got 2"),
        ({"microbatches": 9}, "grid.pipelines x grid.microbatches: expected 9, as in the checkpoint, got 2"),
        ({"microbatch_size": 9}, "grid.microbatch_size: expected 9, as in the checkpoint, got 1"),
        ({"optimizer": "sgd"}, "optimizer.kind: expected sgd, as in the checkpoint, got adamw"),
        ({"model": "x"}, "model: other names, shapes or types of parameters than the checkpoint's"),
        ({"data": "x"}, "data: other samples than the checkpoint's"),
    ],
)
def test_a_foreign_checkpoint_is_refused_with_the_key(tmp_path, change, complaint):
    facts = msgspec.structs.replace(FACTS, **change)
    (text,) = differences(facts, FACTS)
    assert text.startswith(complaint)
    if facts.layers == 2:
        make(tmp_path / "a", 4, facts=facts)
        with pytest.raises(ConfigError, match="not a checkpoint of this job") as caught:
            find_in(tmp_path / "a")
        assert complaint in str(caught.value)


def test_all_differences_are_named_at_once():
    facts = msgspec.structs.replace(FACTS, seed=7, model="x")
    assert len(differences(facts, FACTS)) == 2


@pytest.mark.parametrize("change", [{"job": "other"}, {"holdfast": "9"}])
def test_another_name_or_version_is_no_difference(change):
    assert differences(msgspec.structs.replace(FACTS, **change), FACTS) == ()


@pytest.mark.parametrize("steps", [8, 7])
def test_nothing_left_to_do(tmp_path, steps):
    make(tmp_path / "a", 8)
    with pytest.raises(ConfigError, match=r"train\.steps: the checkpoint is of step 8, nothing is left to do"):
        find_in(tmp_path / "a", of=job(train={"steps": steps}))


def test_later_checkpoints_are_never_overwritten(tmp_path):
    folder = tmp_path / "a"
    make(folder, 4, 8)
    with pytest.raises(ConfigError, match=r"checkpoint\.url: .* holds checkpoints of step 4, 8 already"):
        find(job(), None, str(folder), FACTS)
    with pytest.raises(ConfigError, match=r"checkpoint\.url: .* holds checkpoints of step 8 already"):
        find_in(folder, 4, url=str(folder))
    assert find_in(folder, url=str(folder)).step == 8
    assert find(job(checkpoint={"every": 0}), None, str(folder), FACTS) is None


def test_unsound_later_ones_may_be_overwritten(tmp_path):
    folder = tmp_path / "a"
    make(folder, 4, 8)
    (folder / "step-00000008" / "manifest.json").write_text("torn")
    assert find_in(folder, url=str(folder)).step == 4


@pytest.mark.parametrize(
    ("text", "url", "step"),
    [
        ("runs/a", "runs/a", None),
        ("runs/a@25", "runs/a", 25),
        ("s3://bucket/x@0", "s3://bucket/x", 0),
        ("s3://user@bucket/x", "s3://user@bucket/x", None),
        ("a@b@7", "a@b", 7),
        ("a@-1", "a@-1", None),
        ("a@٣", "a@٣", None),
    ],
)
def test_resume_is_a_place_and_perhaps_a_step(text, url, step):
    assert parse_resume(text) == ResumeFrom(url=url, step=step)
    assert str(parse_resume(text)) == text


@pytest.mark.parametrize("url", [None, "s3://bucket/x"])
def test_a_run_directory_stands_for_its_checkpoints(tmp_path, url):
    of = job(checkpoint={"every": 1, "url": url})
    (tmp_path / "job.yaml").write_text(dump_job(of))
    expected = url or str(tmp_path / "checkpoints")
    assert checkpoints_url(of, tmp_path) == expected
    assert parse_resume(f"{tmp_path}@5") == ResumeFrom(url=expected, step=5)
