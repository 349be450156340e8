"""A worker's protocol and its steps, driven by hand: no sockets, no clock, no other worker."""

import dataclasses

import numpy as np
import pytest
from tests.processes import process_of

from holdfast.control.messages import (
    Attached,
    Audits,
    CaughtUp,
    Finished,
    Hello,
    Install,
    Joined,
    Left,
    Resume,
    Save,
    Saved,
    ShardFailed,
    Shutdown,
    StateAt,
    Status,
    StepDone,
    Suspect,
    Weighed,
)
from holdfast.core.faults import Point
from holdfast.core.ids import Batch
from holdfast.core.instructions import Compute, Payload, Reduce
from holdfast.core.lower import lower
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import unit_costs
from holdfast.core.routes import Route, Routes, Visit
from holdfast.core.schedule import Op, OpKind
from holdfast.core.slots import renamed
from holdfast.core.summing import add_up
from holdfast.errors import CorruptBlob, InternalError, LedgerError, PeerLost, StaleGeneration
from holdfast.protocol.effects import (
    Attach,
    Boundary,
    Build,
    Disconnect,
    Drain,
    Fetch,
    Fetched,
    Listen,
    Load,
    Pin,
    Release,
    Report,
    Serve,
)
from holdfast.protocol.executor import (
    AskPrepared,
    Execution,
    Expect,
    FinishReduce,
    Give,
    PollReduce,
    Reach,
    Run,
    RunAll,
    StartReduce,
    StepCommitted,
    Take,
)
from holdfast.protocol.worker import WorkerProtocol
from holdfast.recovery.audit import Sampling
from holdfast.recovery.rules import JobRules
from holdfast.recovery.view import ClusterView
from holdfast.runtime.engine.emulated import WIDTH, EmulatedStage
from holdfast.schedule.builders import gpipe_orders, regular_plan
from holdfast.strategies.answers import at_boundary
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster

STEPS = 2
RULES = JobRules(steps=STEPS, keeping=unit_costs(5))
MICROBATCHES = 2
PLAN = regular_plan(1, split_evenly(5, 2), MICROBATCHES)
FIRST, LAST = PLAN.workers
JOINING = ["listen", "[detect]", "disconnect", "release", "Status", "[install]", "build", "Joined", "listen"]
UNINTERRUPTED = Attach | Report | Listen | Disconnect | Release
"""Effects that the driver carries out in any generation; all others it can answer with StaleGeneration."""


def stage_of(worker, plan=PLAN):
    layers = plan.placement.layers_of(worker)
    total = len(plan.routes.microbatches)
    return EmulatedStage(layers=layers, num_layers=plan.placement.num_layers, num_microbatches=total)


class Driver:
    """Does what a protocol asks for: computes, makes up what peers send, and answers as the coordinator would.

    Args:
        worker: whose protocol.
        errors: what to throw in at which effect, by its number.
        sums_at_once: whether a sum is there as soon as we have contributed to it.
    """

    def __init__(self, worker, tmp_path, errors=None, plan=PLAN, *, sums_at_once=False):
        self.worker = worker
        self._sums_at_once = sums_at_once
        self.stage = stage_of(worker, plan)
        self.protocol = WorkerProtocol(worker=worker, stage=self.stage, rules=RULES, process=process_of(worker, 1))
        self.effects = []
        self._folder, self._plan = tmp_path, plan
        self._errors = errors or {}
        self._newest = 1
        self._started = {}
        self._greeted = False

    @property
    def reports(self):
        return [
            self.protocol.hello() if isinstance(effect, Attach) else effect.message
            for effect in self.effects
            if isinstance(effect, Attach | Report)
        ]

    def run(self):
        protocol = self.protocol.run()
        result, error = None, None
        while True:
            try:
                effect = protocol.throw(error) if error else protocol.send(result)
            except StopIteration:
                return self
            self.effects.append(effect)
            result, error = None, self._errors.get(len(self.effects) - 1)
            if error is None:
                result = self._perform(effect)
            else:
                self._newest += 1

    def _perform(self, effect):
        match effect:
            case Listen():
                return self._command()
            case Run(op=op, step=step, value=value, layers=layers):
                number = op.microbatch.index
                if op.kind is OpKind.F:
                    return self.stage.forward(step, number, value, layers)
                return self.stage.backward(op.kind, step, number, value, layers)
            case Take(receive=receive, step=step):
                if receive.payload in (Payload.VOTE, Payload.VERDICT):
                    return np.array([[1.0, 1.0, 1.0]] * 5)
                return np.arange(WIDTH) + 1000 * step + 100 * receive.microbatch.index
            case StartReduce(reduction=reduction, value=value):
                self._started[reduction] = add_up([value])
            case PollReduce(reduction=reduction):
                return self._started.pop(reduction) if self._sums_at_once else None
            case FinishReduce(reduction=reduction):
                return self._started.pop(reduction)
        return None

    def _command(self):
        last = self.reports[-1]
        if self._newest > max(1, self.protocol.generation):
            return Install(generation=self._newest, plan=self._plan)
        match last:
            case Hello() if not self._greeted:
                self._greeted = True
                return Attached()
            case Hello():
                return Install(generation=1, plan=self._plan)
            case Joined(generation=generation):
                status = next(m for m in reversed(self.reports) if isinstance(m, Status))
                return Resume(generation=generation, step=min(step for _, step in status.layer_steps))
            case Finished(generation=generation):
                layers = tuple(self.stage.layer_steps())
                return Save(
                    generation=generation, step=self.protocol.rules.steps, layers=layers, directory=str(self._folder)
                )
            case Saved():
                return Shutdown(reason="done")
        raise AssertionError(f"nobody would answer {last}")


