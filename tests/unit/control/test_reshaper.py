"""What the coordinator is told once workers are lost, and when."""

import re
from dataclasses import replace

import pytest
from tests.processes import NODE, process_of

from holdfast.control.membership import Handover, Improved, Stay, Unadvised
from holdfast.control.membership.running import RefusedMove
from holdfast.control.membership.starting import Offer
from holdfast.control.messages import Exited, Hello, Leaving, StartWorker, WorkerOffer
from holdfast.control.reshaper import Reshaper
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.planning.reshaping import Shapes
from holdfast.planning.templates.stages import table_of
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Notice

from .decided import DecidedJob

LAYERS = 12
BASELINE = regular_plan(3, split_evenly(LAYERS, 4), 6)
SHAPES = Shapes(costs=unit_costs(LAYERS), table=table_of(unit_costs(LAYERS)), minimum=3, state=(1,) * LAYERS)
W12 = WorkerId(1, 2)


def job(steps):
    """One whose worker 1.2 was lost in step 1, and that runs again."""
    begun = DecidedJob(BASELINE, steps=steps).begun()
    begun.give(Exited(worker=W12, process=process_of(W12, 1), status=-9))
    return begun.agreed(1)


def test_it_proposes_until_that_is_begun_and_never_for_nothing():
    reshaper = Reshaper(SHAPES)
    assert reshaper.news(DecidedJob(BASELINE, steps=99).begun().state) == (), "nobody is lost"
    bereft = job(99)
    (news,) = reshaper.news(bereft.state)
    assert re.search(r"are 20% faster, \d+\.\d steps more until the job ends$", news.offer.why)
    assert (news.lost, type(news.offer)) == ({W12}, Handover)
    assert reshaper.news(bereft.state) == (news,), "it may have come while something else was under way"
    bereft.give(news)
    assert bereft.state.grid.target == news.offer.grid
    assert [event.text for event in bereft.recorded if isinstance(event, Notice)] == [news.offer.why]
    assert reshaper.news(bereft.state) == ()


def test_it_leaves_a_job_alone_that_is_nearly_over_and_says_so_once():
    ending, reshaper = job(5), Reshaper(SHAPES)
    (news,) = reshaper.news(ending.state)
    assert isinstance(news.offer, Stay)
    assert news.offer.why.endswith("but that gains less than a step until the job ends")
    ending.give(news)
    assert [event.text for event in ending.recorded] == [news.offer.why]
    assert reshaper.news(ending.state) == ()
    (longer,) = Reshaper(SHAPES).news(job(9).state)
    assert isinstance(longer.offer, Handover)


def at(state, seconds, every_s):
    rules = replace(state.rules, failure_every_s=every_s)
    return replace(state, rules=rules, watch=replace(state.watch, now=seconds))


def test_it_goes_over_later_if_the_next_failure_comes_before_that_pays():
    """Costs are seconds here: a step takes 108, then 90, and a layer is on its way for 50."""
    timed = replace(SHAPES, copy_s=(50.0,) * LAYERS)
    bereft, reshaper = job(99), Reshaper(timed)
    (later,) = reshaper.news(at(bereft.state, 1.0, 250.0))
    assert isinstance(later.offer, Stay)
    assert later.offer.why.startswith("other pipelines later: 11 workers")
    bereft.give(later)
    assert reshaper.news(at(bereft.state, 1.0, 250.0)) == ()
    (now,) = reshaper.news(at(bereft.state, 1.0, 1000.0))
    assert isinstance(now.offer, Handover), "the longer nothing fails, the more it gains"


def test_it_waits_for_whoever_is_coming():
    bereft, reshaper = job(99), Reshaper(SHAPES)
    bereft.give(WorkerOffer(worker=W12, node=NODE))
    (later,) = reshaper.news(bereft.state)
    assert later.offer == Stay(
        situation=bereft.state.situation,
        why="other pipelines later, once 1.2 can be part of them",
    )
    bereft.give(later)
    assert [event.text for event in bereft.recorded] == [later.offer.why]


def advised(steps=99, plan=BASELINE):
    begun = DecidedJob(plan, steps=steps).begun()
    begun.state = replace(begun.state, rules=replace(begun.state.rules, weighs=True))
    return begun


def test_whoever_is_told_to_go_stays_until_it_is_known_what_becomes_of_its_layers():
    going = advised().give(Leaving(worker=W12))
    assert going.state.running.upcoming is None
    (news,) = Reshaper(SHAPES).news(going.state)
    assert news.offer.leaving == {W12}
    assert W12 not in news.offer.grid.workers
    going.give(news)
    assert W12 in going.state.running.upcoming.plan.workers, "it trains, and gives its layers, meanwhile"
    assert going.state.running.upcoming.plan.placement.followed


