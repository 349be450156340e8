"""A job that is simulated whole is as fast as one in which every worker, message and operation is simulated."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from tests.sim.test_prices import LAYERS, PLAN, RATES

from holdfast.core.faults import Fault
from holdfast.core.placement import split_evenly
from holdfast.core.profile import Link
from holdfast.schedule.builders import regular_plan
from holdfast.sim.engine import Prepared, simulate
from holdfast.sim.speeds import Speeds
from holdfast.sim.world import Happening, Kind, World
from holdfast.telemetry.events import Agreed, Detected, FaultInjected, Installed, StepOps
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

STEPS = 120
KEPT = {"step_log": True}
KINDS = {"kill": Kind.LOST, "join": Kind.COMES, "slow": Kind.SLOWS}
ALONE = {"plan": regular_plan(1, split_evenly(LAYERS, 4), 6), "logs": True, "checkpoint_every": 10, **KEPT}
CASES = {
    "adaptive": (["kill:1.1@30:backward"], KEPT),
    "adaptive, run again whole": (["kill:1.1@30:backward"], {}),
    "adaptive, three of them": (["kill:1.1@30:backward", "kill:0.2@60:forward", "kill:2.3@61:reduce"], KEPT),
    "adaptive, one is slow": (["slow:1.1@30:2x"], KEPT),
    "adaptive, one is slow as another is lost": (["slow:0.2@20:3x", "kill:1.1@60:backward"], KEPT),
    "adaptive, and one comes back": (["kill:1.1@30:backward", "join:1.1@60"], KEPT),
    "adaptive, replayed": (["kill:0.1@37:backward"], ALONE),
    "adaptive, replayed at a checkpoint": (["kill:0.1@40:forward"], ALONE),
    "adaptive, replayed with a helper": (["kill:0.1@37:backward"], ALONE | {"helpers": 1}),
    "adaptive, replayed in vain, and whole": (
        ["kill:0.1@37:backward", "kill:0.2@32:replay"],
        ALONE | {"wait_for_replacement": 9.0, "step_log": False},
    ),
    "adaptive, replayed twice": (["kill:0.1@37:backward", "kill:0.2@51:forward"], ALONE),
    "checkpoint-restart": (["kill:1.1@37:backward"], {"checkpoint_every": 10, "wait_for_replacement": 9.0}),
    "snapshots": (["kill:1.1@39:backward"], {"checkpoint_every": 50, "snapshot_every": 10}),
}


def times(result, kind):
    return [at for at, event in result.events if isinstance(event, kind)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_takes_as_long(case, seed):
    faults, options = CASES[case]
    scenario = {"plan": PLAN, **options}
    strategy = case.partition(",")[0]
    parsed = [Fault.parse(text) for text in faults]
    cluster = VirtualCluster(
        Scenario(rates=RATES, faults=parsed, steps=STEPS, seed=seed, strategy=strategy, **scenario)
    )
    begins = cluster._begins
    run = cluster.run()
    assert run.outcome == "done", run.detail
    assert set(run.fired) == {*map(str, parsed)}
    ops = [(event.step, op) for _, event in run.events if isinstance(event, StepOps) for op in event.ops]
    began = min(op[3] for step, op in ops if step == 0)
    ended = max(op[4] for step, op in ops if step == STEPS - 1)

    struck = [(at - began, event) for at, event in run.events if isinstance(event, FaultInjected)]
    machines = {worker: index for index, worker in enumerate(map(str, scenario["plan"].workers))}
    happenings = tuple(
        Happening(
            at_s=at,
            kind=KINDS[event.kind],
            machine=len(machines) if event.kind == "join" else machines[event.worker],
            factor=Fault.parse(event.spec).factor,
        )
        for at, event in struck
    )
    lost = [each.at_s for each in happenings if each.kind is Kind.LOST]
    noticed = zip([at - began for at in times(run, Detected)], lost, strict=True)
    detect_s = fmean([after - at for after, at in noticed] or [0.0])
    speeds = Speeds(rates=RATES, detect_s=detect_s, pin=Link(latency_s=0.0, bytes_per_s=1e18))
    if strategy in ("checkpoint-restart", "snapshots"):  # a process is started where the lost one was
        happenings += tuple(Happening(at_s=at + detect_s, kind=Kind.COMES, machine=99) for at in lost)
    prepared = Prepared(rules=replace(begins.rules, steps=10**9), plan=begins.grid.baseline)
    world = World(machines=len(machines), happenings=happenings, lasts_s=ended - began)
    outcome = simulate(prepared, world, speeds)
    assert outcome.steps == pytest.approx(STEPS, rel=0.01)
    installed = [at for at, event in outcome.events if isinstance(event, Installed)]
    assert installed[1:] == pytest.approx([at - began for at in times(run, Installed)[1:]], abs=0.3 * outcome.healthy_s)
    again = [event.goes_on for _, event in run.events if isinstance(event, Agreed)]
    assert [event.goes_on for _, event in outcome.events if isinstance(event, Agreed)] == again
    if "in vain" in case or not lost:  # noticed later, both losses are answered at once, by a grid that is better
        return
    dearer = replace(speeds, detect_s=speeds.detect_s + 2 * outcome.healthy_s)
    assert simulate(prepared, world, dearer).steps < outcome.steps
