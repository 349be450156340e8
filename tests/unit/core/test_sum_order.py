"""The order of additions does not depend on who has what."""

import itertools
import random

import pytest

from holdfast.core.sum_order import SumOrder, better_chunks, most_held


def joined(one, other):
    """Of two numbers the sum is the same either way; the earlier one is written first."""
    first, second = sorted((one, other), key=lambda text: int(text.strip("(").split("+")[0].rstrip(")")))
    return f"({first}+{second})"


def grown(order, numbers, parts=None):
    """What a worker holds that adds these micro-batches, in this order, as formulas."""
    parts = {} if parts is None else parts
    for number in numbers:

        def onto(part, number=number):
            return f"({part}+{number})"

        order.add(parts, number, begin=lambda number=number: str(number), onto=onto, join=joined)
    return parts


def total(order, *held, absent=frozenset()):
    parts = dict(pair for each in held for pair in each.items())
    assert len(parts) == sum(map(len, held))
    return order.total(parts, absent, lambda one, other: f"({one}+{other})")


@pytest.mark.parametrize(
    ("num_microbatches", "chunk", "formula"),
    [
        (1, 1, "0"),
        (3, 3, "((0+1)+2)"),
        (4, 1, "((0+1)+(2+3))"),
        (6, 3, "(((0+1)+2)+((3+4)+5))"),
        (12, 3, "((((0+1)+2)+((3+4)+5))+(((6+7)+8)+((9+10)+11)))"),
    ],
)
def test_chunks_are_added_one_after_another_and_then_neighbours_first(num_microbatches, chunk, formula):
    order = SumOrder.of(num_microbatches)
    assert order.chunk == chunk
    assert total(order, grown(order, range(num_microbatches))) == formula


def test_a_number_of_chunks_that_is_no_power_of_two_has_its_last_ones_alone():
    order = SumOrder(5, 1)
    assert total(order, grown(order, range(5))) == "(((0+1)+(2+3))+4)"
    assert total(SumOrder(6, 2), grown(SumOrder(6, 2), range(6))) == "(((0+1)+(2+3))+(4+5))"


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_whoever_has_which_in_whatever_order_the_sum_is_the_same(chunk, workers):
    order = SumOrder(12, chunk)
    expected = total(order, grown(order, range(12)))
    draw = random.Random(f"{chunk} {workers}")
    for _ in range(50):
        dealt = [[] for _ in range(workers)]
        for number in draw.sample(range(12), 12):
            draw.choice(dealt).append(number)
        assert total(order, *(grown(order, numbers) for numbers in dealt)) == expected


@pytest.mark.parametrize(("num_microbatches", "workers"), [*itertools.product((8, 24, 48, 40), (1, 2, 4, 8))])
def test_up_to_eight_workers_hold_one_partial_sum_each(num_microbatches, workers):
    order, share = SumOrder.of(num_microbatches), num_microbatches // workers
    for first in range(0, num_microbatches, share):
        mine = range(first, first + share)
        assert grown(order, mine).keys() == {(first, first + share)}
        assert order.held(mine)[0] <= 4


def test_what_is_left_out_adds_nothing():
    order = SumOrder.of(6)
    first, second = grown(order, [0, 2]), grown(order, [5])
    assert total(order, first, second, absent={1, 3, 4}) == "((0+2)+5)"
    assert total(order, grown(order, [4]), absent={0, 1, 2, 3, 5}) == "4"
    assert total(order, absent=range(6)) is None


def test_what_came_out_of_turn_waits_for_what_it_is_added_onto():
    order = SumOrder(8, 4)
    parts = grown(order, [2, 1, 5])
    assert parts.keys() == {(1, 2), (2, 3), (5, 6)}
    assert grown(order, [0], parts) == {(0, 3): "((0+1)+2)", (5, 6): "5"}
    assert grown(order, [4, 3], parts) == {(0, 4): "(((0+1)+2)+3)", (4, 6): "(4+5)"}
    assert order.held([0, 1, 2, 5, 6]) == (3, 3)


@pytest.mark.parametrize(
    ("counts", "lanes", "expected"),
    [
        ((6, 6, 6, 6), (), (2, 1)),
        ((4, 4, 4), (), (3, 3)),
        ((24,), (), (4, 1)),
        ((8,), (2,), (4, 4)),
        ((1, 2), (), (2, 2)),
    ],
)
def test_what_any_worker_holds_at_most_and_at_last(counts, lanes, expected):
    assert most_held(counts, lanes) == expected


@pytest.mark.parametrize(
    ("counts", "lanes", "chunks"),
    [
        ((4, 4, 4), (), 3),
        ((4,) * 6, (), 6),
        ((3,) * 5, (), 5),
        ((6, 6), (), None),
        ((5, 4), (), 3),
        ((24,), (), None),
        ((8,), (2,), None),
    ],
)
def test_micro_batches_can_be_cut_so_that_workers_hold_the_fewest_parts(counts, lanes, chunks):
    usual, then = most_held(counts, lanes)[1], most_held(counts, lanes, chunks)[1]
    assert better_chunks(counts, lanes) == (None if chunks is None else (chunks, usual, then))
    assert (then < usual) == (chunks is not None)


def test_chunks_can_be_told():
    order = SumOrder.of(12, 3)
    assert total(order, grown(order, range(12))) == "(((((0+1)+2)+3)+(((4+5)+6)+7))+(((8+9)+10)+11))"
