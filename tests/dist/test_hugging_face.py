"""A model of transformers on a grid: workers die, no bit is lost, and transformers reads what was trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from tests.waiting import LIMIT_S

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
    assert main(["export", str(survived.run_dir), "--to", str(tmp_path / "made")]) == 0
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    paths = sorted((survived.run_dir / "final").glob("layer-*.safetensors"))
    trained = {name: each for path in paths for name, each in load_layer(path).parameters.items()}
    assert {name for name, _ in read.named_parameters()} == trained.keys()
    assert all(torch.equal(each, trained[name]) for name, each in read.named_parameters())


def test_it_survives_in_bfloat16_too(runs):
    """By autocast; cut, it has the bits of the whole in these numbers, too, or it would have been refused."""
    precise = ("train.precision=bf16",)
    survived = runs.train("llama", *FAULTS, overrides=precise)
    assert survived.unfired == ()
    assert survived.weights_sha256 == runs.train("llama", overrides=(*precise, *ALONE)).weights_sha256
    assert survived.weights_sha256 != runs.train("llama", overrides=ALONE).weights_sha256


def test_training_goes_on_from_weights_that_transformers_has_written(runs, tmp_path):
    first = runs.train("llama")
    assert main(["export", str(first.run_dir), "--to", str(tmp_path / "made")]) == 0
    begun = f"model.config={tmp_path / 'made'}", f"model.weights={tmp_path / 'made'}"
    further = runs.train("llama", "kill:0.1@2:forward", overrides=begun)
    assert further.unfired == ()
    assert further.weights_sha256 == runs.train("llama", overrides=(*begun, *ALONE)).weights_sha256
    assert further.final_loss < first.final_loss


def test_a_text_is_read_by_a_tokenizer_once(runs, tmp_path):
    """By whoever tries the job; every worker finds what came of it, also one that comes anew."""
    import tokenizers

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is followed by {n + 1}, and so on\n" for n in range(2000)))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.train([str(text)], tokenizers.trainers.BpeTrainer(vocab_size=250))
    (tmp_path / "words").mkdir()
    made.save(str(tmp_path / "words" / "tokenizer.json"))
    read = (f"data.path={text}", f"data.tokenizer={tmp_path / 'words'}")
    survived = _in_its_own_cache(runs, tmp_path, read, FAULTS)
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