def label(effect):
    match effect:
        case Attach():
            return "Hello"
        case Report(message=message):
            return type(message).__name__
        case Reach(point=point):
            return f"[{point}]"
        case Run(op=op):
            return str(op)
        case Take(receive=instruction) | Give(send=instruction):
            return str(instruction)
        case StartReduce(reduction=reduction):
            return f"start {reduction.name}"
        case PollReduce(reduction=reduction):
            return f"poll {reduction.name}"
        case FinishReduce(reduction=reduction):
            return f"finish {reduction.name}"
        case StepCommitted():
            return "stepcommitted"
    return type(effect).__name__.lower()


def test_sums_that_are_there_while_operations_run_are_taken_then(tmp_path):
    """So their memory is given back; and they are not waited for again."""
    driver = Driver(LAST, tmp_path, sums_at_once=True)
    told = [label(effect) for effect in driver.run().effects]
    first = told[told.index("start L4") : told.index("SEND_VOTE0.0>0.0")]
    assert first == ["start L4", "[reduce]", "poll L4", "start L3", "poll L3"]
    assert driver.stage.layer_digest(4) == Driver(LAST, tmp_path).run().stage.layer_digest(4)


def test_the_order_of_effects(tmp_path):
    told = [label(effect) for effect in Driver(LAST, tmp_path).run().effects]
    assert told[:11] == [
        "Hello", "listen", "listen", "disconnect", "release", "Status", "[install]", "build", "Joined", "listen",
        "[start]",
    ]  # fmt: skip
    step = [
        "[start]", "expect",
        "RECV_ACT0.0<0.0", "F0.0", "B0.0", "SEND_GRAD0.0>0.0",
        "RECV_ACT0.1<0.0", "F0.1", "[forward]", "B0.1", "[backward]", "SEND_GRAD0.1>0.0",
        "askprepared", "start L4", "[reduce]", "poll L4", "start L3", "poll L4", "finish L4", "finish L3",
        "SEND_VOTE0.0>0.0", "RECV_VERDICT0.0<0.0", "[verdict]",
        "[update]", "[commit]", "stepcommitted", "StepDone",
    ]  # fmt: skip
    assert told[10:] == [*step, *step, "Finished", "listen", "Saved", "listen"]


def test_who_does_not_hold_the_last_layer_reports_no_step(tmp_path):
    driver = Driver(FIRST, tmp_path).run()
    assert [type(m) for m in driver.reports] == [Hello, Status, Joined, Finished, Saved]


def test_expected_receives_are_those_that_are_taken(tmp_path):
    effects = Driver(LAST, tmp_path).run().effects
    expected = [receive for effect in effects if isinstance(effect, Expect) for receive in effect.receives]
    assert expected == [(effect.receive, effect.step) for effect in effects if isinstance(effect, Take)]


def digests(driver):
    return driver.reports[-1].digests


