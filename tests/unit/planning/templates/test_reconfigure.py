"""The three steps, as the figure has them, and what is refused."""

import pytest

from holdfast.errors import ConfigError, InfeasiblePlan
from holdfast.planning.templates.reconfigure import Pipelines, reconfigured


def after(pipelines, lost, minimum, **options):
    return reconfigured(Pipelines(pipelines=pipelines), lost, minimum, **options).pipelines


def test_a_pipeline_that_is_still_long_enough_stays():
    assert after(((0, 1), (2, 3, 4, 5)), {3}, 2) == ((0, 1), (2, 4, 5))


def test_a_short_one_borrows_from_the_end_of_the_biggest_the_last_among_equals():
    assert after(((0, 1), (2, 3, 4), (5, 6, 7)), {1}, 2) == ((0, 7), (5, 6), (2, 3, 4))
    assert after(((0, 1), (2, 3, 4), (5, 6, 7, 8)), {1}, 2) == ((0, 8), (2, 3, 4), (5, 6, 7))


def test_a_pipeline_of_which_nobody_is_left_borrows_too():
    assert after(((0, 1), (2, 3, 4, 5)), {0, 1}, 2) == ((2, 3), (5, 4))


def test_short_ones_merge_in_order_and_then_with_the_first_that_has_enough():
    assert after(((0, 1), (2, 3), (4, 5)), {1, 5}, 2) == ((0, 4), (2, 3))
    assert after(((0, 1), (2, 3), (4, 5)), {5}, 2) == ((2, 3), (4, 0, 1))


def test_who_waits_comes_before_anything_is_borrowed():
    found = reconfigured(Pipelines(pipelines=((0, 1), (2, 3, 4)), dormant=(5,)), {1}, 2)
    assert (found.pipelines, found.dormant) == (((0, 5), (2, 3, 4)), ())


def test_nodes_above_the_sizes_that_there_are_wait():
    found = reconfigured(Pipelines(pipelines=((0, 1, 2), (3, 4, 5))), {2, 5}, 3, {3, 4})
    assert (found.pipelines, found.dormant) == (((0, 1, 3, 4),), ())
    found = reconfigured(Pipelines(pipelines=((0, 1, 2), (3, 4, 5))), {5}, 3, {3, 4})
    assert (found.pipelines, found.dormant) == (((3, 4, 0, 1),), (2,))


def test_too_few_are_left():
    with pytest.raises(InfeasiblePlan, match=r"1 node\(s\) are left, but a pipeline needs 2"):
        after(((0, 1), (2, 3)), {0, 1, 2}, 2)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="node 9 is in no pipeline"):
        after(((0, 1),), {9}, 1)
    with pytest.raises(ConfigError, match=r"node 1 of .* is impossible"):
        Pipelines(pipelines=((0, 1), (1, 2)))
    with pytest.raises(ConfigError, match="minimum of 0"):
        after(((0, 1),), {1}, 0)
