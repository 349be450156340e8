"""How many steps the epochs of a job are."""

import pytest

from holdfast.config.load import parse_job
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError
from holdfast.runtime.engine.datasets import in_steps
from holdfast.runtime.specs import emulated_probe


def job(path, **train):
    return parse_job(
        {
            "name": "epochs",
            "model": {"kind": "gpt", "layers": 1, "width": 8, "heads": 2, "context": 8},
            "data": {"kind": "text", "path": str(path)},
            "grid": {"pipelines": 1, "stages": 1, "microbatches": 2, "microbatch_size": 2},
            "train": train,
        }
    )


@pytest.fixture
def text(tmp_path):
    """Of seven samples, and four in a step."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(7 * 8 + 1))
    return path


@pytest.mark.parametrize(("epochs", "steps"), [(1, 2), (2, 4), (3, 6), (4, 7), (8, 14)])
def test_the_last_step_is_filled_up(text, epochs, steps):
    counted = in_steps(job(text, epochs=epochs))
    assert (counted.train.steps, counted.train.epochs) == (steps, epochs)
    assert in_steps(counted) == counted


def test_who_says_steps_has_as_many(text):
    told = job(text, steps=5)
    assert in_steps(told) is told


def test_who_says_both_has_to_mean_the_same(text):
    with pytest.raises(ConfigError, match=r"train.steps: 5, but train.epochs: 2 are 4 steps of 4 samples, as an epoch"):
        in_steps(job(text, epochs=2, steps=5))


def test_where_no_data_are_opened_steps_are_to_be_said(text):
    with pytest.raises(ConfigError, match=r"only the data tell, .* expected train.steps"):
        emulated_probe(job(text, epochs=2), uniform_profile(3, forward_s=0.1))
