"""A model of transformers on a grid: workers die, no bit is lost, and transformers reads what was trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from tests.waiting import LIMIT_S, until

from holdfast.cli.main import main
from holdfast.config.load import dump_job
from holdfast.optim.digest import load_layer

pytestmark = pytest.mark.dist

ALONE = ("grid.pipelines=1", "grid.stages=1", "grid.microbatches=8")
FAULTS = ("kill:1.1@3:backward", "join:1.1@5")


def test_a_model_that_is_cut_survives_with_the_bits_of_one_worker_and_is_read_by_transformers(runs, tmp_path):
    from transformers import AutoModelForCausalLM

    survived = runs.train("llama", *FAULTS)
    assert survived.unfired == ()
    assert survived.weights_sha256 == runs.train("llama", overrides=ALONE).weights_sha256
    read = AutoModelForCausalLM.from_pretrained(survived.run_dir / "final")
    assert {path.stat().st_mode & 0o777 for path in (survived.run_dir / "final").iterdir()} == {0o600}
    assert main(["export", str(survived.run_dir), "--to", str(tmp_path / "made")]) == 0
    for name in ("model.safetensors", "config.json"):
        made, final = ((folder / name).read_bytes() for folder in (tmp_path / "made", survived.run_dir / "final"))
        assert made == final
    paths = sorted((survived.run_dir / "final").glob("layer-*.safetensors"))
    trained = {name: each for path in paths for name, each in load_layer(path).parameters.items()}
    assert {name for name, _ in read.named_parameters()} == trained.keys()
    assert all(torch.equal(each, trained[name]) for name, each in read.named_parameters())


def test_adapters_survive_and_transformers_reads_what_they_have_made_of_the_weights(runs):
    pytest.importorskip("peft", reason="needs peft: pip install -e '.[lora]'")
    from transformers import AutoModelForCausalLM

    first = runs.train("llama")
    begun = f"model.config={first.run_dir / 'final'}", f"model.weights={first.run_dir / 'final'}"
    adapted = (*begun, "model.lora={r: 4, targets: [q_proj, v_proj]}", "train.steps=8", "optimizer.lr=0.01")
    survived = runs.train("llama", *FAULTS, overrides=adapted)
    assert survived.unfired == ()
    assert survived.weights_sha256 == runs.train("llama", overrides=(*adapted, *ALONE)).weights_sha256
    assert survived.final_loss < first.final_loss
    before, behind = (
        AutoModelForCausalLM.from_pretrained(run.run_dir / "final").state_dict() for run in (first, survived)
    )
    changed = {name for name in before if not torch.equal(before[name], behind[name])}
    assert changed == {name for name in before if name.endswith(("q_proj.weight", "v_proj.weight"))}
    assert (survived.run_dir / "final" / "adapter" / "adapter_model.safetensors").exists()


def test_a_model_that_cannot_be_written_is_told_and_the_layers_are_there(runs, tmp_path):
    """A folder is where a file is to be: all is trained, and `holdfast export` writes the model elsewhere."""
    run_dir = tmp_path / "run"
    job = tmp_path / "job.yaml"
    job.write_text(dump_job(runs.job("llama", ("train.steps=200",))))
    line = [sys.executable, "-m", "holdfast", "train", str(job), "--run-dir", str(run_dir)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as training:
        until(lambda: (run_dir / "events.jsonl").exists())
        (run_dir / "final" / "config.json").mkdir(parents=True)
        _, said = training.communicate(timeout=LIMIT_S)
    assert training.returncode == 0, said
    assert f"{run_dir / 'final'}: transformers' own files could not be written: " in said
    assert {path.name for path in (run_dir / "final").glob("[!l]*")} <= {
        "config.json",
        "model.safetensors",
        "generation_config.json",
    }
    assert main(["export", str(run_dir), "--to", str(tmp_path / "made")]) == 0


def test_it_survives_in_bfloat16_too(runs):
    """By autocast; cut, it has the bits of the whole in these numbers, too, or it would have been refused."""
    precise = ("train.precision=bf16",)
    survived = runs.train("llama", *FAULTS, overrides=precise)
    assert survived.unfired == ()
    assert survived.weights_sha256 == runs.train("llama", overrides=(*precise, *ALONE)).weights_sha256
    assert survived.weights_sha256 != runs.train("llama", overrides=ALONE).weights_sha256


def test_training_goes_on_from_weights_that_transformers_has_written(runs):
    first = runs.train("llama")
    begun = f"model.config={first.run_dir / 'final'}", f"model.weights={first.run_dir / 'final'}"
    further = runs.train("llama", "kill:0.1@2:forward", overrides=begun)
    assert further.unfired == ()
    assert further.weights_sha256 == runs.train("llama", overrides=(*begun, *ALONE)).weights_sha256
    assert further.final_loss < first.final_loss


def test_a_text_is_read_by_a_tokenizer_once(runs, tmp_path):
    """By whoever tries the job; every worker finds what came of it, also one that comes anew."""
    import tokenizers
    from transformers import AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is followed by {n + 1}, and so on\n" for n in range(2000)))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.train([str(text)], tokenizers.trainers.BpeTrainer(vocab_size=250))
    (tmp_path / "words").mkdir()
    made.save(str(tmp_path / "words" / "tokenizer.json"))
    read = (f"data.path={text}", f"data.tokenizer={tmp_path / 'words'}")
    survived = _in_its_own_cache(runs, tmp_path, read, FAULTS)
    final = AutoTokenizer.from_pretrained(tmp_path / f"run-{len(read)}" / "final")
    assert final("7 is followed by 8")["input_ids"] == made.encode("7 is followed by 8").ids
    assert len([*(tmp_path / "cache").rglob("*.tokens")]) == 1
    assert survived == _in_its_own_cache(runs, tmp_path, (*read, *ALONE), ())


def _in_its_own_cache(runs, folder, overrides, faults) -> str:
    """The hash of the weights in which a job of another process ends, whose cache is in a folder."""
    job, run_dir = folder / "job.yaml", folder / f"run-{len(overrides)}"
    job.write_text(dump_job(runs.job("llama", overrides)))
    words = [each for fault in faults for each in ("--fault", fault)]
    line = [sys.executable, "-m", "holdfast", "train", str(job), "--run-dir", str(run_dir), *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]