@pytest.mark.parametrize("worker", [FIRST, LAST], ids=str)
def test_a_newer_generation_at_any_effect_leads_to_a_clean_join(worker, tmp_path):
    healthy = Driver(worker, tmp_path).run()
    tried = [i for i, effect in enumerate(healthy.effects) if not isinstance(effect, UNINTERRUPTED)]
    assert len(tried) > 30
    for index in tried:
        driver = Driver(worker, tmp_path, {index: StaleGeneration(1, 2)}).run()
        told = [label(effect) for effect in driver.effects[index + 1 :]]
        assert told[: len(JOINING)] == JOINING, index
        status = next(m for m in reversed(driver.reports) if isinstance(m, Status))
        assert (status.generation, driver.protocol.generation) == (2, 2)
        steps = {step for _, step in status.layer_steps}
        assert max(steps) <= min(steps) + 1
        assert digests(driver) == digests(healthy), f"at effect {index}: {label(healthy.effects[index])}"


def test_two_newer_generations_in_a_row_at_any_effects(tmp_path):
    healthy = Driver(LAST, tmp_path).run()
    for first in range(13, 30):
        if isinstance(healthy.effects[first], UNINTERRUPTED):
            continue
        for second in range(first + 6, first + 30, 5):
            once = Driver(LAST, tmp_path, {first: StaleGeneration(1, 2)}).run()
            if second < len(once.effects) and not isinstance(once.effects[second], UNINTERRUPTED):
                twice = Driver(LAST, tmp_path, {first: StaleGeneration(1, 2), second: StaleGeneration(2, 3)}).run()
                assert twice.protocol.generation == 3
                assert digests(twice) == digests(healthy)


def test_any_effect_can_lose_a_peer(tmp_path):
    healthy = Driver(LAST, tmp_path).run()
    for index, effect in enumerate(healthy.effects):
        if not isinstance(effect, Take | Give | FinishReduce | StartReduce | Build):
            continue
        driver = Driver(LAST, tmp_path, {index: PeerLost("0.0", 1, "reset")}).run()
        detail = "lost worker 0.0 in generation 1: reset"
        assert driver.effects[index + 1] == Report(Suspect(worker=LAST, generation=1, peer=FIRST, detail=detail))
        assert isinstance(driver.effects[index + 2], Listen)
        assert digests(driver) == digests(healthy)


def test_it_connects_with_those_whose_layers_are_beside_its_own(tmp_path):
    plan = regular_plan(2, split_evenly(4, 4), MICROBATCHES)
    driver = Driver(plan.workers[1], tmp_path, plan=plan)
    protocol, answer = driver.protocol.run(), None
    while not isinstance(effect := protocol.send(answer), Build):
        driver.effects.append(effect)
        answer = driver._perform(effect)
    assert list(map(str, effect.neighbours)) == ["0.0", "0.2", "1.0", "1.1", "1.2"]


def test_a_suspicion_of_nobody_in_particular(tmp_path):
    error = PeerLost("", 1)
    driver = Driver(LAST, tmp_path, {11: error}).run()
    (suspect,) = [m for m in driver.reports if isinstance(m, Suspect)]
    assert (suspect.peer, suspect.detail) == (None, str(error))


def test_other_errors_end_the_life(tmp_path):
    with pytest.raises(ZeroDivisionError):
        Driver(LAST, tmp_path, {13: ZeroDivisionError()}).run()


def test_what_was_begun_is_counted(tmp_path):
    """Two layers; in step 1 one forward was run when the newer generation came."""
    healthy = Driver(LAST, tmp_path).run()
    effects = [label(effect) for effect in healthy.effects]
    second = effects.index("F0.0", effects.index("StepDone"))
    driver = Driver(LAST, tmp_path, {second + 1: StaleGeneration(1, 2)}).run()
    status = [m for m in driver.reports if isinstance(m, Status)][1]
    assert status.layer_steps == ((3, 1), (4, 1))
    assert status.executed == ((0, 4), (1, 2))


