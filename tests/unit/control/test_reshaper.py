"""What the coordinator is told once workers are lost, and when."""

from holdfast.control.membership import Handover
from holdfast.control.messages import Exited
from holdfast.control.reshaper import Reshaper
from holdfast.core.builders import regular_plan
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.planning.reshaping import Shapes
from holdfast.telemetry.events import Notice

from .decided import DecidedJob

LAYERS = 12
BASELINE = regular_plan(3, split_evenly(LAYERS, 4), 6)
SHAPES = Shapes(costs=unit_costs(LAYERS), minimum=3, state=(1,) * LAYERS)
W12 = WorkerId(1, 2)


def job(steps):
    """One whose worker 1.2 was lost in step 1, and that runs again."""
    begun = DecidedJob(BASELINE, steps=steps).begun()
    begun.give(Exited(worker=W12, pid=1, status=-9))
    return begun.agreed(1)


def test_it_proposes_until_that_is_begun_and_never_for_nothing():
    reshaper = Reshaper(SHAPES)
    assert reshaper.news(DecidedJob(BASELINE, steps=99).begun().state) == (), "nobody is lost"
    bereft = job(99)
    (news,) = reshaper.news(bereft.state)
    assert (news.lost, type(news.offer)) == ({W12}, Handover)
    assert reshaper.news(bereft.state) == (news,), "it may have come while something else was under way"
    bereft.give(news)
    assert bereft.state.grid.target == news.offer.grid
    assert [event.text for event in bereft.recorded if isinstance(event, Notice)] == [news.offer.why]
    assert reshaper.news(bereft.state) == ()


def test_it_leaves_a_job_alone_that_is_nearly_over():
    assert Reshaper(SHAPES).news(job(5).state) == ()
    assert Reshaper(SHAPES).news(job(9).state) != ()
