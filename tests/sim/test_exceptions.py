"""Exceptions in workers: in one it is that worker's loss, in two it is the program."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from holdfast.core.evaluation import Evaluating
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.work import WorkPhase
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Evaluated, ExceptionRaised, Installed, Reattached
from holdfast.testing.raising import Raise
from holdfast.testing.scenario import Delays, Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster

STEPS = 5
GRID = (3, 3, 2)
FIRST_EFFECT_AFTER_INSTALL = 4
W00, W11, W21, W02 = WorkerId(0, 0), WorkerId(1, 1), WorkerId(2, 1), WorkerId(0, 2)
LAYER = 3
"""Of the last stage; stage 0 has two layers."""


@cache
def plan_of(pipelines: int, stages: int, microbatches: int):
    return regular_plan(pipelines, split_evenly(stages + 1, stages), microbatches)


def cluster(*, grid=GRID, steps=STEPS, seed=0, **options) -> VirtualResult:
    return VirtualCluster(Scenario(plan=plan_of(*grid), steps=steps, seed=seed, **options)).run()


@cache
def healthy(steps=STEPS, grid=GRID) -> VirtualResult:
    result = cluster(steps=steps, grid=grid)
    assert result.outcome == "done"
    return result


def raised(result: VirtualResult) -> list[ExceptionRaised]:
    return [event for _, event in result.events if isinstance(event, ExceptionRaised)]


def check_survived(result: VirtualResult, *lost: WorkerId, steps=STEPS, grid=GRID) -> None:
    """Only these were lost, and every bit is right."""
    assert result.outcome == "done", result.detail
    assert result.lost == tuple(sorted(lost))
    assert result.digest == healthy(steps, grid).digest


def check_program(result: VirtualResult, *expected: str, layers_lost=()) -> None:
    """The job ended because of the program; every layer is saved, as it was after the last committed step."""
    assert result.outcome == "program", (result.outcome, result.detail)
    for text in expected:
        assert text in result.detail
    assert "Traceback" in result.detail
    saved = dict(result.saved)
    last = dict(healthy(result.step).saved) if result.step else dict.fromkeys(range(GRID[1] + 1))
    assert saved.keys() == last.keys() - set(layers_lost)
    assert all(not result.step or saved[layer] == last[layer] for layer in saved)


@pytest.mark.parametrize("phase", [phase for phase in WorkPhase if phase not in (WorkPhase.OTHER, WorkPhase.SCRIPT)])
def test_what_one_worker_raises_is_its_loss(phase):
    """Whatever it was doing, in the middle of the job or at its end."""
    worker = W00 if phase in (WorkPhase.LOADING, WorkPhase.SAVING) else W02
    step = STEPS if phase is WorkPhase.SAVING else 2
    evaluating = Evaluating(every=2, microbatches=4) if phase is WorkPhase.EVALUATION else None
    result = cluster(raises=[Raise(phase=phase, worker=worker, step=step)], evaluating=evaluating)
    assert len(result.fired) == 1
    check_survived(result, worker)
    (event,) = raised(result)
    assert (event.worker, event.phase) == (str(worker), phase)
    assert event.step == min(step, STEPS - 1), "what is saved is the state after the last step"
    (detected,) = [event for _, event in result.events if isinstance(event, Detected)]
    assert detected.worker == str(worker)
    assert "ValueError" in detected.how


def test_what_one_worker_raises_in_the_last_evaluation_is_its_loss():
    options = {"evaluating": Evaluating(every=2, microbatches=4)}
    result = cluster(raises=[Raise(phase=WorkPhase.EVALUATION, worker=W02, step=STEPS)], **options)
    assert len(result.fired) == 1
    check_survived(result, W02)
    told = [event for _, event in result.events if isinstance(event, Evaluated)]
    assert [(event.step, event.microbatches) for event in told] == [(2, 4), (4, 4), (STEPS, 4)]


def test_what_all_raise_in_an_evaluation_is_the_programs():
    raises = [Raise(phase=WorkPhase.EVALUATION, step=2, layer=LAYER, microbatch=1)]
    result = cluster(raises=raises, evaluating=Evaluating(every=2, microbatches=4))
    check_program(result, "evaluation of layer", "micro-batch 1")


def test_its_place_can_be_taken_once_the_others_have_gone_on():
    faults = [Fault.parse(f"join:{W11}@2")]
    result = cluster(raises=[Raise(phase=WorkPhase.FORWARD, worker=W11, step=2)], faults=faults, steps=9)
    assert sorted(result.fired) == sorted(["raise-ValueError:forward:1.1/2/*/*", *map(str, faults)])
    check_survived(result, steps=9)


@pytest.mark.parametrize("phase", [WorkPhase.FORWARD, WorkPhase.BACKWARD])
@pytest.mark.parametrize("seed", range(5))
def test_a_poisonous_micro_batch_is_the_program(phase, seed):
    """It raises on one worker at first, and on whoever takes the micro-batch over."""
    poison = Raise(phase=phase, step=3, layer=LAYER, microbatch=4)
    result = cluster(raises=[poison], seed=seed)
    check_program(result, "worker 2.2", f"{phase} of layer {LAYER}, micro-batch 4", "is the program")
    assert result.step == 3
    assert [event.worker for event in raised(result)] == ["2.2", "0.2"]
    assert len([event for _, event in result.events if isinstance(event, Installed)]) == 3, "first, redo, to save"


def test_the_loss_of_one_micro_batch_is_the_program():
    result = cluster(raises=[Raise(phase=WorkPhase.LOSS, step=1, microbatch=0)])
    check_program(result, "step 1, loss, micro-batch 0", "is the program")
    assert result.step == 1


@pytest.mark.parametrize("phase", [WorkPhase.FORWARD, WorkPhase.BACKWARD, WorkPhase.UPDATE])
@pytest.mark.parametrize("seed", range(5))
def test_a_layer_that_raises_everywhere_is_the_program(phase, seed):
    result = cluster(raises=[Raise(phase=phase, step=2, layer=LAYER)], seed=seed)
    check_program(result, f"{phase} of layer {LAYER}", "is the program")
    assert result.step == 2
    assert len(raised(result)) == 3, "all its owners, before it was judged"


def test_what_all_workers_raise_is_the_program():
    result = cluster(raises=[Raise(phase=WorkPhase.UPDATE, step=2, kind=MemoryError)])
    check_program(result, "MemoryError", "update of layer")
    assert len(raised(result)) == 9
    assert result.step == 2


def test_everything_raises_in_the_first_step():
    result = cluster(raises=[Raise(phase=WorkPhase.FORWARD)])
    check_program(result, "forward of layer 0")
    assert result.step == 0


def test_an_item_that_cannot_be_loaded_is_the_program():
    """The first stage needs it for its inputs, the last for its targets; whoever takes over needs it, too."""
    result = cluster(raises=[Raise(phase=WorkPhase.LOADING, step=2, microbatch=3, kind=OSError)])
    check_program(result, "loading of item 3: OSError", "is the program")
    assert result.step == 2


def test_items_that_different_workers_cannot_load_are_losses_of_theirs():
    raises = [Raise(phase=WorkPhase.LOADING, worker=w, step=2) for w in (WorkerId(1, 0), WorkerId(2, 0))]
    result = cluster(raises=raises, tolerate=2)
    check_survived(result, *(each.worker for each in raises))


@pytest.mark.parametrize("other", [{"layer": 2}, {"kind": KeyError}, {"phase": WorkPhase.BACKWARD}, {"step": 3}])
def test_what_differs_in_place_or_class_is_no_program(other):
    first = {"phase": WorkPhase.FORWARD, "step": 2, "layer": LAYER}
    workers = (WorkerId(0, 2), WorkerId(1, 1)) if "layer" in other else (WorkerId(0, 2), WorkerId(1, 2))
    raises = [Raise(worker=workers[0], **first), Raise(worker=workers[1], **{**first, **other})]
    result = cluster(raises=raises, tolerate=2)
    assert len(result.fired) == 2
    check_survived(result, *workers)


@pytest.mark.parametrize(("tolerate", "outcome"), [(0, "program"), (1, "program"), (2, "done")])
def test_more_losses_than_tolerated_are_the_program(tolerate, outcome):
    """One loss to chance is always tolerated."""
    raises = [Raise(phase=WorkPhase.FORWARD, worker=W11, step=1), Raise(phase=WorkPhase.LOSS, worker=W02, step=4)]
    result = cluster(raises=raises, tolerate=tolerate)
    assert len(result.fired) == 2
    if outcome == "done":
        check_survived(result, W11, W02)
    else:
        check_program(result, "worker 1.1, step 1, forward of layer 2", "2 workers were lost to exceptions")
        assert result.step == 4


def test_losses_of_long_ago_are_forgotten():
    raises = [Raise(phase=WorkPhase.FORWARD, worker=W11, step=1), Raise(phase=WorkPhase.LOSS, worker=W02, step=101)]
    grid = (2, 3, 1)
    result = cluster(raises=raises, steps=103, grid=grid)
    assert len(result.fired) == 2
    check_survived(result, W11, W02, steps=103, grid=grid)


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_without_another_owner_the_job_ends_and_does_not_fall_back(checkpoint_every):
    """Its own state is saved with the rest."""
    faults = [Fault.parse("kill:0.1@1:forward"), Fault.parse("kill:2.1@2:backward")]
    result = cluster(
        faults=faults, raises=[Raise(phase=WorkPhase.BACKWARD, worker=W11, step=3)], checkpoint_every=checkpoint_every
    )
    assert len(result.fired) == 3
    check_program(result, "worker 1.1", "nobody else holds layer(s) 2 and can go on")
    assert result.step == 3


def test_a_death_of_the_last_other_owner_in_the_redo_is_no_fall_back_either():
    """As if it had died before: what a stopped worker holds is saved."""
    raises = [Raise(phase=WorkPhase.BACKWARD, worker=W11, step=3)]
    faults = [Fault.parse("kill:0.1@1:forward"), Fault.parse("kill:2.1@3:replay")]
    result = cluster(faults=faults, raises=raises, checkpoint_every=1)
    assert len(result.fired) == 3
    check_program(result, "worker 1.1", "nobody else holds layer(s) 2")
    assert result.step == 3


def test_a_half_made_update_is_not_saved():
    """Neither is it when others meet the same: no owner of that layer has a state to trust."""
    result = cluster(raises=[Raise(phase=WorkPhase.UPDATE, step=2, layer=2, breaks=True)])
    check_program(result, "but for layer(s) 2, of which nobody holds that state", layers_lost=[2])


def test_a_half_made_update_of_one_owner_is_saved_by_another():
    raises = [Raise(phase=WorkPhase.UPDATE, step=2, layer=2, worker=W11, breaks=True)]
    raises += [Raise(phase=WorkPhase.UPDATE, step=2, layer=2, worker=W21)]
    result = cluster(raises=raises)
    assert len(result.fired) == 2
    check_program(result, "update of layer 2")


def test_raising_while_what_lives_is_saved_does_not_hide_the_first():
    """Another owner saves the layer then."""
    raises = [Raise(phase=WorkPhase.FORWARD, step=2, layer=2), Raise(phase=WorkPhase.SAVING, worker=W00, kind=OSError)]
    result = cluster(raises=raises)
    assert str(raises[1]) in result.fired
    check_program(result, "forward of layer 2")
    assert result.step == 2


def test_nobody_can_save_anything():
    raises = [Raise(phase=WorkPhase.FORWARD, step=2, layer=2), Raise(phase=WorkPhase.SAVING, kind=OSError)]
    result = cluster(raises=raises)
    assert result.outcome == "program"
    assert "forward of layer 2" in result.detail
    assert result.saved == ()


@pytest.mark.parametrize("start", range(7, 67, 15))
def test_a_worker_that_comes_may_raise_at_each_of_its_effects(start):
    """While it connects, waits, takes part, and computes for the first time."""
    for effect in range(start, start + 15):
        result = cluster(
            seed=effect,
            steps=9,
            faults=[Fault.parse("join:1.1@0")],
            kill_at_effect=[(W11, 6)],
            raise_at_effect=[(W11, effect)],
        )
        assert sorted(result.fired) == sorted(["join:1.1@0", "kill:1.1#6", f"raise:1.1#{effect}"])
        check_survived(result, W11, steps=9)


def test_every_effect_of_one_worker():
    """Whatever a worker does when something in it raises: it alone is lost."""
    grid, ends = (2, 3, 2), 0
    for effect in itertools.count(FIRST_EFFECT_AFTER_INSTALL):
        result = cluster(grid=grid, seed=effect, steps=3, raise_at_effect=[(W11, effect)])
        if not result.fired:
            break
        check_survived(result, *result.lost, steps=3, grid=grid)
        over = result.lost == ()  # it had saved its part, and nobody waits for it any more
        assert over or (result.lost, len(raised(result))) == ((W11,), 1)
        ends += over
    assert effect > 80, "the worker lived to the end only after it had raised at each of its effects"
    assert ends <= 3


@cache
def effects(staggered) -> dict[WorkerId, int]:
    """How many effects each worker yields if nothing happens: whoever is to raise at one of them does."""
    return cluster().effects


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_two_workers_raise_anywhere(start, staggered):
    """In recoveries, while others come, at the end: each is lost alone, as they do not do the same at the same place.

    Where they happen to, at the same place of the protocol and in the same step, it passes for the program.
    """
    done = 0
    for seed in range(start, start + 20):
        source = random.Random(seed)
        victims = source.sample(plan_of(*GRID).workers, 2)
        last = effects(staggered)
        raises = [(worker, source.randint(FIRST_EFFECT_AFTER_INSTALL, last[worker])) for worker in victims]
        faults = [Fault.parse(f"kill:{source.choice(sorted(set(plan_of(*GRID).workers) - set(victims)))}@1:forward")]
        result = cluster(seed=seed, raise_at_effect=raises, faults=faults, tolerate=2)
        planned = [f"raise:{worker}#{count}" for worker, count in raises]
        assert set(result.fired) >= set(planned), (seed, result.fired, planned)
        steps = [event.step for event in raised(result)]
        if result.outcome == "done":
            assert set(result.fired) == {*planned, *map(str, faults)}, (seed, result.fired)
            assert result.digest == healthy().digest, seed
            done += 1
        else:
            assert len(set(steps)) < len(steps) or "nobody else holds" in result.detail, (seed, result.detail)
            check_program(result)
    assert done >= 8


@pytest.mark.parametrize("at", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("alone", [True, False])
def test_a_coordinator_that_dies_before_it_has_judged(at, alone):
    """Its successor knows, from its store or from the worker itself."""
    poison = Raise(phase=WorkPhase.FORWARD, step=3, layer=2, worker=W11 if alone else None, microbatch=2)
    before = cluster(raises=[poison], seed=3)
    moment = next(time for time, event in before.events if isinstance(event, ExceptionRaised))
    result = cluster(raises=[poison], seed=3, coordinator_deaths=[(moment + at, 0.3)])
    assert {f"kill-coordinator#{moment + at}", str(poison)} == set(result.fired)
    assert [event for _, event in result.events if isinstance(event, Reattached)]
    if alone:
        check_survived(result, W11)
    else:
        check_program(result, "forward of layer 2", "is the program")
        assert result.step == 3


def test_a_coordinator_that_dies_before_it_hears_of_it():
    poison = Raise(phase=WorkPhase.FORWARD, step=3, layer=2, worker=W11, microbatch=2)
    at_once = Delays(put=(0.0, 0.0))  # what it hears is in the log at the same moment
    before = cluster(raises=[poison], seed=3, delays=at_once)
    moment = next(time for time, event in before.events if isinstance(event, ExceptionRaised))
    result = cluster(raises=[poison], seed=3, delays=at_once, coordinator_deaths=[(moment - 1e-4, 0.3)])
    assert {f"kill-coordinator#{moment - 1e-4}", str(poison)} == set(result.fired)
    assert len(raised(result)) == 1
    check_survived(result, W11)


@pytest.mark.parametrize("strategy", ["checkpoint-restart", "snapshots"])
def test_the_baselines_lose_the_worker_too_and_know_the_program(strategy):
    options = {"strategy": strategy, "checkpoint_every": 2, "wait_for_replacement": 60.0, "snapshot_every": 2}
    chance = Raise(phase=WorkPhase.FORWARD, worker=W11, step=3, layer=2, once=True)
    alone = cluster(raises=[chance], steps=9, **options)
    assert alone.fired == (str(chance),)
    assert [event.worker for event in raised(alone)] == ["1.1"]
    check_survived(alone, steps=9)
    assert [event.strategy for _, event in alone.events if isinstance(event, Installed)][1] == strategy
    poisoned = cluster(raises=[Raise(phase=WorkPhase.FORWARD, step=3, layer=2, microbatch=2)], **options)
    check_program(poisoned, "forward of layer 2, micro-batch 2", "is the program")
    assert poisoned.step == 3
