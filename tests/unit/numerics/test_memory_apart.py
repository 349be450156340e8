"""A stage whose memory is not the host's: the same bits, from messages that come from either memory."""

from typing import Any

import pytest
from tests.elsewhere import Elsewhere

from .numerics_grid import convnet_job, digest, gpt_job, train

JOBS = {"gpt": gpt_job, "convnet": convnet_job}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("split", [False, True])
def test_the_same_bits(name: str, split: bool) -> None:
    device = Elsewhere()
    grid: dict[str, Any] = {"ranges": [(0, 2), (2, 6 if name == "convnet" else 5)], "routes": [[0, 1]], "steps": 2}
    stages, losses = train(JOBS[name](), split=split, **grid)
    apart, theirs = train(JOBS[name](device=device), split=split, **grid)
    assert digest(apart) == digest(stages)
    assert theirs == losses
    assert device.there >= 2 * 6 * 4, "inputs, targets, an activation and a gradient of each micro-batch"
