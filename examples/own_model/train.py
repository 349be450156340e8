"""Trains the model of this folder from Python, kills a worker on the way, and uses what was trained.

Run it from the root of the repository: ``python examples/own_model/train.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from model import build, dataset
from safetensors.torch import load_file
from torch import nn

from holdfast import Fault, Summary, load_job, train

ARGUMENTS = {"width": 32, "blocks": 4}


def main() -> int:
    """Trains twice, once with a kill; returns 0 if both end with the same bits."""
    job = load_job(Path(__file__).with_name("job.yaml"), ["train.steps=150"])
    struck = train(job, run_dir="runs/spirals-struck", faults=[Fault.parse("kill:0.1@100:reduce")])
    healthy = train(job, run_dir="runs/spirals-healthy")
    for name, summary in (("killed", struck), ("nothing failed", healthy)):
        print(f"{name:15} loss {summary.final_loss:.12f}  weights {summary.weights_sha256}")
    print(f"resumed after {1000 * (struck.report.failures[0].resumed_s or 0):.0f} ms")
    print(f"accuracy {accuracy(load_trained(struck)):.4f}")
    return 0 if struck.state_sha256 == healthy.state_sha256 else 1


def load_trained(summary: Summary) -> nn.Sequential:
    """Return the trained model: one file per layer, its tensors named parameter.*, buffer.* and optimizer.*."""
    model = nn.Sequential(*build(**ARGUMENTS))
    for index, layer in enumerate(model):
        tensors = load_file(summary.run_dir / "final" / f"layer-{index:04d}.safetensors")
        kept = {name.partition(".")[2]: value for name, value in tensors.items() if not name.startswith("optimizer.")}
        layer.load_state_dict(kept)
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Sequential) -> float:
    """Return the share of points that the model puts on the right spiral."""
    points, labels = dataset(2000)[:]
    return float((model(points).argmax(dim=1) == labels).float().mean())


if __name__ == "__main__":
    sys.exit(main())
