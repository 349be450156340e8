"""How long sums of gradients keep a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.plan import with_listeners
from holdfast.core.profile import LayerProfile, Link, Profile
from holdfast.recovery.rates import Rates, first_sum_s, remaining_seconds, step_seconds
from holdfast.schedule.builders import regular_plan

LAYER = LayerProfile(
    name="layer",
    forward_s=1.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    held_after_forward_bytes=8,
    held_after_input_bytes=4,
    boundary_bytes=0,
    parameter_bytes=10,
    optimizer_bytes=0,
    optimizer_s=0.0,
)
PROFILE = Profile(layers=(LAYER,) * 4, link=Link(latency_s=0.0, bytes_per_s=10.0))
NONE = Link(latency_s=0.0, bytes_per_s=1e18)
FREE = Rates(profile=PROFILE, message_s=0.0, control_s=0.0, connect_s=0.0, start_s=0.0, copy=NONE, load=NONE, save=NONE)
ONCE, TWICE = replace(FREE, sums=1), replace(FREE, sums=2)


@pytest.mark.parametrize(
    ("pipelines", "rates", "behind_s"),
    [
        (1, TWICE, 0),  # nobody to sum with
        (2, FREE, 0),
        (2, ONCE, 1),  # a layer's backward takes 2 s, its sum 1: that of the first layer comes behind all
        (2, TWICE, 2),
        (4, ONCE, 1.5),  # each sends 2 x 3/4 of a layer: 1.5 s
        (4, TWICE, 2.25 + 0.75),  # 3 x 3/4 s, while the next layer takes 2: of four in a row 0.25 s more are behind
    ],
)
def test_the_last_sums_are_waited_for(pipelines, rates, behind_s):
    plan = regular_plan(pipelines, split_evenly(4, 1), 2)
    assert step_seconds(plan, rates) == step_seconds(plan, FREE) + behind_s == 24 + behind_s
    assert remaining_seconds(plan, 5.0, rates) == 5.0 + behind_s


def test_the_last_stage_sums_while_the_first_computes():
    plan = regular_plan(2, split_evenly(4, 2), 2)
    assert step_seconds(plan, ONCE) == step_seconds(plan, FREE) + 1
    slow = replace(PROFILE, layers=(LAYER, LAYER, LAYER, replace(LAYER, parameter_bytes=80)))
    assert step_seconds(plan, FREE) == 18
    assert step_seconds(plan, replace(ONCE, profile=slow)) == 14 - 4 + 2 + 8 + 1, "its last backward begins at 10"


def test_the_first_sum_begins_behind_the_last_backward_pass_of_the_first_who_is_done_or_at_once():
    """The last of two stages is done first: F F ... of the first, then F B F B, of which the last B begins at 10."""
    plan = regular_plan(2, split_evenly(4, 2), 2)
    assert first_sum_s(plan, FREE) == 10
    listener = with_listeners(plan, [(WorkerId(2, 0), LayerRange(0, 2))])
    assert first_sum_s(listener, FREE) == 0
