import pytest

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.schedule import Op, OpKind, Orders, format_orders, parse_orders
from holdfast.errors import ConfigError, InvalidSchedule

BATCH = Batch((2, 1))
TEXT = "0.0: F0.0 B0.0\n1.2: F1.0 I1.0 W1.0\n2.0:\n"


def test_text_round_trips_exactly():
    assert format_orders(parse_orders(TEXT, BATCH)) == TEXT


def test_rows_are_found_by_worker():
    orders = parse_orders(TEXT, BATCH)
    assert orders.of(WorkerId(1, 2))[1] == Op(OpKind.I, BATCH.named(1, 0))
    assert orders.workers == (WorkerId(0, 0), WorkerId(1, 2), WorkerId(2, 0))
    with pytest.raises(ConfigError, match=r"worker 0\.1 has no row"):
        orders.of(WorkerId(0, 1))


def test_comments_blank_lines_and_any_sequence_of_rows_are_read():
    orders = parse_orders("# healthy\n\n1.0: F1.0 B1.0  # last\n0.0: F0.0 B0.0\n", BATCH)
    assert format_orders(orders) == "0.0: F0.0 B0.0\n1.0: F1.0 B1.0\n"


def test_a_bad_operation_is_named_with_its_place():
    with pytest.raises(InvalidSchedule, match=r"line 2.*'X1\.0'") as caught:
        parse_orders("0.0: F0.0\n1.2: F1.0 X1.0\n", BATCH)
    assert (caught.value.worker, caught.value.position, caught.value.op) == ("1.2", 1, "X1.0")


@pytest.mark.parametrize("text", ["0.0 F0.0", "zero: F0.0", "0.0: F0.0\n0.0: F0.1", "0.0: F0", "0.0: F0.2"])
def test_other_bad_lines_are_refused(text):
    with pytest.raises(InvalidSchedule, match=r"line [12]"):
        parse_orders(text, BATCH)


def test_unsorted_rows_are_refused():
    with pytest.raises(InvalidSchedule, match=r"comes after 1\.0"):
        Orders(((WorkerId(1, 0), ()), (WorkerId(0, 0), ())))
