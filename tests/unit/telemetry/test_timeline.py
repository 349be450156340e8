"""What a run's events say about what every worker was doing when."""

from __future__ import annotations

from holdfast.telemetry.events import (
    Agreed,
    Detected,
    FaultInjected,
    Installed,
    JobEnded,
    JobStarted,
    Migrating,
    Parted,
    Rebuilt,
    StepOps,
    Synced,
    WorkerReady,
)
from holdfast.telemetry.timeline import Generation, Mode, TimelineMark, run_timeline

START = 1000.0
EVERYONE = ("0.0", "1.0", "10.0")


def step(worker, number, generation, start, end):
    """A step whose one operation takes from ``start`` to ``end``."""
    ops = (("F", 0, 0, START + start, START + end),)
    return StepOps(worker=worker, generation=generation, step=number, loss=None, omitted=False, ops=ops)


def fault(kind, worker, step, point="start"):
    spec = f"{kind}:{worker}@{step}"
    return FaultInjected(worker=worker, kind=kind, step=step, point=point, spec=spec)


def at(*timed):
    return [(START + time, event) for time, event in timed]


RUN = at(
    (0, JobStarted(name="r", workers=3, steps=9, samples_per_step=4, wall_time=0.0)),
    (1, WorkerReady(worker="0.0", pid=1)),
    (1, WorkerReady(worker="1.0", pid=2)),
    (2, WorkerReady(worker="10.0", pid=3)),
    (3, Installed(generation=1, workers=EVERYONE, strategy="")),
    (5, step("0.0", 0, 1, 3, 5)),
    (6, step("1.0", 0, 1, 3, 4)),
    (7, fault("kill", "1.0", 1)),
    (8, Detected(worker="1.0", how="signal 9", generation=1)),
    (8, Installed(generation=2, workers=("0.0", "10.0"), strategy="adaptive")),
    (9, Agreed(generation=2, step=1, recomputed_microbatches=1)),
    (10, Rebuilt(generation=2)),
    (10, fault("join", "1.0", 2, "")),
    (11, WorkerReady(worker="1.0", pid=4)),
    (12, Installed(generation=3, workers=EVERYONE, strategy="boundary")),
    (14, Synced(worker="1.0", entered=3, step=4, bytes=10)),
    (15, fault("leave", "10.0", 4)),
    (16, Installed(generation=4, workers=("0.0", "1.0"), strategy="boundary")),
    (16, Parted(worker="10.0", step=5)),
    (20, JobEnded(outcome="done", step=9)),
)


def modes(run, worker):
    (row,) = [row for row in run_timeline(run).rows if row.worker == worker]
    return [(stretch.start, stretch.end, stretch.mode.value) for stretch in row.stretches]


def test_a_worker_that_dies_and_comes_back():
    assert modes(RUN, "1.0") == [
        (0, 1, "absent"),
        (1, 3, "arriving"),
        (3, 6, "member"),
        (6, 7, "recovering"),
        (7, 11, "lost"),
        (11, 12, "arriving"),
        (12, 14, "entering"),
        (14, 20, "member"),
    ]


def test_a_worker_that_nobody_scheduled_to_die_is_lost_once_it_is_found_to_be():
    died = [*RUN[:-1], *at((18, Detected(worker="0.0", how="exit code 1", generation=4)), (20, RUN[-1][1]))]
    assert modes(died, "0.0")[-2:] == [(10, 18, "member"), (18, 20, "lost")]


def test_whoever_hangs_is_lost_from_then_on_whatever_befalls_others_before_it_is_found():
    others = at(
        (15, fault("hang", "0.0", 4)),
        (16, Detected(worker="10.0", how="signal 9", generation=3)),
        (16, Installed(generation=4, workers=("0.0", "1.0"), strategy="adaptive")),
        (18, Detected(worker="0.0", how="no sign of life", generation=4)),
        (20, RUN[-1][1]),
    )
    assert modes([*RUN[:16], *others], "0.0")[-2:] == [(5, 15, "recovering"), (15, 20, "lost")]


def test_whoever_is_struck_and_goes_on_is_not_lost():
    others = at((15, fault("stall", "0.0", 1)), (16, step("0.0", 1, 3, 15, 16)), (20, RUN[-1][1]))
    assert modes([*RUN[:16], *others], "0.0")[-1] == (10, 20, "member")


def test_a_survivor_loses_its_time_from_its_last_finished_step_until_it_can_run():
    assert modes(RUN, "0.0") == [
        (0, 1, "absent"),
        (1, 3, "arriving"),
        (3, 5, "member"),
        (5, 10, "recovering"),
        (10, 20, "member"),
    ]


def test_whoever_finished_no_step_before_a_failure_recovers_from_when_it_became_a_member():
    assert modes(RUN, "10.0") == [
        (0, 2, "absent"),
        (2, 3, "arriving"),
        (3, 10, "recovering"),
        (10, 16, "member"),
        (16, 20, "absent"),
    ]


