"""Which checkpoint a job goes on from, and which it refuses."""

import copy

import msgspec
import pytest

from holdfast.config.deciding import deciding
from holdfast.config.load import dump_job, parse_job
from holdfast.errors import ConfigError
from holdfast.runtime.main.worker import _ASK_AGAIN_S, _restore
from holdfast.runtime.resume import (
    check_accepted,
    check_same_job,
    checkpoints_url,
    compared,
    find,
    jobs_before,
    parse_resume,
    resume_auto,
)
from holdfast.runtime.rundir import RunDirLock
from holdfast.runtime.specs import Found, ResumeFrom
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


def find_in(folder, step=None, *, of=None, url=None, facts=None, accept=()):
    resume = ResumeFrom(url=str(folder), step=step)
    return find(of or job(), resume, url or str(folder.parent / "new"), facts or FACTS, accept)


def test_the_newest_is_found_or_the_one_named(tmp_path):
    make(tmp_path / "a", 4, 8, facts=facts_of(job()))
    url = str(tmp_path / "a")
    assert find_in(tmp_path / "a") == Found(url=url, step=8, rejected=())
    assert find_in(tmp_path / "a", 4) == Found(url=url, step=4, rejected=())


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


def refusal(folder, *, of=None, facts=FACTS, accept=()):
    with pytest.raises(ConfigError, match="not a checkpoint of this job") as caught:
        find_in(folder, of=of, facts=facts, accept=accept)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seed": 7}, "train.seed: expected 7, as in the checkpoint, got 0"),
        ({"microbatches": 9}, "grid.pipelines x grid.microbatches: expected 9, as in the checkpoint, got 2"),
        ({"microbatch_size": 9}, "grid.microbatch_size: expected 9, as in the checkpoint, got 1"),
        ({"optimizer": "sgd"}, "optimizer.kind: expected sgd, as in the checkpoint, got adamw"),
        ({"model": "x"}, "model: other names, shapes or types of parameters than the checkpoint's"),
        ({"data": "x"}, "data: other samples than the checkpoint's"),
    ],
)
def test_a_checkpoint_that_tells_little_is_compared_as_far_as_it_goes(tmp_path, change, complaint):
    make(tmp_path / "a", 4, facts=msgspec.structs.replace(FACTS, **change))
    assert complaint in refusal(tmp_path / "a")


def test_what_such_a_checkpoint_does_not_tell_is_said(tmp_path):
    make(tmp_path / "a", 4)
    (note,) = find_in(tmp_path / "a", of=job(optimizer={"betas": [0.5, 0.5]}), facts=facts_of(job())).notes
    assert note.startswith("the checkpoint is of a Holdfast (0) that noted no arguments of model and optimizer")


CHANGES = {
    "model.heads": ({"model": {**JOB["model"], "heads": 4}}, "expected 2, as in the checkpoint, got 4"),
    "model.dropout": ({"model": {**JOB["model"], "dropout": 0.2}}, "expected 0.1, as in the checkpoint, got 0.2"),
    "optimizer.lr": ({"optimizer": {"lr": 1.0}}, "expected 0.0003, as in the checkpoint, got 1.0"),
    "optimizer.betas": (
        {"optimizer": {"betas": [0.9, 0.5]}},
        "expected [0.9,0.999], as in the checkpoint, got [0.9,0.5]",
    ),
    "optimizer.eps": ({"optimizer": {"eps": 0.1}}, "expected 1e-8, as in the checkpoint, got 0.1"),
    "optimizer.weight_decay": ({"optimizer": {"weight_decay": 0.1}}, "expected 0.0, as in the checkpoint, got 0.1"),
    "optimizer.momentum": (
        {"optimizer": {"kind": "sgd", "momentum": 0.9}},
        "expected 0.0, as in the checkpoint, got 0.9",
    ),
    "optimizer.amsgrad": ({"optimizer": {"amsgrad": True}}, "expected false, as in the checkpoint, got true"),
    "optimizer.warmup_steps": ({"optimizer": {"warmup_steps": 3}}, "expected 0, as in the checkpoint, got 3"),
    "train.clip_norm": ({"train": {"steps": 20, "clip_norm": 1.0}}, "expected null, as in the checkpoint, got 1.0"),
    "train.numerics": ({"train": {"steps": 20, "numerics": "fast"}}, "expected exact, as in the checkpoint, got fast"),
    "train.seed": ({"train": {"steps": 20, "seed": 7}}, "expected 0, as in the checkpoint, got 7"),
    "train.loss_scale": (
        {"train": {"steps": 20, "loss_scale": {"initial": 2.0}}},
        'expected null, as in the checkpoint, got {"growth_every":2000,"initial":2.0}',
    ),
    "grid.microbatch_size": (
        {"grid": {**JOB["grid"], "microbatch_size": 3}},
        "expected 1, as in the checkpoint, got 3",
    ),
}