def test_what_was_counted_once_is_not_counted_again(tmp_path):
    effects = [label(effect) for effect in Driver(LAST, tmp_path).run().effects]
    forward = effects.index("F0.1")
    replay = forward + 2 + len(JOINING)
    driver = Driver(LAST, tmp_path, {forward + 1: StaleGeneration(1, 2), replay: StaleGeneration(2, 3)}).run()
    assert label(driver.effects[replay]) == "[replay]"
    executed = [dict(m.executed).get(0, 0) for m in driver.reports if isinstance(m, Status)]
    assert executed == [0, 4, 0]


def test_what_was_known_of_a_step_that_is_run_again_is_not_told_any_more(tmp_path):
    """With other sums, as `fast` numerics may give them, the verdict would be another one."""
    told = [label(effect) for effect in Driver(LAST, tmp_path).run().effects]
    second_commit = told.index("[commit]", told.index("stepcommitted"))
    once = {second_commit: StaleGeneration(1, 2)}
    told = [label(effect) for effect in Driver(LAST, tmp_path, once).run().effects]
    third_commit = told.index("[commit]", second_commit + 1)
    driver = Driver(LAST, tmp_path, {**once, third_commit: StaleGeneration(2, 3)}).run()
    votes = [[vote.step for vote in m.votes] for m in driver.reports if isinstance(m, Status)]
    assert votes == [[], [0, 1], [0, 1]], "of step 1, only what its second run came to"


def test_steps_are_reported_with_their_loss(tmp_path):
    done = [m for m in Driver(LAST, tmp_path).run().reports if isinstance(m, StepDone)]
    assert [m.step for m in done] == [0, 1]
    assert all(-1.0 <= m.loss <= 1.0 for m in done)


def test_losses_do_not_depend_on_what_was_interrupted():
    """A stage that had run a micro-batch, dropped it and did not get it again must not add to its loss."""
    stage = stage_of(LAST)
    other = np.arange(WIDTH)
    stage.forward(0, 1, other)
    stage.discard()
    stage.forward(0, 0, other)
    (message,) = stage.message((4,), 0).parts
    losses = message[-MICROBATCHES:].view(np.float64).tolist()
    assert losses[1] == 0.0


# The ledger, and what only the digest can tell.

ALONE = regular_plan(1, split_evenly(2, 1), 3)


def run_alone(instructions):
    """Runs a forged program for a worker that holds everything."""
    (worker,) = ALONE.workers
    stage = stage_of(worker, ALONE)
    (honest,) = lower(ALONE)
    operations = tuple(i for i in instructions if isinstance(i, Compute | Reduce))
    program = dataclasses.replace(honest, operations=operations)
    execution = Execution(program=program, stage=stage, step=0)
    steps, result, started = execution.run(), None, {}
    while True:
        try:
            effect = steps.send(result)
        except StopIteration:
            return stage
        except LedgerError:
            assert set(stage.layer_steps().values()) == {0}, "nothing was updated"
            raise
        result = None
        if isinstance(effect, Run):
            act = effect.op.microbatch.index
            forward = effect.op.kind is OpKind.F
            result = stage.forward(0, act, None) if forward else stage.backward(effect.op.kind, 0, act, None)
        if isinstance(effect, StartReduce):
            started[effect.reduction] = add_up([effect.value])
        if isinstance(effect, FinishReduce):
            result = started[effect.reduction]


def program_with(*, without=(), twice=()):
    (program,) = lower(ALONE)
    kept = [i for i in program.instructions if not (isinstance(i, Compute) and i.op.microbatch.index in without)]
    named = [ALONE.routes.batch.named(0, index) for index in twice]
    again = [Compute(Op(kind, each), LayerRange(0, 2)) for each in named for kind in (OpKind.F, OpKind.B)]
    at = sum(isinstance(i, Compute) for i in kept)
    return (*kept[:at], *again, *kept[at:])


def test_a_step_that_is_interrupted_before_its_start_has_not_started():
    (worker,), (program,) = ALONE.workers, lower(ALONE)
    execution = Execution(program=program, stage=stage_of(worker, ALONE), step=0)
    steps = execution.run()
    assert next(steps) == Reach(Point.START, 0)
    with pytest.raises(StaleGeneration):
        steps.throw(StaleGeneration(1))
    assert not execution.started, "what goes on with it comes to its start"
    execution = Execution(program=program, stage=stage_of(worker, ALONE), step=0)
    steps = execution.run()
    next(steps)
    steps.send(None)
    assert execution.started


