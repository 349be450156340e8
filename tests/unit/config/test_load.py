"""Whatever is wrong with a job file is told in one line that names the key and what would be right."""

import copy
import itertools
import re

import pytest
import yaml

from holdfast.config.load import dump_job, load_job, logs_need, num_layers, parse_job
from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError
from holdfast.strategies.registry import STRATEGIES

GRID = (
    "global_microbatches, gpus_per_stage, layout, microbatch_size, microbatches, pipelines, stages, workers, "
    "workers_per_node"
)
JOB = {
    "name": "small",
    "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 4},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 3, "stages": 4, "microbatches": 3},
    "train": {"steps": 4},
}


TEXT = {"kind": "text", "path": "stdlib"}


def with_value(path, value):
    tree = copy.deepcopy(JOB)
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
    node[last] = value
    return tree


def complaint(tree, *overrides):
    with pytest.raises(ConfigError) as caught:
        parse_job(tree, overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert "`$" not in text
    return text.removeprefix("job: ")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("grid.stagse", 2, "grid.stagse: unknown key; did you mean stages?"),
        ("gird", {}, "gird: unknown key; did you mean grid?"),
        ("checkpoint.every", "often", "checkpoint.every: expected one of a whole number, auto, got 'often'"),
        ("cluster.start_s", 0, "cluster.start_s: expected `float` > 0.0, got 0"),
        (
            "zzz",
            1,
            "zzz: unknown key; known: checkpoint, cluster, control, data, evaluate, grid, logging, model, name, "
            "optimizer, resilience, resume, track, train",
        ),
        (
            "model.hieght",
            1,
            "model.hieght: unknown key; known: checkpoint_activations, context, dropout, heads, kind, layers, width",
        ),
        ("data.quux", 1, "data.quux: unknown key; known: context, kind, path, tokenizer"),
        ("data.context", 1, "data.context: this model says it itself; expected model.context"),
        (
            "data.tokenizer",
            "/words",
            "data.tokenizer: this model is one of bytes; expected bytes, or another model",
        ),
        (
            "model",
            {"kind": "huggingface", "config": "bert", "task": "masked-lm"},
            "data.kind: text asks for the tokens that follow; expected kind python for model.task masked-lm",
        ),
        (
            "evaluate.quux",
            1,
            "evaluate.quux: unknown key; known: best, better, data, every, metrics, microbatches, patience",
        ),
        ("evaluate", {"every": 0, "data": TEXT}, "evaluate.every: expected `int` >= 1, got 0"),
        ("evaluate", {"every": 2}, "evaluate.data: is missing and has no default"),
        (
            "evaluate",
            {"every": 2, "data": {**TEXT, "context": 4}},
            "evaluate.data.context: this model says it itself; expected model.context",
        ),
        (
            "evaluate",
            {"every": 2, "data": {"kind": "texts"}},
            "evaluate.data.kind: expected one of text, digits, tinyimagenet, breast-cancer, nt3, python, script, got "
            "'texts'",
        ),
        (
            "evaluate",
            {"every": 2, "data": {"kind": "text", "path": "stdlib", "pth": 1}},
            "evaluate.data.pth: unknown key; did you mean path?",
        ),
        (
            "evaluate",
            {"every": 2, "data": TEXT, "best": "loss"},
            "evaluate.best: each evaluated state needs a checkpoint: expected checkpoint.every to divide 2",
        ),
        (
            "evaluate",
            {"every": 2, "data": TEXT, "patience": 3},
            "evaluate.patience: is for evaluations that are not the best: expected best, such as loss, or patience 0",
        ),
        (
            "evaluate",
            {"every": 2, "data": {"kind": "script"}},
            "evaluate: a script evaluates in its own loop: expected none",
        ),
        (
            "grid.kind",
            "x",
            f"grid.kind: unknown key; known: {GRID}",
        ),
        ("grid.stages", "four", "grid.stages: expected `int`, got 'four'"),
        ("grid.stages", 2.0, "grid.stages: expected `int`, got 2.0"),
        ("grid.stages", True, "grid.stages: expected `int`, got True"),
        ("grid.stages", None, "grid.stages: expected `int`, got None"),
        ("grid", [1], "grid: expected `object`, got [1]"),
        ("grid", None, "grid: expected `object`, got None"),
        ("grid.microbatches", 0, "grid.microbatches: expected `int` >= 1, got 0"),
        (
            "train.sum_chunks",
            2,
            "train.sum_chunks: 2 chunks, and a step has 9 micro-batches; expected a number that divides it",
        ),
        ("grid.pipelines", -1, "grid.pipelines: expected `int` >= 1, got -1"),
        ("train.steps", -1, "train.steps: expected `int` >= 0, got -1"),
        ("train.steps", 0, "train: expected steps to be 1 or more, or epochs"),
        ("train.epochs", 0, "train.epochs: expected `int` >= 1, got 0"),
        ("train.seed", -1, "train.seed: expected `int` >= 0, got -1"),
        (
            "train.loss_scale.initial",
            3,
            "train.loss_scale: expected initial to be a power of two from 1 to 2^64, got 3.0",
        ),
        (
            "train.loss_scale.initial",
            0.5,
            "train.loss_scale: expected initial to be a power of two from 1 to 2^64, got 0.5",
        ),
        ("train.loss_scale.growth_every", 0, "train.loss_scale.growth_every: expected `int` >= 1, got 0"),
        ("train.loss_scale.inital", 2, "train.loss_scale.inital: unknown key; did you mean initial?"),
        ("grid.stages", 5, "grid.stages: 5 stages for a model of 4 layers; at most 4"),
        ("model.heads", 5, "model.heads: must divide model.width (32)"),
        (
            "resilience.tolerate",
            3,
            "resilience.tolerate: 3 pipelines survive any 2 failures, not any 3; use more pipelines or tolerate less",
        ),
        ("resilience.tolerate", -1, "resilience.tolerate: expected `int` >= 0, got -1"),
        ("resilience.spares", -1, "resilience.spares: expected `int` >= 0, got -1"),
        ("resilience.spares", 10_001, "resilience.spares: expected `int` <= 10000, got 10001"),
        (
            "resilience.strategy",
            "hope",
            "resilience.strategy: expected one of auto, adaptive, templates, checkpoint-restart, checkfreq, snapshots, "
            "lossy-forward, rollback, skip, got 'hope'",
        ),
        (
            "resilience.strategy",
            "checkpoint-restart",
            "checkpoint.every: strategy checkpoint-restart goes back to checkpoints; expected more than 0, got 0",
        ),
        (
            "resilience.strategy",
            "snapshots",
            "resilience.snapshot_every: strategy snapshots goes back to snapshots; expected more than 0, got 0",
        ),
        (
            "resilience.snapshot_every",
            4,
            "resilience.snapshot_every: strategy auto takes no snapshots; expected 0, got 4",
        ),
        ("resilience.snapshot_every", -1, "resilience.snapshot_every: expected `int` >= 0, got -1"),
        ("resilience.commit", "redo", "resilience.commit: expected one of shadow, undo, got 'redo'"),
        ("optimizer.nesterov", True, "optimizer.nesterov: needs kind sgd, momentum above 0 and dampening 0"),
        (
            "optimizer",
            {"kind": "sgd", "momentum": 0.9, "dampening": 0.1, "nesterov": True},
            "optimizer.nesterov: needs kind sgd, momentum above 0 and dampening 0",
        ),
        (
            "optimizer",
            {"kind": "sgd", "dampening": 0.1},
            "optimizer.dampening: needs kind sgd and momentum above 0",
        ),
        ("optimizer.dampening", 1.0, "optimizer.dampening: expected `float` < 1.0, got 1.0"),
        ("optimizer", {"kind": "lamb", "amsgrad": True}, "optimizer.amsgrad: needs kind adam or adamw"),
        ("optimizer", {"kind": "mine:make", "amsgrad": True}, "optimizer.amsgrad: needs kind adam or adamw"),
        (
            "model.kind",
            "gtp",
            "model.kind: expected one of gpt, bert, convnet, vit, resnet, nt3, huggingface, python, script, got 'gtp'",
        ),
        (
            "data.kind",
            "texts",
            "data.kind: expected one of text, digits, tinyimagenet, breast-cancer, nt3, python, script, got 'texts'",
        ),
        ("train.numerics", "exakt", "train.numerics: expected one of exact, fast, got 'exakt'"),
        (
            "train.technique",
            "2f2b",
            "train.technique: expected one of auto, 1f1b, gpipe, decoupled, staggered, got '2f2b'",
        ),
        ("train.precision", "bf8", "train.precision: expected one of fp32, bf16, fp16, got 'bf8'"),
        (
            "train.precision",
            "fp16",
            "train: expected loss_scale with precision fp16, whose small gradients would be zero: {}",
        ),
        (
            "optimizer.schedule",
            "step",
            "optimizer.schedule: expected one of constant, cosine, linear, or package.module:name of a scheduler, got "
            "'step'",
        ),
        (
            "optimizer.schedule_arguments",
            {"step_size": 3},
            "optimizer.schedule_arguments: schedule constant takes none; expected none, or a scheduler of torch's",
        ),
        (
            "optimizer",
            {"kind": "mine.py:make", "schedule": "torch.optim.lr_scheduler:StepLR"},
            "optimizer.schedule: torch.optim.lr_scheduler:StepLR goes by a learning rate, and kind mine.py:make has "
            "its own; expected constant, cosine or linear, which are factors on that",
        ),
        ("optimizer.lr", 0, "optimizer.lr: expected `float` > 0.0, got 0"),
        ("optimizer.lr", float("nan"), "optimizer.lr: expected `float` > 0.0, got nan"),
        ("optimizer.betas", [0.9], "optimizer.betas: expected `array` of length 2, got 1, got [0.9]"),
        ("optimizer.betas", [0.9, 1.0], "optimizer.betas[1]: expected `float` < 1.0"),
        ("model.dropout", 1.0, "model.dropout: expected `float` < 1.0, got 1.0"),
        ("control.port", 65536, "control.port: expected `int` <= 65535, got 65536"),
        ("checkpoint.evry", 2, "checkpoint.evry: unknown key; did you mean every?"),
        ("checkpoint.every", -1, "checkpoint.every: expected `int` >= 0, got -1"),
        ("checkpoint.keep", 0, "checkpoint.keep: expected `int` >= 1, got 0"),
        ("checkpoint.url", "", "checkpoint.url: expected `str` of length >= 1, got ''"),
        ("name", "a b", "name: expected `str` matching regex '^[A-Za-z0-9._-]+$', got 'a b'"),
        ("name", 7, "name: expected `str`, got 7"),
    ],
)
def test_a_bad_value_is_named(path, value, text):
    assert complaint(with_value(path, value)) == text


