"""Several nodes with an agent each, in virtual time: they die with all on them, lose their connections, and come."""

from __future__ import annotations

import os
import random
from functools import cache

import pytest

from holdfast.control.membership.watching import AGENT_ALONE_S, WHOLE_NODE_S
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Checkpointed, Detected, Installed, Notice, Parted, Reattached, StepOps, Synced
from holdfast.testing.scenario import Delays, Scenario
from holdfast.testing.virtual import VirtualCluster

STEPS = 12
NODES = 4
GRID = (NODES, 2, 4)
"""A pipeline of two workers on each node."""
SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
LEFT_BEFORE = "it left before it heard that it was needed again"
NOTICED_S = 0.03
"""What messages and a decision take at most, besides the time that a node is given."""


def run(seed=0, steps=STEPS, agents=NODES, **options):
    pipelines, stages, microbatches = GRID
    plan = regular_plan(pipelines, split_evenly(2 * stages, stages), microbatches)
    cluster = VirtualCluster(
        Scenario(plan=plan, steps=steps, seed=seed, workers_per_node=stages, agents=agents, **options)
    )
    return cluster.run()


@cache
def healthy(steps, staggered):
    return run(steps=steps, agents=1)


def survives(staggered, *fired, steps=STEPS, **options):
    """All of this fires, and the bits are those of one node on which nothing happens."""
    result = run(steps=steps, **options)
    assert result.outcome == "done", result.detail
    assert sorted(result.fired) == sorted(fired)
    assert result.digest == healthy(steps, staggered).digest
    return result


def of(result, kind):
    return [event for _, event in result.events if isinstance(event, kind)]


def lost(result):
    return [(event.worker, at) for at, event in result.events if isinstance(event, Detected)]


def of_node(*numbers):
    return [str(WorkerId(number, stage)) for number in numbers for stage in range(GRID[1])]


@pytest.mark.parametrize("at", [0.2, 0.45, 0.7, 0.95, 1.2])
def test_a_node_dies_and_that_is_one_event(staggered, at):
    """Nobody tells of it: its connections close, and none is back in time."""
    result = survives(staggered, f"kill-agent:2#{at}", agent_deaths=[(at, 2)])
    assert [worker for worker, _ in lost(result)] == of_node(2)
    assert {when for _, when in lost(result)} == {lost(result)[0][1]}
    assert WHOLE_NODE_S <= lost(result)[0][1] - at <= WHOLE_NODE_S + NOTICED_S
    assert [event.how for event in of(result, Detected)] == ["its node node-2 is gone"] * 2
    assert [event.generation for event in of(result, Installed)] == [1, 2]
    assert len([event for event in of(result, Notice) if "node-2 is gone" in event.text]) == 1


def test_two_nodes_die_at_once_and_that_is_one_event_too(staggered):
    fired = ("kill-agent:0#0.5", "kill-agent:3#0.5")
    result = survives(
        staggered, *fired, agent_deaths=[(0.5, 0), (0.5, 3)], delays=Delays(control=(0.001, 0.001), put=(0.0, 0.0))
    )
    assert sorted(worker for worker, _ in lost(result)) == of_node(0, 3)
    assert [event.generation for event in of(result, Installed)] == [1, 2]


@pytest.mark.parametrize("after_s", [0.03, 0.07, 0.1, 0.15])
def test_a_node_dies_in_the_recovery_of_another(staggered, after_s):
    deaths = [(0.5, 1), (0.5 + after_s, 2)]
    result = survives(staggered, *(f"kill-agent:{number}#{at}" for at, number in deaths), agent_deaths=deaths)
    assert sorted(worker for worker, _ in lost(result)) == of_node(1, 2)


def test_an_agent_whose_connection_breaks_is_back_in_time_and_nothing_comes_of_it(staggered):
    breaks = [(0.3, 1), (0.6, 1), (0.9, 3)]
    result = survives(staggered, *(f"break-agent:{number}#{at}" for at, number in breaks), broken_agents=breaks)
    assert (lost(result), result.generations) == ([], 1)


def test_an_agent_alone_is_waited_for_longer(staggered):
    """Its workers' connections stand; then it is held to be gone with them, and comes to be told so."""
    away = AGENT_ALONE_S + 0.1
    result = survives(
        staggered,
        "break-agent:1#0.3",
        broken_agents=[(0.3, 1)],
        delays=Delays(reattach=(away, away)),
    )
    assert [worker for worker, _ in lost(result)] == of_node(1)
    assert AGENT_ALONE_S <= lost(result)[0][1] - 0.3 <= AGENT_ALONE_S + NOTICED_S