class AtAStretch:
    """An engine that runs several operations."""

    at_a_stretch = True

    def __init__(self, stage):
        self.stage = stage

    def __getattr__(self, name):
        return getattr(self.stage, name)

    def run(self, step, computes):
        for compute in computes:
            op, number = compute.op, compute.op.microbatch.number
            if op.kind is OpKind.F:
                self.forward(step, number, None, compute.layers)
            else:
                self.backward(op.kind, step, number, None, compute.layers)


def test_operations_are_run_at_a_stretch_as_far_as_a_point_or_a_part():
    plan = regular_plan(2, split_evenly(2, 1), 3)
    worker, program = plan.workers[0], lower(plan)[0]
    stage = AtAStretch(stage_of(worker, plan))
    execution = Execution(program=program, stage=stage, step=0)
    steps, result, seen = execution.run(), None, []
    while not isinstance(effect := steps.send(result), FinishReduce):
        result = None
        match effect:
            case RunAll(computes=computes):
                seen.append(" ".join(map(str, computes)))
                stage.run(0, computes)
                for compute in computes:
                    execution.ran(compute)
            case Run(op=op, layers=layers):
                seen.append(f"part of {op}")
                result = stage.backward(op.kind, 0, op.microbatch.number, effect.value, layers)
            case Reach(point=point):
                seen.append(point.value)
    assert seen == [
        *("start", "F0.0 B0.0 F0.1", "forward", "B0.1 F0.2"),
        *("part of B0.2", "reduce", "part of B0.2", "backward"),
    ]
    assert tuple(execution.ops) == plan.orders.of(worker)
    assert execution.pairs == 6


def test_the_honest_program_runs():
    assert set(run_alone(program_with()).layer_steps().values()) == {1}


@pytest.mark.parametrize(
    ("forged", "count"), [({"without": (1,)}, 0), ({"twice": (1,)}, 2), ({"twice": (1, 1)}, 3)], ids=str
)
def test_the_ledger_stops_lost_and_doubled_microbatches(forged, count):
    with pytest.raises(LedgerError) as caught:
        run_alone(program_with(**forged))
    assert (caught.value.layer, caught.value.microbatch, caught.value.count) == (1, 1, count)


def test_one_lost_and_another_doubled_do_not_cancel_out():
    with pytest.raises(LedgerError):
        run_alone(program_with(without=(0,), twice=(1,)))


def test_a_right_detour_does_not_change_the_digest():
    plan = regular_plan(2, split_evenly(4, 2), 2)
    w00, w01, w10, w11 = (Visit(worker, layers) for worker, layers in plan.placement.ranges)
    batch = Batch((2, 2))
    detours = {batch.named(0, 1): (w00, w11), batch.named(1, 1): (w10, w01)}
    routes = Routes(tuple(Route(r.microbatch, detours.get(r.microbatch, r.visits)) for r in plan.routes.routes))
    other = Plan(placement=plan.placement, routes=routes, orders=gpipe_orders(plan.placement, routes))
    results = [VirtualCluster(Scenario(plan=p, steps=2)).run() for p in (plan, other)]
    assert results[0].digest == results[1].digest != ""


def chain(activation_of):
    """Two stages by hand; ``activation_of`` says whose activation the second is given."""
    first, last = (EmulatedStage(layers=(i,), num_layers=2, num_microbatches=2) for i in (0, 1))
    given = [first.forward(0, m, None) for m in (0, 1)]
    for m in (0, 1):
        last.forward(0, m, given[activation_of(m)])
        first.backward(OpKind.B, 0, m, last.backward(OpKind.B, 0, m, None))
    for layer, stage in enumerate((first, last)):
        stage.accept((layer,), add_up([stage.message((layer,), 0)]))
        stage.conclude(np.ones((2, 3)))
        stage.update(layer)
        stage.swap(layer)
    return first.layer_digest(0), last.layer_digest(1)


def test_activations_of_another_microbatch_change_the_digest():
    right, wrong = chain(lambda m: m), chain(lambda m: 1 - m)
    assert right == chain(lambda m: m)
    assert right[0] != wrong[0]
    assert right[1] != wrong[1]


def test_a_verdict_that_does_not_know_of_every_layer_is_refused():
    stage = stage_of(LAST)
    with pytest.raises(InternalError, match="does not cover every layer"):
        stage.conclude(stage.vote())