def facts_of(of):
    return msgspec.structs.replace(FACTS, values=deciding(of))


@pytest.mark.parametrize("key", CHANGES)
def test_whatever_decides_bits_is_compared_and_can_be_accepted(tmp_path, key):
    change, complaint = CHANGES[key]
    of = job(**change)
    make(tmp_path / "a", 4, facts=facts_of(job(optimizer={"kind": of.optimizer.kind})))
    told = refusal(tmp_path / "a", of=of, facts=facts_of(of))
    assert told.endswith(
        f": not a checkpoint of this job: {key}: {complaint}; to go on all the same, with other bits than the run that "
        f"was begun: --accept {key}"
    )
    for accept in (key, key.partition(".")[0]):
        found = find_in(tmp_path / "a", of=of, facts=facts_of(of), accept=(accept,))
        assert found.notes == (f"{key}: {complaint}: accepted",)
    assert key in refusal(tmp_path / "a", of=of, facts=facts_of(of), accept=("optimizer.kind", key[:-1]))


def test_all_differences_are_named_at_once_and_what_was_accepted_is_not(tmp_path):
    make(tmp_path / "a", 4, facts=facts_of(job()))
    of = job(optimizer={"betas": [0.9, 0.5], "eps": 0.1}, model={**JOB["model"], "heads": 4})
    told = refusal(tmp_path / "a", of=of, facts=facts_of(of), accept=("optimizer.eps",))
    assert "model.heads: expected 2" in told
    assert "optimizer.betas: expected" in told
    assert "optimizer.eps" not in told
    assert told.endswith("--accept model.heads,optimizer.betas")
    assert "\n" not in told


def test_long_values_are_shown_where_they_part_and_what_to_do_is_never_cut_off(tmp_path):
    """Eight arguments of 400 numbers each."""
    own = {"kind": "python", "target": "a:b"}
    lists = {f"widths{index}": list(range(400)) for index in range(8)}
    before, of = (
        job(model={**own, "arguments": each}) for each in (lists, {n: [*v[:-1], 7] for n, v in lists.items()})
    )
    make(tmp_path / "a", 4, facts=facts_of(before))
    told = refusal(tmp_path / "a", of=of, facts=facts_of(of))
    assert "397,398,399], as in the checkpoint, got ..." in told
    assert "397,398,7]" in told
    assert "; and " in told
    assert told.endswith("--accept " + ",".join(f"model.arguments.{name}" for name in lists))


def test_the_global_batch_is_accepted_by_any_key_that_makes_it(tmp_path):
    make(tmp_path / "a", 4, facts=facts_of(job()))
    of = job(grid={**JOB["grid"], "microbatches": 3})
    complaint = "grid.pipelines x grid.microbatches: expected 2, as in the checkpoint, got 3"
    told = refusal(tmp_path / "a", of=of, facts=facts_of(of))
    assert complaint in told
    assert told.endswith("--accept grid.microbatches")
    for accept in ("grid.microbatches", "grid.pipelines", "grid"):
        assert find_in(tmp_path / "a", of=of, facts=facts_of(of), accept=(accept,)).notes == (f"{complaint}: accepted",)


