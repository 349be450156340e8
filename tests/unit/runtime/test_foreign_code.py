"""Models, data, losses and optimizers that were not written for us: they work, or one line says what would be right."""

# ruff: noqa: E501 - messages stand as people read them

from __future__ import annotations

import re
import sys
from functools import partial
from itertools import count

import msgspec
import pytest
import torch

from holdfast.config.load import parse_job
from holdfast.core.schedule import OpKind
from holdfast.errors import ConfigError
from holdfast.runtime.engine.build import build_stage
from holdfast.runtime.engine.datasets import build_dataset, microbatch_loader
from holdfast.runtime.engine.probing import probe
from holdfast.settings.planning import healthy_plan

GOOD = """
import random
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

def build():
    return [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)]

def data():
    return TensorDataset(torch.arange(60.0).reshape(20, 3) / 60, torch.arange(20) % 2)

def loss(output, target):
    return functional.cross_entropy(output, target)

class Rows(Dataset):
    def __init__(self, item, length=20):
        self.item, self.length = item, length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return self.item(index)

def row(index):
    return torch.full((3,), float(index)), torch.tensor(index % 2)
"""


@pytest.fixture(autouse=True)
def _as_it_was():
    """One thread, as the probe has; and no folder of a test stays on the import path."""
    threads, path = torch.get_num_threads(), list(sys.path)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.path[:] = path


@pytest.fixture
def job(tmp_path):
    """A job over a file that holds good functions, and what a test puts in their place."""

    numbers = count()

    def make(text="", *overrides, loss=True):
        folder = tmp_path / str(next(numbers))  # a file is imported once in a process
        folder.mkdir(exist_ok=True)
        file = folder / "mine.py"
        file.write_text(GOOD + text)
        model = {"kind": "python", "target": f"{file}:build", **({"loss": f"{file}:loss"} if loss else {})}
        tree = {
            "model": model,
            "data": {"kind": "python", "target": f"{file}:data"},
            "grid": {"pipelines": 1, "stages": 1, "microbatches": 1, "microbatch_size": 4},
            "train": {"steps": 2},
        }
        return parse_job(tree, [text.replace("{file}", str(file)) for text in overrides])

    return make


def complaint(job):
    with pytest.raises(ConfigError) as caught:
        probe(job)
    text = str(caught.value)
    assert "\n" not in text
    return re.sub(r"\S*/mine\.py", "mine.py", text)


