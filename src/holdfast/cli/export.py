"""``holdfast export``: writes what a run has trained as plain PyTorch reads it."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_export_parser"]


def add_export_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``export`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "export",
        help="write what a run has trained as plain PyTorch reads it",
        description="Writes the model's state_dict, and those of its optimizers, from what a run of holdfast train or "
        "holdfast run ended with, or from one of its checkpoints. Names are the model's own where a script has trained "
        "it, else those of its list of layers: 0.weight, 0.bias and so on.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR[@STEP]", help="a run directory; with @STEP its checkpoint of that step"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="model.pt|DIR",
        help="a new file for torch.load, with model (a state_dict), optimizer (a list of them), scheduler, state and "
        "step; or a new folder, with model.safetensors and optimizer.pt. Readable by its owner only",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the file or folder, tells what is in it and returns 0."""
    from holdfast.runtime.exporting import check_target, export, write  # PyTorch takes seconds to load

    to = Path(args.to)
    check_target(to)
    exported = export(args.run_dir)
    write(exported, to)
    for note in exported.notes:
        print(f"note: {note}")
    numbers = sum(value.numel() for value in exported.model.values())
    print(f"step {exported.step}: {len(exported.model)} tensors of {numbers} numbers, in {to}")
    return 0