def test_another_model_is_never_accepted(tmp_path):
    make(tmp_path / "a", 4, facts=msgspec.structs.replace(facts_of(job()), model="x"))
    told = refusal(tmp_path / "a", facts=facts_of(job()), accept=("model", "train", "grid", "optimizer", "data"))
    assert "other names, shapes or types of parameters" in told
    assert "--accept" not in told
    wider = msgspec.structs.replace(facts_of(job()), layers=3)
    (text,) = compared(wider, facts_of(job()), job()).foreign
    assert text == "the number of the model's layers: expected 3, got 2"


def test_other_data_are_refused_though_three_samples_agree(tmp_path):
    make(tmp_path / "a", 4, facts=msgspec.structs.replace(facts_of(job()), contents="x"))
    here = msgspec.structs.replace(facts_of(job()), contents="y")
    assert "data: other samples than the checkpoint's" in refusal(tmp_path / "a", facts=here)
    assert find_in(tmp_path / "a", facts=here, accept=("data",)).notes


def test_changed_code_is_said_and_not_refused(tmp_path):
    make(tmp_path / "a", 4, facts=msgspec.structs.replace(facts_of(job()), sources={"model.target": "x"}))
    here = msgspec.structs.replace(facts_of(job()), sources={"model.target": "y"})
    (note,) = find_in(tmp_path / "a", facts=here).notes
    assert note == "model.target: the code in its file has changed since the checkpoint was made"


SCRIPT = {"optimizer.kind": "AdamW", "optimizer.lr": 0.1, "optimizer.eps": 1e-8, "data.length": 9}


def of_script(**changes):
    told = {key: value for key, value in {**SCRIPT, **changes}.items() if value is not None}
    return msgspec.structs.replace(facts_of(job()), script=told, first="bits")


@pytest.mark.parametrize(
    ("changes", "complaint", "accept"),
    [
        ({"optimizer.lr": 0.2}, "optimizer.lr: expected 0.1, as in the checkpoint, got 0.2", "optimizer.lr"),
        ({"optimizer.kind": "SGD", "optimizer.eps": None}, "optimizer.kind: expected AdamW", "optimizer.kind"),
        ({"optimizer.eps": None}, "optimizer.eps: expected 1e-8, as in the checkpoint, got nothing", "optimizer"),
        (
            {"scheduler.kind": "StepLR"},
            "scheduler.kind: expected nothing, as in the checkpoint, got StepLR",
            "scheduler",
        ),
        ({"data.length": 8}, "data.length: expected 9, as in the checkpoint, got 8", "data"),
    ],
)
def test_what_a_script_says_of_itself_is_compared_and_can_be_accepted(tmp_path, changes, complaint, accept):
    make(tmp_path / "a", 4, facts=of_script())
    here = msgspec.structs.replace(of_script(**changes), first="other bits, as of a model that was saved meanwhile")
    told = refusal(tmp_path / "a", facts=here)
    assert complaint in told
    assert told.count("expected") == 1
    first, *others = find_in(tmp_path / "a", facts=here, accept=(accept,)).notes
    assert complaint in first
    assert first.endswith(": accepted")
    anew = [f"{key}: its state begins anew, and the weights go on" for key in changes if key.endswith(".kind")]
    assert others == anew


def test_a_script_of_a_version_that_told_nothing_of_it_is_compared_as_far_as_it_goes(tmp_path):
    old = msgspec.structs.replace(of_script(), script=None, first="", model="bits")
    make(tmp_path / "a", 4, facts=old)
    (note,) = find_in(tmp_path / "a", facts=of_script(**{"optimizer.lr": 0.2})).notes
    assert "noted no settings of a script's optimizers" in note
    other = msgspec.structs.replace(of_script(), first="other bits")
    assert "model: other names, shapes or types" in refusal(tmp_path / "a", facts=other)


