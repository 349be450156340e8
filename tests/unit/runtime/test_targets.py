"""A user's own model, data and optimizer: what is wrong with their names is told with the key."""

import pytest

from holdfast.config.load import parse_job
from holdfast.errors import ConfigError
from holdfast.runtime.engine import probing
from holdfast.runtime.engine.datasets import build_dataset
from holdfast.runtime.engine.foreign import load_target
from holdfast.runtime.engine.modules import build_model
from holdfast.runtime.engine.probing import probe
from holdfast.settings.planning import healthy_plan


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("math", "'math' is no target; expected package.module:name or path/to/file.py:name"),
        ("math:", "'math:' is no target; expected package.module:name or path/to/file.py:name"),
        (":sqrt", "':sqrt' is no target; expected package.module:name or path/to/file.py:name"),
        (
            "no_such_module:f",
            "'no_such_module:f' cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("math:no_such", "math has no function 'no_such'"),
        ("math:sqr", "math has no function 'sqr'; did you mean sqrt?"),
        ("math:pi", "math has no function 'pi'"),
        ("no/such.py:f", "no/such.py: No such file; expected one that holds a function to call"),
    ],
)
def test_a_target_that_cannot_be_loaded(target, complaint):
    with pytest.raises(ConfigError) as caught:
        load_target(target, "model.target")
    assert str(caught.value) == f"model.target: {complaint}"


@pytest.fixture
def module(tmp_path):
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_function_of_a_module_or_a_file(module):
    assert load_target("math:sqrt", "k")(4) == 2
    path = module("import threading\ncount = []\ndef f(): count.append(1); return len(count)\n")
    assert [load_target(f"{path}:f", "k")(), load_target(f"{path}:f", "k")()] == [1, 2], "imported once"


@pytest.mark.parametrize("text", ["def f(:\n", "x = undefined\n"], ids=["syntax", "name"])
def test_a_file_that_cannot_be_run_is_the_users(module, text):
    with pytest.raises(ConfigError, match=r"model\.target"):
        load_target(f"{module(text)}:f", "model.target")


def test_a_file_that_failed_fails_again(module):
    path = module("raise ValueError('mine')\ndef f(): pass\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="ValueError: mine"):
            load_target(f"{path}:f", "k")


def job(**overrides):
    tree = {
        "model": {"kind": "convnet", "width": 2},
        "data": {"kind": "digits"},
        "grid": {"pipelines": 1, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
    }
    return parse_job({**tree, **overrides})


def test_a_model_that_is_no_list_of_modules():
    with pytest.raises(ConfigError, match=r"model\.target: builtins:dict returned a dict; expected an ordered list"):
        build_model(job(model={"kind": "python", "target": "builtins:dict"}))


def test_a_dataset_without_items():
    with pytest.raises(
        ConfigError, match=r"data\.target: builtins:list returned a list of length 0; expected at least one item"
    ):
        build_dataset(job(data={"kind": "python", "target": "builtins:list"}))


def test_data_that_is_not_there():
    with pytest.raises(ConfigError, match=r"data\.path: 'no/such\*' names no file"):
        build_dataset(job(data={"kind": "text", "path": "no/such*", "context": 8}))


def test_a_step_has_no_more_samples_than_there_are(monkeypatch):
    monkeypatch.setattr(probing, "_try_items", None)  # none is read: that many may take minutes
    grid = {"pipelines": 1, "stages": 1, "microbatches": 2, "microbatch_size": 900}
    with pytest.raises(
        ConfigError, match=r"data: 1797 samples are fewer than a step has, 2 micro-batches of 900 \(grid"
    ):
        probe(job(grid=grid))


def test_samples_of_text_are_as_long_as_the_model_or_the_data_say():
    data = {"kind": "text", "path": __file__}
    with pytest.raises(
        ConfigError, match=r"data\.context: this model does not say how many bytes or tokens a sample has"
    ):
        build_dataset(job(data=data))
    assert build_dataset(job(data={**data, "context": 24}))[0][0].shape == (24,)
    model = {"kind": "gpt", "context": 16, "layers": 1, "width": 8, "heads": 2}
    assert build_dataset(job(data=data, model=model))[0][0].shape == (16,)


def test_an_unknown_optimizer_is_found_by_the_probe():
    with pytest.raises(ConfigError, match=r"optimizer\.kind: .*adamm"):
        probe(job(optimizer={"kind": "adamm"}))


@pytest.mark.parametrize(
    ("optimizer", "complaint"),
    [
        ({"kind": "adam", "amsgrad": True}, "Adam cannot be undone: amsgrad takes an element-wise maximum"),
        ({"kind": "{mine}:make"}, "Mine has no registered inverse"),
    ],
)
def test_undo_of_what_has_no_inverse_is_found_by_the_probe(module, optimizer, complaint):
    mine = module(
        "import torch\nclass Mine(torch.optim.SGD): pass\ndef make(parameters): return Mine(parameters, lr=0.1)\n"
    )
    optimizer = {**optimizer, "kind": optimizer["kind"].format(mine=mine)}
    with pytest.raises(ConfigError, match=rf"resilience\.commit: undo is impossible: {complaint}.*; use shadow"):
        probe(job(optimizer=optimizer, resilience={"commit": "undo"}))
    probe(job(optimizer=optimizer))


def test_undo_of_ones_own_optimizer_with_an_inverse(module):
    mine = module(
        "import torch\n"
        "from holdfast.optim.undo import Inverse, register_inverse, undo_sgd\n"
        "class Mine(torch.optim.SGD): pass\n"
        "register_inverse(Mine, Inverse(undo=undo_sgd))\n"
        "def make(parameters): return Mine(parameters, lr=0.1)\n"
    )
    probe(job(optimizer={"kind": f"{mine}:make"}, resilience={"commit": "undo"}))


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "lamb"])
def test_every_kind_can_be_undone(kind):
    probe(job(optimizer={"kind": kind}, resilience={"commit": "undo"}))


def test_more_stages_than_layers():
    layers = len(probe(job()).boundaries)
    with pytest.raises(ConfigError, match=rf"grid\.stages: {layers + 1} stages for a model of {layers} layers"):
        healthy_plan(job(grid={"pipelines": 1, "stages": layers + 1, "microbatches": 1}), layers)
