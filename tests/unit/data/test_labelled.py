"""Items in the form of transformers' datasets: what is the target, and what is refused."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch

from holdfast.core.tensorspec import NO_TARGET
from holdfast.data.items import stack
from holdfast.data.labelled import Labelled
from holdfast.errors import ConfigError

ROW = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "attention_mask": np.array([1, 1, 1])}


@pytest.mark.parametrize("row", [ROW, UserDict(ROW), {**ROW, "labels": torch.tensor([5, 6, 7])}])
def test_labels_are_the_target_and_all_else_inputs(row):
    inputs, target = stack((0,), (Labelled([row], follows=False)[0],), None)
    assert list(inputs) == ["input_ids", "attention_mask"]
    assert inputs["input_ids"].tolist() == [[5, 6, 7]]
    assert target.tolist() == [[5, 6, 7]]


def test_of_a_causal_model_what_follows_is_asked_for():
    data = Labelled([ROW], follows=True)
    assert len(data) == 1
    assert data[0][1].tolist() == [6, 7, NO_TARGET]


def test_one_label_of_an_item_may_be_called_label():
    assert Labelled([{"pixel_values": torch.zeros(3, 2, 2), "label": 4}], follows=False)[0][1].item() == 4


def test_pairs_stay_as_they_are():
    pair = (torch.zeros(3), 1)
    assert Labelled([pair], follows=True)[0] is pair


def test_what_has_no_labels_is_refused_by_its_keys():
    with pytest.raises(
        ConfigError, match=r"^data: item 0 has the keys input_ids, idx; expected labels among them, or a pair"
    ):
        _ = Labelled([{"input_ids": [1], "idx": 3}], follows=False)[0]
    with pytest.raises(
        ConfigError, match=r"^data: the labels of item 0 are of \[\]; expected one for each token of the item"
    ):
        _ = Labelled([{"input_ids": [1], "label": 3}], follows=True)[0]