def test_a_worker_that_leaves_is_gone_and_nobody_recovers():
    assert modes(RUN, "10.0")[-2:] == [(10, 16, "member"), (16, 20, "absent")]
    after = [stretch for row in run_timeline(RUN).rows for stretch in row.stretches if stretch.start >= 10]
    assert Mode.RECOVERING not in {stretch.mode for stretch in after}


def test_a_failure_sends_whoever_was_entering_back():
    interrupted = [
        *RUN[:15],
        *at(
            (13, Detected(worker="10.0", how="signal 9", generation=3)),
            (13, Installed(generation=4, workers=("0.0",), strategy="adaptive")),
            (15, Installed(generation=5, workers=("0.0", "1.0"), strategy="boundary")),
            (20, JobEnded(outcome="done", step=9)),
        ),
    ]
    assert modes(interrupted, "1.0")[-3:] == [(12, 13, "entering"), (13, 15, "arriving"), (15, 20, "entering")]


def test_whoever_changes_places_enters_again_once_all_go_over():
    moves = at(
        (15, Migrating(generation=4, moves=(("0.0", "2.0"),), before=2.0, meanwhile=3.0, period=1.0)),
        (16, Installed(generation=4, workers=EVERYONE, strategy="boundary")),
        (18, Synced(worker="0.0", entered=5, step=6, bytes=10)),
        (20, RUN[-1][1]),
    )
    assert modes([*RUN[:16], *moves], "0.0")[-3:] == [(10, 16, "member"), (16, 18, "entering"), (18, 20, "member")]
    assert modes([*RUN[:16], *moves], "1.0")[-1] == (14, 20, "member")


def test_whoever_a_smaller_grid_does_without_is_gone():
    smaller = at((15, Installed(generation=4, workers=("0.0",), strategy="fallback")), (20, RUN[-1][1]))
    assert modes([*RUN[:16], *smaller], "1.0")[-1] == (15, 20, "absent")


def test_a_recovery_that_another_failure_overtakes_lasts_until_the_last_one_is_over():
    overtaken = [
        *RUN[:10],
        *at(
            (9, Detected(worker="10.0", how="signal 9", generation=2)),
            (9, Installed(generation=3, workers=("0.0",), strategy="adaptive")),
            (11, Agreed(generation=3, step=1, recomputed_microbatches=1)),
            (12, JobEnded(outcome="done", step=9)),
        ),
    ]
    assert modes(overtaken, "0.0")[-2:] == [(5, 11, "recovering"), (11, 12, "member")]


def test_rows_are_in_the_order_of_the_grid_and_know_what_was_computed():
    rows = run_timeline(RUN).rows
    assert [row.worker for row in rows] == ["0.0", "1.0", "10.0"]
    assert [row.busy for row in rows] == [((3, 5),), ((3, 4),), ()]
    for row in rows:
        assert row.stretches[0].start == 0
        assert row.stretches[-1].end == 20
        assert all(one.end == two.start for one, two in zip(row.stretches, row.stretches[1:], strict=False))


def test_a_run_has_its_length_its_generations_and_the_steps_that_were_done():
    timeline = run_timeline(RUN)
    assert (timeline.duration, timeline.commits) == (20, ((0, 6),))
    assert timeline.generations == (
        Generation(time=3, number=1, strategy=""),
        Generation(time=8, number=2, strategy="adaptive"),
        Generation(time=12, number=3, strategy="boundary"),
        Generation(time=16, number=4, strategy="boundary"),
    )


def test_a_mark_for_every_fault_and_for_a_death_that_nobody_scheduled():
    died = [*RUN[:-1], *at((18, Detected(worker="0.0", how="exit code 1", generation=4)), (20, RUN[-1][1]))]
    assert run_timeline(RUN).marks == (
        TimelineMark(time=7, worker="1.0", kind="kill", text="kill:1.0@1"),
        TimelineMark(time=10, worker="1.0", kind="join", text="join:1.0@2"),
        TimelineMark(time=15, worker="10.0", kind="leave", text="leave:10.0@4"),
    )
    assert run_timeline(died).marks[-1] == TimelineMark(time=18, worker="0.0", kind="death", text="exit code 1")


def test_what_is_no_worker_of_the_grid_gets_a_row_below_for_its_marks():
    offered = [*RUN[:12], *at((10.5, fault("join", "new", 2, ""))), *RUN[12:]]
    assert [row.worker for row in run_timeline(offered).rows] == [*EVERYONE, "new"]
    assert {stretch.mode for stretch in run_timeline(offered).rows[-1].stretches} == {Mode.ABSENT}


def test_no_events_no_rows():
    assert run_timeline([]).rows == ()