def test_keys_of_a_script_are_known_to_the_script_only():
    sections = {"model": {"kind": "script", "path": "a.py"}, "data": {"kind": "script"}}
    script = job(**sections, grid={"pipelines": 2, "stages": 1, "microbatches": 1})
    check_accepted(script, ["optimizer.groups", "scheduler.gamma", "data.length", "optimizer.1.lr"])
    with pytest.raises(ConfigError, match="--accept control: no key"):
        check_accepted(script, ["control"])
    with pytest.raises(ConfigError, match=r"--accept optimizer\.groups: no key"):
        check_accepted(job(), ["optimizer.groups"])


def test_a_key_that_decides_nothing_is_not_accepted():
    check_accepted(job(), ["model.dropout", "optimizer", "grid.microbatches", "data", "train.steps"])
    with pytest.raises(ConfigError, match=r"--accept model\.dropuot: .*did you mean model\.dropout\?"):
        check_accepted(job(), ["model.dropuot"])
    with pytest.raises(ConfigError, match=r"--accept control\.port: no key that decides the bits"):
        check_accepted(job(), ["control.port"])


@pytest.mark.parametrize("change", [{"job": "other"}, {"holdfast": "9"}])
def test_another_name_or_version_is_no_difference(tmp_path, change):
    make(tmp_path / "a", 4, facts=msgspec.structs.replace(facts_of(job()), **change))
    assert find_in(tmp_path / "a", facts=facts_of(job())).notes == ()


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


# The same command again and again.


def auto(run_dir, of=None):
    return resume_auto(of or job(), run_dir, jobs_before(run_dir, pytest.fail))


def find_auto(run_dir, of=None, **options):
    of = of or job()
    return find(of, auto(run_dir, of), checkpoints_url(of, run_dir), facts_of(of), **options)


def attempt_of(run_dir, **sections):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "job.yaml").write_text(dump_job(job(**sections)))
    return run_dir


def test_auto_begins_where_nothing_is(tmp_path):
    assert find_auto(tmp_path / "run") is None
    assert str(auto(tmp_path / "run")) == "auto"
    assert find_auto(attempt_of(tmp_path / "run")) is None


def test_auto_takes_the_newest_of_all_places_of_all_attempts(tmp_path):
    run_dir = attempt_of(tmp_path / "run")
    make(run_dir / "checkpoints", 4, facts=facts_of(job()))
    RunDirLock(run_dir).set_aside()
    attempt_of(run_dir, checkpoint={"every": 4, "url": str(tmp_path / "b")})
    make(tmp_path / "b", 8, facts=facts_of(job()))
    moved = job(checkpoint={"every": 4, "url": str(tmp_path / "c")})
    assert auto(run_dir, moved) == ResumeFrom(
        url=str(tmp_path / "c"), step=None, auto=True, others=(str(tmp_path / "b"), str(run_dir / "checkpoints"))
    )
    assert find_auto(run_dir, moved) == Found(url=str(tmp_path / "b"), step=8, rejected=())
    next((tmp_path / "b" / "step-00000008").glob("layer-0001*")).unlink()
    found = find_auto(run_dir, moved)
    assert (found.url, found.step) == (str(run_dir / "checkpoints"), 4)
    assert [each.step for each in found.rejected] == [8]
    make(tmp_path / "c", 12, facts=facts_of(job()))
    assert find_auto(tmp_path / "elsewhere", moved).step == 12, "the run directory may be lost"


def test_auto_does_not_begin_anew_beside_checkpoints_that_cannot_be_read(tmp_path):
    run_dir = attempt_of(tmp_path / "run")
    make(run_dir / "checkpoints", 4, facts=facts_of(job()))
    (run_dir / "checkpoints" / "step-00000004" / "manifest.json").write_text("torn")
    with pytest.raises(ConfigError, match="--resume auto: no checkpoint is sound, delete them to begin anew: step 4: "):
        find_auto(run_dir)


def test_auto_ends_what_was_cut_off_after_the_last_step(tmp_path):
    make(tmp_path / "run" / "checkpoints", 20, facts=facts_of(job()))
    assert find_auto(tmp_path / "run").step == 20
    with pytest.raises(ConfigError, match=r"train\.steps: the checkpoint is of step 20, nothing is left to do"):
        find_auto(tmp_path / "run", job(train={"steps": 19}))


