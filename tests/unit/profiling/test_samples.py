import pytest

from holdfast.profiling.samples import fit_link, spread


def test_the_spread_is_between_the_quartiles_and_outliers_do_not_matter():
    assert spread([5.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == spread([1.0, 2.0, 3.0, 4.0, 5000.0]) == 2.0


def test_a_line_through_the_medians_gives_latency_and_bandwidth():
    link = fit_link({100: [0.5, 1.1, 40.0], 1100: [2.1, 2.1, 9.0]})
    assert link.bytes_per_s == pytest.approx(1000.0)
    assert link.latency_s == pytest.approx(1.0)
    assert link.spread == {"100": pytest.approx(19.75), "1100": pytest.approx(3.45)}
    assert link.seconds_of(1100) == pytest.approx(2.1)


@pytest.mark.parametrize("large_s", [1.0, 0.5])
def test_large_messages_that_are_no_slower_than_small_ones_give_a_link_as_good_as_endless(large_s):
    link = fit_link({8: [1.0], 1000: [large_s]})
    assert link.latency_s == 1.0
    assert link.bytes_per_s >= 1e12
