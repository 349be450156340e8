"""What a strategy chose is carried out action by action, and what makes no sense is named."""

from __future__ import annotations

from dataclasses import is_dataclass, replace

import pytest
from tests.processes import NODE

from holdfast.control.membership import Contact, GridState, Membership, Roster, Tell
from holdfast.control.membership.acting import _FUNCTIONS, carry_out, on_status
from holdfast.control.messages import Install, Resume, StartWorker, StateAt, Status
from holdfast.core.placement import split_evenly
from holdfast.errors import InternalError
from holdfast.recovery import actions
from holdfast.recovery.actions import (
    Abort,
    Action,
    Await,
    InstallPlan,
    LoadState,
    Recompute,
    RecoveryPlan,
    Spawn,
    TakeBack,
)
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import adaptive_plan, regular_plan
from holdfast.strategies.answers import resume

PLAN = regular_plan(2, split_evenly(3, 2), 2)
W00, W01, W10, W11 = PLAN.workers
STATE = Membership(
    grid=GridState(baseline=PLAN),
    rules=JobRules(steps=9, directory="out"),
    generation=1,
    roster=Roster(lost=frozenset({W10})),
    contact=Contact(agents={NODE: None}),
)
LEFT = adaptive_plan(PLAN, [W10])


def told(outputs, kind):
    return {
        output.to: output.command for output in outputs if isinstance(output, Tell) and isinstance(output.command, kind)
    }


def status(worker, step):
    layers = PLAN.placement.layers_of(worker)
    return Status(worker=worker, generation=2, layer_steps=tuple((layer, step) for layer in layers), executed=())


def test_what_needs_all_to_have_told_waits_for_the_last_of_them():
    actions = (Abort(), InstallPlan(plan=LEFT), Spawn(workers=(W10,)), TakeBack(), Recompute())
    state, outputs = carry_out(STATE, RecoveryPlan(strategy="mine", actions=actions))
    assert told(outputs, Install).keys() == {W00, W01, W11}
    assert told(outputs, StartWorker) == {None: StartWorker(worker=W10)}, "it comes before what waits"
    assert state.forming.pending == (TakeBack(), Recompute())
    for worker, step in ((W00, 4), (W01, 5)):
        state, outputs = on_status(state, status(worker, step))
        assert outputs == ()
    state, outputs = on_status(state, status(W11, 5))
    assert told(outputs, Resume) == dict.fromkeys((W00, W01, W11), Resume(generation=2, step=4))
    assert state.forming.pending == ()


def test_what_comes_behind_what_waits_waits_too():
    actions = (Abort(), InstallPlan(plan=LEFT), TakeBack(), Recompute(), Spawn(workers=(W10,)))
    state, outputs = carry_out(STATE, RecoveryPlan(strategy="mine", actions=actions))
    assert told(outputs, StartWorker) == {}
    for worker in (W00, W01, W11):
        state, outputs = on_status(state, status(worker, 4))
    assert told(outputs, StartWorker) == {None: StartWorker(worker=W10)}


def test_a_state_that_is_not_there_is_named():
    state = replace(STATE, restoring=replace(STATE.restoring, restorable=(StateAt(url="file:///there", step=6),)))
    loaded, outputs = carry_out(state, resume("mine", LEFT, LoadState(step=6)))
    assert (
        {install.load for install in told(outputs, Install).values()}
        == {loaded.restoring.loading}
        == set(state.restoring.restorable)
    )
    with pytest.raises(InternalError, match="the state before step 5; those that there are: 6"):
        carry_out(state, resume("mine", LEFT, LoadState(step=5)))
    with pytest.raises(InternalError, match="those that there are: none"):
        carry_out(STATE, resume("mine", LEFT, LoadState(step=5)))


def test_every_action_has_its_function():
    there = {each for each in vars(actions).values() if isinstance(each, type) and issubclass(each, Action)}
    kinds = {each for each in there if is_dataclass(each)}
    assert set(_FUNCTIONS) == kinds
    assert kinds <= {getattr(actions, name) for name in actions.__all__}


def test_nobody_waits_for_workers_who_would_have_nothing_to_load():

    with pytest.raises(InternalError, match="no state that all could load"):
        carry_out(STATE, RecoveryPlan(strategy="patient", actions=(Abort(), Await(limit_s=5, everyone=True))))
