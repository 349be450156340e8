import pytest

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.errors import ConfigError


def test_text_round_trips():
    assert WorkerId.parse(str(WorkerId(1, 2))) == WorkerId(1, 2)
    assert MicroBatch.parse(str(MicroBatch(10, 11))) == MicroBatch(10, 11)


def test_workers_sort_by_number_not_by_text():
    assert sorted([WorkerId(10, 0), WorkerId(2, 3), WorkerId(2, 0)]) == [
        WorkerId(2, 0),
        WorkerId(2, 3),
        WorkerId(10, 0),
    ]


@pytest.mark.parametrize("text", ["", "1", "1.", ".2", "1.2.3", "a.b", "-1.2", "1,2", "²·1", "1.٣"])
def test_nonsense_is_refused_with_what_would_be_right(text):
    with pytest.raises(ConfigError, match=r"pipeline\.stage such as 1\.2"):
        WorkerId.parse(text)
    with pytest.raises(ConfigError, match=r"pipeline\.index such as 1\.5"):
        MicroBatch.parse(text)


def test_negative_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"0\.-1"):
        WorkerId(0, -1)
    with pytest.raises(ConfigError, match=r"micro-batch -1\.0 is impossible"):
        MicroBatch(-1, 0)


def test_numbers_count_through_the_pipelines_in_order():
    numbers = [MicroBatch(p, i).number(6) for p in range(3) for i in range(6)]
    assert numbers == list(range(18))


def test_a_number_that_would_belong_to_another_microbatch_is_refused():
    with pytest.raises(ConfigError, match=r"micro-batch 0\.6 .* only 6"):
        MicroBatch(0, 6).number(6)