def test_checkpoints_are_pinned_between_steps_and_saving_is_told_after_they_are_written(tmp_path):
    driver = Driver(FIRST, tmp_path)
    driver.protocol.checkpoint_every = 1
    effects = driver.run().effects
    layers = tuple(PLAN.placement.layers_of(FIRST))
    pins = [effect for effect in effects if isinstance(effect, Pin)]
    assert pins == [Pin(1, 1, layers), Pin(1, 2, layers)], "none of step 0, one after the last step"
    assert effects[effects.index(pins[0]) + 1] == Reach(Point.START, 1)
    assert isinstance(effects[effects.index(pins[0]) - 1], StepCommitted | Report)
    told = [effect for effect in effects if isinstance(effect, Report) and isinstance(effect.message, Finished | Saved)]
    assert [(type(effect.message), effect.when_written) for effect in told] == [(Finished, False), (Saved, True)]
    assert effects.index(pins[1]) < effects.index(told[0])


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [2]), (3, [])])
def test_only_steps_that_are_due_are_pinned(tmp_path, every, steps):
    driver = Driver(FIRST, tmp_path)
    driver.protocol.checkpoint_every = every
    assert [effect.step for effect in driver.run().effects if isinstance(effect, Pin)] == steps


# Going over at a boundary: leaving, staying, serving, entering.

TWO = regular_plan(2, split_evenly(5, 2), MICROBATCHES)
COMER = TWO.workers[3]
ENTERING = at_boundary(
    ClusterView(rules=RULES, baseline=TWO, lost=frozenset(TWO.workers[2:]), entering=frozenset({COMER}))
).plan
"""0.0 and 0.1 compute everything; 1.1, without state, enters beside 0.1."""


class Crossed(Exception):
    """What we wanted to see is over."""


class Crosser(Driver):
    """All are ready for what is prepared, from the first step on."""

    def __init__(self, worker, tmp_path, plan):
        super().__init__(worker, tmp_path)
        self.prepared = Install(generation=2, plan=plan, at_boundary=True)

    def _perform(self, effect):
        match effect:
            case AskPrepared():
                return self.prepared and self.prepared.plan
            case Boundary():
                install, self.prepared = self.prepared, None
                return install
            case Take(receive=receive) if receive.payload in (Payload.VOTE, Payload.VERDICT):
                return np.array([[1.0, 1.0, 0.0]] * 5)
            case Reach(point=Point.COPY):
                raise Crossed
        return super()._perform(effect)


def after_first_step(driver):
    told = [label(effect) for effect in driver.effects]
    return told[told.index("stepcommitted") + 1 :]


def test_a_boundary_is_crossed_between_two_steps_without_a_word_to_the_coordinator_before(tmp_path):
    driver = Crosser(LAST, tmp_path, PLAN).run()
    assert after_first_step(driver)[:6] == ["StepDone", "boundary", "release", "drain", "build", "Joined"]
    assert after_first_step(driver)[6] == "[start]"
    (joined,) = [m for m in driver.reports if isinstance(m, Joined) and m.step is not None]
    assert (joined.generation, joined.step, driver.protocol.generation) == (2, 1, 2)
    assert digests(driver) == digests(Driver(LAST, tmp_path).run()), "and changes no bit"


def test_who_crosses_waits_for_the_others(tmp_path):
    """A coordinator that is started again meanwhile is not told that the new generation runs here."""
    driver = Crosser(LAST, tmp_path, PLAN)
    stood, perform = [], driver._perform

    def watched(effect):
        if isinstance(effect, Drain):
            stood.append((driver.protocol.hello().generation, driver.protocol.hello().activity))
        return perform(effect)

    driver._perform = watched
    driver.run()
    assert stood == [(2, "waiting")]


def first_order(**order):
    """A protocol whose process holds what its plan gives to it, told of a plan for the first time."""
    protocol = WorkerProtocol(worker=LAST, stage=stage_of(LAST), rules=RULES, process=process_of(LAST, 1))
    script = protocol.run()
    script.send(None)
    assert isinstance(script.send(None), Listen)
    assert isinstance(script.send(Attached()), Listen)
    effect = script.send(Install(generation=4, **order))
    while isinstance(effect, Disconnect | Release | Reach):
        effect = script.send(None)
    return script, effect


