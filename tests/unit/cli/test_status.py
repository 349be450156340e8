"""``holdfast status``: a running job for people."""

from dataclasses import dataclass

import msgspec
import pytest

from holdfast.cli import arguments
from holdfast.cli import status as at_status
from holdfast.cli.main import main
from holdfast.cli.status import tell_status
from holdfast.control.messages import Ended
from holdfast.control.reach import Reach
from holdfast.control.status import FailureStatus, JobStatus, NodeStatus
from holdfast.errors import CoordinatorUnavailable, NobodyLeads

NODES = (
    NodeStatus(name="n1", workers=("0.0", "0.1"), room=0, away_s=None, leads=True),
    NodeStatus(name="node-2", workers=(), room=12, away_s=0.26, leads=False),
)
STATUS = JobStatus(
    job="small",
    phase="running",
    generation=3,
    step=120,
    steps=260,
    steps_per_s=14.0,
    alive=("0.0", "0.1"),
    workers=4,
    checkpoint=100,
    workers_to_lose=1,
    nodes_to_lose=0,
    nodes=NODES,
    failures=(FailureStatus(workers=("1.0", "1.1"), how="its node n3 is gone", ago_s=75.2),),
)


def changed(**fields):
    return msgspec.structs.replace(STATUS, **fields)


def test_a_job_is_told_in_lines_and_a_table():
    assert tell_status(STATUS).splitlines() == [
        "job small: running, 120 of 260 steps done, 14.00 steps/s over the last minute, 0:00:10 left",
        "2 of 4 workers, generation 3; the newest checkpoint is of step 100",
        "may be lost at once: any 1 worker(s), no node for certain",
        "node    workers  room",
        "n1      0.0 0.1  0     leads",
        "node-2  -        12    away for 0.3 s",
        "1.0, 1.1 lost 0:01:15 ago: its node n3 is gone",
    ]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"steps_per_s": None}, "job small: running, 120 of 260 steps done"),
        ({"checkpoint": None}, "2 of 4 workers, generation 3; no checkpoint"),
        ({"workers_to_lose": 2, "nodes_to_lose": 1}, "may be lost at once: any 2 worker(s), any 1 node(s)"),
        (
            {"workers_to_lose": 0},
            "some layer has one owner alone: with that, what was done since the last checkpoint may be lost",
        ),
        (
            {"workers_to_lose": None, "nodes_to_lose": None},
            "nothing more may be lost now: not every layer has an owner that is there",
        ),
    ],
)
def test_what_is_not_so_is_said_otherwise(fields, line):
    assert line in tell_status(changed(**fields)).splitlines()


def test_what_came_from_outside_is_one_plain_line(asked, capsys):
    hostile = NodeStatus(name="n\x1b[2J\n", workers=("\x9b",), room=0, away_s=None, leads=False)
    assert asked(changed(job="a\nb", phase="\x1b[2J", nodes=(hostile,))) == 0
    told = capsys.readouterr().out
    assert told.replace("\n", "").isprintable()
    assert len(told.splitlines()) == 6


@dataclass
class Answers:
    """What coordinators say, one after another; time passes between two."""

    answers: list
    now: float = 0.0

    def ask(self, what, reach):
        assert what == "Status"
        return next(self.watch(reach))

    def watch(self, reach):
        """Each coordinator says one thing, and leads no more."""
        assert reach == Reach(addresses="h:7000", token="a-token-of-the-job")
        answer = self.answers.pop(0) if self.answers else CoordinatorUnavailable("nobody listens there")
        if isinstance(answer, Exception):
            raise answer
        yield msgspec.json.encode(answer)

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def asked(monkeypatch):
    """Runs the command, with these answers; returns its exit code."""

    def run(*answers, words=()):
        coordinators = Answers([*answers])
        monkeypatch.setenv("HOLDFAST_TOKEN", "a-token-of-the-job")
        monkeypatch.setattr(at_status, "ask", coordinators.ask)
        monkeypatch.setattr(at_status, "watch", coordinators.watch)
        monkeypatch.setattr("time.sleep", coordinators.sleep)
        monkeypatch.setattr("time.monotonic", lambda: coordinators.now)
        return main(["status", "h:7000", *words])

    return run


AWAY = CoordinatorUnavailable("coordinator at h:7000: unavailable: it is gone")


def test_it_is_told_once(asked, capsys):
    assert asked(STATUS) == 0
    assert capsys.readouterr().out == tell_status(STATUS) + "\n"


def test_it_is_watched_to_the_end_while_another_coordinator_takes_over(asked, capsys):
    ended = changed(phase="ended", step=260)
    assert asked(STATUS, AWAY, AWAY, ended, words=("--watch", "--format", "json")) == 0
    told = [msgspec.json.decode(line, type=JobStatus) for line in capsys.readouterr().out.splitlines()]
    assert told == [STATUS, ended]


def test_an_end_that_nobody_has_seen_is_no_success(asked, capsys):
    assert asked(STATUS, words=("--watch",)) == 1
    text = "holdfast: nobody listens there: the job has ended, or its coordinators are gone\n"
    assert capsys.readouterr().err == text


def test_nobody_to_ask_is_one_line(asked, capsys):
    assert asked(AWAY) == 2
    assert capsys.readouterr().err.startswith("holdfast: coordinator at h:7000: unavailable: it is gone; expected")


def test_who_asks_while_another_coordinator_takes_over_waits_for_it(asked, capsys):
    stands_by = NobodyLeads("coordinator at h:7000: not the leader")
    assert asked(stands_by, AWAY, stands_by, STATUS) == 0
    assert capsys.readouterr().out == tell_status(STATUS) + "\n"
    assert asked(*[stands_by] * 40) == 1
    text = "holdfast: coordinator at h:7000: not the leader: nobody has led for 15 s\n"
    assert capsys.readouterr().err == text


def test_a_token_is_needed(capsys):
    assert main(["status", "h:7000"]) == 2
    assert "--token-file: expected a file with the job's token" in capsys.readouterr().err


def test_of_a_job_that_has_ended_machines_are_told_how(tmp_path, monkeypatch, capsys):
    ended = Ended(outcome="preempted", detail='"why"', step=3, directory="", generations=1, lost_layers=())
    monkeypatch.setattr(arguments, "reach_in", lambda *args, **more: ended)
    assert main(["status", str(tmp_path), "--format", "json"]) == 0
    assert capsys.readouterr().out == '{"phase":"ended","ended":"preempted","detail":"\\"why\\""}\n'


def test_a_job_that_has_ended_is_told_by_its_directory(tmp_path, monkeypatch, capsys):
    ended = Ended(outcome="done", detail="", step=9, directory="", generations=1, lost_layers=())
    monkeypatch.setattr(arguments, "reach_in", lambda run_dir, token, tls: ended)
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the job has ended: done\n"


def test_in_a_directory_without_a_job_nobody_is_to_be_asked(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert f"holdfast: {tmp_path}: no coordinator has said there where it listens" in capsys.readouterr().err
