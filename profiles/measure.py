"""Measures what the layers of the GPT-3 models cost on this machine's GPU; see README.md.

    python -m profiles.measure FOLDER

writes ``NAME-measured.json`` for each into the folder. Two blocks of each are measured, and stand for all of them; the
link is that of the estimates.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from profiles.estimate import CONTEXT, LINK, SHAPES, Shape

from holdfast.config.load import parse_job
from holdfast.config.profiles import save_profile
from holdfast.core.profile import Profile
from holdfast.devices.named import opened
from holdfast.profiling.layers import measure_layers

__all__ = ["measured"]

_MODEL = Path(__file__).with_name("gpt3.py")


def measured(shape: Shape, *, iterations: int) -> Profile:
    """Returns the profile of a whole model, on the first GPU.

    Args:
        shape: of the model.
        iterations: how often each layer is timed.
    """
    job = parse_job(
        {
            "model": {
                "kind": "python",
                "target": f"{_MODEL}:layers",
                "loss": f"{_MODEL}:loss",
                "arguments": {"blocks": 2, "width": shape.width},
            },
            "data": {"kind": "python", "target": f"{_MODEL}:Tokens"},
            "grid": {"pipelines": 1, "stages": 1, "microbatches": 2, "microbatch_size": shape.microbatch},
            "optimizer": {"kind": "adamw", "lr": 1e-4},
            "train": {"steps": 1},
        }
    )
    device = opened("cuda", exact=True)
    first, *_, block, head = measure_layers(job, iterations=iterations, device=device, on_iteration=lambda done: None)
    middle = (replace(block, name=f"block {number}") for number in range(shape.blocks))
    machine = {"device": device.identity, "microbatch": shape.microbatch, "context": CONTEXT}
    layers = (replace(first, name="embedding"), *middle, replace(head, name="head"))
    return Profile(layers=layers, link=LINK, machine=machine, iterations=iterations)


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for shape in SHAPES:
        save_profile(measured(shape, iterations=20), folder / f"{shape.name}-measured.json")


if __name__ == "__main__":
    main()