MODELS = {
    "return nn.Linear(3, 2)": (
        "model.target: mine.py:build returned one module, a Linear; expected its layers in order, as a list in which each "
        "takes what the one before returned"
    ),
    "return nn.TransformerEncoderLayer(4, 2)": (
        "model.target: mine.py:build returned one module, a TransformerEncoderLayer; expected its layers in order, as a list in which "
        "each takes what the one before returned (its parts: self_attn, linear1, dropout, linear2, norm1, norm2, dropout1, dropout2)"
    ),
    "return []": "model.target: mine.py:build returned no layer; expected at least one",
    "return (layer for layer in ())": "model.target: mine.py:build returned no layer; expected at least one",
    "return None": "model.target: mine.py:build returned a NoneType; expected an ordered list of modules",
    "return {'a': nn.Linear(3, 2)}": "model.target: mine.py:build returned a dict; expected an ordered list of modules",
    "return 'layers'": "model.target: mine.py:build returned a str; expected an ordered list of modules",
    "yield nn.Linear(3, 2); raise ValueError('later\\non')": (
        "model.target: mine.py:build failed: ValueError: later on (mine.py, line 30)"
    ),
    "raise SystemExit('no weights')": "model.target: mine.py:build failed: SystemExit: no weights (mine.py, line 30)",
    "return [nn.Linear(3, 4), nn.ReLU]": "layer 1 is the class ReLU, expected a module: ReLU(...)",
    "return [functional.relu]": "layer 0 is a function, expected a torch.nn.Module",
    "return [nn.Linear(3, 4), nn.Bilinear(3, 4, 2)]": (
        "layer 1 (Bilinear) takes input1, input2; expected one tensor: whatever else it needs must be in that tensor, in a "
        "buffer or in the layer"
    ),
    "return [nn.LazyLinear(4)]": "layer 0 (LazyLinear): parameter weight has no values yet, expected all sizes in build",
    "return [nn.Linear(3, 2, device='meta')]": (
        "layer 0 (Linear): parameter weight has no values yet, expected all sizes in build"
    ),
    "return [nn.Linear(3, 4), nn.LSTM(4, 2)]": (
        "layer 1 (LSTM) returned a tuple of 2, expected one floating-point tensor: wrap the layer in a module that returns "
        "just that"
    ),
    "return [nn.Linear(3, 4), Says(None)]": (
        "layer 1 (Says) returned None, expected one floating-point tensor: wrap the layer in a module that returns just "
        "that"
    ),
    "return [nn.Linear(3, 4), Says({'logits': torch.zeros(2)})]": (
        "layer 1 (Says) returned a dict, expected one floating-point tensor: wrap the layer in a module that returns just "
        "that"
    ),
    "return [nn.Linear(3, 4), Says(torch.zeros(2, dtype=torch.int64))]": (
        "layer 1 (Says) returned a tensor, int64 [2], expected one floating-point tensor: wrap the layer in a module that "
        "returns just that"
    ),
    "return [nn.Linear(3, 4), nn.Linear(5, 2)]": (
        "layer 1 (Linear) failed on float32 [4, 4]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x4 and 5x2)"
    ),
    "return [nn.Linear(3, 4), nn.ReLU(inplace=True)]": (
        "layer 1 (ReLU) failed on float32 [4, 4]: RuntimeError: a leaf Variable that requires grad is being used in an "
        "in-place operation."
    ),
    "return [nn.Linear(3, 4).double()]": (
        "parameter weight of layer 0 is torch.float64, expected float32, bfloat16 or float16"
    ),
    "return [nn.Linear(3, 4), nn.Linear(4, 2).half()]": "layer 1 (Linear) failed on float32 [4, 4]: RuntimeError: ",
    "return [nn.Linear(3, 2).requires_grad_(False)]": (
        "no parameter of any layer has requires_grad, expected at least one that is trained"
    ),
    "return [nn.Linear(3, 2), Breaks()]": "layer 1 (Breaks) failed on float32 [4, 2]: KeyError: 'x' (mine.py, line ",
    "return [nn.Linear(3, 2), BreaksBack()]": (
        "layer 1 (BreaksBack) failed in its backward pass: RuntimeError: no way back (mine.py, line "
    ),
    "return [nn.Linear(3, 2), Counts()]": "layer 1 (Counts) changes its buffer 'seen' in the forward pass; ",
    "return [nn.Linear(3, 4), Renormed('bound')]": (
        "layer 1 (Renormed) changes its parameter 'weight' in the forward pass; only"
    ),
    "return [nn.Linear(3, 4), Renormed('in place')]": (
        "layer 1 (Renormed) changes its parameter 'weight' in the forward pass, through its .data; "
    ),
    "return [nn.Linear(3, 4), Scaled(4)]": (
        "layer 1 (Scaled) depends on the running statistics of its batch-norm in training (0: a class "
    ),
    "return [nn.Linear(3, 4), Renormed('looked up')]": (
        "layer 1 (Renormed) changes its parameter 'weight' in the forward pass; only"
    ),
}

MODULES = """
class Says(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what
    def forward(self, x):
        return self.what

class Breaks(nn.Module):
    def forward(self, x):
        return {}["x"]

class NoWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no way back")

class BreaksBack(nn.Module):
    def forward(self, x):
        return NoWay.apply(x)

class Scaled(nn.Sequential):
    def __init__(self, width):
        super().__init__(ScaledNorm(width), nn.Linear(width, 2))

class ScaledNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * (1 + self.running_var.clone())

class Renormed(nn.Linear):
    def __init__(self, how):
        super().__init__(4, 2)
        self.how = how
    def forward(self, x):
        if self.how == "bound":
            self.weight.data = self.weight.data * 0.5
        elif self.how == "in place":
            self.weight.data.mul_(0.5)
        else:
            functional.embedding(torch.zeros(1).long(), self.weight, max_norm=0.01)
        return super().forward(x)

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x):
        self.seen.add_(1)
        return x * 1
"""


@pytest.mark.parametrize("body", MODELS)
def test_a_model_that_cannot_be_trained(job, body):
    assert complaint(job(f"\ndef build():\n    {body}\n{MODULES}")).startswith(MODELS[body])