def test_whose_layers_are_others_than_when_its_process_was_started_loads_these():
    moved = renamed(PLAN, {FIRST: LAST, LAST: FIRST})
    _, effect = first_order(plan=moved)
    assert effect == Load(moved, None)
    _, effect = first_order(plan=PLAN)
    assert isinstance(effect, Report), "its own are there"


def test_a_state_that_cannot_be_read_is_told_with_its_step():
    script, effect = first_order(plan=PLAN, load=StateAt(url="file:///nowhere", step=7))
    assert isinstance(effect, Load)
    told = script.throw(CorruptBlob("layer 2", "1", "2")).message
    assert (told.worker, told.generation, told.step) == (LAST, 4, 7)
    assert "layer 2" in told.detail


def test_nothing_is_crossed_behind_the_last_step(tmp_path):
    driver = Crosser(LAST, tmp_path, PLAN)
    driver.protocol.rules = dataclasses.replace(RULES, steps=1)
    assert "boundary" not in [label(effect) for effect in driver.run().effects]


def test_one_that_is_not_ready_keeps_everyone_where_they_are(tmp_path):
    driver = Crosser(FIRST, tmp_path, PLAN)
    driver.prepared = None
    assert "boundary" not in [label(effect) for effect in driver.run().effects]


def test_who_leaves_waits_until_all_is_sent_and_says_so_last(tmp_path):
    without_us = regular_plan(1, split_evenly(5, 1), MICROBATCHES)
    driver = Crosser(LAST, tmp_path, without_us).run()
    assert after_first_step(driver) == ["StepDone", "boundary", "release", "drain", "Left"]
    assert driver.reports[-1] == Left(worker=LAST, process=driver.protocol.process, generation=2, step=1)


def test_who_stays_serves_those_that_enter_before_it_connects(tmp_path):
    driver = Crosser(LAST, tmp_path, ENTERING)
    with pytest.raises(Crossed):
        driver.run()
    told = after_first_step(driver)
    assert told == ["StepDone", "boundary", "release", "serve", "drain", "build", "Joined", "[copy]"]
    (release, serve) = [effect for effect in driver.effects if isinstance(effect, Release | Serve)][-2:]
    assert release == Release((COMER,))
    assert (serve.generation, serve.step, serve.target, sorted(serve.snapshots)) == (2, 1, COMER, [3, 4])


def test_who_holds_nothing_that_is_needed_serves_nothing(tmp_path):
    driver = Crosser(FIRST, tmp_path, ENTERING)
    with pytest.raises(Crossed):
        driver.run()
    assert "serve" not in after_first_step(driver)


class Entering(Driver):
    """The worker 1.1 of a running job: 0.1, which computes everything, is played here; the copy takes two steps."""

    def __init__(self, tmp_path):
        super().__init__(COMER, tmp_path, plan=TWO)
        self.peer = stage_of(LAST, TWO)
        self.protocol.rules = dataclasses.replace(RULES, steps=5)
        self.play_step(0)
        self.copied = {layer: self.peer.snapshot(layer)() for layer in (3, 4)}

    def compute(self, step):
        self.peer.begin(step)
        for number in range(len(TWO.routes.microbatches)):
            self.peer.forward(step, number, np.arange(WIDTH) + number)
            self.peer.backward(OpKind.B, step, number, None)

    def conclude(self):
        self.peer.conclude(np.array([[1.0, 1.0, 1.0]] * 5))
        for layer in (3, 4):
            self.peer.update(layer)
            self.peer.swap(layer)

    def play_step(self, step):
        self.compute(step)
        for layer in (3, 4):
            self.peer.accept((layer,), add_up([self.peer.message((layer,), 0)]))
        self.conclude()

    def _perform(self, effect):
        match effect:
            case Reach(point=Point.START, step=step):
                self.compute(step)
            case StartReduce(reduction=reduction, value=value):
                self._started[reduction] = add_up([value, self.peer.message(reduction.layers, 0)])
                self.peer.accept(reduction.layers, self._started[reduction])
                return None
            case StepCommitted():
                self.conclude()
            case Fetched():
                return self.copied if self.protocol.execution and self.protocol.execution.step == 2 else None
        return super()._perform(effect)

    def _command(self):
        match self.reports[-1]:
            case Hello() if self._greeted:
                return Install(generation=3, plan=ENTERING)
            case Joined():
                return Resume(generation=3, step=1)
        return super()._command()


