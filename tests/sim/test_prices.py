"""What an action is said to cost is what it takes, where a cluster is as fast as the rates say."""

import random
from dataclasses import replace

import pytest

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.profile import LayerProfile, Link, Profile, costs_from_profile
from holdfast.planning.planner import Technique
from holdfast.planning.replays import Logging
from holdfast.planning.training import Terms, replanned
from holdfast.recovery.actions import (
    Abort,
    Await,
    CopyState,
    FinishStep,
    InstallPlan,
    LoadState,
    Recompute,
    ReplaceGrid,
    ReplayLayers,
    Restore,
    SaveCommitted,
    Spawn,
    TakeBack,
)
from holdfast.recovery.rates import Rates, step_seconds
from holdfast.recovery.rules import JobRules
from holdfast.recovery.view import ClusterView
from holdfast.schedule.builders import regular_plan
from holdfast.schedule.evaluate import evaluate
from holdfast.strategies.adaptive import adaptive
from holdfast.strategies.answers import fall_back
from holdfast.strategies.checkpoint_restart import checkpoint_restart
from holdfast.strategies.registry import strategy_named
from holdfast.strategies.snapshots import snapshots
from holdfast.telemetry.events import Agreed, Detected, Installed, Rebuilt, Replaying, StepOps, Synced
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

LAYERS = 8


def a_profile(source: random.Random) -> Profile:
    layers = tuple(
        LayerProfile(
            name=f"layer {index}",
            forward_s=source.uniform(0.01, 0.05),
            backward_input_s=source.uniform(0.01, 0.05),
            backward_weight_s=source.uniform(0.01, 0.04),
            held_after_forward_bytes=8,
            held_after_input_bytes=4,
            boundary_bytes=source.randint(10, 3000),
            parameter_bytes=source.randint(1000, 50_000),
            optimizer_bytes=20_000,
            optimizer_s=source.uniform(0.0, 0.004),
        )
        for index in range(LAYERS)
    )
    return Profile(layers=layers, link=Link(latency_s=source.uniform(0.0, 0.002), bytes_per_s=1e6))


def some_rates(seed: int = 0) -> Rates:
    source = random.Random(seed)
    return Rates(
        profile=a_profile(source),
        message_s=source.uniform(0.0, 0.001),
        control_s=source.uniform(0.0005, 0.002),
        connect_s=source.uniform(0.001, 0.05),
        start_s=source.uniform(0.1, 0.5),
        copy=Link(latency_s=0.002, bytes_per_s=source.uniform(1e6, 1e7)),
        load=Link(latency_s=0.01, bytes_per_s=source.uniform(1e5, 1e6)),
        save=Link(latency_s=0.003, bytes_per_s=source.uniform(1e5, 1e6)),
    )


RATES = some_rates()
PLAN = regular_plan(3, split_evenly(LAYERS, 4), 6)
RULES = JobRules(steps=9)
VICTIM = WorkerId(1, 1)


def close(seconds: float):
    return pytest.approx(seconds, rel=0.01, abs=1e-9)


class Run:
    """A job, and when it happened."""

    def __init__(self, *faults, plan=PLAN, rates=RATES, **options):
        parsed = [Fault.parse(text) for text in faults]
        scenario = Scenario(plan=plan, rates=rates, faults=parsed, **{"steps": 8, **options})
        self.result = VirtualCluster(scenario).run()
        self.plan = plan
        assert set(self.result.fired) == {*map(str, parsed)}

    def when(self, kind, generation=None):
        """The first time of an event."""
        return next(
            at
            for at, e in self.result.events
            if isinstance(e, kind) and (generation is None or e.generation == generation)
        )

    def ops(self, step, generation):
        """When the first operation of a step began, and when a worker had committed that begins the next one."""
        told = [(at, e) for at, e in self.result.events if isinstance(e, StepOps)]
        of = [(at, e) for at, e in told if (e.step, e.generation) == (step, generation)]
        first = [at for at, e in of if WorkerId.parse(e.worker).stage == 0]
        return min(op[3] for _, e in of for op in e.ops), min(first)

    def began(self, step, generation):
        return self.ops(step, generation)[0]

    def ended(self, step, generation):
        return self.ops(step, generation)[1]

    def view(self, step, *, rules=RULES, **options):
        """What was known as the worker was found to be lost, in a step."""
        elapsed_s = self.when(Detected) - self.began(step - 1, 1) - step_seconds(self.plan, RATES)
        return ClusterView(
            rules=rules,
            baseline=self.plan,
            lost=frozenset([VICTIM]),
            plan=self.plan,
            step=step,
            elapsed_s=elapsed_s,
            **options,
        )