MINE = "mine.py:make"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["optimizer.momentum=0.9"], "optimizer.momentum: counts for nothing with kind adamw; expected kind sgd"),
        (
            ["optimizer.kind=lamb", "optimizer.momentum=0.9"],
            "optimizer.momentum: counts for nothing with kind lamb; ex",
        ),
        (
            ["optimizer.kind=sgd", "optimizer.betas=[0.5, 0.9]"],
            "optimizer.betas: counts for nothing with kind sgd; expected kind adam or adamw or lamb",
        ),
        (
            ["optimizer.kind=sgd", "optimizer.eps=1e-6"],
            "optimizer.eps: counts for nothing with kind sgd; expected kind",
        ),
        (
            [f"optimizer.kind={MINE}", "optimizer.lr=0.1"],
            "optimizer.lr: counts for nothing with a function of yours, which is given parameters only; expected no",
        ),
        ([f"optimizer.kind={MINE}", "optimizer.weight_decay=0.1"], "optimizer.weight_decay: counts for nothing with a"),
        (
            [f"optimizer.kind={MINE}", "optimizer.momentum=0.1"],
            "optimizer.momentum: counts for nothing with a function",
        ),
        (
            [f"optimizer.kind={MINE}", "optimizer.betas=[0, 0]"],
            "optimizer.betas: counts for nothing with a function of",
        ),
        (
            ["checkpoint.keep=5"],
            "checkpoint.keep: no checkpoints are made; expected checkpoint.every with it (0: none)",
        ),
        (["checkpoint.url=s3://b/x"], "checkpoint.url: no checkpoints are made; expected checkpoint.every with it"),
        (["checkpoint.synchronous=true"], "checkpoint.synchronous: no checkpoints are made; expected"),
        (["checkpoint.on_sigterm=5"], "checkpoint.on_sigterm: no checkpoints are made; expected checkpoint.every"),
        (
            ["logging.helpers=1"],
            "logging.helpers: nothing is logged without checkpoints; expected checkpoint.every with",
        ),
        (
            ["resilience.step_log=false", "resilience.step_log_bytes=1000"],
            "resilience.step_log_bytes: nothing is kept of a step; expected resilience.step_log true with it",
        ),
        (["control.outside_s=60"], "control.outside_s: no script with a loop of its own is run; expected no such key"),
        (
            ["checkpoint.every=5", "logging.upload=always"],
            "logging.upload: there is no place to send logs to; expected logging.url with it",
        ),
    ],
)
def test_a_key_that_counts_for_nothing_is_refused(overrides, text):
    assert complaint(JOB, *overrides).startswith(text)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.kind=sgd", "optimizer.momentum=0.9"],
        ["optimizer.kind=lamb", "optimizer.betas=[0.5, 0.9]", "optimizer.eps=1e-6"],
        [f"optimizer.kind={MINE}", "optimizer.schedule=cosine", "optimizer.warmup_steps=2"],
        ["optimizer.schedule=torch.optim.lr_scheduler:StepLR", "optimizer.schedule_arguments={step_size: 3}"],
        ["checkpoint.keep=5", "checkpoint.every=0", "logging.helpers=1"],
        ["checkpoint.keep=5", "checkpoint.every=2"],
        ["checkpoint.url=s3://b/x", "resume=auto"],
    ],
)
def test_what_counts_is_taken_and_so_is_the_file_that_a_run_leaves(overrides, job_file):
    job = parse_job(JOB, overrides)
    assert load_job(job_file(dump_job(job))) == job


