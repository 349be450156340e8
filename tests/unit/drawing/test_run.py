"""A run, as text and as SVG."""

import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest

from holdfast.drawing.run import run_to_svg
from holdfast.drawing.run_text import run_to_text
from holdfast.telemetry.events import Installed, JobStarted
from holdfast.telemetry.timeline import (
    BOUNDARY,
    Generation,
    Mode,
    Row,
    RunTimeline,
    Stretch,
    TimelineMark,
    run_timeline,
)

SVG = "{http://www.w3.org/2000/svg}"


def row(worker, modes, end, busy=()):
    """A worker that is in each mode from that time on."""
    borders = [*modes, end]
    stretches = [Stretch(start=a, end=b, mode=modes[a]) for a, b in pairwise(borders)]
    return Row(worker=worker, stretches=tuple(stretches), busy=tuple(busy))


ABSENT, ARRIVING, ENTERING, MEMBER, RECOVERING = Mode.ABSENT, Mode.ARRIVING, Mode.ENTERING, Mode.MEMBER, Mode.RECOVERING
KILLED = {0: ABSENT, 1: ARRIVING, 3: MEMBER, 6: RECOVERING, 7: Mode.LOST, 11: ARRIVING, 12: ENTERING, 14: MEMBER}
RUN = RunTimeline(
    duration=20,
    rows=(
        row("0.0", {0: ABSENT, 1: ARRIVING, 3: MEMBER, 5: RECOVERING, 10: MEMBER}, 20, [(3, 5)]),
        row("1.0", KILLED, 20, [(3, 4)]),
        row("10.0", {0: ABSENT, 2: ARRIVING, 3: RECOVERING, 10: MEMBER, 16: ABSENT}, 20),
    ),
    marks=(
        TimelineMark(time=7, worker="1.0", kind="kill", text="kill:1.0@1"),
        TimelineMark(time=10, worker="1.0", kind="join", text="join:1.0@2"),
        TimelineMark(time=15, worker="10.0", kind="leave", text="leave:10.0@4"),
    ),
    generations=(
        Generation(time=3, number=1, strategy=""),
        Generation(time=8, number=2, strategy="adaptive"),
        Generation(time=12, number=3, strategy=BOUNDARY),
        Generation(time=16, number=4, strategy=BOUNDARY),
    ),
    commits=((0, 6),),
)


def alone(duration, busy=(), generations=(), commits=()):
    """A run of one worker."""
    rows = (row("0.0", {0: MEMBER}, duration, busy),)
    return RunTimeline(duration=duration, rows=rows, marks=(), generations=generations, commits=commits)


PICTURE = """\
   seconds  |0  |2  |4  |6  |8  |10 |12 |14 |16 |18|20
generation        |1        |2      |3      |4
       0.0    aaaa####xxxxxxxxxx--------------------
       1.0    aaaa##----xxK.....J.aaeeee------------
      10.0      aaxxxxxxxxxxxxxx----------L-
            # computing  + computing less than half of the time  - waiting  x step given up, recovering
            a there, not let in yet  e entering, computes nothing  . lost  (blank) absent
            K kill  J join  L leave"""


def test_the_picture_in_letters():
    assert run_to_text(RUN, slices=40) == PICTURE


def test_a_slice_that_is_partly_computed():
    assert run_to_text(alone(4, [(1, 1.25)]), slices=4).splitlines()[2] == "       0.0  -+--"


@pytest.mark.parametrize(
    "event",
    [
        JobStarted(name="r", workers=3, steps=9, samples_per_step=4, wall_time=0.0),
        Installed(generation=1, workers=("0.0",), strategy=""),
    ],
)
def test_a_run_that_has_only_begun_can_be_drawn(event):
    run = run_timeline([(1000.0, event)])
    assert "generation" in run_to_text(run)
    ET.fromstring(run_to_svg(run, "a run"))


@pytest.fixture(scope="module")
def picture():
    return ET.fromstring(run_to_svg(RUN, "a <run> & more"))


def of_class(element, tag, name):
    return [each for each in element.iter(SVG + tag) if name in (each.get("class") or "").split()]


def test_the_svg_has_a_row_per_worker_with_a_bar_per_stretch(picture):
    rows = of_class(picture, "g", "row")
    assert [row.find(SVG + "text").text for row in rows] == ["0.0", "1.0", "10.0"]
    drawn = Counter(bar.get("class") for bar in rows[1].iter(SVG + "rect"))
    assert drawn == {"arriving": 2, "member": 2, "recovering": 1, "lost": 1, "entering": 1, "busy": 1}


def test_whoever_is_lost_is_red_from_then_on_and_nobody_else(picture):
    (bar,) = of_class(picture, "rect", "lost")
    width = 1200 - 68 - 20
    assert bar in list(of_class(picture, "g", "row")[1].iter())
    assert (float(bar.get("x")), float(bar.get("width"))) == pytest.approx(
        (68 + width * 7 / 20, width * 4 / 20), abs=0.2
    )
    same = [each.get("class") for each in picture.iter(SVG + "rect") if each.get("fill") == bar.get("fill")]
    assert same == [None, "lost"], "in the legend and here"


def test_bars_are_in_proportion_to_time(picture):
    width = 1200 - 68 - 20
    (bar,) = of_class(of_class(picture, "g", "row")[1], "rect", "recovering")
    assert float(bar.get("x")) == pytest.approx(68 + width * 6 / 20, abs=0.1)
    assert float(bar.get("width")) == pytest.approx(width * 1 / 20, abs=0.2)


def test_the_svg_has_lines_for_generations_and_discs_for_faults(picture):
    lines = of_class(picture, "g", "generation")
    assert [line.find(SVG + "text").text for line in lines] == ["1", "2", "3", "4"]
    assert [line.get("class") for line in lines] == ["generation"] * 2 + ["generation boundary"] * 2
    marks = of_class(picture, "g", "mark")
    assert [mark.find(SVG + "text").text for mark in marks] == ["K", "J", "L"]
    assert marks[0].find(SVG + "title").text == "7.000 s: kill kill:1.0@1"


def test_numbers_of_generations_do_not_touch():
    crowd = tuple(Generation(time=number / 1000, number=number + 1, strategy="") for number in range(8))
    lines = of_class(ET.fromstring(run_to_svg(alone(100, generations=crowd), "")), "g", "generation")
    assert len(lines) == 8
    assert [line.find(SVG + "text") is not None for line in lines] == [True, True] + [False] * 6


def test_the_title_is_text_whatever_it_says(picture):
    assert "a <run> & more" in [text.text for text in picture.iter(SVG + "text")]


def test_operations_too_near_to_tell_apart_are_one_bar():
    run = alone(10, [(n / 1000, (n + 1) / 1000) for n in range(10_000)])
    assert len(of_class(ET.fromstring(run_to_svg(run, "")), "rect", "busy")) == 1


def steps_of(times):
    """A picture of one worker whose steps end at these seconds, of 1000."""
    root = ET.fromstring(run_to_svg(alone(1000, commits=tuple(enumerate(times))), ""))
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
