"""Better plans from a library: prepared answers are replaced, and who is here goes over to a better plan."""

from dataclasses import replace

import pytest
from tests.processes import process_of

from holdfast.control.detection import Watch
from holdfast.control.membership import (
    AnswerPlanned,
    GridState,
    Improved,
    Membership,
    Phase,
    Prospects,
    Record,
    Reports,
    Roster,
    Running,
    Tell,
    decide,
    plan_recovery,
    restore,
    to_store,
    unplanned,
)
from holdfast.control.messages import Hello, Install, Joined, Leaving
from holdfast.control.plan_lookup import PlanLookup
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import unit_costs
from holdfast.planning.library import PlanLibrary
from holdfast.planning.migration import Migration
from holdfast.planning.normalise import normalised
from holdfast.planning.planner import Technique
from holdfast.planning.training import Rerouted, Terms, looked_up, planned_grid, regular_grid, rerouted
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import adaptive_plan
from holdfast.telemetry.events import PlanImproved

STAGES = split_evenly(4, 4)
TERMS = Terms(technique=Technique.STAGGERED, costs=unit_costs(4), in_flight=8)
GRID = regular_grid(3, STAGES, 6, TERMS)
PLAN = planned_grid(regular_grid(3, STAGES, 6, TERMS), (), TERMS, at_once=False).plan
(PLACE,) = normalised(GRID, 1, TERMS.technique.rules)
ELSEWHERE = WorkerId(0, (PLACE.stage + 1) % 4)


def running(*lost, period=100.0):
    """A membership in which steps are run without the lost, by a plan that takes so long."""
    state = Membership(
        grid=GridState(baseline=PLAN),
        rules=JobRules(terms=TERMS, steps=99),
        phase=Phase.RUNNING,
    )
    plan = adaptive_plan(PLAN, lost)
    return replace(
        state,
        generation=3,
        roster=Roster(lost=frozenset(lost), processes={worker: process_of(worker, 1) for worker in PLAN.workers}),
        running=Running(plan=plan, period=period, staggered=True),
        reports=Reports(joined=frozenset(plan.workers)),
    )


def prepared(state):
    """With answers to all next losses that are worse than any of the library."""
    for lost in unplanned(state):
        slow = replace(plan_recovery(state, lost), period=100.0)
        state, _ = decide(state, AnswerPlanned(lost=lost, recovery=slow))
    return state


def fill(folder, failures=1):
    library = PlanLibrary(folder)
    while library.step(GRID, failures, TERMS.technique, time_limit_s=0.05) is not None:
        pass
    return library


def test_without_a_library_there_is_no_news(tmp_path):
    lookup, state = PlanLookup(PlanLibrary(tmp_path / "none")), prepared(running())
    assert lookup.news(state) == ()


def test_answers_are_replaced_once_the_library_has_better_ones(tmp_path):
    folder = tmp_path / "plans"
    lookup, state = PlanLookup(PlanLibrary(folder)), prepared(running())
    assert lookup.news(state) == ()
    library = fill(folder)
    news = lookup.news(state)
    assert {event.lost for event in news} == {frozenset({WorkerId(p, PLACE.stage)}) for p in range(3)}
    for event in news:
        state, outputs = decide(state, event)
        assert outputs == ()
        assert state.prospects.planned[event.lost].plan == looked_up(library, PLAN, event.lost, TERMS).plan
        assert state.prospects.planned[event.lost].strategy == "adaptive"
    assert lookup.news(state) == (), "nothing has changed since"


def test_no_answer_is_replaced_by_one_that_is_no_better(tmp_path):
    fill(tmp_path)
    state = running()
    for lost in unplanned(state):
        quick = replace(plan_recovery(state, lost), period=0.5)
        state, _ = decide(state, AnswerPlanned(lost=lost, recovery=quick))
    assert PlanLookup(PlanLibrary(tmp_path)).news(state) == ()


def test_a_better_plan_for_who_is_here_is_told(tmp_path):
    library = fill(tmp_path)
    offer = looked_up(library, PLAN, [PLACE], TERMS)
    assert Improved(lost=frozenset({PLACE}), offer=offer) in PlanLookup(PlanLibrary(tmp_path)).news(running(PLACE))
    assert PlanLookup(PlanLibrary(tmp_path)).news(running(ELSEWHERE)) == ()
    assert PlanLookup(PlanLibrary(tmp_path)).news(replace(running(PLACE), running=Running(plan=offer.plan))) == (), (
        "it runs already"
    )


