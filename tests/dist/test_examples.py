"""Examples that need packages of their own, run as they say, with the bits of one process in which nothing fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import holdfast

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install -e '.[hf]'"
)
def test_a_model_of_transformers_goes_on_while_a_worker_dies(tmp_path):
    script, steps = str(EXAMPLES / "hf_gpt2.py"), "--steps=4"
    run(script, steps, str(tmp_path / "alone"))
    fault, where = ("--fault", "kill:1.0@2:backward"), ("--run-dir", str(tmp_path / "run"))
    told = run("-m", "holdfast", "run", "--workers", "2", *fault, *where, script, steps, str(tmp_path / "two"))
    assert "lost worker 1.0 in step 2" in told.stdout
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("alone", "two")]
    assert saved[0] == saved[1]


def test_the_plain_twin_of_the_cnn_trains_and_goes_on(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    out = ("--out", str(tmp_path))
    first = run(*torchrun, str(EXAMPLES / "cnn_ddp.py"), "--epochs", "1", *out)
    later = run(*torchrun, str(EXAMPLES / "cnn_ddp.py"), "--epochs", "2", "--resume", *out)
    assert [line.split(":")[0] for line in (first.stdout + later.stdout).splitlines()] == ["epoch 0", "epoch 1"]
    assert (tmp_path / "model.pt").exists()


def test_the_cnn_goes_on_from_a_checkpoint_in_the_midst_of_an_epoch(tmp_path):
    """Average, patience, the epoch's totals and the schedule of learning rates are state of the script's own."""

    def trained(name, *options):
        where, out = ("--workers", 2, "--quiet", "--run-dir", tmp_path / name), tmp_path / "out"
        kept = ("--set", "checkpoint.every=10", "--set", "checkpoint.keep=9")
        ended = holdfast("run", *where, *kept, *options, EXAMPLES / "cnn_holdfast.py", "--epochs", 1, "--out", out)
        assert ended.returncode == 0, ended.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        bits = (summary["weights_sha256"], summary["state_sha256"], summary["final_loss"])
        return bits, (out / "model.pt").read_bytes()

    whole = trained("whole")
    later = trained("later", "--resume", f"{tmp_path / 'whole'}@20", "--fault", "kill:1.0@24:backward")
    assert later == whole
