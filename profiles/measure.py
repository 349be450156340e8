"""Measures what the layers of the GPT-3 models cost on this machine's GPU; see README.md.

    python profiles/measure.py FOLDER

writes ``NAME-measured.json`` for each into the folder. Two blocks of each are measured, and stand for all of them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.config.load import parse_job
from holdfast.config.profiles import save_profile
from holdfast.core.profile import Link, Profile
from holdfast.devices.cuda import Cuda
from holdfast.devices.device import Device
from holdfast.profiling.layers import measure_layers

__all__ = ["NAMES", "measured", "save"]

NAMES = {"gpt3-medium-350m": (24, 1024, 8), "gpt3-3.35b": (28, 3072, 1), "gpt3-6.7b": (32, 4096, 1)}
"""Blocks, width and samples of a micro-batch."""
_HERE = Path(__file__).parent
_BETWEEN_NODES = Link(latency_s=30e-6, bytes_per_s=10e9)
"""As in the estimates: it was not measured."""


def measured(name: str, *, iterations: int, device: Device | None = None) -> Profile:
    """Returns the profile of a whole model.

    Args:
        name: one of ``NAMES``.
        iterations: how often each layer is timed.
        device: where; None: the first GPU.
    """
    blocks, width, samples = NAMES[name]
    device = device or Cuda()
    device.settle()
    job = parse_job(
        {
            "model": {
                "kind": "python",
                "target": f"{_HERE / 'gpt3.py'}:layers",
                "loss": f"{_HERE / 'gpt3.py'}:loss",
                "arguments": {"blocks": 2, "width": width},
            },
            "data": {"kind": "python", "target": f"{_HERE / 'gpt3.py'}:Tokens"},
            "grid": {"pipelines": 1, "stages": 1, "microbatches": 2, "microbatch_size": samples},
            "optimizer": {"kind": "adamw", "lr": 1e-4},
            "train": {"steps": 1},
        }
    )
    first, *_, block, head = measure_layers(job, iterations=iterations, device=device, on_iteration=lambda done: None)
    middle = (replace(block, name=f"block {number}") for number in range(blocks))
    machine = {"device": device.identity, "microbatch": samples, "context": 2048, "torch": str(torch.__version__)}
    layers = (replace(first, name="embedding"), *middle, replace(head, name="head"))
    return Profile(layers=layers, link=_BETWEEN_NODES, machine=machine, iterations=iterations)


def save(profile: Profile, path: Path) -> None:
    """Writes a profile to a file."""
    save_profile(profile, path)


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name in NAMES:
        save(measured(name, iterations=20), folder / f"{name}-measured.json")


if __name__ == "__main__":
    main()
