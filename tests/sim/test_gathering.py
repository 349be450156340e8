"""A job begins once agents have room for all: in virtual time, with agents that come one by one, and what may die."""

from __future__ import annotations

import os
import random

import pytest
from tests.sim.test_nodes import lost, of, survives

from holdfast.core.ids import WorkerId
from holdfast.telemetry.events import CoordinatorReady, Notice, StepOps, Synced

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
WORKERS = 8


def come(*agents):
    """So many workers can be started from then on."""
    return {"agents": 0, "more_agents": agents}, [f"add-agent:{room}#{at}" for at, room in agents]


def begun(result):
    """When the first step was over, and who ran it."""
    ran = [(at, event.worker) for at, event in result.events if isinstance(event, StepOps) and event.step == 0]
    return min(ran)[0], {worker for _, worker in ran}


def told(result):
    return [event.text for event in of(result, Notice) if "begin on" in event.text]


def test_nobody_begins_before_there_is_room_for_all(staggered):
    options, fired = come((0.0, 3), (0.2, 3), (5.0, 4))
    result = survives(staggered, *fired, **options)
    assert begun(result)[0] > 5.0
    assert begun(result)[1] == {str(WorkerId(pipeline, stage)) for pipeline in range(4) for stage in range(2)}
    assert (told(result), lost(result)) == (
        ["8 workers begin on 3 nodes: any 2 of them may be lost, but the coordinator's"],
        [],
    )


def test_room_that_nobody_needs_is_taken_when_somebody_goes(staggered):
    options, fired = come((0.0, 4), (0.0, 4), (0.3, 2))
    result = survives(staggered, *fired, "kill-agent:1#0.5", steps=30, agent_deaths=[(0.5, 1)], **options)
    assert len(lost(result)) == 4
    assert len(of(result, Synced)) == 2


@pytest.mark.parametrize("at", [0.01, 0.05, 0.1, 0.3])
def test_a_node_that_dies_before_the_job_has_begun_is_done_without(staggered, at):
    """Its workers were being started, or would have been; they begin where there is room."""
    options, fired = come((0.0, 4), (0.0, 4), (2.0, 4))
    result = survives(staggered, *fired, f"kill-agent:1#{at}", agent_deaths=[(at, 1)], **options)
    assert begun(result)[0] > 2.0 or len(lost(result)) == 4, "it has begun without them, or with them before they died"


@pytest.mark.parametrize("at", [0.005, 0.02, 0.04, 0.06, 0.1, 0.3])
def test_the_coordinator_dies_while_they_gather(staggered, at):
    """The next one hears what each agent has been asked for, and what it has room for."""
    options, fired = come((0.0, 3), (0.01, 3), (0.05, 2), (0.4, 1))
    result = survives(staggered, *fired, f"kill-coordinator#{at}", coordinator_deaths=[(at, 0.1)], **options)
    assert (lost(result), len(of(result, CoordinatorReady))) == ([], 1)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_anything_while_they_gather(staggered, seed):
    """Agents come, die and lose their connections, and the coordinator dies, until a last one has room for all."""
    source = random.Random(seed)
    first = [(round(source.uniform(0.0, 0.3), 3), source.randint(1, 4)) for _ in range(source.randint(1, 4))]
    options, fired = come(*sorted(first), (1.0, WORKERS))
    dies = source.sample(range(len(first)), source.randint(0, 1))  # with more of them a layer could be lost
    deaths = [(round(source.uniform(0.3, 0.6), 3), number) for number in dies]
    dead = [(round(source.uniform(0.0, 0.7), 3), 0.1) for _ in range(source.randint(0, 1))]
    fired += [f"kill-agent:{number}#{at}" for at, number in deaths]
    fired += [f"kill-coordinator#{at}" for at, _ in dead]
    try:
        survives(staggered, *fired, seed=seed, agent_deaths=deaths, coordinator_deaths=dead, **options)
    except BaseException as error:
        error.add_note(f"repeat: seed {seed}, agents {options['more_agents']}, deaths {deaths}, coordinator {dead}")
        raise