SCRIPT = {
    "name": "a",
    "model": {"kind": "script", "path": "a.py"},
    "data": {"kind": "script"},
    "grid": {"pipelines": 2, "stages": 1, "microbatches": 1},
    "train": {"steps": 1},
}


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_script_s_loop_has_a_strategy_by_which_nobody_goes_back(strategy):
    override = f"resilience.strategy={strategy}"
    if strategy in ("auto", "adaptive", "lossy-forward", "rollback", "skip"):
        assert parse_job(SCRIPT, [override]).loops
    else:
        assert complaint(SCRIPT, override).startswith("resilience.")


def test_a_script_s_loop_that_would_go_back_is_told_what_would_not():
    known = "auto, adaptive, lossy-forward, rollback, skip, got templates"
    told = complaint(SCRIPT, "resilience.strategy=templates")
    assert told == f"resilience.strategy: a script's loop never goes back; expected one of {known}"


@pytest.mark.parametrize("key", ["checkpoint.url", "logging.url", "resume"])
def test_what_looks_like_a_url_and_is_none_is_refused(key):
    found = complaint(JOB, f"{key}=s3//b/x", "checkpoint.every=5")
    assert found == f"{key}: s3//b/x: is no URL; expected s3://b/x, or ./s3//b/x for a folder"
    assert parse_job(JOB, [f"{key}=./s3//b/x", "checkpoint.every=5"])