LOSSES = {
    "return functional.cross_entropy(output, target, reduction='none')": (
        "model.loss: returned a tensor, float32 [4], expected a scalar tensor: the micro-batch's mean, such as its .mean()"
    ),
    "return 1": "model.loss: returned a int, expected a scalar tensor: the micro-batch's mean",
    "return None": "model.loss: returned None, expected a scalar tensor: the micro-batch's mean",
    "return (output - output).abs().argmax()": (
        "model.loss: returned a tensor, int64 [], expected a scalar tensor: the micro-batch's mean"
    ),
    "return output.detach().sum()": (
        "model.loss: what it returned does not depend on the model's output by operations of torch"
    ),
    "return output.mean() + target.nothing": (
        "model.loss: failed on an output of float32 [4, 2] and a target of int64 [4]: AttributeError: 'Tensor' object has "
        "no attribute 'nothing' (mine.py, line 30)"
    ),
}


@pytest.mark.parametrize("body", LOSSES)
def test_a_loss_that_is_none(job, body):
    assert complaint(job(f"\ndef loss(output, target):\n    {body}\n")) == LOSSES[body]


def test_a_loss_that_was_forgotten(job):
    """Cross entropy of one row of everything would be a number, too."""
    assert complaint(
        job("\ndef data():\n    return Rows(lambda index: (row(index)[0], torch.zeros(2)))\n", loss=False)
    ) == (
        "model.loss: is missing, and the model returns float32 [4, 2] for a target of float32 [4, 2]; without it the loss "
        "is the cross entropy of logits [batch, ..., classes] against int64 [batch, ...]"
    )


ROWS = {
    "{'input_ids': torch.zeros(3), 'labels': 1}": (
        "data: item 8 is a dict with the keys input_ids, labels; expected a pair: (input, target), the input a tensor"
    ),
    "(torch.zeros(3), torch.ones(3), 1)": "data: item 8 is a tuple of 3; expected a pair: (input, target), the input a tensor",
    "None": "data: item 8 is None; expected a pair: (input, target), the input a tensor",
    "torch.zeros(2, 3)": "data: item 8 is one tensor, float32 [2, 3]; expected a pair: (input, target), the input a tensor",
    "('a text', 1)": "data: the input of item 8 is a str; expected a tensor, a numpy array, a number or a list",
    "(torch.zeros(3), None)": "data: the target of item 8 is None; expected a tensor, a numpy array, a number or a list",
    "(np.array(['a', 'b']), 1)": "data: the input of item 8 cannot be a tensor: ",
    "(__import__('decimal').Decimal('0.5'), 1)": "data: the input of item 8 cannot be a tensor: ",
    "(torch.zeros(3), __import__('fractions').Fraction(1, 3))": "data: the target of item 8 cannot be a tensor: ",
    "(torch.zeros(3), 10**30)": "data: the target of item 8 cannot be a tensor: ",
    "(torch.zeros(3 + index % 2), index % 2)": (
        "data: the input of item 9 is float32 [4], others are float32 [3]; expected one shape and type for all items: pad "
        "or cut them"
    ),
    "(torch.zeros(3), float(index) if index % 2 else index)": (
        "data: the target of item 9 is float32 [], others are int64 []; "
    ),
    "({}, 1)": "data: the input of item 8 is a dict with the keys ; expected tensors by name, one or more",
    "({1: torch.zeros(3)}, 1)": "data: the input of item 8 is a dict with the keys 1; expected tensors by name, one or mo",
    "({'x': 'a text'}, 1)": "data: the input 'x' of item 8 is a str; expected a tensor, a numpy array, a number or a list",
    "([[1, 2], [3]], 1)": "data: the input of item 8 cannot be a tensor: ",
    "({'x' if index % 2 else 'y': torch.zeros(3)}, 1)": (
        "data: the input of item 9 is x, of others y; expected the same names for all items"
    ),
    "({'x': torch.zeros(3)} if index % 2 else torch.zeros(3), 1)": (
        "data: the input of item 9 is x, of others one tensor; expected the same names for all items"
    ),
    "({'x': torch.zeros(3 + index % 2)}, 1)": (
        "data: the input 'x' of item 9 is float32 [4], others are float32 [3]; expected one shape and type for all items:"
    ),
    "({'x': torch.zeros(3), 'mask': [1, 0]}, 1)": (
        "data: the input of an item is x, mask, by name; layers of a list take one tensor; expected that, or model.split: "
        "blocks, by which a module is called with all of them"
    ),
    "row(index) if index < 19 else {}['end']": "data: item 19 of 20 cannot be read: KeyError: 'end' (mine.py, line ",
}