def test_a_run_directory_of_another_job_is_refused(tmp_path):
    check_same_job(job(), tmp_path / "run", (), ())
    run_dir = attempt_of(tmp_path / "run", optimizer={"lr": 0.5})
    with pytest.raises(ConfigError) as caught:
        check_same_job(job(), run_dir, jobs_before(run_dir, pytest.fail), ())
    assert str(caught.value) == (
        f"--run-dir {run_dir}: holds a run of another job: optimizer.lr: expected 0.5, as in the run before, got "
        "0.0003; to go on all the same, with other bits than the run that was begun: --accept optimizer.lr"
    )
    check_same_job(job(), run_dir, jobs_before(run_dir, pytest.fail), ("optimizer.lr",))


def test_an_attempt_whose_job_cannot_be_read_is_passed_over_and_told(tmp_path):
    """The disk was full, or a later Holdfast no longer knows a key: the same command goes on all the same."""
    run_dir = attempt_of(tmp_path / "run", checkpoint={"every": 4, "url": str(tmp_path / "b")})
    RunDirLock(run_dir).set_aside()
    (run_dir / "job.yaml").touch()
    RunDirLock(run_dir).set_aside()
    (run_dir / "job.yaml").write_text("bygone: 1\n" + dump_job(job()))
    told = []
    before = jobs_before(run_dir, told.append)
    assert before == (job(checkpoint={"every": 4, "url": str(tmp_path / "b")}),)
    assert [text.partition(": ")[0] for text in told] == [
        "an earlier attempt is passed over, its job cannot be read"
    ] * 2
    assert f"{run_dir}/job.yaml: bygone: unknown key" in told[0]
    assert f"{run_dir}/attempts/0002/job.yaml: expected keys such as model" in told[1]
    assert resume_auto(job(), run_dir, before).others == (str(tmp_path / "b"),)


# A worker that cannot read what was found sound a moment ago.


class Stage:
    """Two layers, as they are given."""

    def __init__(self):
        self.layers = {}

    def layer_steps(self):
        return {0: 0, 1: 0}

    def restore(self, layer, data):
        self.layers[layer] = data


def test_a_shard_that_cannot_be_read_at_the_start_is_asked_for_again(tmp_path):
    make(tmp_path / "a", 8)
    shard = next((tmp_path / "a" / "step-00000008").glob("layer-0001*"))
    shard.rename(tmp_path / "away")
    waited, stage = [], Stage()

    def pause(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            (tmp_path / "away").rename(shard)

    _restore(stage, ResumeFrom(url=str(tmp_path / "a"), step=8), pause)
    assert stage.layers == {0: b"0", 1: b"1"}
    assert waited == list(_ASK_AGAIN_S[:2])


@pytest.mark.parametrize(
    ("steps", "is_auto", "way_on"),
    [
        ((4, 6, 8), False, "go on from the one before: --resume {url}@6"),
        ((8,), False, "there is no older one"),
        ((4, 8), True, "the same command goes on, from the newest checkpoint that can be read then"),
    ],
)
def test_if_that_is_in_vain_it_is_said_how_to_go_on(tmp_path, steps, is_auto, way_on):
    url = str(tmp_path / "a")
    make(tmp_path / "a", *steps)
    next((tmp_path / "a" / "step-00000008").glob("layer-0001*")).unlink()
    with pytest.raises(ConfigError) as caught:
        _restore(Stage(), ResumeFrom(url=url, step=8, auto=is_auto), lambda seconds: None)
    told = str(caught.value)
    assert told.startswith(f"--resume {url}@8: {url}/step-00000008/layer-0001")
    assert told.endswith(f" (tried 4 times, after it was found sound); {way_on.format(url=url)}")
    if is_auto or len(steps) > 1:
        assert find_auto_or(url, is_auto).step == max(step for step in steps if step < 8), "and so it does"


def find_auto_or(url, is_auto):
    resume = ResumeFrom(url=url, step=None, auto=True) if is_auto else ResumeFrom(url=url, step=6)
    return find(job(), resume, url + "-new", FACTS)
