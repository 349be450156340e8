"""The nodes of a pipeline as a chain, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.sim.test_engine import PROFILE

from holdfast.core.placement import group_into_nodes, split_evenly
from holdfast.planning.groups.of_plan import chain_of
from holdfast.schedule.builders import regular_plan

LIMITS = {"interval": 5, "limit_bytes": 1e6}


def test_each_node_computes_its_layers_and_passes_activations_and_gradients():
    layers = (PROFILE.layers[0], replace(PROFILE.layers[1], boundary_bytes=70), *PROFILE.layers[2:])
    plan = regular_plan(1, split_evenly(4, 4), 3)
    chain = chain_of(plan, group_into_nodes(plan.workers, 1), replace(PROFILE, layers=layers), **LIMITS)
    assert chain.compute_s == pytest.approx((0.9,) * 4), "three micro-batches, each 0.1 s of F, I and W"
    assert chain.boundary_bytes == (2 * 3 * 1000, 2 * 3 * 70, 2 * 3 * 1000)
    assert (chain.interval, chain.limit_bytes, chain.bandwidth) == (5, 1e6, 1e9)


def test_what_stays_on_a_node_is_not_passed():
    plan = regular_plan(1, split_evenly(4, 4), 3)
    chain = chain_of(plan, group_into_nodes(plan.workers, 2), PROFILE, **LIMITS)
    assert chain.compute_s == pytest.approx((1.8, 1.8))
    assert chain.boundary_bytes == (6000,)


def test_several_pipelines_are_no_chain():
    plan = regular_plan(2, split_evenly(4, 2), 3)
    assert chain_of(plan, group_into_nodes(plan.workers, 1), PROFILE, **LIMITS) is None