@pytest.fixture(autouse=True)
def synchronous(staggered, request):
    """Once is enough, but for the tests that say otherwise."""
    if staggered and request.function is not test_steps_of_any_plan:
        pytest.skip("only steps themselves are priced otherwise where updates are ahead of the verdict")


def test_the_actions_that_answer_a_loss():
    run = Run(f"kill:{VICTIM}@3:backward", step_log=False)
    view = run.view(3)
    recovery = adaptive(view)
    prices = dict(zip(map(type, recovery.actions), recovery.priced(view, RATES), strict=True))
    assert all(each.still for each in prices.values())
    detected, agreed = run.when(Detected), run.when(Agreed, 2)
    assert agreed - RATES.control_s - detected == close(prices[Abort].seconds)
    assert run.when(Rebuilt, 2) - agreed == close(prices[InstallPlan].seconds), "the order to go on is there before"
    assert prices[TakeBack].seconds == 0
    began, ended = run.began(3, 2), run.ended(3, 2)
    assert ended - began == close(prices[Recompute].seconds)
    total = sum(each.seconds for each in prices.values())
    assert total - RATES.connect_s < ended - detected <= total * 1.01, "who is connected does not wait for others"
    assert (recovery.actions[-1].after(view).step, view.step) == (4, 3)
    assert Recompute().after(replace(view, resumes=3)).resumes is None, "of the next step that is not known yet"
    assert Abort().price(replace(view, plan=None), RATES).seconds <= prices[Abort].seconds, "nothing runs then"


@pytest.mark.parametrize("point", ["forward", "backward", "reduce"])
def test_what_is_left_of_a_step_is_less_than_the_step(point):
    """It is priced as the survivors plan it, if all had come as far as their plan says."""
    run = Run(f"kill:{VICTIM}@3:{point}")
    view = run.view(3, rules=replace(RULES, keeping=costs_from_profile(RATES.profile)))
    recovery = adaptive(view)
    prices = dict(zip(map(type, recovery.actions), recovery.priced(view, RATES), strict=True))
    detected, agreed = run.when(Detected), run.when(Agreed, 2)
    assert agreed - RATES.control_s - detected == close(prices[Abort].seconds)
    assert run.when(Rebuilt, 2) - agreed == close(prices[InstallPlan].seconds)
    left_s = run.ended(3, 2) - run.when(Rebuilt, 2) + RATES.control_s
    assert left_s == pytest.approx(prices[FinishStep].seconds, rel=0.02)
    assert left_s < 0.75 * step_seconds(recovery.plan, RATES)


def test_whoever_computes_hears_an_order_at_the_end_of_its_operation():
    """And nobody else is waited for; the view tells how far the step is."""
    spans = evaluate(PLAN, costs_from_profile(RATES.profile)).spans
    longest = max(spans, key=lambda span: span.end - span.start)
    view = ClusterView(
        rules=RULES, baseline=PLAN, lost=frozenset(), plan=PLAN, elapsed_s=longest.start - RATES.control_s
    )
    assert Abort().price(view, RATES).seconds == pytest.approx(RATES.control_s + longest.end - longest.start)
    alone = replace(view, lost=frozenset(PLAN.workers))
    assert Abort().price(alone, RATES).seconds == RATES.control_s


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_any_plan(seed, staggered):
    source = random.Random(seed)
    rates, stages = some_rates(seed), source.randint(1, 5)
    plan = regular_plan(source.randint(1, 3), split_evenly(LAYERS, stages), source.randint(1, 7))
    if staggered:
        terms = Terms(technique=Technique.STAGGERED, costs=costs_from_profile(rates.profile), in_flight=2 * stages)
        plan = replanned(plan, terms)
    run = Run(plan=plan, rates=rates, steps=5)
    assert run.began(4, 1) - run.began(3, 1) == close(step_seconds(plan, rates, updates_ahead=staggered))