@pytest.mark.parametrize("path", ["optimizer.lr", "control.heartbeat_s", "optimizer.weight_decay"])
def test_infinite_numbers_are_refused(path):
    assert complaint(with_value(path, float("inf"))).startswith(f"{path}: expected `float` <= ")


def test_how_long_it_is_trained_is_said_by_steps_or_by_epochs():
    assert complaint(JOB | {"train": {}}) == "train: expected steps to be 1 or more, or epochs"
    told = parse_job(JOB | {"train": {"epochs": 2}}).train
    assert (told.steps, told.epochs) == (0, 2)
    told = parse_job(JOB | {"train": {"epochs": 2, "steps": 9}}).train  # as a run's job.yaml has it
    assert (told.steps, told.epochs) == (9, 2)


@pytest.mark.parametrize("section", ["model", "data", "grid", "train"])
def test_a_missing_section_is_named(section):
    tree = copy.deepcopy(JOB)
    del tree[section]
    assert complaint(tree) == f"{section}: is missing and has no default"


@pytest.mark.parametrize("path", ["model.kind", "data.path"])
def test_a_missing_key_is_named(path):
    tree = copy.deepcopy(JOB)
    section, key = path.split(".")
    del tree[section][key]
    assert complaint(tree) == f"{path}: is missing and has no default"


LAYOUT = [{"stages": [1, 2, 1], "microbatches": 5}, {"stages": [2, 2], "microbatches": 3}]


def with_layout(**changes):
    tree = copy.deepcopy(JOB)
    tree["model"]["layers"] = 2  # and an embedding and a head
    tree["grid"] = {"layout": copy.deepcopy(LAYOUT), **changes}
    return tree


def test_pipelines_may_be_unlike():
    job = parse_job(with_layout())
    assert (job.grid.depths, job.grid.batch.counts, job.num_workers) == ((3, 2), (5, 3), 5)
    assert [job.has(WorkerId(p, s)) for p, s in ((0, 2), (1, 1), (1, 2), (2, 0))] == [True, True, False, False]


def test_a_layout_set_over_a_file_takes_the_place_of_what_it_stands_for():
    set_ = "grid.layout=[{stages: [1, 2, 1], microbatches: 5}, {stages: [2, 2], microbatches: 3}]"
    tree = copy.deepcopy(JOB)
    tree["model"]["layers"] = 2
    assert parse_job(tree, [set_]).grid == parse_job(with_layout()).grid
    assert parse_job(tree, ["grid.microbatch_size=7", set_]).grid.microbatch_size == 7


@pytest.mark.parametrize("nothing", ["", "[]", "null"])
def test_an_empty_layout_set_over_a_file_is_none(nothing):
    assert parse_job(JOB, [f"grid.layout={nothing}"]) == parse_job(JOB)
    alike = ["grid.pipelines=2", "grid.stages=2", "grid.microbatches=4"]
    assert parse_job(with_layout(), [f"grid.layout={nothing}", *alike]).grid.depths == (2, 2)


