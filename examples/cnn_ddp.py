"""A CNN trained as people do it, with DistributedDataParallel; `diff cnn_ddp.py cnn_holdfast.py` shows its conversion.

torchrun --standalone --nproc-per-node 2 examples/cnn_ddp.py              two processes
torchrun --standalone --nproc-per-node 2 examples/cnn_ddp.py --resume     and on from the last epoch that was saved
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # pip install -e '.[digits]'
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TRAINED = 1440


class Digits(Dataset):
    """Handwritten digits; those to train on are shifted, and some of their pixels are noise."""

    def __init__(self, train: bool) -> None:
        """Loads one part of them."""
        digits = load_digits()
        part = slice(0, TRAINED) if train else slice(TRAINED, None)
        self.images = torch.tensor(digits.images[part], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target[part])
        self.train = train

    def __len__(self) -> int:
        """How many there are."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns one of them."""
        image = self.images[index]
        if self.train:
            down, right = (int(shift) for shift in torch.randint(-1, 2, (2,)))
            image = torch.roll(image, (down, right), (1, 2)) + 0.1 * torch.randn(image.shape)
        return image, self.labels[index]


class Patience:
    """Says when the loss on held-out data has been no better for some epochs."""

    def __init__(self, epochs: int) -> None:
        """Has seen nothing yet."""
        self.epochs, self.best, self.worse = epochs, float("inf"), 0

    def is_over(self, loss: float) -> bool:
        """Takes the loss of an epoch."""
        self.best, self.worse = (loss, 0) if loss < self.best else (self.best, self.worse + 1)
        return self.worse >= self.epochs

    def state_dict(self) -> dict:
        """What it has seen."""
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from what another one has seen."""
        self.best, self.worse = state["best"], state["worse"]


def build() -> nn.Module:
    """Returns a small CNN."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 16, 10),
    )


def evaluate(model: nn.Module, data: Dataset) -> tuple[float, float]:
    """Returns the loss on some data, and which part of them is right."""
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=64):
            output = model(x)
            loss += nn.functional.cross_entropy(output, y, reduction="sum").item()
            right += int((output.argmax(1) == y).sum())
    model.train()
    return loss / len(data), right / len(data)


def main() -> None:
    """Trains until the held-out loss gets no better."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("cnn-out"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, held_out = Digits(train=True), Digits(train=False)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=48 // world, sampler=sampler, num_workers=2)

    model = DDP(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    patience, first = Patience(args.patience), 0
    kept = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "patience": patience}
    args.out.mkdir(exist_ok=True)
    if args.resume:
        saved = torch.load(args.out / "last.pt")
        first = saved["epoch"]
        for name, each in kept.items():
            each.load_state_dict(saved[name])

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        totals = torch.zeros(2)
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
            loss = nn.functional.cross_entropy(output.float(), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model.module)
            totals += torch.tensor([loss.item() * len(y), len(y)])

        dist.all_reduce(totals)
        loss, right = evaluate(ema, held_out)
        if rank == 0:
            print(f"epoch {epoch}: loss {totals[0] / totals[1]:.3f}, held out {loss:.3f}, {right:.1%} right")
            torch.save(
                {"epoch": epoch + 1, **{name: each.state_dict() for name, each in kept.items()}}, args.out / "last.pt"
            )
        if patience.is_over(loss):
            break

    if rank == 0:
        torch.save(ema.module.state_dict(), args.out / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
