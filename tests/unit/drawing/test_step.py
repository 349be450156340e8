"""One step of a run as a picture: every operation, and what a loss did to it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from holdfast.drawing.step import step_to_svg
from holdfast.errors import ConfigError
from holdfast.telemetry.events import Agreed, Detected, FaultInjected, StepOps

SVG = "{http://www.w3.org/2000/svg}"


def done(worker, step, *ops, generation=1):
    return StepOps(worker=worker, generation=generation, step=step, loss=None, omitted=False, ops=ops)


TIMED = [
    (1.0, done("0.0", 2, ("F", 0, 0, 0.2, 0.9))),
    (1.5, Detected(worker="0.1", how="process ended", generation=1)),
    (1.6, Agreed(generation=2, step=3, recomputed_microbatches=2, goes_on=True, redone=((1, 0),))),
    (2.0, done("0.0", 3, ("F", 0, 0, 1.1, 1.3), ("B", 0, 0, 1.7, 1.9), generation=2)),
]


def boxes(picture):
    return [each for each in ET.fromstring(picture).iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]


def words(picture):
    return [each.text for each in ET.fromstring(picture).iter(f"{SVG}text")]


def test_every_operation_is_a_box_and_what_came_after_the_loss_is_thick():
    found = boxes(step_to_svg(TIMED, 3))
    assert [box.find(f"{SVG}title").text for box in found] == ["F0.0, 200.0 ms", "B0.0, 200.0 ms"]
    assert [float(box.get("stroke-width")) for box in found] == [0.5, 1.6]
    assert float(found[0].get("x")) < float(found[1].get("x"))


def test_who_was_lost_and_how_all_went_on_is_told():
    told = words(step_to_svg(TIMED, 3))
    assert {"0.0", "0.1", "0.1 is found to be lost", "all go on with it", "since the loss"} <= set(told)


@pytest.mark.parametrize("struck", [None, 1.4])
def test_whoever_is_lost_is_red_from_the_fault_on(struck):
    """From when it was found to be, where no fault was injected."""
    fault = FaultInjected(worker="0.1", kind="kill", step=3, point="start", spec="kill:0.1@3")
    timed = sorted([*TIMED, *([] if struck is None else [(struck, fault)])], key=lambda pair: pair[0])
    picture = step_to_svg(timed, 3)
    assert "lost" in words(picture)
    (bar,) = [each for each in ET.fromstring(picture).iter(f"{SVG}rect") if each.get("class") == "lost"]
    second = (1200 - 52 - 20) / (2.0 - 1.0)
    since = struck or 1.5
    assert float(bar.get("x")) == pytest.approx(52 + second * (since - 1.0), abs=0.2)
    assert float(bar.get("width")) == pytest.approx(second * (2.0 - since), abs=0.2)
    nobody = [each for each in TIMED if not isinstance(each[1], Detected)]
    assert "lost" not in words(step_to_svg(nobody, 3))


def test_of_a_step_that_was_run_again_it_is_told_that_what_came_before_is_given_up():
    again = [*TIMED[:2], (1.6, Agreed(generation=2, step=3, recomputed_microbatches=2)), TIMED[3]]
    picture = step_to_svg(again, 3)
    assert {"all run from step 3", "what was run until here is given up"} <= set(words(picture))
    assert all(float(box.get("stroke-width")) == 0.5 for box in boxes(picture))


def test_a_step_that_nobody_finished_cannot_be_drawn():
    with pytest.raises(ConfigError, match="no worker finished step 7"):
        step_to_svg(TIMED, 7)