def test_steps_that_are_run_again_from_a_snapshot():
    late = replace(RATES, start_s=100.0)  # whoever comes for the lost one is not there yet
    run = Run(f"kill:{VICTIM}@5:backward", rates=late, strategy="snapshots", snapshot_every=3)
    view = replace(run.view(5), snapshot=3)
    recovery = snapshots(view)
    prices = dict(zip(map(type, recovery.actions), recovery.priced(view, RATES), strict=True))
    assert prices[Restore].seconds == 0
    assert (prices[Spawn].still, prices[Spawn].seconds) == (False, RATES.start_s + 2 * RATES.control_s)
    assert run.ended(5, 2) - run.began(3, 2) == close(prices[Recompute].seconds)


def test_a_checkpoint_is_waited_for_and_loaded():
    run = Run(f"kill:{VICTIM}@5:backward", strategy="checkpoint-restart", checkpoint_every=2, wait_for_replacement=9.0)
    view = run.view(5, rules=replace(RULES, wait_s=9.0), checkpoint=4, coming=True)
    waits = next(each for each in checkpoint_restart(view).actions if isinstance(each, Await))
    halted, again = run.when(Installed, 2), run.when(Installed, 3)
    assert again - halted == close(waits.price(view, RATES).seconds)
    assert waits.price(replace(view, coming=False), RATES).seconds == 9.0, "nobody is started"
    whole = replace(view, lost=frozenset())
    loads = LoadState(step=4).price(whole, RATES).seconds
    assert run.when(Agreed, 3) - again - 2 * RATES.control_s == close(loads)
    loaded = InstallPlan(plan=PLAN).after(LoadState(step=4).after(whole))
    assert run.ended(5, 3) - run.began(4, 3) == close(Recompute().price(loaded, RATES).seconds)


def test_a_checkpoint_is_loaded_by_a_smaller_grid():
    others = [WorkerId(pipeline, 1) for pipeline in range(3)]
    run = Run(*(f"kill:{worker}@5:backward" for worker in others), checkpoint_every=2)
    view = ClusterView(rules=RULES, baseline=PLAN, lost=frozenset(others), plan=PLAN, step=5, checkpoint=4)
    recovery = fall_back(view, PLAN.placement.layers_of(others[0]))
    prices = dict(zip(map(type, recovery.actions), recovery.priced(view, RATES), strict=True))
    generation = next(
        e.generation for _, e in run.result.events if isinstance(e, Installed) and e.strategy == "fallback"
    )
    installed, agreed = run.when(Installed, generation), run.when(Agreed, generation)
    left = Abort().price(view, RATES).seconds - RATES.control_s  # who had stopped before waits for nothing
    assert agreed - installed - 2 * RATES.control_s == pytest.approx(prices[LoadState].seconds, rel=0.01, abs=left)
    assert prices[LoadState].seconds > LoadState(step=4).price(view, RATES).seconds, "fewer workers load more each"
    assert run.ended(5, generation) - run.began(4, generation) == close(prices[Recompute].seconds)


def test_a_boundary_costs_a_connection_and_a_copy_nothing_but_its_time():
    run = Run(f"kill:{VICTIM}@2:start", f"join:{VICTIM}@4", steps=14)
    generation = next(
        e.generation for _, e in run.result.events if isinstance(e, Installed) and e.strategy == "boundary"
    )
    first = min(e.step for _, e in run.result.events if isinstance(e, StepOps) and e.generation == generation)
    view = ClusterView(rules=RULES, baseline=PLAN, lost=frozenset([VICTIM]), plan=PLAN)
    boundary = InstallPlan(plan=PLAN, at_boundary=True).price(view, RATES)
    assert run.began(first, generation) - run.ended(first - 1, generation - 1) == close(boundary.seconds)


