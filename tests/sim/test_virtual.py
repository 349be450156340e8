"""The whole protocol under a virtual clock: many seeds, deaths at every effect, and one seed is one history."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.config.load import parse_job
from holdfast.core.faults import Fault, Point
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.placement import split_evenly
from holdfast.protocol.step_log import StepLog
from holdfast.runtime.engine.build import build_stage
from holdfast.runtime.engine.probing import probe
from holdfast.schedule.builders import regular_plan
from holdfast.settings.planning import healthy_plan
from holdfast.telemetry.events import CoordinatorLost, CoordinatorReady, Detected, Installed, Reattached, StepOps
from holdfast.telemetry.report import report
from holdfast.testing.scenario import Pause, Scenario, VirtualResult
from holdfast.testing.virtual import VirtualCluster
from holdfast.testing.virtual_transport import VirtualTransport

SEEDS = int(os.environ.get("HOLDFAST_SEEDS", "6"))
CHUNK = 25
STEPS = 3
FIRST_EFFECT_AFTER_INSTALL = 4


@cache
def plan_of(pipelines: int, stages: int, microbatches: int):
    return regular_plan(pipelines, split_evenly(stages + 1, stages), microbatches)


def cluster(grid, seed=0, **options) -> VirtualResult:
    plan = plan_of(*grid)
    return VirtualCluster(Scenario(plan=plan, steps=STEPS, seed=seed, **options)).run()


@cache
def healthy(grid) -> VirtualResult:
    result = cluster(grid)
    assert result.outcome == "done"
    return result


@cache
def effects(grid, staggered) -> dict[WorkerId, int]:
    """How many effects each worker yields if nothing happens: whoever is to die at one of them does."""
    return cluster(grid).effects


def random_kills(source, grid, staggered, least=1):
    """Up to half of the workers, each at some effect, whatever it is doing then."""
    workers = plan_of(*grid).workers
    victims = source.sample(workers, source.randint(least, max(1, len(workers) // 2)))
    yielded = effects(grid, staggered)
    return [(worker, source.randint(FIRST_EFFECT_AFTER_INSTALL, yielded[worker])) for worker in victims]


def random_deaths(source, grid):
    """The coordinator dies up to four times while the job runs, and never while it is dead."""
    end = 0.7 * healthy(grid).events[-1][0]  # some seeds, and updates ahead of the verdict, take less time
    times = sorted(source.uniform(0.0, end) for _ in range(source.randint(1, 4)))
    return [(at, source.uniform(0.0, min(0.4, after - at))) for at, after in itertools.pairwise([*times, math.inf])]


def check_fired(result: VirtualResult, kills, deaths=()) -> None:
    """Every kill and every death of the coordinator, unless the job was over before, as its layers were lost."""
    planned = {f"kill:{worker}#{count}" for worker, count in kills} | {f"kill-coordinator#{at}" for at, _ in deaths}
    assert set(result.fired) <= planned
    assert result.fired
    assert result.outcome == "lost" or set(result.fired) == planned, (result.fired, planned)


def check(result: VirtualResult, grid) -> None:
    """Done with the healthy bits, or lost because a stage has no worker left; nothing else."""
    pipelines, stages, _ = grid
    assert {str(worker) for worker in result.lost} <= {e.worker for _, e in result.events if isinstance(e, Detected)}
    dead_stages = [s for s in range(stages) if all(WorkerId(p, s) in result.lost for p in range(pipelines))]
    if dead_stages:
        assert result.outcome == "lost", result.detail
    else:
        assert result.outcome == "done", result.detail
        assert result.digest == healthy(grid).digest
        assert result.step == STEPS


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_deaths_anywhere_at_any_time(start, staggered):
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        grid = (source.randint(2, 3), source.randint(1, 3), source.randint(1, 3))
        kills = random_kills(source, grid, staggered)
        try:
            result = cluster(grid, seed=seed, kill_at_effect=kills)
            check(result, grid)
            check_fired(result, kills)
        except BaseException as error:
            error.add_note(f"repeat: seed {seed}, grid {grid}, kill_at_effect {[(str(w), n) for w, n in kills]}")
            raise


def test_every_effect_of_one_worker():
    """A worker of the middle stage dies at each of its effects in turn."""
    grid = (2, 3, 2)
    for effect in itertools.count(FIRST_EFFECT_AFTER_INSTALL):
        result = cluster(grid, seed=effect, kill_at_effect=[(WorkerId(1, 1), effect)])
        check(result, grid)
        if not result.fired:
            break
    assert effect > 80, "the worker lived to the end only after it had died at each of its effects"


OF_A_STEP = [Point.START, Point.FORWARD, Point.BACKWARD, Point.REDUCE, Point.UPDATE, Point.COMMIT]
OF_A_RECOVERY = [Point.DETECT, Point.INSTALL, Point.REPLAY]


@pytest.mark.parametrize("kind", ["kill", "hang", "stall"])
@pytest.mark.parametrize("point", OF_A_STEP + OF_A_RECOVERY)
def test_every_named_point(point, kind):
    grid = (3, 3, 3)
    first = "kill:1.1@1:backward"
    faults = [first, f"{kind}:0.2@1:{point}"] if point in OF_A_RECOVERY else [f"{kind}:1.1@1:{point}"]
    result = cluster(grid, seed=5, faults=[Fault.parse(text) for text in faults])
    assert sorted(result.fired) == sorted(faults)
    check(result, grid)
    failures = report(result.events).failures
    assert len(failures) == len(faults)
    assert all(failure.detected_s > 0 and failure.resumed_s > failure.detected_s for failure in failures)


def test_one_survivor_per_stage():
    grid = (3, 3, 3)
    victims = ["0.0", "1.1", "2.2", "1.0", "2.1", "0.2"]
    faults = [Fault.parse(f"kill:{w}@{i // 3}:backward") for i, w in enumerate(victims)]
    result = cluster(grid, seed=1, faults=faults)
    assert len(result.fired) == 6
    check(result, grid)
    installed = [event for _, event in result.events if isinstance(event, Installed)]
    assert len(installed[-1].workers) == 3


def test_a_stage_without_workers_ends_the_job():
    grid = (2, 2, 2)
    result = cluster(grid, faults=[Fault.parse("kill:0.1@0:start"), Fault.parse("kill:1.1@1:start")])
    assert len(result.fired) == 2
    assert result.outcome == "lost"
    assert "layer(s) 2" in result.detail
    assert result.step == 1, "the step of what lives is the last committed one"


def test_one_seed_is_one_history():
    kills = [(WorkerId(0, 1), 37), (WorkerId(2, 0), 60)]
    runs = [cluster((3, 3, 3), seed=11, kill_at_effect=kills) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0].fired) == 2
    other = cluster((3, 3, 3), seed=12, kill_at_effect=kills)
    assert other.events != runs[0].events
    assert other.digest == runs[0].digest


GPT = {
    "model": {"kind": "gpt", "layers": 2, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
    "data": {"kind": "text", "path": os.__file__},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2, "microbatch_size": 2},
    "train": {"steps": STEPS, "seed": 1},
}


@pytest.fixture(scope="module")
def gpt():
    torch.set_num_threads(1)
    job = parse_job(GPT)
    found = probe(job)
    boundaries = found.boundaries
    plan = healthy_plan(job, len(boundaries))

    def run(seed=0, **options):
        def stage(worker, plan):
            return build_stage(job, plan, worker, boundaries).stage

        return VirtualCluster(
            Scenario(plan=plan, steps=STEPS, seed=seed, stage=stage, ties=found.ties, **options)
        ).run()

    return run


class Counting(TorchDispatchMode):
    """Counts what torch is asked to do, below autograd."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_kept_in_case_a_step_is_interrupted_is_what_was_sent_and_no_copy(gpt, monkeypatch):
    kept, sent = {}, {}
    keep, send = StepLog.keep, VirtualTransport.send

    def keeping(log, step, payload, boundary, number, value, **how):
        keep(log, step, payload, boundary, number, value, **how)
        if log.num_bytes:
            kept[step, payload, boundary, number] = log.recall(step, payload, boundary, number)

    def sending(transport, key, peer, tensor):
        if key.payload in (Payload.ACTIVATION, Payload.GRADIENT):
            sent[key.step, key.payload, key.boundary, key.microbatch] = tensor
        send(transport, key, peer, tensor)

    monkeypatch.setattr(StepLog, "keep", keeping)
    monkeypatch.setattr(VirtualTransport, "send", sending)
    with Counting() as with_log:
        first = gpt()
    assert len(sent) == STEPS * 4 * 2, "an activation and a gradient of every micro-batch"
    assert sent.keys() <= kept.keys()
    assert all(kept[key].data_ptr() == tensor.data_ptr() for key, tensor in sent.items())
    kept.clear()
    with Counting() as without:
        assert gpt(step_log=False).digest == first.digest
    assert kept.keys().isdisjoint(sent), "what else is kept is handed on within a worker"
    assert with_log.calls == without.calls
    assert with_log.calls["aten.clone.default"] > 0, "it is counted"