def test_if_no_agent_has_a_connection_it_is_the_coordinator_that_is_cut_off(staggered):
    """It judges nobody."""
    breaks = [(0.5, number) for number in range(NODES)]
    away = AGENT_ALONE_S + 0.1
    result = survives(
        staggered,
        *(f"break-agent:{number}#0.5" for number in range(NODES)),
        broken_agents=breaks,
        delays=Delays(reattach=(away, away)),
    )
    assert (lost(result), result.generations) == ([], 1)


def test_the_only_agent_is_waited_for(staggered):
    result = survives(
        staggered,
        "break-agent:0#0.5",
        agents=1,
        broken_agents=[(0.5, 0)],
        delays=Delays(reattach=(1.0, 1.0)),
    )
    assert (lost(result), result.generations) == ([], 1)


def test_a_further_node_takes_the_place_of_one_that_died(staggered):
    """Its agent has offered workers; they get their state from those who are there."""
    result = survives(
        staggered,
        "kill-agent:2#0.5",
        "add-agent:2#0.9",
        steps=30,
        agent_deaths=[(0.5, 2)],
        more_agents=[(0.9, 2)],
    )
    assert sorted(event.worker for event in of(result, Synced)) == of_node(2)
    computed = {event.worker for event in of(result, StepOps) if event.step == 29 and event.ops}
    assert computed == set(of_node(*range(NODES)))


def test_what_a_node_was_starting_is_started_on_another_when_it_dies(staggered):
    """It has taken its offer up, and its process was on the way."""
    result = survives(
        staggered,
        "kill-agent:2#0.5",
        "add-agent:2#0.9",
        "kill-agent:4#1.0",
        steps=30,
        agent_deaths=[(0.5, 2), (1.0, 4)],
        more_agents=[(0.9, 2)],
        delays=Delays(start=(0.4, 0.4)),
    )
    told = [event.text for event in of(result, Notice) if "was lost while starting" in event.text]
    assert told == ["was lost while starting (its node node-4 is gone); it is started again, once"] * 2
    assert sorted(event.worker for event in of(result, Synced)) == of_node(2)


@pytest.mark.parametrize("at", [0.45, 0.5, 0.52, 0.6])
def test_a_node_dies_around_the_death_of_the_coordinator(staggered, at):
    """The next one hears nothing of that node, and gives up waiting for its workers."""
    result = survives(
        staggered, "kill-agent:1#0.5", f"kill-coordinator#{at}", agent_deaths=[(0.5, 1)], coordinator_deaths=[(at, 0.2)]
    )
    assert sorted(worker for worker, _ in lost(result)) == of_node(1)
    assert len(of(result, Reattached)) == 1


@pytest.mark.parametrize("at", [0.05, 0.2, 0.45, 0.7, 0.95, 1.2])
def test_a_node_that_is_told_to_go_costs_nothing(staggered, at):
    result = survives(staggered, f"leave-agent:2#{at}", steps=30, leaving_agents=[(at, 2)])
    assert sorted(event.worker for event in of(result, Parted)) == of_node(2)
    assert lost(result) == []
    told = [event.text for event in of(result, Notice) if "node-2" in event.text]
    assert told == ["node node-2 was told to go: its workers leave", "node node-2 has left"]
    done = [(event.worker, event.step) for event in of(result, StepOps)]
    assert len(set(done)) == len(done), "no worker ran any step twice"


def test_who_comes_takes_the_place_of_a_node_that_has_left(staggered):
    leaves, comes = [(0.5, 2)], [(0.9, 2)]
    fired = ("leave-agent:2#0.5", "add-agent:2#0.9")
    delays = Delays(start=(0.05, 0.05))
    result = survives(staggered, *fired, steps=30, leaving_agents=leaves, more_agents=comes, delays=delays)
    assert sorted(event.worker for event in of(result, Synced)) == of_node(2)