@pytest.mark.parametrize("item", ROWS)
def test_items_that_are_none(job, item, monkeypatch):
    monkeypatch.setattr("holdfast.runtime.engine.probing.sample_indices", lambda *_: [8, 9])
    assert complaint(job(f"\ndef data():\n    return Rows(lambda index: {item})\n")).startswith(ROWS[item])


DATASETS = {
    "return DataLoader(TensorDataset(torch.zeros(4, 3)))": (
        "data.target: mine.py:data returned a DataLoader; expected its dataset: grid.microbatch_size makes the batches"
    ),
    "return Endless()": (
        "data.target: mine.py:data returned a Endless; expected a map-style dataset: a length, and items by index"
    ),
    "return iter([])": (
        "data.target: mine.py:data returned a list_iterator; expected a map-style dataset: a length, and items by index"
    ),
    "return None": (
        "data.target: mine.py:data returned a NoneType; expected a map-style dataset: a length, and items by index"
    ),
    "return Rows(row, 0)": "data.target: mine.py:data returned a Rows of length 0; expected at least one item",
    "return Rows(row, -1)": "data.target: mine.py:data returned a Rows whose length cannot be told: ValueError: ",
    "return Rows(row, 'x')": "data.target: mine.py:data returned a Rows whose length cannot be told: TypeError: ",
    "return Rows([row(0), row(1)].__getitem__, 30)": "data: item 15 of 30 cannot be read: IndexError: ",
}


@pytest.mark.parametrize("body", DATASETS)
def test_data_that_cannot_be_read(job, body, monkeypatch):
    monkeypatch.setattr("holdfast.runtime.engine.probing.sample_indices", lambda *_: [0, 1])
    text = f"\nclass Endless(IterableDataset):\n    def __iter__(self): return iter([])\ndef data():\n    {body}\n"
    assert complaint(job(text)).startswith(DATASETS[body])