@pytest.mark.parametrize("steps", [0.5, 1.5, 2.5, 4.5])
def test_training_goes_on_during_a_copy(steps):
    """Whoever was given state has caught up at the end of the step in which it came."""
    layers = LayerRange(*PLAN.placement.layers_of(VICTIM)[:1], PLAN.placement.layers_of(VICTIM)[-1] + 1)
    view = ClusterView(rules=RULES, baseline=PLAN, lost=frozenset([VICTIM]), plan=PLAN)
    size = sum(RATES.profile.layers[layer].state_bytes for layer in layers.indices)
    step_s = step_seconds(adaptive(view).plan, RATES)
    rates = replace(RATES, copy=Link(latency_s=0.0, bytes_per_s=size / (steps * step_s)))
    copied = CopyState(layers=layers, target=VICTIM).price(view, rates)
    assert (copied.still, copied.seconds) == (False, close(steps * step_s))
    run = Run(f"kill:{VICTIM}@2:start", f"join:{VICTIM}@4", rates=rates, steps=14)
    synced = next(e for _, e in run.result.events if isinstance(e, Synced))
    assert synced.step - synced.entered == steps + 0.5


def test_what_lives_is_saved():
    others = [WorkerId(pipeline, 1) for pipeline in range(3)]
    run = Run(*(f"kill:{worker}@3:backward" for worker in others))
    assert run.result.outcome == "lost"
    view = ClusterView(rules=RULES, baseline=PLAN, lost=frozenset(others), plan=PLAN, step=3)
    agreed = max(at for at, e in run.result.events if isinstance(e, Agreed))
    assert run.result.seconds - agreed == close(SaveCommitted().price(view, RATES).seconds)
    smaller = replace(view, baseline=regular_plan(1, split_evenly(LAYERS, 4), 18))
    assert ReplaceGrid(plan=smaller.baseline).price(view, RATES).seconds == 0


@pytest.mark.parametrize("helpers", [0, 1])
@pytest.mark.parametrize("step", [5, 6, 9])
def test_what_nobody_holds_is_replayed(step, helpers):
    """Of one pipeline, by those beside the lost one and so many helpers; at the checkpoint there is nothing to run."""
    plan = regular_plan(1, split_evenly(LAYERS, 4), 6)
    options = {"logs": True, "checkpoint_every": 5, "steps": 12, "helpers": helpers}
    run = Run(f"kill:0.1@{step}:backward", plan=plan, **options)
    rules, lost = replace(RULES, logging=Logging(helpers=helpers)), frozenset([WorkerId(0, 1)])
    view = ClusterView(rules=rules, baseline=plan, lost=lost, plan=plan, step=step, checkpoint=5, logs=True)
    recovery = fall_back(view, plan.placement.layers_of(WorkerId(0, 1)))
    price = recovery.priced(view, RATES)[[type(each) for each in recovery.actions].index(ReplayLayers)]
    began, replaying = next((at, e) for at, e in run.result.events if isinstance(e, Replaying))
    assert len(replaying.workers) == 2 + (helpers if step > 5 else 0)
    ended = min(at for at, e in run.result.events if isinstance(e, Agreed) and at > began)
    assert ended - began == close(price.seconds)


@pytest.mark.parametrize("strategy", ["lossy-forward", "skip", "rollback"])
def test_a_step_that_ends_without_what_was_lost(strategy):
    plan = regular_plan(4, split_evenly(LAYERS, 1), 2)
    rules = replace(RULES, keeping=costs_from_profile(RATES.profile), strategy=strategy)
    run = Run("kill:1.0@3:backward", plan=plan, strategy=strategy, steps=6)
    view = replace(run.view(3, rules=rules), lost=frozenset([WorkerId(1, 0)]))
    recovery = strategy_named(strategy).answer(view)
    prices = dict(zip(map(type, recovery.actions), recovery.priced(view, RATES), strict=True))
    ending = prices[type(recovery.actions[-1])].seconds
    steps = (3, 4) if strategy == "rollback" else (3,)
    assert run.ended(steps[-1], 2) - run.when(Rebuilt, 2) + RATES.control_s == pytest.approx(ending, rel=0.02)
    assert (ending > step_seconds(recovery.plan, RATES)) == (strategy == "rollback")