def test_who_enters_takes_part_in_reductions_until_its_state_is_there(tmp_path):
    driver = Entering(tmp_path).run()
    told = [label(effect) for effect in driver.effects]
    assert told[:12] == [
        "Hello", "listen", "listen", "disconnect", "release", "Status", "[install]", "build", "Joined", "listen",
        "fetch", "[copy]",
    ]  # fmt: skip
    status = next(m for m in driver.reports if isinstance(m, Status))
    assert (status.layer_steps, status.follows) == ((), (3, 4)), "what its process began with is no state"
    (fetch,) = [effect for effect in driver.effects if isinstance(effect, Fetch)]
    assert fetch == Fetch(3, {3: (LAST,), 4: (LAST,)})
    starts = [index for index, text in enumerate(told) if text == "[start]"]
    before = [told[index - 1] for index in starts]
    assert before == ["fetched", "fetched", "CaughtUp", "stepcommitted"]
    assert not [text for text in told if text[0] in "FBIW" and text[1].isdigit()], "it computes nothing"


class Willing(Entering):
    """The next generation is prepared here from the beginning on."""

    def _perform(self, effect):
        return TWO if isinstance(effect, AskPrepared) else super()._perform(effect)


def test_who_has_no_state_yet_keeps_all_from_the_next_boundary(tmp_path):
    """Else it would be given work in a plan before it has the weights for it."""
    driver = Willing(tmp_path).run()
    (synced,) = [m for m in driver.reports if isinstance(m, CaughtUp)]
    dissents = {}
    for effect in driver.effects:
        if isinstance(effect, StartReduce):
            (message,) = effect.value.parts
            dissents.setdefault(effect.step, int(message[WIDTH]))
    assert dissents == {step: int(step < synced.step) for step in range(1, driver.protocol.rules.steps)}
    assert dissents[1] == 1


def test_who_entered_has_the_bits_of_its_peer_when_it_says_that_it_caught_up(tmp_path):
    driver = Entering(tmp_path).run()
    (synced,) = [m for m in driver.reports if isinstance(m, CaughtUp)]
    assert (synced.worker, synced.generation, synced.step) == (COMER, 3, 3)
    assert synced.entered <= synced.step
    assert synced.bytes > 0
    assert dict(digests(driver)) == {layer: driver.peer.layer_digest(layer) for layer in (3, 4)}
    assert driver.stage.layer_steps() == {3: 5, 4: 5}


class Gone(EmulatedStage):
    """It cannot give the state of before its step, unless it is told that it is not ahead of it."""

    ahead = True

    def snapshot(self, layer, *, to_file=False):
        assert not self.ahead, "there is no such state"
        return super().snapshot(layer, to_file=to_file)

    def layer_digest(self, layer):
        assert not self.ahead, "there is no such state"
        return super().layer_digest(layer)


@pytest.mark.parametrize("ahead", [False, True])
def test_of_a_state_that_is_gone_nothing_is_written_or_told_but_that(ahead):
    """Who had ended a step that others had not, and never goes back, has no state of before it."""
    stage = Gone(layers=PLAN.placement.layers_of(FIRST), num_layers=5, num_microbatches=MICROBATCHES)
    rules = dataclasses.replace(RULES, checkpoint_every=2, sampling=Sampling(seed=0, every=2, layers=False))
    protocol = WorkerProtocol(worker=FIRST, stage=stage, rules=rules, process=process_of(FIRST, 1))
    protocol.plan, protocol.audits, stage.ahead = PLAN, Audits(), ahead
    for step in (2, 3):
        effects = list(protocol._before(step, beginning=True))
        told = [effect.message for effect in effects if isinstance(effect, Report)]
        if not ahead or step == 3:
            assert not any(isinstance(message, ShardFailed) for message in told)
            assert any(isinstance(effect, Pin) for effect in effects) == (step == 2)
            assert [type(message) for message in told] == [Weighed] * (step == 2)
        else:
            ((failed,), pins) = told, [effect for effect in effects if isinstance(effect, Pin)]
            assert (failed.worker, failed.step, pins) == (FIRST, 2, [])
            assert failed.detail.startswith("its weights are those of step 3 already")