def test_part_of_a_grid_set_over_a_layout_says_what_to_do():
    assert "got stages and layout (an empty layout is none)" in complaint(with_layout(), "grid.stages=2")


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        ({"stages": 2}, "grid: expected either pipelines, stages and microbatches or layout, got stages and layout"),
        ({"layout": []}, "missing: pipelines, stages, microbatches"),
        ({"layout": [{"stages": [], "microbatches": 1}]}, "grid.layout[0].stages: expected `array` of length >= 1"),
        ({"layout": [{"stages": [4], "microbatches": 0}]}, "grid.layout[0].microbatches: expected `int` >= 1"),
        ({"layout": [{"stages": [4]}]}, "grid.layout[0].microbatches: is missing and has no default"),
        ({"layout": [{"stages": [4], "microbatches": 1, "x": 1}]}, "grid.layout[0].x: unknown key; known: "),
        ({"layout": [*LAYOUT, {"stages": [2, 3], "microbatches": 1}]}, "pipeline 2 have 5 layers together, 2 + 3; exp"),
        ({"layout": [{"stages": [4], "microbatches": 20_000_000}]}, "grid: 1 workers with 60000000 operations in a"),
        ({"layout": [{"stages": [10**13], "microbatches": 1}]}, "no model has 10000000000000 layers; expected at most"),
    ],
)
def test_a_bad_layout_is_named(grid, text):
    assert text in complaint(with_layout(**grid))


WIDE = [{"stages": [1, 2, 1], "microbatches": 5, "gpus": [1, 2, 1]}, {"stages": [4], "microbatches": 3}]


def test_a_stage_of_several_gpus_is_so_many_workers():
    job = parse_job(with_layout(layout=WIDE, workers_per_node=5))
    assert (job.lanes, job.sizes, job.num_workers) == (((1, 2, 1), (1,)), (4, 1), 5)
    assert (job.has(WorkerId(0, 3)), job.has(WorkerId(1, 1))) == (True, False)
    assert parse_job(yaml.safe_load(dump_job(job))) == job, "the file that a run leaves says it, too"


def test_all_stages_may_have_equally_many_gpus():
    job = parse_job(JOB, ["grid.gpus_per_stage=2", "grid.workers_per_node=2"])
    pipelines, stages = job.grid.pipelines, job.grid.stages
    assert job.lanes == ((2,) * stages,) * pipelines
    assert job.num_workers == 2 * pipelines * stages


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        ({"layout": [{**WIDE[0], "gpus": [1, 2]}]}, "expected gpus to be one number per stage, 3 of them, got 2"),
        ({"layout": [{**WIDE[0], "gpus": [1, 0, 1]}]}, "grid.layout[0].gpus[1]: expected `int` >= 1"),
        ({"layout": WIDE, "gpus_per_stage": 2}, "expected the gpus of each stage in layout, got gpus_per_stage and"),
        (
            {"layout": WIDE},
            "grid.workers_per_node: with 1 workers per node, stage 1 of pipeline 0, which has 2 GPUs, would lie on "
            "nodes 1 to 2; expected a number such that every stage is on one node, such as 3",
        ),
        ({"layout": WIDE, "workers_per_node": 2}, "would lie on nodes 0 to 1; expected a number such that"),
        ({"layout": [{**WIDE[0], "microbatches": 1}], "workers_per_node": 4}, "has 1 micro-batches for a stage of 2"),
    ],
)
def test_gpus_that_do_not_fit_are_named(grid, text):
    assert text in complaint(with_layout(**grid))


FAST = ("train.numerics=fast", "grid.gpus_per_stage=2", "grid.microbatch_size=4")


def test_with_fast_numerics_a_stage_of_several_gpus_is_one_worker():
    job = parse_job(with_layout(layout=WIDE, microbatch_size=2), ["train.numerics=fast"])
    assert (job.lanes, job.shards, job.num_workers) == (((1, 1, 1), (1,)), ((1, 2, 1), (1,)), 4)
    assert [job.gpus_of(WorkerId(*each)) for each in ((0, 0), (0, 1), (1, 0), (2, 0))] == [1, 2, 1, 1]
    wide = parse_job(JOB, [*FAST, "resilience.spares=1"])
    assert (wide.num_workers, wide.gpus_of(WorkerId(0, 0)), wide.gpus_of(wide.spares[0])) == (12, 2, 2)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("grid.microbatch_size=3", "which share the samples of each micro-batch; expected a multiple of 2, got 3"),
        ("resilience.commit=undo", "sharded over them; expected shadow"),
        ("optimizer.kind=lamb", "expected sgd, adam or adamw, which update each element by itself"),
    ],
)
def test_what_does_not_go_with_sharded_stages_is_named(override, text):
    found = complaint(JOB, *FAST, override)
    assert found.startswith(f"{override.partition('=')[0]}: with numerics fast a stage of several GPUs is sharded")
    assert text in found


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("resilience.strategy=templates", "expected adaptive, or equally many GPUs for each stage"),
        ("resilience.spares=1", "expected 0, or equally many GPUs for each stage"),
    ],
)
def test_workers_of_other_pipelines_and_spares_are_all_alike(override, text):
    found = complaint(with_layout(layout=WIDE, microbatch_size=2), "train.numerics=fast", override)
    assert found.startswith(f"{override.partition('=')[0]}: with numerics fast a stage of several GPUs is sharded")
    assert text in found
    assert parse_job(JOB, [*FAST, override])


