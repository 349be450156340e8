"""What a run has trained, as plain PyTorch loads it."""

from __future__ import annotations

import stat

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from holdfast.cli.commands import run_command
from holdfast.config.load import parse_job
from holdfast.errors import ConfigError
from holdfast.optim.digest import LayerState, encode_layer, layer_file, save_layer
from holdfast.runtime.exporting import export, write
from holdfast.runtime.loop.prepared import prepare
from holdfast.runtime.loop.stage import LoopStage
from holdfast.runtime.specs import facts_of
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints

SCRIPT = "{name: a, model: {kind: script, path: a.py}, data: {kind: script}, train: {steps: 1}, GRID}"
LIST = "{name: a, model: {kind: gpt, layers: 1, width: 8, heads: 2}, data: {kind: text, path: stdlib}, GRID, TRAIN}"
GRID = "grid: {pipelines: 1, stages: 1, microbatches: 1}"


class Net(nn.Module):
    """A weight that is used twice, batch-norm, and one that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.last = nn.Linear(4, 2)


def optimizers(model):
    wide = [p for p in model.last.parameters() if p.ndim > 1]
    groups = [{"params": wide}, {"params": [model.last.bias], "weight_decay": 0.0}]
    return (
        torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9)),
        torch.optim.SGD([*model.embed.parameters(), *model.norm.parameters()], lr=0.2, momentum=0.9),
    )


class Average:
    def state_dict(self):
        return {"times": 3, "of": torch.ones(2)}

    def load_state_dict(self, state):
        raise AssertionError("nothing is loaded here")


def run_of_script(folder):
    """A run directory as a script leaves it, after a step of its optimizers; returns these and the model."""
    model = Net()
    made = optimizers(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for each in made:
        each.step()
    scheduler = torch.optim.lr_scheduler.StepLR(made[0], 3)
    prepared = prepare(model, made, schedulers=(scheduler,), bucket_bytes=8)
    prepared.objects = [Average()]
    prepared.begin()
    stage = LoopStage(prepared=prepared, turns=None, owned=range(len(prepared.buckets)), num_microbatches=1)
    folder.mkdir()
    (folder / "job.yaml").write_text(SCRIPT.replace("GRID", GRID))
    for layer in stage.layers:
        stage.save(layer, folder / "final")
    facts = facts_of(parse_job(yaml(SCRIPT)), layers=len(prepared.buckets), model="m", data="d")
    checkpoints = Checkpoints(LocalStore(folder / "checkpoints"))
    shards = [checkpoints.write_shard(7, layer, stage.snapshot(layer)()) for layer in stage.layers]
    checkpoints.commit(7, shards, facts)
    assert len(stage.layers) > 2
    return model, made


def yaml(text):
    from yaml import safe_load

    return safe_load(text.replace("GRID", GRID).replace("TRAIN", "train: {steps: 1}"))


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


@pytest.mark.parametrize("at", ["", "@7"])
def test_a_script_finds_its_model_and_optimizers_again(tmp_path, at, capsys):
    model, made = run_of_script(tmp_path / "a")
    assert run_command(["export", f"{tmp_path / 'a'}{at}", "--to", str(tmp_path / "model.pt")]) == 0
    assert "step 0: 11 tensors of 57 numbers" in capsys.readouterr().out
    kept = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(kept["model"]) == list(model.state_dict()), "the weight that is used twice has both names"
    assert same(kept["model"], model.state_dict())
    again = Net()
    again.load_state_dict(kept["model"])
    for fresh, was, state in zip(optimizers(again), made, kept["optimizer"], strict=True):
        fresh.load_state_dict(state)
        assert fresh.state_dict().keys() == was.state_dict().keys()
        found, expected = fresh.state_dict(), was.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        assert all(same(found["state"][key], expected["state"][key]) for key in found["state"])
    assert kept["scheduler"][0]["step_size"] == 3
    assert (kept["state"][0]["times"], kept["state"][0]["of"].tolist(), kept["step"]) == (3, [1.0, 1.0], 0)
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o600


def test_a_folder_has_the_weights_apart(tmp_path):
    model, _ = run_of_script(tmp_path / "a")
    write(export(str(tmp_path / "a")), tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["model.safetensors", "optimizer.pt"]
    assert same(load_file(tmp_path / "kept" / "model.safetensors"), model.state_dict())
    assert len(torch.load(tmp_path / "kept" / "optimizer.pt", weights_only=True)["optimizer"]) == 2
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kept", *(tmp_path / "kept").iterdir())]
    assert modes == [0o700, 0o600, 0o600]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "kept"}, "nothing else is left"


def test_names_of_a_list_of_layers_are_its_own(tmp_path):
    (tmp_path / "a" / "final").mkdir(parents=True)
    (tmp_path / "a" / "job.yaml").write_text(LIST.replace("GRID", GRID).replace("TRAIN", "train: {steps: 1}"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    for index, layer in enumerate(model):
        parameters = {name: p.detach() for name, p in layer.named_parameters()}
        entries = {
            name: {"exp_avg": p + 1, "exp_avg_sq": p + 2, "step": torch.tensor(1.0)} for name, p in parameters.items()
        }
        tied = ("weight",) if index == 2 else ()
        state = LayerState(layer=index, step=5, parameters=parameters, optimizer=entries, tied=tied)
        save_layer(layer_file(tmp_path / "a" / "final", index), state)
    write(export(str(tmp_path / "a")), tmp_path / "model.pt")
    kept = torch.load(tmp_path / "model.pt", weights_only=True)
    assert same(kept["model"], model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    optimizer.load_state_dict(kept["optimizer"][0])
    assert optimizer.param_groups[0]["lr"] == parse_job(yaml(LIST)).optimizer.lr
    assert torch.equal(optimizer.state[model[0].bias]["exp_avg"], model[0].bias + 1)


def test_an_older_run_of_a_script_gives_the_model_alone(tmp_path):
    run_of_script(tmp_path / "a")
    last = max((tmp_path / "a" / "final").iterdir())
    data = last.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert b'\\"about\\"' in data[: 8 + size]
    last.write_bytes(data.replace(b'\\"about\\"', b'\\"aboot\\"'))
    found = export(str(tmp_path / "a"))
    assert found.optimizers == []
    assert "an older Holdfast made it" in found.notes[0]
    assert "embed.weight" in found.model


@pytest.mark.parametrize(
    ("spoil", "run", "text"),
    [
        (lambda a: None, "nowhere", "is no run directory"),
        (lambda a: None, "a@8", "a@8: .* its checkpoints are .*a@7"),
        (lambda a: (a / "final" / "layer-0001.safetensors").unlink(), "a", "holds layers 0, 2.*; expected all.*a@7"),
        (lambda a: [path.unlink() for path in (a / "final").iterdir()], "a", "holds layers none"),
        (
            lambda a: (a / "final" / "layer-0000.safetensors").write_bytes(
                encode_layer(LayerState(layer=0, step=9, parameters={}))
            ),
            "a",
            r"layers are of steps \[0, 9\]",
        ),
    ],
)
def test_what_is_no_state_of_a_run_is_refused(tmp_path, spoil, run, text):
    run_of_script(tmp_path / "a")
    spoil(tmp_path / "a")
    with pytest.raises(ConfigError, match=text):
        export(str(tmp_path / run))


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("there.pt", "exists already, and nothing was overwritten"),
        ("there", "exists already, and nothing was overwritten"),
        ("none/model.pt", "there is no folder"),
        ("model.bin", "expected a name that ends in .pt or .pth"),
    ],
)
def test_what_is_there_is_not_overwritten(tmp_path, capsys, to, text):
    run_of_script(tmp_path / "a")
    (tmp_path / "there").mkdir()
    (tmp_path / "there.pt").write_text("kept")
    assert run_command(["export", str(tmp_path / "a"), "--to", str(tmp_path / to)]) == 2
    assert text in capsys.readouterr().err
    assert (tmp_path / "there.pt").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "there", "there.pt"}


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    run_of_script(tmp_path / "a")
    found = export(str(tmp_path / "a"))

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("holdfast.runtime.hardening.os.fsync", full)
    for to in ("model.pt", "kept"):
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            write(found, tmp_path / to)
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
