"""A job file to begin with is one that holdfast train takes; what there is none for is told in one line."""

from __future__ import annotations

import json

import pytest
import yaml

from holdfast.cli.commands import run_command
from holdfast.config.job import GptModel, HuggingFaceModel, PythonData, PythonModel, TextData
from holdfast.config.load import load_job, parse_job

NET = """
from torch import nn

class Net(nn.Module):
    pass

def build():
    return [nn.Linear(2, 2)]

def data():
    return []
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with a model of one's own, texts and one of transformers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "notes.txt").write_text("some words")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.fixture
def made(folder, capsys):
    """Runs the command; returns the job that it has written."""

    def make(*words):
        assert run_command(["init", *map(str, words)]) == 0
        text = capsys.readouterr().out
        return parse_job(yaml.safe_load(text)), text

    return make


@pytest.mark.parametrize("kind", ["gpt", "bert", "vit", "convnet", "resnet", "nt3"])
def test_what_is_here_has_data_that_fit(made, kind):
    job, _ = made(kind)
    assert (job.model.__struct_config__.tag, job.num_workers) == (kind, 4)
    assert job.name == "job"


@pytest.mark.parametrize(("workers", "grid"), [(1, (1, 1)), (2, (2, 1)), (3, (3, 1)), (4, (2, 2)), (6, (3, 2))])
def test_workers_make_a_grid(made, workers, grid):
    job, text = made("gpt", "--workers", workers)
    assert (job.grid.pipelines, job.grid.stages) == grid
    assert f"{job.samples_per_step} samples a step" in text


def test_a_model_of_transformers_is_found_with_its_weights_task_and_tokenizer(made, folder):
    job, _ = made("llama", "--data", "notes.txt")
    assert job.model == HuggingFaceModel(config="llama")
    assert job.data == TextData(path="notes.txt", context=128)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "llama" / name).write_text("")
    job, text = made(folder / "llama", "--data", "*.txt")
    assert job.model.weights == job.data.tokenizer == str(folder / "llama")
    whole = yaml.safe_load(text.replace("# evaluate", "evaluate"))
    assert parse_job(whole).evaluate.best == "loss"
    told = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (folder / "llama" / "config.json").write_text(json.dumps(told))
    job, _ = made("llama", "--data", "net.py:data")
    assert job.model.task == "sequence-classification"


def test_ones_own_class_is_cut_and_a_function_returns_a_list(made):
    job, _ = made("net.py:Net", "--data", "net.py:data")
    assert job.model == PythonModel(target="net.py:Net", split="blocks")
    assert job.data == PythonData(target="net.py:data")
    assert made("net.py:build", "--data", "digits")[0].model == PythonModel(target="net.py:build")
    assert made("package.net:Net", "--data", "digits")[0].model.split is None


def test_what_is_evaluated_is_held_out(made):
    assert "data: {kind: text, path: HELD_OUT.txt}" in made("gpt")[1]
    assert "data: {kind: python, target: 'net.py:HELD_OUT'}" in made("net.py:Net", "--data", "net.py:data")[1]
    assert "evaluate" not in made("net.py:Net", "--data", "digits")[1]


def test_a_file_may_have_a_name_that_no_job_has(folder):
    assert run_command(["init", "gpt", "--out", "my job.yaml"]) == 0
    assert load_job("my job.yaml").name == "my-job"


def test_a_file_is_written_once(folder, capsys):
    words = ["init", "gpt", "--out", "mine.yaml"]
    assert run_command(words) == 0
    assert capsys.readouterr().out == "written to mine.yaml; holdfast train mine.yaml\n"
    job = load_job("mine.yaml")
    assert (job.name, type(job.model)) == ("mine", GptModel)
    assert "# holdfast train mine.yaml --run-dir runs/mine" in (folder / "mine.yaml").read_text()
    assert run_command(words) == 2
    assert capsys.readouterr().err == (
        "holdfast: --out mine.yaml: exists already, and nothing was overwritten; choose another name\n"
    )


WRONG = [
    (["nothing"], "nothing: is no folder with a config.json; expected one, FILE.py:NAME, or one of gpt, bert, vit, "),
    (
        ["net.py"],
        "net.py: a script is run as it is: holdfast run --workers 4 net.py; expected net.py:NAME for a job",
    ),
    (["llama"], "--data: is missing; expected a text file, a folder or a glob of such, or FILE.py:NAME"),
    (
        ["llama", "--data", "none.txt"],
        "--data none.txt: there is no such file or folder; expected one, a glob, or F",
    ),
    (["other.py:Net", "--data", "digits"], "other.py: cannot be read: "),
    (["net.py:Nett", "--data", "digits"], "net.py: defines no Nett; expected a file that does"),
    (["net.py:Net", "--data", "net.py:dataa"], "net.py: defines no dataa; expected a file that does"),
    (["gpt", "--workers", "0"], "--workers 0: expected at least 1"),
    (["gpt", "--out", "no/such/job.yaml"], "--out no/such/job.yaml: cannot be written: No such file or directory"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_cannot_be_is_told_in_one_line(folder, capsys, words, said):
    assert run_command(["init", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"holdfast: {said}")
    assert told.err.count("\n") == 1


def test_a_damaged_config_is_told(folder, capsys):
    (folder / "llama" / "config.json").write_text("{")
    assert run_command(["init", "llama", "--data", "notes.txt"]) == 2
    assert "llama/config.json: cannot be read: " in capsys.readouterr().err
