import pytest

from holdfast.core.ids import Batch, WorkerId
from holdfast.errors import ConfigError


def test_text_round_trips():
    assert WorkerId.parse(str(WorkerId(1, 2))) == WorkerId(1, 2)
    batch = Batch((12,) * 11)
    assert batch.named(10, 11) == batch.microbatches[-1]
    assert str(batch.named(10, 11)) == "10.11"


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


def test_negative_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"0\.-1"):
        WorkerId(0, -1)
    with pytest.raises(ConfigError, match=r"micro-batch -1\.0 is impossible"):
        Batch((1,)).named(-1, 0)


def test_numbers_count_through_the_pipelines_in_order():
    batch = Batch((5, 3, 6))
    assert [each.number for each in batch.microbatches] == list(range(14))
    assert batch.named(1, 0).number == 5


@pytest.mark.parametrize("name", ["0.5", "1.3", "3.0"])
def test_a_micro_batch_that_no_pipeline_has_is_refused(name):
    with pytest.raises(ConfigError, match=rf"there is no micro-batch {name}: the pipelines have \(5, 3, 6\)"):
        Batch((5, 3, 6)).named(*map(int, name.split(".")))


@pytest.mark.parametrize("counts", [(), (0,), (2, 0, 1), (1 << 20, 1)])
def test_impossible_steps_are_refused(counts):
    with pytest.raises(ConfigError, match="every pipeline has at least 1"):
        Batch(counts)
