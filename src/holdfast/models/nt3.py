"""CANDLE's NT3 as a list of layers: a 1-D convolutional classifier of gene expressions, normal or of a tumour.

Source: github.com/ECP-CANDLE/Benchmarks, Pilot1/NT3: conv 128x20, pool 1, conv 128x10, pool 10, dense 200 and 20 with
dropout 0.1, dense 2. There the last layer has a softmax, here the loss has it.
"""

from __future__ import annotations

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.models.convnet import loss

__all__ = ["SHORTEST", "build", "loss"]

SHORTEST = 29
"""Values of an item, at least: what two convolutions leave something of."""
_KERNELS, _POOL, _FULL_WIDTH, _DENSE = (20, 10), 10, 128, (200, 20)


def build(width: int = 128, values: int = 60483, dropout: float = 0.1, *, seed: int = 0) -> list[nn.Module]:
    """Return the 5 layers, for float32 ``[batch, 1, values]``.

    The initial weights depend on ``seed`` and sizes alone; the global random state is left as it was.

    Args:
        width: channels of both convolutions; as published with 128. The first dense layer grows with it.
        values: of an item; the pooling is as wide as the second convolution's result, if that is less than 10.
        dropout: rate behind the first two dense layers.
        seed: of the initial weights.

    Raises:
        ConfigError: a size is impossible.
    """
    if width < 1 or values < SHORTEST or not 0 <= dropout < 1:
        raise ConfigError(
            f"model: width={width}, values={values}, dropout={dropout} is impossible: expected width >= 1, items of "
            f"{SHORTEST} values or more, 0 <= dropout < 1"
        )
    left = values - sum(_KERNELS) + len(_KERNELS)
    pool, dense = min(_POOL, left), max(_DENSE[1], _DENSE[0] * width // _FULL_WIDTH)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return [
            nn.Sequential(nn.Conv1d(1, width, _KERNELS[0]), nn.ReLU()),
            nn.Sequential(nn.Conv1d(width, width, _KERNELS[1]), nn.ReLU(), nn.MaxPool1d(pool), nn.Flatten()),
            nn.Sequential(nn.Linear(width * (left // pool), dense), nn.ReLU(), nn.Dropout(dropout)),
            nn.Sequential(nn.Linear(dense, _DENSE[1]), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(_DENSE[1], 2),
        ]
