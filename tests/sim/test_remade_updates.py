"""Updates ahead of the verdict that do not stand, in virtual time: all make them again, and end in the healthy bits.

Gradients of some steps must be scaled. The reference is the run in which every update waits for the verdict, so nothing
is ever made again there.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.planning.planner import Technique
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Agreed, Detected, Installed, MadeAgain, Notice, Synced
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

STEPS = 12
SCALED = 0.3
"""Of the grid (2, 3, 2): in step 9."""
OFTEN = 0.5
"""Of the grid (2, 3, 2): in steps 1, 4 and 7, and in some of the rest."""
GRID = (2, 3, 2)


@pytest.fixture(autouse=True)
def staggered():
    """These tests say themselves what waits for the verdict: once is enough."""


def run(*faults, scaled=SCALED, ahead=True, grid=GRID, **options):
    pipelines, stages, microbatches = grid
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), microbatches)
    technique = Technique.STAGGERED if ahead else None
    parsed = [Fault.parse(text) for text in faults]
    cluster = VirtualCluster(
        Scenario(
            plan=plan,
            faults=parsed,
            scaled=scaled,
            staggered=ahead,
            technique=technique,
            **{"steps": STEPS, **options},
        )
    )
    return cluster.run()


@cache
def waiting(scaled=SCALED, grid=GRID, steps=STEPS):
    """The bits of the run whose updates wait, and in which nothing fails."""
    result = run(scaled=scaled, grid=grid, ahead=False, steps=steps)
    assert of(result, MadeAgain) == []
    return result.digest


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def times(result, kind):
    return [time for time, event in result.events if isinstance(event, kind)]


def made_again(result):
    return [event.step for event in of(result, MadeAgain)]


def check(result, *faults, also=(), **options):
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == sorted([*(str(Fault.parse(text)) for text in faults), *also])
    assert result.digest == waiting(**options)


def test_scaling_makes_other_bits():
    """Else the bits of an update that was not made again would be right, too."""
    assert len({waiting(scaled) for scaled in (0.0, SCALED, OFTEN)}) == 3


def test_an_update_that_does_not_stand_is_made_again_by_all():
    result = run()
    check(result)
    assert made_again(result) == [9]
    assert [event.step for event in of(result, Agreed)] == [0, 10], "all keep step 9 with the gradients that they have"
    assert result.generations == 2
    assert {len(event.workers) for event in of(result, Installed)} == {6}, "nobody is lost for it"


@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_grid_and_the_delays(seed):
    draw = random.Random(seed)
    grid = (draw.randint(1, 3), draw.randint(2, 4), draw.randint(2, 3))
    result = run(scaled=OFTEN, grid=grid, seed=seed)
    check(result, scaled=OFTEN, grid=grid)
    assert made_again(result)


@pytest.mark.parametrize("who", ["0.0", "1.1"])
def test_a_worker_dies_at_each_effect_around_an_update_made_again(who):
    """From the step whose update does not stand until the next one is settled for good."""
    small = {"grid": (2, 2, 2), "scaled": 0.2, "steps": 3}
    expected = waiting(**small)
    interrupted = 0
    for effect in range(20, 56):
        result = run(seed=effect, kill_at_effect=[(WorkerId.parse(who), effect)], **small)
        assert result.outcome == "done", result.detail
        assert result.digest == expected, f"at effect {effect}"
        assert result.fired == (f"kill:{who}#{effect}",)
        (lost,) = times(result, Detected)
        interrupted += any(0 < lost - at < 0.1 for at in times(result, MadeAgain))
    assert interrupted > 10, "many of these deaths fall into the generation that makes it again, or come right after it"


@pytest.mark.parametrize("kind", ["kill", "hang"])
@pytest.mark.parametrize("point", ["detect", "install", "replay"])
def test_a_worker_is_lost_at_each_point_of_making_an_update_again(point, kind):
    fault = f"{kind}:1.1@10:{point}"
    result = run(fault)
    check(result, fault)
    assert made_again(result) == [9]
    assert result.generations == 3


@pytest.mark.parametrize(
    "where", ["1.1@9:forward", "1.1@9:backward", "1.1@9:reduce", "1.1@9:update", "1.1@9:commit", "0.2@9:verdict"]
)
def test_a_worker_dies_in_the_step_that_does_not_stand(where):
    """Its survivors know different things of the verdict, and settle it all the same.

    Before its update, the step is run again, and that one waits; from then on it is mostly made again.
    """
    assert waiting() != waiting(0.0), "it is scaled"
    fault, found = f"kill:{where}", set()
    for seed in range(4):
        result = run(fault, seed=seed)
        check(result, fault)
        again = of(result, Agreed)[-1].step == 9
        assert made_again(result) in ([[]] if again else [[], [9]])
        found.add("again" if again else "made again" if made_again(result) else "kept")
    if where.endswith(("update", "commit", "verdict")):
        assert "made again" in found
    else:
        assert found == {"again"}


@pytest.mark.parametrize("seed", range(8))
def test_the_coordinator_dies_around_updates_made_again(seed):
    draw = random.Random(seed)
    (at,) = times(run(seed=seed), MadeAgain)
    deaths = [(at + draw.uniform(-0.05, 0.05), draw.uniform(0.0, 0.4))]
    result = run(seed=seed, coordinator_deaths=deaths)
    check(result, also=[f"kill-coordinator#{deaths[0][0]}"])


def test_who_enters_while_updates_are_made_again_gets_the_right_bits():
    faults = ["kill:1.1@2:backward", "join:1.1@4"]
    for seed in range(2):
        result = run(*faults, scaled=0.4, seed=seed, steps=30)
        check(result, *faults, scaled=0.4, steps=30)
        assert made_again(result)
        assert [event.worker for event in of(result, Synced)] == ["1.1"]


@pytest.mark.parametrize("every", [2, 3])
def test_checkpoints_and_snapshots_hold_only_settled_states(every):
    """Whoever goes back to one starts from the bits of the run that waits."""
    reference = run(scaled=OFTEN, ahead=False, checkpoint_every=every)
    result = run(scaled=OFTEN, checkpoint_every=every)
    check(result, scaled=OFTEN)
    assert made_again(result)
    assert result.checkpoints == reference.checkpoints
    fault = "kill:1.1@7:backward"
    back = run(fault, scaled=OFTEN, strategy="snapshots", snapshot_every=every)
    check(back, fault, scaled=OFTEN)


def test_a_job_that_scales_often_waits_from_then_on():
    result = run(scaled=OFTEN)
    check(result, scaled=OFTEN)
    assert made_again(result) == [1, 4, 7]
    (notice,) = of(result, Notice)
    assert notice.text == "gradients were scaled in steps 1, 4, 7: updates wait for the norm from now on"


def test_always_scaled_still_ends():
    """Every step is refused at first; the one after a recovery is closing, so each generation makes progress."""
    result = run(scaled=1.0)
    check(result, scaled=1.0)
    assert 1 <= len(made_again(result)) <= 3
