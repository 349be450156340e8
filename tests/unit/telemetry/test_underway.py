"""How far a running job is."""

import pytest

from holdfast.telemetry.events import Detected, Installed, JobStarted, Parted, Resumed, StepOps, WorkerReady
from holdfast.telemetry.underway import recent, underway

STARTED = (0.0, JobStarted(name="j", workers=2, steps=1000, samples_per_step=8, wall_time=0.0))
FORMED = (1.0, Installed(generation=1, workers=("0.0", "1.0"), strategy=""))


def steps(times, first=0):
    return [
        (time, StepOps(worker=worker, generation=1, step=number, loss=1.0, omitted=False, ops=()))
        for number, time in enumerate(times, first)
        for worker in ("0.0", "1.0")
    ]


def test_the_rate_is_that_of_the_last_minute():
    slow, fast = [float(10 * each) for each in range(1, 11)], [100 + each / 2 for each in range(1, 201)]
    told = underway([STARTED, FORMED, *steps([*slow, *fast])], now=200.0)
    assert (told.done, told.steps, told.alive, told.workers) == (210, 1000, 2, 2)
    assert told.steps_per_s == pytest.approx(2.0, rel=0.02)
    assert told.left_s == pytest.approx(790 / told.steps_per_s)
    assert told.idle_s == 0.0


def test_a_job_that_stands_still_becomes_slower_until_nothing_can_be_said():
    timed = [STARTED, FORMED, *steps([2.0, 4.0, 6.0])]
    assert underway(timed, now=6.0).steps_per_s == pytest.approx(0.5)
    assert underway(timed, now=22.0).steps_per_s == pytest.approx(0.1)
    told = underway(timed, now=500.0)
    assert (told.steps_per_s, told.left_s, told.idle_s, told.done) == (None, None, 494.0, 3)


def test_before_the_first_step():
    ready = (0.5, WorkerReady(worker="0.0", pid=1))
    assert underway([STARTED, ready], now=3.0).alive == 1
    told = underway([STARTED, (0.2, Resumed(step=40, url="u")), ready], now=3.0)
    assert (told.done, told.idle_s) == (40, None)


def test_whoever_is_lost_or_has_left_is_not_alive():
    lost = (2.0, Detected(worker="0.0", how="signal 9", generation=1))
    left = (3.0, Parted(worker="1.0", step=4))
    assert [underway([STARTED, FORMED, *more], now=4.0).alive for more in ([lost], [lost, left])] == [1, 0]


def test_a_long_run_is_told_from_its_last_two_minutes():
    timed = [STARTED, FORMED, *steps([1 + each / 2 for each in range(900)])]
    kept = recent(timed, now=460.0)
    assert len(kept) < 500 < len(timed)
    assert underway(kept, now=460.0) == underway(timed, now=460.0)
    assert recent(kept, now=10_000.0) == kept, "however long it stands still"
