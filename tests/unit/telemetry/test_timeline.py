"""What a run's events say about what every worker was doing when, and how that is drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter

import pytest

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
from holdfast.telemetry.picture import draw_svg, draw_text
from holdfast.telemetry.timeline import Mark, Mode, run_timeline

START = 1000.0
SVG = "{http://www.w3.org/2000/svg}"
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
        (6, 8, "recovering"),
        (8, 11, "absent"),
        (11, 12, "arriving"),
        (12, 14, "entering"),
        (14, 20, "member"),
    ]


def test_a_survivor_loses_its_time_from_its_last_finished_step_until_it_can_run():
    assert modes(RUN, "0.0") == [
        (0, 1, "absent"),
        (1, 3, "arriving"),
        (3, 5, "member"),
        (5, 10, "recovering"),
        (10, 20, "member"),
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


def test_a_mark_for_every_fault_and_for_a_death_that_nobody_scheduled():
    died = [*RUN[:-1], *at((18, Detected(worker="0.0", how="exit code 1", generation=4)), (20, RUN[-1][1]))]
    assert run_timeline(RUN).marks == (
        Mark(time=7, worker="1.0", kind="kill", text="kill:1.0@1"),
        Mark(time=10, worker="1.0", kind="join", text="join:1.0@2"),
        Mark(time=15, worker="10.0", kind="leave", text="leave:10.0@4"),
    )
    assert run_timeline(died).marks[-1] == Mark(time=18, worker="0.0", kind="death", text="exit code 1")


def test_what_is_no_worker_of_the_grid_gets_a_row_below_for_its_marks():
    offered = [*RUN[:12], *at((10.5, fault("join", "new", 2, ""))), *RUN[12:]]
    assert [row.worker for row in run_timeline(offered).rows] == [*EVERYONE, "new"]
    assert {stretch.mode for stretch in run_timeline(offered).rows[-1].stretches} == {Mode.ABSENT}


def test_no_events_no_rows():
    assert run_timeline([]).rows == ()


PICTURE = """\
   seconds  |0  |2  |4  |6  |8  |10 |12 |14 |16 |18|20
generation        |1        |2      |3      |4
       0.0    aaaa####xxxxxxxxxx--------------------
       1.0    aaaa##----xxKx    J aaeeee------------
      10.0      aaxxxxxxxxxxxxxx----------L-
            # computing  + computing less than half of the time  - waiting  x step given up, recovering
            a there, not let in yet  e entering, computes nothing  (blank) absent
            K kill  J join  L leave"""


def test_the_picture_in_letters():
    """10.0 finished no step before the failure: its recovery begins when it became a member."""
    assert draw_text(run_timeline(RUN), slices=40) == PICTURE


def test_a_slice_that_is_partly_computed():
    run = at((0, Installed(generation=1, workers=("0.0",), strategy="")), (4, step("0.0", 0, 1, 1, 1.25)))
    assert draw_text(run_timeline(run), slices=4).splitlines()[2] == "       0.0  -+--"


@pytest.mark.parametrize("run", [RUN[:1], at((0, Installed(generation=1, workers=("0.0",), strategy="")))])
def test_a_run_that_has_only_begun_can_be_drawn(run):
    assert "generation" in draw_text(run_timeline(run))
    ET.fromstring(draw_svg(run_timeline(run), "a run"))


@pytest.fixture(scope="module")
def picture():
    return ET.fromstring(draw_svg(run_timeline(RUN), "a <run> & more"))


def of_class(element, tag, name):
    return [each for each in element.iter(SVG + tag) if name in (each.get("class") or "").split()]


def test_the_svg_has_a_row_per_worker_with_a_bar_per_stretch(picture):
    rows = of_class(picture, "g", "row")
    assert [row.find(SVG + "text").text for row in rows] == list(EVERYONE)
    drawn = Counter(bar.get("class") for bar in rows[1].iter(SVG + "rect"))
    assert drawn == {"arriving": 2, "member": 2, "recovering": 1, "entering": 1, "busy": 1}


def test_bars_are_in_proportion_to_time(picture):
    width = 1200 - 68 - 20
    (bar,) = of_class(of_class(picture, "g", "row")[1], "rect", "recovering")
    assert float(bar.get("x")) == pytest.approx(68 + width * 6 / 20, abs=0.1)
    assert float(bar.get("width")) == pytest.approx(width * 2 / 20, abs=0.2)


def test_the_svg_has_lines_for_generations_and_discs_for_faults(picture):
    lines = of_class(picture, "g", "generation")
    assert [line.find(SVG + "text").text for line in lines] == ["1", "2", "3", "4"]
    assert [line.get("class") for line in lines] == ["generation"] * 2 + ["generation boundary"] * 2
    marks = of_class(picture, "g", "mark")
    assert [mark.find(SVG + "text").text for mark in marks] == ["K", "J", "L"]
    assert marks[0].find(SVG + "title").text == "7.000 s: kill kill:1.0@1"


def test_numbers_of_generations_do_not_touch():
    crowd = [Installed(generation=number, workers=("0.0",), strategy="") for number in range(1, 9)]
    run = at(*((number / 1000, event) for number, event in enumerate(crowd)), (100, RUN[-1][1]))
    lines = of_class(ET.fromstring(draw_svg(run_timeline(run), "")), "g", "generation")
    assert len(lines) == 8
    assert [line.find(SVG + "text") is not None for line in lines] == [True, True] + [False] * 6


def test_the_title_is_text_whatever_it_says(picture):
    assert "a <run> & more" in [text.text for text in picture.iter(SVG + "text")]


def test_operations_too_near_to_tell_apart_are_one_bar():
    ops = tuple(("F", 0, 0, START + n / 1000, START + (n + 1) / 1000) for n in range(10_000))
    event = StepOps(worker="0.0", generation=1, step=0, loss=None, omitted=False, ops=ops)
    run = at((0, Installed(generation=1, workers=("0.0",), strategy="")), (10, event))
    assert len(of_class(ET.fromstring(draw_svg(run_timeline(run), "")), "rect", "busy")) == 1


def steps_of(times):
    """A picture of one worker whose steps end at these seconds, of 1000."""
    ran = [(time, step("0.0", number, 1, time, time)) for number, time in enumerate(times)]
    run = at((0, Installed(generation=1, workers=("0.0",), strategy="")), *ran, (1000, RUN[-1][1]))
    root = ET.fromstring(draw_svg(run_timeline(run), ""))
    lines = [float(line.get("x1")) for line in of_class(root, "line", "step")]
    return lines, [(text.text, float(text.get("x"))) for text in of_class(root, "text", "step")]


def test_the_axis_tells_how_many_steps_were_done():
    lines, labels = steps_of([100, 200, 600])
    width = 1200 - 68 - 20
    places = [68 + width * share for share in (0.1, 0.2, 0.6)]
    assert lines == pytest.approx(places, abs=0.1)
    assert [text for text, _ in labels] == ["1", "2", "3"]
    assert [x for _, x in labels] == pytest.approx(places, abs=0.1)


def test_steps_too_near_to_tell_apart_are_counted_by_round_numbers():
    lines, labels = steps_of(range(1, 1001))
    assert len(lines) == 200, "every fifth"
    assert [text for text, _ in labels] == [str(number) for number in range(50, 1001, 50)]
    lines, labels = steps_of([500 + number / 1000 for number in range(40)])
    assert (len(lines), [text for text, _ in labels]) == (1, ["40"])
