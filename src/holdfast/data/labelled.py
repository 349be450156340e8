"""Items in the form that Hugging Face's datasets have: mappings with labels, as pairs of inputs and a target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.core.tensorspec import NO_TARGET
from holdfast.data.items import pair_of
from holdfast.data.sampler import Dataset
from holdfast.errors import ConfigError

__all__ = ["Labelled"]

_NAMES = ("labels", "label")


class Labelled:
    """A dataset whose items may be mappings: what is called ``labels``, or ``label``, is the target.

    Items that are pairs stay as they are.

    Args:
        whole: the dataset.
        follows: whether the target of a position is the label of the next one, as causal language models have it, whose
            labels are their inputs.
    """

    def __init__(self, whole: Dataset, *, follows: bool) -> None:
        self._whole, self._follows = whole, follows

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int, /) -> object:
        """Returns an item as a pair.

        Raises:
            ConfigError: it is a mapping without labels; names the item.
        """
        item = self._whole[index]
        if not isinstance(item, Mapping):
            return item
        name = next((each for each in _NAMES if each in item), None)
        if name is None:
            raise ConfigError(
                f"data: item {index} has the keys {', '.join(map(str, item))}; expected labels among them, or a pair: "
                "(inputs, labels)"
            )
        inputs, target = pair_of(index, ({key: value for key, value in item.items() if key != name}, item[name]))
        return inputs, self._next(index, target) if self._follows else target

    def _next(self, index: int, labels: Tensor) -> Tensor:
        if labels.dim() != 1:
            raise ConfigError(
                f"data: the labels of item {index} are of {list(labels.shape)}; expected one for each token of the item"
            )
        return torch.cat([labels[1:], labels.new_full((1,), NO_TARGET)])