@pytest.mark.parametrize("why", ["nothing is better", "nobody is asked any more"])
def test_it_goes_at_once_if_nothing_is_better_or_nobody_can_be_asked(why):
    going = advised().give(Leaving(worker=W12))
    if why == "nothing is better":
        going.give(Improved(lost=frozenset(), offer=Stay(situation=going.state.situation, why=why)))
    else:
        going.give(Unadvised())
    assert W12 not in going.state.running.upcoming.plan.workers


def test_it_goes_at_once_if_that_grid_could_not_be_become_before():
    going = advised().give(Leaving(worker=W12))
    (news,) = Reshaper(SHAPES).news(going.state)
    refused = RefusedMove(grid=news.offer.grid, absent=frozenset(), why="it was tried")
    going.state = replace(going.state, prospects=replace(going.state.prospects, refused=refused))
    going.give(news)
    assert W12 not in going.state.running.upcoming.plan.workers
    assert going.state.grid.target is None
    assert going.state.prospects.weighed == (going.state.situation, "it was tried")


def test_what_was_said_of_another_situation_does_not_count():
    going = advised().give(Leaving(worker=W12))
    before = going.state.situation
    going.give(Leaving(worker=WorkerId(0, 0)), Improved(lost=frozenset(), offer=Stay(situation=before, why="")))
    assert going.state.running.upcoming is None


def test_the_last_owner_of_a_layer_may_go_once_others_have_it():
    alone = regular_plan(1, split_evenly(LAYERS, 4), 6)
    going = advised(plan=alone).give(Leaving(worker=WorkerId(0, 1)))
    (news,) = Reshaper(SHAPES).news(going.state)
    assert news.offer.why == "3 workers become pipelines of 3: else a layer would have no owner"
    going.give(news)
    assert going.state.grid.target == news.offer.grid


def test_spares_for_which_there_is_no_place_make_the_grid_larger():
    spares = [WorkerId(3, number) for number in range(4)]
    larger, reshaper = advised(), Reshaper(SHAPES)
    (few,) = reshaper.news(larger.give(Hello(worker=spares[0], process=process_of(spares[0], 9))).state)
    assert few.offer.why == "all stay as they are: other pipelines would hardly be faster", "of 13, that is"
    larger.give(*(Hello(worker=spare, process=process_of(spare, 9)) for spare in spares[1:]))
    (news,) = reshaper.news(larger.state)
    assert news.offer.why.startswith("14 workers become pipelines of 3 + 3 + 4 + 4: "), "two more would be of no use"
    larger.give(news)
    assert larger.state.roster.arriving == set(spares[:2])
    assert larger.state.roster.spares == set(spares[2:])
    upcoming = larger.state.running.upcoming
    assert upcoming.entering == set(spares[:2])
    for spare in spares[:2]:
        assert upcoming.plan.placement.followed_by(spare) == news.offer.grid.placement.held_by(spare)
    assert upcoming.plan.routes == BASELINE.routes, "nothing else has changed yet"


def test_processes_that_are_offered_come_as_spares_where_the_grid_can_grow():
    offered = advised().give(WorkerOffer(worker=None, node=NODE), WorkerOffer(worker=None, node=NODE))
    assert (None, StartWorker(worker=WorkerId(4, 0))) in offered.told
    assert offered.state.roster.expected == {WorkerId(3, 0), WorkerId(4, 0)}
    kept = DecidedJob(BASELINE).begun().give(WorkerOffer(worker=None, node=NODE))
    assert (kept.told, kept.state.vacancies.offers) == ([], (Offer(None, NODE),))


def test_who_is_started_while_the_grid_changes_keeps_its_name_for_itself():
    """Its name was forgotten at the boundary, and given to the next one, too: one of the two never had a place."""
    changing = advised().give(Leaving(worker=W12))
    (news,) = Reshaper(SHAPES).news(changing.state)
    changing.give(news, WorkerOffer(worker=None, node=NODE))
    assert (None, StartWorker(worker=WorkerId(3, 0))) in changing.told
    changing.joined(3).joined(5)
    assert W12 not in changing.state.grid.baseline.workers
    assert changing.state.roster.expected == {WorkerId(3, 0)}
    changing.give(WorkerOffer(worker=None, node=NODE))
    assert changing.commands(StartWorker) == {None: StartWorker(worker=WorkerId(4, 0))}
