"""What a simulated job would have written into its log tells of it what is simulated."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.unit.sim.test_engine import EXACT, HOUR, MACHINES, SPEEDS, comes, job, lost, world

from holdfast.sim.diary import attempts
from holdfast.sim.engine import simulate
from holdfast.sim.failures import parse_failures
from holdfast.telemetry.events import FaultInjected, Installed, JobEnded, JobStarted, Ran, Synced
from holdfast.telemetry.report import report
from holdfast.telemetry.timeline import Mode, run_timeline


def told(outcome):
    return list(attempts(outcome.events, "j", MACHINES, 12, outcome.seconds))


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("failures", ["poisson:mtbf=20m,repair=15m", "periodic:25m,notice=1m,repair=10m"])
def test_a_report_of_it_has_the_steps_and_losses_that_were_simulated(strategy, failures):
    outcome = simulate(job(strategy), parse_failures(failures).draw(MACHINES, 3 * HOUR, "0"), SPEEDS)
    found = [report(events) for events in told(outcome)]
    assert len(found) == 1 + outcome.restarts
    assert found[-1].commits[-1][0] + 1 == outcome.steps
    began = 0
    for each in found:
        assert [step for step, _ in each.commits] == list(range(each.commits[0][0], each.commits[-1][0] + 1))
        assert each.commits[0][0] <= began, "it goes on from what was saved"
        assert all(at < then for (_, at), (_, then) in pairwise(each.commits))
        assert each.commits[-1][1] <= outcome.seconds
        began = each.commits[-1][0] + 1
    recovered = [failure for each in found for failure in each.failures]
    assert len(recovered) >= outcome.failures
    assert all(failure.kind == "kill" for failure in recovered)
    assert not found[-1].missing


def test_a_step_that_is_run_again_was_committed_when_it_was_last():
    outcome = simulate(job("checkpoint-restart"), world(lost(600.0, 1), comes(700.0, MACHINES)), SPEEDS)
    (events,) = told(outcome)
    (failure,) = report(events).failures
    again = next(event for at, event in events if isinstance(event, Ran) and at > 700.0)
    before = [event for at, event in events if isinstance(event, Ran) and at < 600.0][-1]
    assert again.first == before.stop - before.stop % 50 < before.stop
    commits = dict(report(events).commits)
    assert commits[again.first - 1] < 600.0
    assert commits[again.first] > 700.0
    assert failure.resumed_s == pytest.approx(commits[again.first] - 600.0)
    assert failure.detected_s == pytest.approx(SPEEDS.detect_s)


def test_a_picture_of_it_shows_who_is_lost_who_comes_and_who_computes():
    outcome = simulate(job("checkpoint-restart"), world(lost(600.0, 1), comes(700.0, MACHINES)), SPEEDS)
    (events,) = told(outcome)
    timeline = run_timeline(events)
    assert timeline.duration == HOUR
    struck = [event.worker for _, event in events if isinstance(event, FaultInjected)]
    assert [(mark.worker, mark.kind) for mark in timeline.marks] == [(struck[0], "kill")]
    rows = {row.worker: row for row in timeline.rows}
    assert len(rows) == MACHINES
    away = [(each.start, each.end) for each in rows[struck[0]].stretches if each.mode is Mode.LOST]
    assert away[0] == (600.0, 700.0 + SPEEDS.rates.start_s + 2 * SPEEDS.rates.control_s)
    for row in timeline.rows:
        busy = sum(end - start for start, end in row.busy)
        assert 0.9 * HOUR < busy < HOUR - 90, "but for the wait"


def test_steps_are_told_in_one_piece_until_something_else_happens():
    outcome = simulate(job(checkpoint_every=0), world(), SPEEDS)
    ran = [event for _, event in outcome.events if isinstance(event, Ran)]
    assert [(event.first, event.stop) for event in ran] == [(0, outcome.steps)]


def test_whoever_is_given_state_is_given_as_much_as_its_layers_have():
    outcome = simulate(job(), world(lost(600.0, 1), comes(900.0, MACHINES)), SPEEDS)
    ((_, synced),) = [(at, event) for at, event in outcome.events if isinstance(event, Synced)]
    assert synced.bytes == 2 * 3 * 10**8


def test_a_job_that_has_ended_is_an_attempt_by_itself():
    gone = [lost(600.0 + 10 * index, index) for index in range(MACHINES)]
    back = [comes(1200.0, MACHINES + index) for index in range(MACHINES)]
    outcome = simulate(job(wait_s=0.0), world(*gone, *back), SPEEDS)
    first, second = told(outcome)
    assert [type(events[0][1]) for events in (first, second)] == [JobStarted] * 2
    assert [[e.outcome for _, e in events if isinstance(e, JobEnded)] for events in (first, second)] == [
        ["lost"],
        ["simulated"],
    ]
    assert [next(e.generation for _, e in events if isinstance(e, Installed)) for events in (first, second)] == [1, 1]
    assert second[0][0] > 1200.0
