import pytest

from holdfast.core.faults import Fault, FaultKind, Point
from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError


def test_the_point_defaults_to_the_start():
    assert Fault.parse("kill:1.2@5") == Fault(kind=FaultKind.KILL, worker=WorkerId(1, 2), step=5, point=Point.START)


@pytest.mark.parametrize(
    "point", [point for point in Point if point not in (Point.PERSIST, Point.BROADCAST, Point.GRADIENTS)]
)
def test_the_text_form_round_trips(point):
    text = f"kill:10.0@123:{point}"
    assert str(Fault.parse(text)) == text
    assert Fault.parse(text).point is point


@pytest.mark.parametrize(
    "text",
    [
        "hang:1.2@5:reduce",
        "kill:2.0@5:gradients:50",
        "stall:0.0@1:start",
        "leave:0.3@7:commit",
        "suspend:1.0@2:start",
        "wake:1.0@4:reduce",
        "partition:2.1@4:forward",
        "slow:1.2@5:2.5x",
        "join:1.2@30",
        "join:new@30",
        "kill-node:2@5:backward",
        "kill-coordinator@10:persist",
        "kill:1.2@+12.5s",
        "join:new@+30s",
        "kill-node:1@+0s",
    ],
)
def test_every_kind_round_trips(text):
    assert str(Fault.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("slow:1.2@5", "expected such as slow:1.2@5:3x, with a factor of at least 1"),
        ("slow:1.2@5:0.5x", "expected such as slow:1.2@5:3x, with a factor of at least 1"),
        ("kill-node:1.2@5", "expected such as kill-node:2@5"),
        ("kill-node@5", "expected such as kill-node:2@5"),
        ("kill-coordinator:1@5", "expected such as kill-coordinator@10"),
        ("kill-coordinator@5:forward", "kill-coordinator has no point forward; it has start, detect, persist"),
        ("kill:1.2@5:persist", "kill has no point persist; it has start, forward"),
        ("kill@5", "expected such as kill:1.2@5:backward"),
        ("join@5", "expected such as join:1.2@30 or join:new@30"),
        ("join:1.2@5:forward", "join has no point forward"),
        ("kill:1.2@5:gradients", "expected such as kill:2.0@5:gradients:50, with a number from 0 to 100"),
        ("kill:1.2@5:gradients:101", "expected such as kill:2.0@5:gradients:50, with a number from 0 to 100"),
        ("kill:1.2@5:reduce:50", "expected such as kill:2.0@5:gradients:50, with a number from 0 to 100"),
        ("leave:1.2@5:gradients:50", "leave has no point gradients"),
        ("hang:1.2@+5s", "expected one of kill, kill-node, join at a time, and no point"),
        ("kill:1.2@+5s:start", "expected one of kill, kill-node, join at a time, and no point"),
        ("kill:1.2@+5", "'+5' is no time: expected such as +12.5s"),
        ("kill:1.2@+-5s", "'+-5s' is no time: expected such as +12.5s"),
        ("kill:new@+5s", "'new' is no worker: expected pipeline.stage such as 1.2"),
        ("kill:new@5", "'new' is no worker: expected pipeline.stage such as 1.2"),
    ],
)
def test_what_a_kind_cannot_have(text, complaint):
    with pytest.raises(ConfigError) as caught:
        Fault.parse(text)
    assert str(caught.value).startswith(f"--fault {text}: {complaint}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "--fault : expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward"),
        ("kill:1.2", "--fault kill:1.2: expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward"),
        ("kill:1.2@5:", "--fault kill:1.2@5:: expected KIND:WORKER@STEP[:POINT], such as kill:1.2@5:backward"),
        ("kil:1.2@5", "--fault kil:1.2@5: unknown kind 'kil'; known: " + ", ".join(FaultKind)),
        (
            "kill:1.2@5:lunch",
            "--fault kill:1.2@5:lunch: unknown point 'lunch'; known: start, forward, backward, reduce, gradients, "
            "verdict, update, commit, evaluate, checkpoint, detect, persist, broadcast, install, copy, replay",
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


@pytest.mark.parametrize(
    ("text", "in_a_step"),
    [
        ("kill:1.2@5", True),
        ("kill-node:1@5:commit", True),
        ("hang:1.2@5:gradients:50", True),
        ("kill:1.2@5:replay", False),
        ("kill:1.2@5:checkpoint", False),
        ("kill:1.2@+5s", False),
        ("slow:1.2@5:2x", False),
        ("join:new@5", False),
        ("kill-coordinator@5", False),
    ],
)
def test_which_faults_strike_a_worker_in_a_step(text, in_a_step):
    assert Fault.parse(text).in_a_step is in_a_step
