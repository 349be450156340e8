"""A training script that is edited between two runs, by a file in its folder; it tells its learning rates."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import holdfast

FOLDER = Path(sys.argv[1])


class Folder(Dataset):
    """Samples in a folder, which may grow while the job runs."""

    def __init__(self) -> None:
        self.paths = sorted(FOLDER.glob("sample-*.pt"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        sample = torch.load(self.paths[index])
        return sample, sample.sum(0, keepdim=True)


def main() -> None:
    hf = holdfast.session(seed=3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    edited = {"kind": "AdamW", "lr": 0.05, **json.loads((FOLDER / "edits.json").read_text())}
    optimizer = getattr(torch.optim, edited["kind"])(model.parameters(), lr=edited["lr"], foreach=False)
    last = FOLDER / "last.pt"
    if last.exists():
        kept = torch.load(last)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer = hf.prepare(model, optimizer, scheduler=scheduler, bucket_bytes=64)
    for step in hf.steps(Folder(), microbatches=4, size=2, steps=6):
        if hf.is_first:
            with (FOLDER / "rates.jsonl").open("a") as file:
                entries = [float(each["step"]) for each in optimizer.state.values() if "step" in each]
                file.write(json.dumps([step.number, optimizer.param_groups[0]["lr"], entries]) + "\n")
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        if step.number == 2 and hf.worker == "0.0" and (FOLDER / "wait").exists():
            if edited_script := (FOLDER / "wait").read_text():
                with Path(edited_script).open("a") as file:
                    file.write("# edited, whatever it is\n")
            else:
                torch.save(torch.ones(4), FOLDER / "sample-9.pt")
            (FOLDER / "grown").touch()
            while (FOLDER / "wait").exists():
                time.sleep(0.01)
    if hf.is_first:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, FOLDER / "saved.pt")


if __name__ == "__main__":
    main()
