import pytest
from tests.plan_texts import orders_of

from holdfast.core.ids import Batch, WorkerId
from holdfast.core.schedule import Op, OpKind, Orders, format_orders
from holdfast.errors import ConfigError, InvalidSchedule

BATCH = Batch((2, 1))
TEXT = "0.0: F0.0 B0.0\n1.2: F1.0 I1.0 W1.0\n2.0:\n"


def test_text_round_trips_exactly():
    assert format_orders(orders_of(TEXT, BATCH)) == TEXT


def test_rows_are_found_by_worker():
    orders = orders_of(TEXT, BATCH)
    assert orders.of(WorkerId(1, 2))[1] == Op(OpKind.I, BATCH.named(1, 0))
    assert orders.workers == (WorkerId(0, 0), WorkerId(1, 2), WorkerId(2, 0))
    with pytest.raises(ConfigError, match=r"worker 0\.1 has no row"):
        orders.of(WorkerId(0, 1))


def test_unsorted_rows_are_refused():
    with pytest.raises(InvalidSchedule, match=r"comes after 1\.0"):
        Orders(((WorkerId(1, 0), ()), (WorkerId(0, 0), ())))
