"""What a run shows of its cluster is how fast that is: of simulated clusters that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.test_prices import PLAN, RATES

from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.profile import Link
from holdfast.sim.calibrate import Layers, medians, shown_by
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster


@pytest.fixture
def shown(staggered):
    """What a run with these faults shows."""

    def of(*faults, rates=RATES, **options):
        parsed = [Fault.parse(text) for text in faults]
        run = VirtualCluster(Scenario(plan=PLAN, rates=rates, faults=parsed, steps=24, **options)).run()
        assert run.outcome == "done"
        assert set(run.fired) == {*map(str, parsed)}
        return shown_by(run.events, Layers(plan=PLAN, profile=rates.profile, ahead=staggered))

    return of


def test_a_loss_shows_how_fast_messages_and_connections_are(shown, staggered):
    found = medians([shown("kill:1.1@6:backward", step_log=True)])
    assert found["control_s"] == pytest.approx(RATES.control_s, rel=0.01)
    assert found["connect_s"] == pytest.approx(RATES.connect_s, rel=0.01)
    if not staggered:  # a step does not wait for the message by which it is settled
        assert found["message_s"] == pytest.approx(RATES.message_s, rel=0.05)
    assert 0 < found["detect_s"] < 0.1
    assert "load" not in found, "nobody has read a checkpoint"


def test_all_who_go_back_show_how_fast_a_checkpoint_is_read(shown):
    options = {"strategy": "checkpoint-restart", "checkpoint_every": 5, "wait_for_replacement": 9.0}
    found = medians([shown("kill:1.1@8:backward", **options)])
    assert found["load"] == pytest.approx(RATES.load.bytes_per_s, rel=0.2), "and once for each layer it waits"
    assert found["connect_s"] == pytest.approx(RATES.connect_s, rel=0.1)


def test_state_that_takes_steps_shows_how_fast_it_is_given(shown):
    size = sum(RATES.profile.layers[layer].state_bytes for layer in PLAN.placement.layers_of(WorkerId(1, 1)))
    slow = replace(RATES, copy=Link(latency_s=0.0, bytes_per_s=size / 12.0))
    found = medians([shown("kill:1.1@3:start", "join:1.1@5", rates=slow)])
    assert found["copy"] == pytest.approx(size / 12.0, rel=0.2), "it is looked at between two steps"


def test_what_is_shown_more_often_counts_more():
    assert medians([{"start_s": [1.0, 9.0]}, {"start_s": [2.0], "copy": []}]) == {"start_s": 2.0}
    assert not medians([])


def test_a_run_in_which_nothing_fails_shows_nothing_of_losses(shown):
    found = shown()
    assert set(found) <= {"message_s"}