def test_pipelines_of_templates_have_no_lanes():
    tree = with_layout(layout=WIDE, workers_per_node=5)
    assert "resilience.strategy: templates makes pipelines whose" in complaint(tree, "resilience.strategy=templates")


def test_each_lane_has_a_gpu():
    job = parse_job(with_layout(layout=WIDE, workers_per_node=5))
    workers = [WorkerId(pipeline, index) for pipeline, size in enumerate(job.sizes) for index in range(size)]
    assert (len(workers), {job.gpus_of(worker) for worker in (*workers, WorkerId(2, 0))}) == (5, {1})


def test_lanes_hold_layers_for_one_another():
    tree = with_layout(layout=[{**WIDE[0], "gpus": [2, 2, 3]}], workers_per_node=7)
    assert parse_job(tree, ["resilience.tolerate=1"]).resilience.tolerate == 1
    assert "survive any 1 failures, not any 2" in complaint(tree, "resilience.tolerate=2")


def test_what_ones_own_function_is_called_with_keeps_its_type(tmp_path):
    """YAML has days, times and bytes, too: the job file of a run gives them back as they were."""
    path = tmp_path / "job.yaml"
    arguments = "{day: 2001-01-01, time: 2001-01-01 10:00:00, key: !!binary aGk=, text: '2001-01-01'}"
    job = parse_job(JOB, [f"data={{kind: python, target: 'm.py:data', arguments: {arguments}}}"])
    path.write_text(dump_job(job))
    assert load_job(path) == job
    assert [type(value).__name__ for value in job.data.arguments.values()] == ["date", "datetime", "bytes", "str"]


def test_what_the_grid_lacks_is_named():
    tree = copy.deepcopy(JOB)
    del tree["grid"]["microbatches"]
    expected = "grid: expected pipelines, stages and microbatches, or layout instead; missing: microbatches"
    assert complaint(tree).startswith(expected)


def test_keys_that_are_no_text():
    assert complaint({**JOB, 1: 2}) == "the job: every key must be text, quote those that are numbers"
    assert complaint(with_value("grid", {1: 2})) == "grid: every key must be text, quote those that are numbers"


@pytest.mark.parametrize("tree", [None, [], 3, "job"])
def test_a_job_is_keys_and_values(tree):
    assert complaint(tree).startswith("expected keys such as model, data, grid, train; got ")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("grid", "--set grid: expected KEY=VALUE, such as grid.stages=2"),
        ("=2", "--set =2: expected KEY=VALUE, such as grid.stages=2"),
        ("grid.stages.x=2", "--set grid.stages.x=2: stages is a value, it has no keys below it"),
        ("grid.stages=[", "--set grid.stages=[: '[' is not a YAML value"),
        ("grid.stages=", "grid.stages: expected `int`, got None"),
        ("grid.stages=two", "grid.stages: expected `int`, got 'two'"),
        (
            "grid..stages=2",
            f"grid.: unknown key; known: {GRID}",
        ),
        ("gird.stages=2", "gird: unknown key; did you mean grid?"),
        ("model=3", "model: expected `object`, got 3"),
    ],
)
def test_a_bad_override_is_named(override, text):
    assert complaint(copy.deepcopy(JOB), override) == text


def test_overrides_apply_in_order():
    job = parse_job(JOB, ["grid.stages=3", "grid.stages=2", "optimizer.lr=1e-3", "data.path=a=b", "optimizer.kind=sgd"])
    assert job.grid.stages == 2
    assert job.optimizer.lr == 1e-3
    assert job.data.path == "a=b"
    assert job.optimizer.kind == "sgd"


def test_overrides_leave_the_given_tree_alone():
    before = copy.deepcopy(JOB)
    parse_job(JOB, ["grid.stages=2", "optimizer.lr=1"])
    assert before == JOB


def test_an_override_can_replace_a_section():
    job = parse_job(JOB, ["model={kind: convnet, width: 8}", "data={kind: digits}"])
    assert type(job.model).__name__ == "ConvnetModel"
    assert num_layers(job) == 7


@pytest.fixture
def job_file(tmp_path):
    def write(text):
        path = tmp_path / "job.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_job_file_is_read(job_file):
    assert load_job(job_file(dump_job(parse_job(JOB)))) == parse_job(JOB)


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "+3e-4", "3.0e-4", "0.0003", "3.e-4", ".3e-3"])
def test_numbers_in_any_usual_form(job_file, text):
    path = job_file(dump_job(parse_job(JOB)))
    assert load_job(path, [f"optimizer.lr={text}"]).optimizer.lr == 3e-4
    written = path.read_text().replace("lr: 0.0003", f"lr: {text}")
    assert f"lr: {text}\n" in written
    assert load_job(job_file(written)).optimizer.lr == 3e-4