@pytest.mark.parametrize(("pattern", "damage"), [("*.plan", b"x"), ("*.json", b"[")])
def test_a_damaged_library_is_said_once_and_costs_nothing_else(tmp_path, pattern, damage):
    fill(tmp_path)
    for path in tmp_path.glob(pattern):
        path.write_bytes(damage)
    told = []
    lookup = PlanLookup(PlanLibrary(tmp_path, told.append))
    assert [lookup.news(running(PLACE)) for _ in range(3)] == [()] * 3
    assert len(told) == 1


SAME_STAGE = (WorkerId(0, 1), WorkerId(1, 1))
KNOWN = replace(TERMS, copy_s=(0.5,) * 4)
WATCH = Watch()


def without_two(*, terms=KNOWN, failure_every_s=0.0, began=0.0, losses=2, watch=WATCH):
    state = running(*SAME_STAGE, period=54.0)
    return replace(
        state,
        rules=replace(state.rules, terms=terms, failure_every_s=failure_every_s),
        prospects=Prospects(began=began, losses=losses),
        watch=watch,
    )


def migrations(news):
    return [event for event in news if isinstance(event, Improved) and isinstance(event.offer, Migration)]


@pytest.mark.parametrize("options", [{"failure_every_s": 1000.0}, {"watch": Watch(now=2000.0)}], ids=["said", "so far"])
def test_workers_are_to_change_places_once_that_pays(tmp_path, options):
    fill(tmp_path, 2)
    (told,) = migrations(PlanLookup(PlanLibrary(tmp_path)).news(without_two(**options)))
    assert told.lost == frozenset(SAME_STAGE)
    assert {place for _, place in told.offer.moves} <= set(SAME_STAGE)


def test_it_pays_later_if_nothing_fails_meanwhile(tmp_path):
    fill(tmp_path, 2)
    lookup, state = PlanLookup(PlanLibrary(tmp_path)), without_two(watch=Watch(now=10.0))
    assert not migrations(lookup.news(state)), "a failure every five seconds"
    assert migrations(lookup.news(replace(state, watch=Watch(now=5000.0))))
    assert not migrations(lookup.news(replace(state, watch=Watch(now=9000.0)))), "it was told"


def test_nobody_moves_in_the_last_steps_of_a_job(tmp_path):
    fill(tmp_path, 2)
    lookup, state = PlanLookup(PlanLibrary(tmp_path)), without_two(failure_every_s=1e6)
    assert not migrations(lookup.news(replace(state, last_step=state.rules.steps - 2)))
    assert migrations(lookup.news(state))


def test_nobody_moves_while_somebody_is_on_the_way(tmp_path):
    fill(tmp_path, 2)
    lookup, state = PlanLookup(PlanLibrary(tmp_path)), without_two(failure_every_s=1e6)
    assert not migrations(lookup.news(replace(state, roster=replace(state.roster, expected=frozenset(SAME_STAGE[:1])))))
    (told,) = migrations(lookup.news(state))
    waiting = replace(state, roster=replace(state.roster, expected=frozenset(SAME_STAGE[:1])))
    assert decide(waiting, told) == (waiting, ())


@pytest.mark.parametrize(
    "options",
    [{"watch": Watch(now=2000.0), "losses": 0}, {"watch": Watch()}, {"began": None}, {"terms": TERMS}],
    ids=["nothing has failed", "no time has passed", "not begun", "copying costs nobody knows what"],
)
def test_nobody_moves_where_the_gain_is_not_known(tmp_path, options):
    fill(tmp_path, 2)
    assert not migrations(PlanLookup(PlanLibrary(tmp_path)).news(without_two(**options)))


def moving(tmp_path):
    """A job that is told to migrate; the state before, and after with what was sent."""
    fill(tmp_path, 2)
    before = without_two(failure_every_s=1e6)
    (told,) = migrations(PlanLookup(PlanLibrary(tmp_path)).news(before))
    return before, told.offer, *decide(before, told)


def test_those_who_move_give_up_their_places_at_the_boundary(tmp_path):
    before, offer, state, outputs = moving(tmp_path)
    migrating = tuple(sorted(worker for worker, _ in offer.moves))
    told = [o.event.moves for o in outputs if isinstance(o, Record)]
    assert told == [tuple((str(worker), str(place)) for worker, place in offer.moves)]
    told = installs(outputs)
    assert len(told) == len(before.alive), "each is told once"
    assert all(each.at_boundary and followers(each) == set(migrating) for each in told)
    assert all(told[0].plan.orders.of(worker) == () for worker in migrating)
    assert (state.grid.baseline, state.roster.entering) == (PLAN, frozenset()), "until all have gone over"
    state, _ = decide(state, Joined(worker=migrating[0], generation=4, step=7))
    assert (state.grid.baseline, state.roster.entering) == (offer.baseline, frozenset(migrating))
    assert state.absent == frozenset({*SAME_STAGE, *migrating})
    for worker in state.alive:
        state, outputs = decide(state, Joined(worker=worker, generation=4))
    assert {each.plan for each in installs(outputs)} == {offer.afterwards.plan}, "what was priced is what comes next"