def test_a_real_gpt_with_tied_weights_under_the_virtual_clock(gpt):
    healthy = gpt()
    for seed in range(12):
        source = random.Random(seed)
        victim = source.choice([WorkerId(p, s) for p in range(2) for s in range(2)])
        kill = (victim, source.randint(FIRST_EFFECT_AFTER_INSTALL, healthy.effects[victim]))
        result = gpt(seed=seed, kill_at_effect=[kill])
        assert result.outcome == "done", result.detail
        assert result.digest == healthy.digest, f"seed {seed}: {result.fired}"
        check_fired(result, [kill])


@pytest.mark.parametrize("start", range(0, SEEDS, CHUNK))
def test_the_coordinator_dies_at_any_time_alone_and_with_workers(start, staggered):
    """Messages on their way are lost with it; up to half of the workers die too, also while it is away."""
    for seed in range(start, start + CHUNK):
        source = random.Random(seed)
        grid = (source.randint(2, 3), source.randint(1, 3), source.randint(1, 3))
        kills = random_kills(source, grid, staggered, least=0)
        deaths = random_deaths(source, grid)
        try:
            result = cluster(grid, seed=seed, kill_at_effect=kills, coordinator_deaths=deaths)
            check(result, grid)
            check_fired(result, kills, deaths)
        except BaseException as error:
            told = f"seed {seed}, grid {grid}, kills {[(str(w), n) for w, n in kills]}, coordinator {deaths}"
            error.add_note(f"repeat: {told}")
            raise