ARGUMENTS = {
    "{}": "model.arguments: missing a required argument: 'width'; mine.py:build takes (width, depth=1)",
    "{widht: 3}": "model.arguments: missing a required argument: 'width'; mine.py:build takes (width, depth=1)",
    "{width: 3, heads: 1}": (
        "model.arguments: got an unexpected keyword argument 'heads'; mine.py:build takes (width, depth=1)"
    ),
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_that_a_function_does_not_take(job, arguments):
    made = job("\ndef build(width, depth=1): return [nn.Linear(width, 2)]\n", f"model.arguments={arguments}")
    assert complaint(made) == ARGUMENTS[arguments]


OPTIMIZERS = {
    "return None": "optimizer.kind: mine.py:optimizer returned a NoneType; expected a torch.optim.Optimizer",
    "return torch.optim.SGD(parameters, lr=-1)": (
        "optimizer.kind: mine.py:optimizer failed: ValueError: Invalid learning rate: -1 (mine.py, line 30)"
    ),
    "return torch.optim.LBFGS(parameters)": "the optimizer failed in its update of layer 2 (Linear): ",
}


@pytest.mark.parametrize("body", OPTIMIZERS)
def test_an_optimizer_that_is_none(job, body):
    made = job(f"\ndef optimizer(parameters):\n    {body}\n", "optimizer.kind={file}:optimizer")
    assert complaint(made).startswith(OPTIMIZERS[body])


UNSTEADY = {
    "numpy": (
        "def forward(self, x): return self.inner(x) * float(np.random.rand())",
        "forward pass when it is run again: it draws from numpy's generator",
    ),
    "random": (
        "def forward(self, x): return self.inner(x) * random.random()",
        "forward pass when it is run again: it draws from Python's random module",
    ),
    "kept": (
        "times = 0\n    def forward(self, x):\n        self.times += 1\n        return self.inner(x) * self.times",
        "forward pass when it is run again: it draws from a generator of its own, keeps something from one time",
    ),
    "backward": (
        "def forward(self, x): return Shaky.apply(self.inner(x))",
        "backward pass when it is run again: it draws from numpy's generator",
    ),
}
SHAKY = """
class Shaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(np.random.rand())

class Unsteady(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
    {forward}

def build():
    return [nn.Linear(3, 4), Unsteady()]
"""


@pytest.mark.parametrize("case", UNSTEADY)
def test_a_layer_that_gives_other_bits_the_second_time(job, case):
    forward, what = UNSTEADY[case]
    made = job(SHAKY.replace("{forward}", forward))
    line = complaint(made)
    assert line.startswith(f"layer 1 (Unsteady) gives other bits in its {what}")
    assert line.endswith(
        "; train.numerics exact needs the same bits every time: draw from torch's default generator, which is seeded, or "
        "use fast"
    )


def test_fast_numerics_only_warn_of_it(job):
    found = probe(job(SHAKY.replace("{forward}", UNSTEADY["numpy"][0]), "train.numerics=fast"))
    (warning,) = found.warnings
    assert warning.startswith("layer 1 (Unsteady) gives other bits in its forward pass")


def test_a_loss_and_an_optimizer_that_give_other_bits(job):
    loss = "\ndef loss(output, target): return output.mean() * random.random()\n"
    assert complaint(job(loss)).startswith("model.loss: gives other bits when it is run again: it draws from Python's")
    noisy = (
        "\nclass Noisy(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']: p.data += random.random()\n"
        "def optimizer(parameters): return Noisy(parameters, lr=0.1)\n"
    )
    line = complaint(job(noisy, "optimizer.kind={file}:optimizer"))
    assert line.startswith("layer 0 (Linear) gives other bits in its update by the optimizer when it is run again")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_initial_weights_that_are_not_the_same_in_every_worker(job, numerics):
    text = "\ndef build():\n    m = nn.Linear(3, 2)\n    m.weight.data += np.random.rand()\n    return [m]\n"
    assert complaint(job(text, f"train.numerics={numerics}")).startswith(
        "model.target: mine.py:build does not give the same model every time (weight of layer 0 (Linear)), as every worker needs: "
        "draw initial weights from torch's default generator"
    )


def test_items_that_are_not_the_same_every_time(job):
    text = (
        "\nown = np.random.default_rng(1)\ndef data(): return Rows(lambda i: (torch.full((3,), own.random()), i % 2))\n"
    )
    assert re.match(
        r"data: item \d+ is not the same when it is read again: it draws from a generator of its own, .*; train\.numerics "
        r"exact",
        complaint(job(text)),
    )
    assert len(probe(job(text, "train.numerics=fast")).warnings) > 1


@pytest.mark.parametrize(
    "draws", ["torch.rand(3)", "torch.full((3,), np.random.rand())", "torch.full((3,), random.random())"]
)
def test_items_may_draw_from_the_generators_that_all_share(job, draws):
    """As augmentations do: a micro-batch is the same whenever, wherever and after whatever it is loaded."""
    made = job(f"\ndef data(): return Rows(lambda i: ({draws} + i, i % 2))\n")
    probe(made)

    dataset = build_dataset(made)
    load = microbatch_loader(made, lambda: dataset)
    once = load(3, 0)[0]
    assert not torch.equal(load(4, 0)[0] % 1, once % 1)
    assert torch.equal(load(3, 0)[0], once)


WORKING = {
    "sequential": "def build(): return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))",
    "generator": "def build():\n    yield nn.Linear(3, 4)\n    yield nn.Linear(4, 2)",
    "numpy": "def data(): return Rows(lambda i: (np.full(3, i, dtype=np.float32), np.int64(i % 2)))",
    "numbers": "def data(): return Rows(lambda i: [torch.full((3,), float(i)), i % 2])",
    "list": "def data(): return [row(i) for i in range(20)]",
    "read-only": "def data(): return Rows(lambda i: (np.frombuffer(bytes(12), dtype=np.float32), i % 2))",
    "dropout": "def build(): return [nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)]",
    "batch-norm": "def build(): return [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]",
    "in place": "def build(): return [nn.ReLU(inplace=True), nn.Linear(3, 2)]",
    "sparse": "def build(): return [nn.Sequential(Long(), nn.Embedding(9, 4, sparse=True), nn.Flatten()), nn.Linear(12, 2)]\n"
    "class Long(nn.Module):\n    def forward(self, x): return (x * 8).long()",
    "frozen": "def build(): return [nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2)]",
}


@pytest.mark.parametrize("text", WORKING.values(), ids=WORKING)
def test_what_simply_works(job, text):
    found = probe(job("\n" + text + "\n"))
    assert found.warnings == ()
    assert found.boundaries[-1].shape == (4, 2)


def test_a_loss_module_is_a_loss(job):
    probe(job("", "model.loss=torch.nn:CrossEntropyLoss"))
    probe(job("\nmine = nn.CrossEntropyLoss()\n", "model.loss={file}:mine"))


def test_what_lies_beside_a_target_and_in_the_current_folder_can_be_imported(job, tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "beside_it.py").write_text("WIDTH = 4\n")
    here = tmp_path / "here"
    here.mkdir()
    (here / "from_here.py").write_text("import torch\ndef build(): return [torch.nn.Linear(3, 2)]\n")
    monkeypatch.chdir(here)
    probe(job("\nimport beside_it, from_here\ndef build(): return [nn.Linear(3, beside_it.WIDTH), nn.Linear(4, 2)]\n"))
    probe(job("", "model.target=from_here:build"))


def test_a_file_of_a_package_is_told_how_to_be_named(job):
    assert complaint(job("\nfrom .parts import x\n")).endswith(
        "(mine.py, line 29); a file in a package is named package.module:name"
    )


def test_the_micro_batches_of_a_run_are_like_those_of_the_probe(job):
    """An item that the probe did not read is told all the same, with its number."""
    made = job("\ndef data(): return Rows(lambda i: (torch.zeros(3 + (i == 7)), i % 2))\n", "grid.microbatch_size=1")

    found = probe(made)
    load = microbatch_loader(made, lambda: build_dataset(made), found.item)
    with pytest.raises(ConfigError, match=r"data: the input of item 7 is float32 \[4\], others are float32 \[3\]"):
        [load(step, 0) for step in range(20)]


def stages_of(job, stages):
    """The stages of one pipeline, as its workers build them after the probe."""
    found = probe(job)
    job = msgspec.structs.replace(job, grid=msgspec.structs.replace(job.grid, stages=stages))
    plan = healthy_plan(job, found.facts.layers)
    return [
        build_stage(job, plan, worker, boundaries=found.boundaries, item=found.item).stage for worker in plan.workers
    ]


def test_a_layer_that_returns_another_shape_than_at_first(job):
    cut = "\nclass Cut(nn.Module):\n    def forward(self, x): return x[:, : 2 + int(x[0, 0] > 5)]\n"
    made = job(
        cut + "def data(): return Rows(lambda i: (torch.full((3,), float(i // 10)), i % 2), 100)\n"
        "def build(): return [Cut(), nn.Linear(2, 2)]\n",
        "grid.microbatch_size=1",
        "grid.microbatches=100",
    )
    (stage,) = stages_of(made, 1)
    with pytest.raises(ConfigError) as caught:
        list(map(partial(stage.forward, 0), range(100), [None] * 100))
    assert str(caught.value) == (
        "layer 0 (Cut) returned float32 [1, 3], and float32 [1, 2] at first; expected one shape and type for all micro-batches"
    )


def test_what_data_and_loss_draw_does_not_depend_on_who_computes_the_loss(job):
    """The last stage loads the targets only when it needs them: that must not move the generator of the loss."""
    made = job(
        "\ndef data(): return Rows(lambda i: (torch.rand(3), i % 2))\n"
        "def loss(output, target): return (output * torch.rand_like(output)).mean() + 0 * target.sum()\n"
    )
    (whole,) = stages_of(made, 1)
    whole.forward(0, 0, None)
    whole.backward(OpKind.B, 0, 0, None)
    first, last = stages_of(made, 2)
    last.forward(0, 0, first.forward(0, 0, None))
    last.backward(OpKind.B, 0, 0, None)
    ours, theirs = whole.message((2,), 0), last.message((2,), 0)
    assert torch.equal(*ours.parts, *theirs.parts)
    assert ours.header == theirs.header


def test_a_micro_batch_is_loaded_within_what_tells_of_it(job):
    told = []

    class Loading:
        def __enter__(self):
            told.append("in")

        def __exit__(self, *raised):
            told.append("out")

    class Data(list):
        def __getitem__(self, index):
            told.append(index)
            return torch.zeros(2), torch.zeros(1)

    made = job()
    microbatch_loader(made, lambda: Data(range(50)), loading=Loading())(0, 0)
    assert (told[0], told[-1], len(told)) == ("in", "out", 2 + made.grid.microbatch_size)
