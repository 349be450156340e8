"""What ``make test`` leaves to ``make soak``: cases that show what others beside them show, too."""

import pytest


def some(cases, kept):
    """Cases of a test, for ``parametrize``; whichever are not ``kept`` are run in a soak only."""
    cases = list(cases)
    assert all(case in cases for case in kept)
    assert kept
    return [case if case in kept else pytest.param(*_values(case), marks=pytest.mark.soak) for case in cases]


def _values(case):
    return case if isinstance(case, tuple) else (case,)
