"""Layers are handed from worker to worker while all train, in virtual time: whoever dies meanwhile, the bits stay."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest

from holdfast.control.membership import Handover, recovering
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.routes import Visit
from holdfast.protocol import worker as worker_module
from holdfast.schedule.builders import assigned_plan
from holdfast.telemetry.events import Agreed, HandingOver, Installed, Notice, Suspected, Synced
from holdfast.testing.scenario import Delays

from .test_unlike import alone, any_layout, effects, lost_layers, plan_of, run

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
CHUNK = 10
STEPS = 16
BEFORE = ((4, 2), (1, 5)), (3, 2)
AFTER = ((2, 4), (4, 2)), (3, 2)
"""0.1 takes 2:4 from 0.0, which 1.1 holds as well; 1.0 takes 1:4 from 1.1."""


class Recut:
    """Asks once, as soon as steps are run, that all become another grid; ``ever``: until they are."""

    def __init__(self, grid, *, ever=False, after=0):
        self._grid, self._ever, self._after = grid if isinstance(grid, Plan) else plan_of(grid), ever, after
        self.asked = 0

    def __call__(self, state):
        over = state.grid.baseline.placement == self._grid.placement
        if over or state.last_step < self._after or (self.asked and not self._ever):
            return None
        self.asked += 1
        return Handover(grid=self._grid)


def recut(source, layout):
    """The same workers and micro-batches, with other cuts."""
    pipelines, counts = layout
    layers = sum(pipelines[0])
    found = []
    for sizes in pipelines:
        cuts = [0, *sorted(source.sample(range(1, layers), len(sizes) - 1)), layers]
        found.append(tuple(b - a for a, b in pairwise(cuts)))
    return tuple(found), counts


def events_of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def held(result):
    return {str(worker): layers for worker, layers in result.layers.items()}


def test_layers_go_from_worker_to_worker_and_nothing_is_aborted(staggered):
    result = run(BEFORE, steps=STEPS, better=Recut(AFTER))
    assert (result.outcome, result.digest) == ("done", alone(BEFORE, STEPS, staggered)), result.detail
    (handing,) = events_of(result, HandingOver)
    assert handing.takes == (("0.1", "2:4"), ("1.0", "1:4"))
    assert sorted(event.worker for event in events_of(result, Synced)) == ["0.1", "1.0"]
    assert len(events_of(result, Agreed)) == 1, "going over needs no agreement"
    assert [e.strategy for e in events_of(result, Installed)].count("boundary") == 2, "to follow, and to hold"
    assert held(result) == {str(w): plan_of(AFTER).placement.layers_of(w) for w in plan_of(AFTER).workers}


def test_where_whoever_was_to_take_layers_is_lost_the_others_let_go_at_once(staggered):
    """There is nothing to follow any more, so one boundary is enough."""
    before, after = (((4, 2), (1, 5), (3, 3)), (2, 1, 1)), (((2, 4), (4, 2), (3, 3)), (2, 1, 1))
    faults = [Fault.parse(text) for text in ("kill:0.1@1:backward", "kill:1.0@1:backward")]
    result = run(before, steps=STEPS, better=Recut(after, after=3), faults=faults)
    assert (result.outcome, result.digest) == ("done", alone(before, STEPS, staggered)), result.detail
    assert events_of(result, HandingOver) == []
    assert held(result) == {"0.0": (0, 1), "1.1": (4, 5), "2.0": (0, 1, 2), "2.1": (3, 4, 5)}


def test_a_loss_is_answered_before_it_is_known_that_all_have_let_go(staggered, monkeypatch):
    """Without 0.0 and 1.1 layers 1 to 3 are on nobody, but in the grid that all have become by then, or nearly."""
    suppose, supposed, found = recovering._taken_for_over, [], []
    monkeypatch.setattr(recovering, "_taken_for_over", lambda state: supposed.append(suppose(state)) or supposed[-1])
    delays = Delays(detect=(0.0, 0.001), control=(0.0, 0.1))
    for count in range(220, 560, 10):
        supposed.clear()
        options = {"faults": [Fault.parse("kill:0.0@1:backward")], "kill_at_effect": [(WorkerId(1, 1), count)]}
        result = run(BEFORE, seed=2, steps=STEPS, better=Recut(AFTER, after=2), delays=delays, **options)
        assert len(result.fired) == 2
        if result.outcome == "done":
            assert result.digest == alone(BEFORE, STEPS, staggered)
            assert held(result) == {"0.1": (2, 3, 4, 5), "1.0": (0, 1, 2, 3)}
        found.append((result.outcome, any(state.grid.former is not None for state in supposed)))
    outcomes = [outcome for outcome, _ in found]
    assert outcomes == sorted(outcomes, reverse=True), "once they have taken the layers nothing is lost any more"
    assert {("lost", True), ("done", True)} <= set(found)


@pytest.mark.parametrize("point", ["start", "forward", "backward", "reduce", "update", "commit"])
@pytest.mark.parametrize("worker", ["0.0", "0.1", "1.0", "1.1"])
@pytest.mark.parametrize("step", [3, 5])
def test_anybody_is_lost_meanwhile(worker, point, step, staggered):
    """Every layer has an owner in both grids without this one: so all go on, in one or the other."""
    result = run(BEFORE, steps=STEPS, better=Recut(AFTER), faults=[Fault.parse(f"kill:{worker}@{step}:{point}")])
    assert result.fired
    assert (result.outcome, result.digest) == ("done", alone(BEFORE, STEPS, staggered)), result.detail
    assert events_of(result, HandingOver)


def test_a_grid_that_nobody_could_hold_any_more_is_given_up(staggered):
    """0.0 and 1.1 hold everything between them; in the other grid layer 2 would be on the two that are lost."""
    faults = [Fault.parse(text) for text in ("kill:0.1@2:backward", "kill:1.0@3:backward")]
    wanted = Recut((((2, 4), (3, 3)), (3, 2)), after=5, ever=True)
    result = run(BEFORE, steps=STEPS, better=wanted, faults=faults)
    assert wanted.asked > 1
    assert (result.outcome, result.digest) == ("done", alone(BEFORE, STEPS, staggered))
    assert result.lost == (WorkerId(0, 1), WorkerId(1, 0))
    told = [event.text for event in events_of(result, Notice) if event.worker == "coordinator"]
    said = "the grid stays as it is: in the one that it was to become nobody is left to hold layer(s) 2"
    assert told.count(said) == 1
    assert events_of(result, HandingOver) == []


def test_one_that_fails_is_given_up_told_once_and_not_tried_again(staggered):
    """0.1 never gets the state of what it is to take: all connect anew, and go on as they were."""
    wanted = Recut(AFTER, ever=True)
    result = run(BEFORE, steps=STEPS, better=wanted, broken_copies=[(WorkerId(0, 1), 99)])
    assert (result.outcome, result.digest) == ("done", alone(BEFORE, STEPS, staggered)), result.detail
    assert (result.fired, result.lost) == (("break-copy:0.1",), ())
    assert len(events_of(result, HandingOver)) == 1
    assert wanted.asked > 1
    told = [event.text for event in events_of(result, Notice) if event.worker == "coordinator"]
    (said,) = (text for text in told if "grid" in text)
    assert said.startswith("the grid stays as it is: layers could not be handed over: 0.1: ")
    assert said.endswith("nobody gives it the state of its layers")
    assert held(result) == {str(w): plan_of(BEFORE).placement.layers_of(w) for w in plan_of(BEFORE).workers}


def test_one_that_failed_is_tried_again_when_somebody_has_come(staggered):
    faults = [Fault.parse(text) for text in ("leave:1.1@5:forward", "join:1.1@8")]
    options = {"faults": faults, "broken_copies": [(WorkerId(0, 1), 1)]}
    result = run(BEFORE, steps=40, better=Recut(AFTER, ever=True), **options)
    assert (result.outcome, result.digest) == ("done", alone(BEFORE, 40, staggered)), result.detail
    assert set(result.fired) == {*map(str, faults), "break-copy:0.1"}
    assert len(events_of(result, HandingOver)) > 1
    assert held(result) == {str(w): plan_of(AFTER).placement.layers_of(w) for w in plan_of(AFTER).workers}


@pytest.mark.parametrize("most", [0, 3])
def test_who_is_too_far_behind_makes_all_wait_for_its_state(staggered, monkeypatch, most):
    """A copy takes as long as twenty steps: what is kept of them for the layers to come has a limit."""
    monkeypatch.setattr(worker_module, "MOST_MISSED", most)
    delays = Delays(copy=(20.0, 20.0))
    result = run(BEFORE, steps=STEPS, better=Recut(AFTER), delays=delays)
    assert (result.outcome, result.digest) == ("done", alone(BEFORE, STEPS, staggered)), result.detail
    behind = {event.worker: event.step - event.entered for event in events_of(result, Synced)}
    assert behind == {"0.1": most, "1.0": most}
    assert len(events_of(result, HandingOver)) == 1
    assert len(events_of(result, Suspected)) == 0, "they wait, and nobody is stuck"
    assert held(result) == {str(w): plan_of(AFTER).placement.layers_of(w) for w in plan_of(AFTER).workers}


@pytest.mark.parametrize("point", ["start", "forward", "reduce"])
def test_somebody_dies_while_all_wait_for_the_state_of_one(staggered, monkeypatch, point):
    monkeypatch.setattr(worker_module, "MOST_MISSED", 2)
    for victim in plan_of(BEFORE).workers:
        fault = Fault.parse(f"kill:{victim}@4:{point}")
        result = run(BEFORE, steps=STEPS, better=Recut(AFTER), delays=Delays(copy=(20.0, 20.0)), faults=[fault])
        assert (result.outcome, result.digest) == ("done", alone(BEFORE, STEPS, staggered)), result.detail
        assert result.fired == (str(fault),)
        assert events_of(result, HandingOver)


def one(seed, staggered, crossed):
    source = random.Random(seed)
    before = any_layout(source)
    after = recut(source, before)
    steps = STEPS
    workers = plan_of(before).workers
    yielded = effects(before, staggered)
    victims = source.sample(workers, source.randint(1, max(1, len(workers) // 3)))
    kills = [(worker, source.randint(4, yielded[worker] * steps // 4)) for worker in victims]
    try:
        result = run(
            before, seed=seed, steps=steps, better=Recut(after, ever=source.random() < 0.5), kill_at_effect=kills
        )
        crossed.append(bool(events_of(result, HandingOver)))
        holds = [plan_of(layout).placement.without(result.lost).unowned_layers() for layout in (before, after)]
        if all(holds):
            assert result.outcome == "lost", result.detail
        elif not any(holds) or result.outcome != "lost":
            expected = ("done", alone(before, steps, staggered))
            assert (result.outcome, result.digest) == expected, result.detail
        return result.outcome
    except BaseException as error:
        error.add_note(f"repeat: seed {seed}, {before} to {after}, kill_at_effect {[(str(w), n) for w, n in kills]}")
        raise


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_deaths_anywhere_while_layers_are_handed_over(start, staggered):
    crossed, outcomes = [], []
    for seed in range(start, start + CHUNK):
        outcomes.append(one(seed, staggered, crossed))
    assert sum(crossed) > CHUNK // 10
    assert outcomes.count("done") > CHUNK // 3


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_workers_go_and_come_while_layers_are_handed_over(start, staggered):
    """Also while the coordinator is started again: what was begun goes on, or begins anew, until all are there."""
    over = handed = 0
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        before = any_layout(source)
        after = recut(source, before)
        (victim,) = source.sample(plan_of(before).workers, 1)
        kind, step = source.choice(["kill", "hang", "leave"]), source.randrange(1, 8)
        faults = [
            f"{kind}:{victim}@{step}:{source.choice(['forward', 'backward', 'reduce'])}",
            f"join:{victim}@{step + 3}",
        ]
        deaths = [(source.uniform(0.8, 2.4), source.uniform(0.01, 0.4))] if seed % 2 else []
        options = {"faults": [Fault.parse(text) for text in faults], "coordinator_deaths": deaths}
        try:
            result = run(before, seed=seed, steps=30, better=Recut(after, ever=True), **options)
            if lost_layers(before, [victim]):
                continue
            assert (result.outcome, result.digest) == ("done", alone(before, 30, staggered)), result.detail
            over += result.lost == ()
            handed += bool(events_of(result, HandingOver))
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, {before} to {after}, faults {faults}, coordinator {deaths}")
            raise
    assert over > CHUNK // 3
    assert handed > CHUNK // 10


THREE = ((3, 3), (3, 3), (2, 4)), (2, 2, 2)
WITHOUT_21 = assigned_plan(
    [
        [
            Visit(WorkerId(0, 0), LayerRange(0, 2)),
            Visit(WorkerId(2, 0), LayerRange(2, 3)),
            Visit(WorkerId(0, 1), LayerRange(3, 6)),
        ],
        [Visit(WorkerId(1, 0), LayerRange(0, 3)), Visit(WorkerId(1, 1), LayerRange(3, 6))],
    ],
    plan_of(THREE).routes.microbatches,
    (4, 2),
)
"""Two pipelines of the five that are left of three: 2.0 takes layer 2, and lets go of 0 and 1."""


def test_a_lost_worker_is_left_out_of_the_grid(staggered):
    """Its micro-batches are re-routed at once; once layers are handed over, five workers are the whole grid."""
    wanted = Recut(WITHOUT_21, after=3)
    result = run(THREE, steps=STEPS, better=wanted, faults=[Fault.parse("kill:2.1@1:backward")])
    assert (result.outcome, result.digest) == ("done", alone(THREE, STEPS, staggered)), result.detail
    (handing,) = events_of(result, HandingOver)
    assert handing.takes == (("2.0", "2:3"),)
    assert held(result) == {str(w): WITHOUT_21.placement.layers_of(w) for w in WITHOUT_21.workers}


def test_nobody_who_lives_is_left_out_of_the_grid(staggered):
    result = run(THREE, steps=STEPS, better=Recut(WITHOUT_21))
    assert (result.outcome, result.digest) == ("done", alone(THREE, STEPS, staggered)), result.detail
    assert events_of(result, HandingOver) == []
    assert held(result) == {str(w): plan_of(THREE).placement.layers_of(w) for w in plan_of(THREE).workers}


@pytest.mark.parametrize("point", ["start", "forward", "backward", "reduce", "update", "commit"])
@pytest.mark.parametrize("worker", [str(worker) for worker in WITHOUT_21.workers])
@pytest.mark.parametrize("step", [5, 8])
def test_anybody_is_lost_while_or_after_a_lost_one_is_left_out(worker, point, step, staggered):
    faults = [Fault.parse("kill:2.1@1:backward"), Fault.parse(f"kill:{worker}@{step}:{point}")]
    result = run(THREE, steps=STEPS, better=Recut(WITHOUT_21, after=3), faults=faults)
    assert len(result.fired) == 2
    assert (result.outcome, result.digest) == ("done", alone(THREE, STEPS, staggered)), result.detail


def test_who_was_to_come_back_to_a_place_that_is_given_up_takes_the_next_that_is_vacant(staggered):
    faults = [Fault.parse(text) for text in ("kill:2.1@1:backward", "join:2.1@12", "kill:1.0@20:backward")]
    result = run(THREE, steps=40, better=Recut(WITHOUT_21, after=3), faults=faults)
    assert (result.outcome, result.digest) == ("done", alone(THREE, 40, staggered)), result.detail
    assert set(result.fired) == set(map(str, faults))
    assert [event.worker for event in events_of(result, Synced)] == ["2.0", "1.0"]
    assert held(result) == {str(w): WITHOUT_21.placement.layers_of(w) for w in WITHOUT_21.workers}
