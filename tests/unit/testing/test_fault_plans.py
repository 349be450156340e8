"""Random faults: reproducible, spread over time, and always such that a job must survive them."""

from __future__ import annotations

import doctest
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.faults import Fault, FaultKind
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes
from holdfast.errors import ConfigError
from holdfast.testing import fault_plans
from holdfast.testing.fault_plans import LOSSES, STEP_POINTS, random_faults

arguments = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "pipelines": st.integers(2, 4),
        "stages": st.integers(1, 3),
        "count": st.integers(1, 40),
        "every_steps": st.integers(1, 20),
        "settle_steps": st.integers(1, 60),
        "workers_per_node": st.integers(1, 4),
    }
)


def targets(fault, nodes):
    return nodes[fault.node] if fault.kind is FaultKind.KILL_NODE else (fault.worker,)


@given(arguments)
def test_every_stage_keeps_a_worker_and_only_who_is_there_is_lost(given_):
    faults = random_faults(**given_)
    assert len(faults) == given_["count"]
    workers = tuple(WorkerId(p, s) for p in range(given_["pipelines"]) for s in range(given_["stages"]))
    nodes = group_into_nodes(workers, given_["workers_per_node"])
    working_from = dict.fromkeys(workers, 0)
    for fault in faults:
        for worker in targets(fault, nodes):
            if fault.kind is FaultKind.JOIN:
                assert working_from[worker] is None
                working_from[worker] = fault.step + given_["settle_steps"]
            else:
                assert working_from[worker] is not None
                assert working_from[worker] <= fault.step
                working_from[worker] = None
        sure = {w.stage for w, since in working_from.items() if since is not None and since <= fault.step}
        assert fault.kind is FaultKind.JOIN or sure == set(range(given_["stages"]))


@given(arguments)
def test_one_seed_is_one_course_in_the_order_of_steps_and_in_text(given_):
    faults = random_faults(**given_)
    assert random_faults(**given_) == faults
    steps = [fault.step for fault in faults]
    assert steps[0] >= 2
    assert all(earlier < later for earlier, later in itertools.pairwise(steps))
    assert tuple(Fault.parse(str(fault)) for fault in faults) == faults


def test_all_kinds_and_points_occur_and_faults_come_as_often_as_asked():
    faults = random_faults(3, pipelines=3, stages=2, count=1000, every_steps=20, settle_steps=10, workers_per_node=2)
    kinds = Counter(fault.kind for fault in faults)
    assert set(kinds) == {*LOSSES, FaultKind.JOIN}
    assert min(kinds.values()) > 50
    assert {fault.point for fault in faults if fault.kind in LOSSES} == set(STEP_POINTS)
    assert faults[-1].step == pytest.approx(20 * 1000, rel=0.1)


def test_another_seed_is_another_course():
    plans = {random_faults(seed, pipelines=3, stages=2, count=9, every_steps=5, settle_steps=5) for seed in range(20)}
    assert len(plans) == 20


def test_one_pipeline_is_refused():
    with pytest.raises(ConfigError, match="pipelines=1: nobody can be lost"):
        random_faults(0, pipelines=1, stages=3, count=1, every_steps=1, settle_steps=1)


def test_the_example_is_true():
    assert doctest.testmod(fault_plans).failed == 0