def test_a_quoted_number_is_text(job_file):
    job = load_job(job_file(dump_job(parse_job(JOB))), ['name="1e5"'])
    assert job.name == "1e5"
    assert load_job(job_file(dump_job(job))) == job


BOMB = "".join(f"\n{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise("bcdefghi"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "is not YAML: "),
        ("a: b: c", "is not YAML: "),
        ("a: !!python/name:os.system x", "is not YAML: "),
        ("\0", "is not YAML: "),
        (b"\xff\xfe\x00", "is not text; expected a job file in YAML"),
        ("", "expected keys such as model, data, grid, train; got NoneType"),
        ("- a", "expected keys such as model, data, grid, train; got list"),
        ("a: &a {b: *a}", "a value holds itself; expected plain values"),
        ("grid: &a {pipelines: *a}", "a value holds itself; expected plain values"),
        (
            "a: &a [x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]" + BOMB,
            "with its aliases written out, it has more than",
        ),
        ("a: 2001-99-99", "is not YAML: month must be in 1..12"),
        ("a: " + "9" * 5000, "is not YAML: Exceeds the limit"),
        ("a: " + "[" * 5000, "is not YAML: is nested too deeply"),
        ("a: [" + "x," * 200_000, "expected at most 262144 characters"),
        ('name: "a\\0b"', "'a\\x00b': no text may have the character '\\x00'"),
    ],
)
def test_a_bad_file_is_named(job_file, text, complaint):
    path = job_file(text)
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert str(caught.value).startswith(f"{path}: {complaint}")
    assert "\n" not in str(caught.value)


def test_no_file_and_a_folder(tmp_path):
    for path, why in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as caught:
            load_job(path)
        assert str(caught.value) == f"{path}: {why}; expected a job file in YAML"


def test_sizes_of_a_step():
    job = parse_job(JOB, ["grid.microbatch_size=5"])
    assert (job.global_microbatches, job.samples_per_step, num_layers(job)) == (9, 45, 4)


RESTART = ("resilience.strategy=checkfreq", "checkpoint.every=2")


def test_who_waits_for_new_workers_needs_a_limit():
    text = (
        "resilience.wait_for_replacement: strategy checkfreq waits for new workers; expected the most seconds to wait, "
        "more than 0, got 0"
    )
    assert complaint(copy.deepcopy(JOB), *RESTART) == text


def test_checkfreq_does_not_stand_still():
    text = "checkpoint.synchronous: strategy checkfreq writes while training goes on; expected false, got true"
    wait = "resilience.wait_for_replacement=9"
    assert complaint(copy.deepcopy(JOB), *RESTART, wait, "checkpoint.synchronous=true") == text
    job = parse_job(copy.deepcopy(JOB), (*RESTART, wait))
    assert (job.resilience.strategy, job.checkpoint.synchronous) == ("checkfreq", False)


def test_snapshots_need_no_checkpoint_and_no_waiting():
    job = parse_job(copy.deepcopy(JOB), ("resilience.strategy=snapshots", "resilience.snapshot_every=5"))
    assert (job.resilience.snapshot_every, job.checkpoint.every, job.resilience.wait_for_replacement) == (5, 0, 0)


def test_who_goes_back_to_checkpoints_takes_no_snapshots():
    text = "resilience.snapshot_every: strategy checkfreq takes no snapshots; expected 0, got 3"
    wait = ("resilience.wait_for_replacement=9", "resilience.snapshot_every=3")
    assert complaint(copy.deepcopy(JOB), *RESTART, *wait) == text


def test_a_loss_is_scaled_only_where_the_job_says_so():
    assert parse_job(JOB).train.loss_scale is None
    chosen = parse_job(JOB, ["train.loss_scale={}", "train.loss_scale.initial=1024"]).train.loss_scale
    assert (chosen.initial, chosen.growth_every) == (1024.0, 2000)


def test_heartbeats_must_come_often_enough_to_tell_who_hangs():
    told = complaint(JOB | {"control": {"heartbeat_s": 1.5, "hang_s": 4}})
    assert told.startswith("control.hang_s: 4 s without a sign of life say nothing where workers give one every 1.5 s")
    assert parse_job(JOB | {"control": {"heartbeat_s": 1.5, "hang_s": 4.5}}).control.hang_s == 4.5


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "node-7.example.org", ""])
def test_an_address_that_others_reach_must_be_meant(host):
    control = {"host": host}
    with pytest.raises(ConfigError, match=r"control\.host: .* expected control\.tls .*, or control\.insecure: true"):
        parse_job(JOB | {"control": control})
    assert parse_job(JOB | {"control": control | {"insecure": True}}).control.host == host
    tls = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
    assert parse_job(JOB | {"control": control | {"tls": tls}}).control.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST"])
