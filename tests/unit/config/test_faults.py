import pytest

from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError


def test_the_point_defaults_to_the_start():
    assert Fault.parse("kill:1.2@5") == Fault(kind=FaultKind.KILL, worker=WorkerId(1, 2), step=5, point=Point.START)


@pytest.mark.parametrize("point", list(Point))
def test_the_text_form_round_trips(point):
    text = f"kill:10.0@123:{point}"
    assert str(Fault.parse(text)) == text
    assert Fault.parse(text).point is point


def test_points_of_a_recovery():
    assert [point.value for point in Point if point.in_recovery] == ["detect", "install", "replay"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "--fault : expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward"),
        ("kill:1.2", "--fault kill:1.2: expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward"),
        ("kill@5", "--fault kill@5: expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward"),
        ("kill:1.2@5:", "--fault kill:1.2@5:: expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward"),
        ("kil:1.2@5", "--fault kil:1.2@5: unknown kind 'kil'; known: kill"),
        (
            "kill:1.2@5:lunch",
            "--fault kill:1.2@5:lunch: unknown point 'lunch'; known: start, forward, backward, reduce, update, "
            "commit, detect, install, replay",
        ),
        ("kill:1.2@five", "--fault kill:1.2@five: step 'five' is not a whole number from 0"),
        ("kill:1.2@-1", "--fault kill:1.2@-1: step '-1' is not a whole number from 0"),
        ("kill:1.2@1.5", "--fault kill:1.2@1.5: step '1.5' is not a whole number from 0"),
    ],
)
def test_what_is_wrong_is_named(text, complaint):
    with pytest.raises(ConfigError) as caught:
        Fault.parse(text)
    assert str(caught.value) == complaint


@pytest.mark.parametrize("target", ["12", "a.b", "1.-2"])
def test_a_target_that_is_no_worker(target):
    with pytest.raises(ConfigError, match=r"is no worker: expected pipeline\.stage such as 1\.2"):
        Fault.parse(f"kill:{target}@5")


@pytest.mark.parametrize("text", ["kill:1.2@²", "kill:12@5"])
def test_every_complaint_names_the_flag(text):
    with pytest.raises(ConfigError, match="--fault"):
        Fault.parse(text)