def test_a_coordinator_that_is_started_again_knows_of_a_migration(tmp_path):
    _, offer, state, _ = moving(tmp_path)
    stored = to_store(replace(state, revision=0), replace(state, revision=1))
    assert restore(running(), stored, reattach_until=0.0).running.upcoming.baseline == offer.baseline


def test_a_migration_is_not_begun_while_something_else_is_under_way(tmp_path):
    before, offer, state, _ = moving(tmp_path)
    again = Improved(lost=before.absent, offer=offer)
    assert decide(state, again) == (state, ())
    other = running(SAME_STAGE[0])
    assert decide(other, again) == (other, ()), "others are lost by now"


def offered(period, lost=(PLACE,)):
    quick = rerouted(PLAN, lost, TERMS)
    return Improved(lost=frozenset(lost), offer=replace(quick, period=period))


def followers(install):
    return {worker for worker, _ in install.plan.placement.followed}


def installs(outputs):
    return [output.command for output in outputs if isinstance(output, Tell) and isinstance(output.command, Install)]


def test_all_go_over_to_a_better_plan_at_a_boundary():
    before = running(PLACE)
    state, outputs = decide(before, offered(90.0))
    assert Record(event=PlanImproved(generation=4, before=100.0, period=90.0)) in outputs
    told = installs(outputs)
    assert len(told) == len(before.alive)
    assert all(each.at_boundary and each.generation == 4 and each.staggered for each in told)
    assert (state.generation, state.running.plan) == (3, before.running.plan), "it runs on until all have gone over"
    state, _ = decide(state, Joined(worker=state.alive[0], generation=4, step=7))
    assert state.running.plan == offered(90.0).offer.plan
    runs = state.running
    assert (state.generation, runs.period, runs.upcoming, state.prospects.planned) == (4, 90.0, None, {})
    assert state.generations == before.generations + 1


@pytest.mark.parametrize(
    ("state", "improved"),
    [
        (running(PLACE), offered(99.5)),
        (running(PLACE), offered(None)),
        (running(PLACE, period=None), offered(1.0)),
        (running(PLACE), offered(1.0, [ELSEWHERE])),
        (running(PLACE, ELSEWHERE), offered(1.0)),
        (replace(running(PLACE), phase=Phase.FORMING), offered(1.0)),
        (replace(running(PLACE), reports=Reports()), offered(1.0)),
        (replace(running(PLACE), roster=Roster(arriving=frozenset({PLACE}))), offered(1.0)),
        (decide(running(PLACE), Leaving(worker=WorkerId(2, 1)))[0], offered(1.0)),
    ],
    ids=["hardly", "unknown", "unknown-now", "others", "more", "forming", "unconnected", "arriving", "leaving"],
)
def test_nothing_changes_if_it_is_not_better_or_something_else_is_under_way(state, improved):
    assert decide(state, improved) == (state, ())


def test_whoever_comes_meanwhile_waits_for_the_boundary():
    state, _ = decide(running(PLACE), offered(90.0))
    state, outputs = decide(state, Hello(worker=PLACE, process=process_of(PLACE, 2)))
    assert installs(outputs) == []
    for worker in running(PLACE).alive:
        state, outputs = decide(state, Joined(worker=worker, generation=4, step=7))
    assert [followers(each) for each in installs(outputs)] == [{PLACE}] * len(installs(outputs))


def test_a_coordinator_that_is_started_again_knows_the_periods():
    before = running(PLACE)
    state, _ = decide(before, offered(90.0))
    back = restore(
        Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=9)),
        to_store(before, state),
        reattach_until=1.0,
    )
    assert (back.running.period, back.running.upcoming.period) == (100.0, 90.0)


def test_the_answer_to_a_loss_tells_its_period():
    state = replace(running(), running=Running(plan=PLAN))
    quick = plan_recovery(state, frozenset({PLACE}))
    assert quick.period == rerouted(PLAN, [PLACE], TERMS).period
    offer = Rerouted(plan=quick.plan, period=1.0)
    assert plan_recovery(state, frozenset({PLACE}), offer).period == 1.0