def test_an_address_of_the_machines_own_needs_nothing(host):
    assert not parse_job(JOB | {"control": {"host": host}}).control.insecure


def test_bodies_are_not_carried_in_the_clear_beside_sealed_links():
    tls = {"cert": "c.pem", "key": "k.pem", "ca": "a.pem"}
    assert parse_job(JOB | {"control": {"carrier": "gloo"}}).control.carrier == "gloo"
    with pytest.raises(
        ConfigError, match=r"control\.carrier: gloo carries bodies in the clear, .* expected links with"
    ):
        parse_job(JOB | {"control": {"carrier": "gloo", "tls": tls}})


def test_checkfreq_sets_its_own_interval_unless_one_is_given():
    waits = ("resilience.strategy=checkfreq", "resilience.wait_for_replacement=60")
    own, given, none = (parse_job(JOB, overrides) for overrides in (waits, (*waits, "checkpoint.every=7"), ()))
    assert (own.sets_interval, given.sets_interval, none.sets_interval) == (True, False, False)
    assert (own.checkpoint_every, given.checkpoint_every, none.checkpoint_every) == (10, 7, 0)
    young = parse_job(with_value("checkpoint.every", "auto"))
    assert (young.checkpoint_every, young.sets_interval, young.follows_failures) == (10, True, True)
    assert not own.follows_failures


def test_spares_are_named_as_one_more_pipeline_would_be():
    spares = parse_job(JOB, ["resilience.spares=2"]).spares
    assert spares == (WorkerId(3, 0), WorkerId(3, 1))
    assert parse_job(JOB).spares == ()


@pytest.mark.parametrize("groups", [[[0, 1], [1]], [[0, 99]]])
def test_nodes_that_are_replayed_together_are_there_and_in_one_group(groups):
    found = complaint(JOB, "checkpoint.every=2", f"logging.groups={groups}")
    assert "logging.groups" in found
    assert "each in one group at most" in found


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_words_that_yaml_takes_for_true_and_false_are_words_where_words_are_expected(job_file, word):
    path = job_file(f"{yaml.safe_dump(JOB)}checkpoint: {{every: 2}}\nlogging: {{use: {word}}}\n")
    assert load_job(path).logging.use == word
    assert load_job(path, (f"logging.use={word}",)).logging.use == word


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ((), "checkpoint.every: more than 0: layers are replayed from a checkpoint"),
        (("checkpoint.every=2", "grid.gpus_per_stage=2", "grid.workers_per_node=2"), "grid: stages of one GPU"),
        (("checkpoint.every=2", "resilience.strategy=templates"), "resilience.strategy: auto or adaptive"),
    ],
)
def test_what_logs_need_is_named(overrides, needed):
    assert logs_need(parse_job(JOB, overrides)) == needed
    assert complaint(JOB, *overrides, "logging.use=on") == f"logging.use: on needs {needed}"
    assert logs_need(parse_job(JOB, ("checkpoint.every=2", "logging.use=on"))) == ""


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "cuda:0 ", "", "cpu:x", "auto:x", "own.py:", "own.py:1"]
)
def test_what_is_no_device_is_refused(device):
    found = complaint(JOB | {"train": {"steps": 3, "device": device}})
    wanted = "auto, cpu, cuda, cuda:N such as cuda:0, or path/to/file.py:name"
    assert found == f"train: expected device to be {wanted}, got {device!r}"


def test_devices_that_can_be_asked_for():
    for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:12", "own.py:Own", "package.module:make"):
        assert parse_job(JOB | {"train": {"steps": 3, "device": device}}).train.device == device
    assert parse_job(JOB).train.device == "cpu"


def test_stages_that_are_sharded_compute_on_cpus():
    sharded = JOB | {"train": {"steps": 3, "numerics": "fast", "device": "cuda"}}
    found = complaint(sharded, "grid.gpus_per_stage=2", "grid.microbatch_size=2")
    assert found.startswith("train.device: with numerics fast a stage of several GPUs"), found


@pytest.mark.parametrize(
    ("train", "resilience", "told"),
    [
        ({"numerics": "fast"}, {}, "expected numerics to be exact with audit_every 10, got fast"),
        ({}, {"commit": "undo"}, "train.audit_every: 10, .* expected commit shadow, or audit_every 0"),
    ],
)
def test_what_is_not_the_same_bits_on_all_owners_cannot_be_audited(train, resilience, told):
    found = complaint(JOB | {"train": {"steps": 3, "audit_every": 10, **train}, "resilience": resilience})
    assert re.search(told, found, re.IGNORECASE), found
    assert parse_job(JOB | {"train": {"steps": 3, "audit_every": 10}}).train.audit_every == 10
    assert parse_job(JOB | {"train": {"steps": 3, **train}, "resilience": resilience}).train.audit_every == 0
