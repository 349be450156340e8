"""What is shown while a job starts and trains, and that nothing heavy is loaded before signals are answered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast import parse_job
from holdfast.cli.arguments import hours
from holdfast.cli.lines import ProgressLine, describe_preparing
from holdfast.telemetry.events import Chosen, JobStarted, Notice, Preparing

JOB = parse_job(
    {
        "model": {"kind": "gpt", "layers": 1, "width": 8, "heads": 2, "context": 8},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 1, "stages": 1, "microbatches": 1},
        "train": {"steps": 3},
    }
)


@pytest.mark.parametrize(
    ("seconds", "text"), [(45249, "12:34:09"), (62, "0:01:02"), (0, "0:00:00"), (360000, "100:00:00")]
)
def test_time_left_is_told_in_hours_minutes_and_seconds(seconds, text):
    assert hours(seconds) == text


def test_what_is_prepared_is_told_with_how_much_of_it_for_how_long_and_who_is_missing():
    assert describe_preparing(Preparing(text="planning")) == "planning"
    assert describe_preparing(Preparing(text="planning", waited_s=12.4)) == "planning, for 12 s"
    few = Preparing(text="starting workers", done=10, of=12, missing=("0.1", "1.2"))
    assert describe_preparing(few) == "starting workers (10 of 12)"
    late = Preparing(text="starting workers", done=10, of=12, missing=("0.1", "1.2"), waited_s=20.0)
    assert describe_preparing(late) == "starting workers (10 of 12), for 20 s; missing: 0.1, 1.2"
    many = Preparing(text="starting workers", of=9, missing=tuple(f"0.{i}" for i in range(9)), waited_s=20.0)
    assert describe_preparing(many) == "starting workers (0 of 9), for 20 s; missing: 0.0, 0.1, 0.2, 0.3, ..."


def test_off_a_terminal_every_beginning_is_a_line_and_what_goes_on_is_not(capsys):
    line = ProgressLine(JOB, quiet=False)
    for text in ("planning", "planning", "starting workers", "starting workers"):
        line.tell(Preparing(text=text, waited_s=1.0))
    assert capsys.readouterr().err.splitlines() == ["planning, for 1 s", "starting workers, for 1 s"]


def test_where_it_is_written_is_told_once_it_begins(capsys):
    line = ProgressLine(JOB, quiet=False)
    line.where = "written to runs/x"
    assert capsys.readouterr().err == ""
    line.tell(JobStarted(name="j", workers=1, steps=1, samples_per_step=1, wall_time=0.0))
    assert capsys.readouterr().err == "written to runs/x\n"


def test_quietly_only_news_are_told(capsys):
    line = ProgressLine(JOB, quiet=True)
    line.where = "written to runs/x"
    line.tell(JobStarted(name="j", workers=1, steps=1, samples_per_step=1, wall_time=0.0))
    line.tell(Preparing(text="planning"))
    line.tell(Notice(worker="agent", text="worker 1.2 is lost: signal 9"))
    assert capsys.readouterr().err == "holdfast: worker 1.2 is lost: signal 9\n"


def chosen():
    way = "re-route"
    return Chosen(
        way=way,
        advised=way,
        why="every layer has owners on several nodes",
        reasons=(),
        logging=False,
        alone=(),
        spares=0,
        crossing_bytes=0,
        state_bytes=1,
        copy_s=None,
        bubble_s=None,
        step_log=True,
        step_log_bytes=4,
    )


def test_how_a_lost_node_comes_back_is_a_line_that_stays_but_not_quietly(capsys, monkeypatch):
    told = "for the loss of a node: re-route (every layer has owners on several nodes)"
    for quiet in (False, True):
        ProgressLine(JOB, quiet=quiet).tell(chosen())
        assert capsys.readouterr().err == ("" if quiet else f"{told}\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = ProgressLine(JOB, quiet=False)
    line.tell(Preparing(text="planning"))
    line.tell(chosen())
    assert capsys.readouterr().err == f"\r\x1b[Kplanning\r\x1b[K{told}\n"


def test_on_a_terminal_news_take_the_place_of_the_line_that_is_replaced(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = ProgressLine(JOB, quiet=False)
    line.tell(Preparing(text="planning"))
    line.tell(Preparing(text="planning", waited_s=1.0))
    line.tell(Notice(worker="agent", text="news"))
    line.tell(Preparing(text="starting workers"))
    line.end()
    fresh = "\r\x1b[K"
    expected = f"{fresh}planning{fresh}planning, for 1 s{fresh}holdfast: news\n{fresh}starting workers\n"
    assert capsys.readouterr().err == expected


def test_the_version_is_told():
    told = subprocess.run([sys.executable, "-m", "holdfast", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("holdfast ")


def test_nothing_heavy_is_loaded_before_signals_are_answered():
    program = "import sys, holdfast.cli.main; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'holdfast.cli.main'" in loaded
    for heavy in ("holdfast.cli.commands", "holdfast.errors", "msgspec", "yaml", "grpc", "torch", "argparse", "typing"):
        assert f"'{heavy}'" not in loaded, heavy


def test_public_names_are_loaded_when_asked_for():
    import holdfast

    assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        holdfast.nothing  # noqa: B018
