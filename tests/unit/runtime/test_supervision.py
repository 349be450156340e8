"""Deaths that happen are told from a process that cannot live."""

import pytest

from holdfast.errors import InternalError
from holdfast.runtime.supervision import RestartLimit, describe_exit


def test_too_many_deaths_in_a_short_time_are_an_error():
    limit = RestartLimit(num_restarts=2, within_s=10.0)
    limit.note(0.0, "signal 9")
    limit.note(1.0, "signal 9")
    with pytest.raises(InternalError, match=r"died 3 times within 10 s, it is not started again; .*: exit code 1"):
        limit.note(9.9, "exit code 1")


def test_deaths_far_apart_are_not():
    limit = RestartLimit(num_restarts=2, within_s=10.0)
    for at in range(0, 100, 5):
        limit.note(float(at), "signal 9")


@pytest.mark.parametrize(("status", "text"), [(-9, "signal 9"), (1, "exit code 1"), (0, "exit code 0")])
def test_how_a_process_ended(status, text):
    assert describe_exit(status) == text