def test_what_finds_nothing_to_strike_has_not_fired():
    grid, end = (2, 2, 2), healthy((2, 2, 2)).events[-1][0]
    deaths = [(0.1, 0.5), (0.3, 0.1), (end + 10.0, 0.1)]
    breaks = [(0.0, WorkerId(0, 0)), (0.2, WorkerId(0, 1)), (0.05, WorkerId(1, 1))]
    pauses = [
        Pause(at=0.3, lasts_s=0.5, workers=(WorkerId(1, 0),)),
        Pause(at=end + 10.0, lasts_s=1.0, coordinator=True),
    ]
    kills = [(WorkerId(0, 0), 10_000)]
    options = {"coordinator_deaths": deaths, "broken_streams": breaks, "pauses": pauses, "kill_at_effect": kills}
    result = cluster(grid, seed=1, **options)
    check(result, grid)
    assert result.fired == ("break:1.1#0.05", "kill-coordinator#0.1", "pause:1.0#0.3")


def test_steps_go_on_while_there_is_no_coordinator():
    grid = (2, 2, 2)
    result = cluster(grid, seed=3, coordinator_deaths=[(0.1, 5.0)])
    check(result, grid)
    (lost,) = [time for time, event in result.events if isinstance(event, CoordinatorLost)]
    back = [time for time, event in result.events if isinstance(event, CoordinatorReady)][-1]
    meanwhile = {event.step for time, event in result.events if isinstance(event, StepOps) and lost < time < back}
    assert meanwhile == set(range(STEPS))
    assert [event.adopted for _, event in result.events if isinstance(event, Reattached)] == [True]
    assert result.generations == 1
