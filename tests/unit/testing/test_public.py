"""What other people's tests import."""

import doctest

import pytest

from holdfast import testing


@pytest.mark.parametrize("name", testing.__all__)
def test_every_public_name_is_there(name):
    assert getattr(testing, name).__name__ == name


def test_what_is_not_public_is_told_as_usual():
    with pytest.raises(AttributeError, match=r"module 'holdfast\.testing' has no attribute 'Cluster'"):
        _ = testing.Cluster


def test_the_example_is_true():
    found = doctest.testmod(testing)
    assert (found.failed, found.attempted) == (0, 9)
