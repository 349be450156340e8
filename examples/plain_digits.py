"""An ordinary training script; `diff plain_digits.py ddp_digits.py` shows what it takes to go on while workers die."""

from itertools import chain

import torch
from sklearn.datasets import load_digits  # pip install -e '.[digits]'
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Trains, and tells how many held-out digits are right."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    train = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
    held_out = images[1500:], torch.tensor(digits.target[1500:])

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    loss_fn = nn.CrossEntropyLoss()

    batches = DataLoader(train, batch_size=48, shuffle=True)
    for number, (x, y) in zip(range(60), chain(batches, batches), strict=False):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        scheduler.step()

        if number % 20 == 19:
            model.eval()
            with torch.no_grad():
                right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean()
            model.train()
            print(f"step {number + 1}: {right:.1%} of held-out digits are right")


if __name__ == "__main__":
    main()
