import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.recovery.checkfreq import OVERHEAD, checkpoint_interval

SECONDS = st.floats(min_value=1e-4, max_value=1e3)


@given(SECONDS, SECONDS, SECONDS)
def test_it_is_the_smallest_that_keeps_both_bounds(stall, write, step):
    def allowed(interval, slack):
        return stall / (interval * step) <= OVERHEAD * slack and write <= interval * step * slack

    interval = checkpoint_interval(stall, write, step)
    assert interval >= 1
    assert allowed(interval, 1 + 1e-9)
    assert interval == 1 or not allowed(interval - 1, 1 - 1e-9)


@pytest.mark.parametrize(
    ("stall", "write", "step", "interval"),
    [
        (0.0, 0.0, 1.0, 1),
        (0.035, 0.0, 1.0, 1),
        (0.036, 0.0, 1.0, 2),
        (1.05, 0.0, 1.0, 30),
        (0.0, 2.5, 1.0, 3),
        (0.035, 2.5, 1.0, 3),
    ],
)
def test_examples(stall, write, step, interval):
    assert checkpoint_interval(stall, write, step) == interval


def test_a_looser_bound_allows_more_checkpoints():
    assert checkpoint_interval(1.0, 0.0, 1.0, overhead=0.5) == 2


@pytest.mark.parametrize(
    ("arguments", "overhead"),
    [((0.1, 0.1, 0.0), 0.1), ((-1.0, 0.1, 1.0), 0.1), ((0.1, -1.0, 1.0), 0.1), ((0.1, 0.1, 1.0), 0)],
)
def test_impossible_times_are_refused(arguments, overhead):
    with pytest.raises(ConfigError, match="expected stall_s and write_s of at least 0"):
        checkpoint_interval(*arguments, overhead=overhead)