def test_a_node_stays_that_is_the_only_one_with_layers_until_another_one_has_them(staggered):
    """Meanwhile a checkpoint is made, as it may be gone before that."""
    gone, told, comes = [(0.3, 0), (0.3, 1), (0.3, 3)], [(0.8, 2)], [(1.2, 2)]
    result = survives(
        staggered,
        *(f"kill-agent:{number}#0.3" for number in (0, 1, 3)),
        "leave-agent:2#0.8",
        "add-agent:2#1.2",
        steps=40,
        agent_deaths=gone,
        leaving_agents=told,
        more_agents=comes,
        checkpoint_every=1000,
        delays=Delays(start=(0.05, 0.05)),
    )
    (left,) = {event.step for event in of(result, Parted)}
    assert sorted(event.worker for event in of(result, Parted)) == of_node(2)
    assert left >= max(event.step for event in of(result, Synced))
    assert of(result, Checkpointed)[0].step < left
    stays = [event.text for event in of(result, Notice) if "asked to leave" in event.text]
    assert sorted(stays) == [
        f"asked to leave, but nobody else holds layer(s) {layers}: it stays until somebody does; a checkpoint is made, "
        "in case it cannot"
        for layers in ("0, 1", "2, 3")
    ]


@pytest.mark.parametrize("at", [0.2, 0.5, 0.8])
def test_all_nodes_are_told_to_go_and_one_has_to_stay(staggered, at):
    told = [(at, number) for number in range(NODES)]
    fired = [f"leave-agent:{number}#{at}" for number in range(NODES)]
    result = survives(staggered, *fired, steps=30, leaving_agents=told, checkpoint_every=1000)
    assert lost(result) == []
    assert len(of(result, Parted)) == (NODES - 1) * GRID[1]
    assert len(of(result, Checkpointed)) == 1


@pytest.mark.parametrize("at", [0.45, 0.5, 0.52, 0.6, 0.7])
def test_a_node_leaves_around_the_death_of_the_coordinator(staggered, at):
    fired = ("leave-agent:1#0.5", f"kill-coordinator#{at}")
    result = survives(staggered, *fired, steps=30, leaving_agents=[(0.5, 1)], coordinator_deaths=[(at, 0.2)])
    early = [event for event in of(result, Detected) if event.how == LEFT_BEFORE]
    assert early == of(result, Detected), "the next coordinator may have taken them for members"
    assert sorted(event.worker for event in [*early, *of(result, Parted)]) == of_node(1)


@pytest.mark.parametrize("after_s", [-0.1, 0.0, 0.05, 0.1, 0.2])
def test_a_node_dies_while_another_one_leaves(staggered, after_s):
    at = round(0.5 + after_s, 3)
    fired = ("leave-agent:1#0.5", f"kill-agent:2#{at}")
    result = survives(staggered, *fired, steps=30, leaving_agents=[(0.5, 1)], agent_deaths=[(at, 2)])
    assert sorted({worker for worker, _ in lost(result)}) == of_node(2)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_anything_at_any_time(staggered, seed):
    """Nodes die or leave, agents' connections break, the coordinator dies, nodes come: never all of a stage's die."""
    source = random.Random(seed)
    deaths = [(round(source.uniform(0.1, 1.5), 3), node) for node in source.sample(range(NODES), source.randint(0, 3))]
    breaks = [(round(source.uniform(0.1, 1.5), 3), source.randrange(NODES)) for _ in range(source.randint(0, 3))]
    more = [(round(source.uniform(0.2, 1.5), 3), source.randint(1, 3)) for _ in range(source.randint(0, 2))]
    dead = [(round(source.uniform(0.2, 1.5), 3), 0.2) for _ in range(source.randint(0, 1))]
    safe = next(node for node in range(NODES) if node not in dict(map(reversed, deaths)))
    may_go = [node for node in range(NODES) if not deaths or node != safe]
    told = [(round(source.uniform(0.1, 1.5), 3), node) for node in source.sample(may_go, source.randint(0, 3))]
    try:
        result = run(
            seed=seed,
            steps=30,
            agent_deaths=deaths,
            leaving_agents=told,
            broken_agents=breaks,
            more_agents=more,
            coordinator_deaths=dead,
        )
        assert result.outcome == "done", result.detail
        assert result.digest == healthy(30, staggered).digest
        left = {node for at, node in told}
        assert {f"kill-agent:{node}#{at}" for at, node in deaths if node not in left} <= set(result.fired)
        assert {f"add-agent:{offers}#{at}" for at, offers in more} <= set(result.fired)
        stayed = [node for _, node in deaths if node not in left]
        assert {worker for worker, _ in lost(result)} >= set(of_node(*stayed))
    except BaseException as error:
        error.add_note(
            f"repeat: seed {seed}, deaths {deaths}, told {told}, breaks {breaks}, more {more}, coordinator {dead}"
        )
        raise
