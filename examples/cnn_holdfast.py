"""The CNN of cnn_ddp.py, trained while workers die; `diff cnn_ddp.py cnn_holdfast.py` shows what it takes.

python examples/cnn_holdfast.py                                                               one process
holdfast run --workers 4 --fault kill:2.0@20:backward examples/cnn_holdfast.py                four, of which one dies
holdfast run --workers 4 --set checkpoint.every=30 --resume auto examples/cnn_holdfast.py     and on from a checkpoint
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits  # pip install -e '.[digits]'
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import holdfast

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


class Totals:
    """Adds up an epoch's losses: state, as whoever joins in the middle of an epoch has not seen its beginning."""

    def __init__(self) -> None:
        """Has added nothing yet."""
        self.sum, self.count = 0.0, 0

    def add(self, value: float, count: int) -> None:
        """Adds those of a step."""
        self.sum, self.count = self.sum + value, self.count + count

    def take(self) -> float:
        """Returns the mean, and begins anew."""
        mean = self.sum / self.count
        self.sum, self.count = 0.0, 0
        return mean

    def state_dict(self) -> dict:
        """What it has added."""
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from what another one has added."""
        self.sum, self.count = state["sum"], state["count"]


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
    args = parser.parse_args()

    hf = holdfast.session(seed=0)
    train, held_out = Digits(train=True), Digits(train=False)
    loader = DataLoader(train, batch_size=8, shuffle=True, num_workers=2)  # items of a step; workers share them
    steps = len(train) // 48  # of an epoch

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * steps)
    model, optimizer = hf.prepare(model, optimizer, scheduler=scheduler, clip_norm=1.0)
    ema = hf.state(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True))
    patience, totals = hf.state(Patience(args.patience)), hf.state(Totals())
    args.out.mkdir(exist_ok=True)

    for step in hf.steps(loader, microbatches=6, epochs=args.epochs, logs=("loss",)):
        for x, y in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
            loss = nn.functional.cross_entropy(output.float(), y)
            step.backward(loss)
            step.log("loss", loss)
        ema.update_parameters(model)
        totals.add(step.sums["loss"], step.counts["loss"])

        if step.number % steps == steps - 1:
            loss, right = evaluate(ema, held_out)
            mean = totals.take()
            if hf.is_first:
                print(f"epoch {step.number // steps}: loss {mean:.3f}, held out {loss:.3f}, {right:.1%} right")
            if patience.is_over(loss):
                hf.stop()

    if hf.is_first:
        torch.save(ema.module.state_dict(), args.out / "model.pt")


if __name__ == "__main__":
    main()
