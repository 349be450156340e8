"""The same script, which goes on while workers die.

python examples/ddp_digits.py                                                   one process
holdfast run --workers 4 --fault kill:2.0@20:backward examples/ddp_digits.py    four, of which one dies
"""

import torch
from sklearn.datasets import load_digits  # pip install -e '.[digits]'
from torch import nn
from torch.utils.data import TensorDataset

import holdfast


def main() -> None:
    """Trains, and tells how many held-out digits are right."""
    hf = holdfast.session()
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
    model, optimizer = hf.prepare(model, optimizer, scheduler=scheduler)
    loss_fn = nn.CrossEntropyLoss()

    for step in hf.steps(train, microbatches=12, size=4, steps=60):
        for x, y in step:
            step.backward(loss_fn(model(x), y))

        if step.number % 20 == 19 and hf.is_first:
            model.eval()
            with torch.no_grad():
                right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean()
            model.train()
            print(f"step {step.number + 1}: {right:.1%} of held-out digits are right")


if __name__ == "__main__":
    main()
