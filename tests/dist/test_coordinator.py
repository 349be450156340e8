"""The coordinator is really killed: training goes on, it comes back, and nothing of it can be seen in the weights."""

from __future__ import annotations

import re

import pytest
from tests.soak import some
from tests.waiting import until

from holdfast.control.certificates import make_certificates
from holdfast.errors import InternalError
from holdfast.telemetry.events import (
    CoordinatorLost,
    CoordinatorReady,
    Detected,
    FaultInjected,
    Notice,
    Reattached,
    StepOps,
    Synced,
    read_events,
)

pytestmark = pytest.mark.dist

POINTS = ["detect", "persist", "broadcast", "install"]


def events_of(summary, kind):
    return [(time, event) for time, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


def steps(events):
    return {event.step for event in events if isinstance(event, StepOps)}


def test_healthy_training_goes_on_without_it(runs):
    """It stays away until ten more steps are committed and it was tried to start it again."""

    def over(events):
        return max(steps(events)) >= 12 and any(isinstance(e, Notice) and e.worker == "agent" for e in events)

    with runs.absence(over) as away:
        overrides = ("train.steps=60", *away.overrides)
        summary = runs.survives("gpt", "kill-coordinator@2", overrides=overrides, run_dir=away.run_dir)
    ((lost, _),) = events_of(summary, CoordinatorLost)
    (_, (back, ready)) = events_of(summary, CoordinatorReady)
    assert len(steps(event for time, event in events_of(summary, StepOps) if lost < time < back)) >= 9
    (waited,) = [event.text for _, event in events_of(summary, Notice) if event.worker == "agent"]
    assert "cannot be started again yet, it is tried every 0.5 s: control.port: cannot listen on 127.0.0.1:" in waited
    assert ready.generation == 1
    ((_, reattached),) = events_of(summary, Reattached)
    assert reattached.adopted
    assert summary.generations == 1, "nobody was interrupted"


def test_who_hears_of_progress_keeps_nobody_from_starting_it_again(runs):
    """As one who uploads what he hears to somebody who does not answer."""
    folder, heard = runs.folder(), []

    def back():
        events = [event for _, event in read_events(folder / "events.jsonl")]
        return sum(isinstance(event, CoordinatorReady) for event in events) == 2

    def upload(progress):
        heard.append(progress.step)
        until(back, "the coordinator's return")

    overrides = ("train.steps=20",)
    summary = runs.survives("gpt", "kill-coordinator@2", overrides=overrides, run_dir=folder, on_progress=upload)
    assert heard == sorted(set(heard))
    assert heard[-1] == summary.steps - 1


DECIDING = [(name, point) for name in ("gpt", "convnet") for point in POINTS]


@pytest.mark.parametrize(("name", "point"), some(DECIDING, [case for case in DECIDING if case[0] == "gpt"]))
def test_at_each_point_of_a_recovery(runs, name, point):
    summary = runs.survives(name, "kill:1.2@2:backward", f"kill-coordinator@2:{point}")
    decided_before = point in ("broadcast", "install")
    assert summary.generations == (3 if decided_before else 2)
    assert [event.adopted for _, event in events_of(summary, Reattached)] == [False]


@pytest.mark.parametrize("point", POINTS[1:])
def test_while_the_first_generation_is_formed(runs, point):
    runs.survives("gpt", f"kill-coordinator@0:{point}")


def test_together_with_a_second_worker_that_dies_in_the_recovery(runs):
    runs.survives("gpt", "kill:1.2@2:backward", "kill-coordinator@2:install", "kill:0.1@2:detect")


@pytest.mark.parametrize("technique", ["1f1b", "staggered"])
def test_while_state_is_copied_to_one_that_comes(runs, technique):
    """The worker that comes catches up without it, and is adopted as an owner."""
    faults = ("slow:2.0@3:6x", "kill:1.1@2:backward", "join:1.1@4", "kill-coordinator@4:copy")
    overrides = (f"train.technique={technique}",)
    summary = runs.survives("small", *faults, overrides=overrides, healthy=runs.healthy("small"))
    ((lost, _),) = events_of(summary, CoordinatorLost)
    computed = [at for at, event in events_of(summary, StepOps) if event.worker == "1.1" and event.ops]
    assert computed[-1] > lost, "it has its state, and computes again"


def test_again_and_again(runs):
    faults = [f"kill-coordinator@{step}" for step in (0, 1, 3)]
    runs.survives("gpt", *faults, "kill:2.1@2:commit", overrides=("train.steps=8",))


def test_a_worker_that_dies_while_it_is_away_is_handled_when_it_is_back(runs):
    with runs.absence(lambda events: any(isinstance(e, FaultInjected) and e.worker == "1.1" for e in events)) as away:
        faults = ("kill-coordinator@1", "kill:1.1@2:backward")
        summary = runs.survives("gpt", *faults, overrides=away.overrides, run_dir=away.run_dir)
    (died, struck) = (time for time, _ in events_of(summary, FaultInjected))
    (_, (back, _)) = events_of(summary, CoordinatorReady)
    ((detected, _),) = events_of(summary, Detected)
    assert died < struck < back < detected


def test_all_finish_while_it_is_away_and_save_when_it_is_back(runs):
    workers = 12
    with runs.absence(lambda events: sum(isinstance(e, StepOps) and e.step == 3 for e in events) == workers) as away:
        summary = runs.survives("gpt", "kill-coordinator@3", overrides=away.overrides, run_dir=away.run_dir)
    assert [event.adopted for _, event in events_of(summary, Reattached)] == [True]
    (_, (back, _)) = events_of(summary, CoordinatorReady)
    finished = [time for time, event in events_of(summary, StepOps) if event.step == 3]
    assert len(finished) == workers
    assert max(finished) < back


def test_one_that_cannot_live_ends_the_job_with_a_clear_error(runs):
    faults = [f"kill-coordinator@{step}:start" for step in range(6)]
    with pytest.raises(InternalError, match=re.escape("the coordinator died 6 times within 900 s")):
        runs.train("gpt", *faults, overrides=("train.steps=400", "control.restart_window_s=900"))


@pytest.fixture
def tls(runs):
    """The overrides under which every control connection speaks mutual TLS, and links are sealed."""
    ca, cert, key = make_certificates(runs.folder() / "certs", ("127.0.0.1",))
    return tuple(f"control.tls.{name}={path}" for name, path in (("ca", ca), ("cert", cert), ("key", key)))


def test_with_certificates_a_worker_comes_and_is_given_its_state(runs, tls):
    faults = ("slow:2.0@3:6x", "kill:1.1@2:backward", "join:1.1@4")
    summary = runs.survives("small", *faults, overrides=tls)
    assert [event.worker for _, event in events_of(summary, Synced)] == ["1.1"]


def test_with_certificates_the_coordinator_comes_back_too(runs, tls):
    runs.survives("gpt", "kill:1.2@2:backward", "kill-coordinator@2:broadcast", overrides=tls)
