"""``holdfast board``: what is served, to whom, and what of a run is in it."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from tests.unit.cli.test_metrics import TOKEN, Job
from tests.waiting import LIMIT_S, until

from holdfast.cli import board
from holdfast.cli import watched as watching
from holdfast.cli.main import main
from holdfast.core.ids import Batch
from holdfast.core.placement import regular_placement, split_evenly
from holdfast.errors import StoreAway
from holdfast.schedule.builders import home_plan
from holdfast.telemetry.events import JobEnded, StepOps

FILES = ("/", "/board.css", "/board.js", "/uPlot.css", "/uPlot.js", "/icon.svg")


@pytest.fixture
def job(tmp_path):
    with contextlib.closing(Job(tmp_path)) as made:
        yield made


@pytest.fixture
def serve(job):
    """Has the board served; returns what asks for a path: the status, the headers and the text of the answer."""
    with contextlib.ExitStack() as stack:

        def start(*words):
            line = [sys.executable, "-m", "holdfast", "board", str(job.run_dir), "--listen", "127.0.0.1:0", *words]
            process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            said = process.stdout.readline()
            form = rf"board of {re.escape(str(job.run_dir))} at (http\S+)/( \(the run is yet to begin\))?\n"
            where = urlsplit(re.fullmatch(form, said)[1])

            def ask(path, **headers):
                with contextlib.closing(http.client.HTTPConnection(where.hostname, where.port, LIMIT_S)) as caller:
                    caller.request("GET", path, headers=headers)
                    answer = caller.getresponse()
                    return answer.status, dict(answer.headers), answer.read().decode()

            return ask

        yield start


def news(ask, path="/news", **headers):
    status, kinds, text = ask(path, **headers)
    assert (status, kinds["Content-Type"]) == (200, "application/json")
    return json.loads(text)


def ran(job, workers=("0.0", "1.0")):
    """Writes down a step with its operations."""
    for number, name in enumerate(workers):
        ops = tuple(
            (kind, number, 0, 10.0 * job.step + 3 * start, 10.0 * job.step + 3 * start + 2)
            for start, kind in enumerate("FB")
        )
        job.write(StepOps(worker=name, generation=1, step=job.step, loss=2.0, omitted=False, ops=ops, knows_loss=True))
    job.step += 1


def test_a_run_is_told_before_it_begins_as_it_goes_on_and_once_it_has_ended(job, serve):
    ask = serve()
    assert news(ask)["job"] == {"name": ""}
    job.begin()
    job.steps(2)
    until(lambda: news(ask)["job"].get("done") == 2)
    first = news(ask)
    assert first["job"]["name"] == 'a "j"'
    assert first["workers"] == {name: {"mode": "member", "node": ""} for name in ("0.0", "1.0")}
    job.steps(1)
    job.write(JobEnded(outcome="done", step=3))
    path = f"/news?run={first['run']}&since={first['tick']}"
    until(lambda: news(ask, path)["job"].get("outcome") == "done")
    later = news(ask, path)
    assert later["curve"]["steps"] == [2]
    assert "workers" not in later
    assert [line["text"] for line in later["lines"]] == ["ended: done at step 3"]


@pytest.mark.parametrize(
    "words", ["?run=1&since=99", "?run=7&since=1", "?run=x&since=-1", "?since=" + "9" * 500, "?=&&"]
)
def test_whoever_asks_for_what_there_never_was_is_told_all(job, serve, words):
    job.begin()
    job.steps(1)
    ask = serve()
    until(lambda: news(ask)["job"].get("done") == 1)
    assert news(ask, f"/news{words}")["curve"]["steps"] == [0]


def test_the_page_and_what_it_needs_are_served_and_nothing_else(serve):
    ask = serve()
    for path in FILES:
        status, headers, text = ask(path)
        assert (status, bool(text)) == (200, True)
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/../board.py", "/page/board.js", "//etc/passwd", "/LICENSE.uPlot"):
        assert ask(path)[0] == 404
    named = re.findall(r'(?:src|href)="([^"]*)"', ask("/")[2])
    assert {f"/{name}" for name in named} < set(FILES)


def test_the_page_names_no_other_machine(serve):
    ask = serve()
    for path in FILES:
        text = re.sub(r"http://www\.w3\.org/\S+", "", ask(path)[2])  # names, which nobody visits
        assert re.findall(r"https?://\S+", text) in (
            [],
            ["https://github.com/leeoniya/uPlot"],
        )  # its author's, in a comment


def test_a_page_of_elsewhere_whose_name_leads_here_is_told_nothing(job, serve, tmp_path):
    ask = serve()
    for name in ("rebound.example", "rebound.example:8571", "10.0.0.1", "[", "127.0.0.1.example"):
        for path in ("/news", "/"):
            assert ask(path, Host=name)[0] == 421
    for name in ("localhost:8571", "127.0.0.1", "[::1]:1", "LOCALHOST"):
        assert ask("/news", Host=name)[0] == 200
    (tmp_path / "token").write_text(TOKEN)
    ask = serve("--token-file", tmp_path / "token")
    assert ask("/news", Host="board.example", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_whoever_shows_no_token_has_the_page_but_nothing_of_the_run(job, serve, tmp_path):
    job.begin()
    (tmp_path / "token").write_text(TOKEN)
    ask = serve("--token-file", tmp_path / "token")
    assert ask("/")[0] == 200
    for path in ("/news", "/schedules"):
        status, headers, text = ask(path, Authorization=f"Bearer {TOKEN}x")
        assert (status, headers["WWW-Authenticate"], "j" in text) == (401, "Bearer", False)
        assert ask(path, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_log_that_cannot_be_read_is_said(job, serve):
    job.begin()
    ask = serve()
    until(lambda: news(ask)["job"]["name"])
    with (job.run_dir / "events.jsonl").open("a") as log:
        log.write("no event\n")
    until(lambda: "is no log of events" in news(ask).get("trouble", ""))
    assert news(ask)["job"]["name"] == 'a "j"'


def test_a_job_that_nobody_runs_any_more_is_said_to_be_gone(job, monkeypatch):
    monkeypatch.setattr(watching, "_SILENT_S", 0.0)
    job.begin()
    watched = board._Watched(job.run_dir)
    watched.look()
    told = json.loads(watched.news(board.Asked()).text)
    assert told["trouble"] == "It has not ended, and no process that can be found runs it."
    job.write(JobEnded(outcome="done", step=0))
    watched.look()
    assert "trouble" not in json.loads(watched.news(board.Asked()).text)


def test_whether_it_runs_on_another_machine_is_not_guessed(job, monkeypatch):
    monkeypatch.setattr(watching, "_SILENT_S", 0.0)
    job.begin()
    log = job.run_dir / "events.jsonl"
    log.write_text(log.read_text().replace('"clock":""', '"clock":"0123456789ab"'))
    watched = board._Watched(job.run_dir)
    watched.look()
    assert not watched.here
    assert "trouble" not in json.loads(watched.news(board.Asked()).text)


PLANS = {1: home_plan(regular_placement(2, split_evenly(4, 1)), Batch((2, 2)))}


def looked(watched):
    """Has it look, and find the plan."""
    watched.look()
    watched._seeking.join(LIMIT_S)


def test_a_store_that_is_away_is_asked_again(job, monkeypatch):
    found = []
    monkeypatch.setattr(board, "decisions_of", lambda run_dir: "etcd://127.0.0.1:1/x")
    monkeypatch.setattr(board, "plans_in", lambda url: found.pop() if found else away())
    monkeypatch.setattr(board, "_PATIENCE_S", 0.0)

    def away():
        raise StoreAway("no answer")

    job.begin()
    watched = board._Watched(job.run_dir)
    looked(watched)
    holding = json.loads(watched.news(board.Asked()).text)["holding"]
    assert holding["why"] == "who holds what is not known: no answer"
    found.append(PLANS)
    looked(watched)
    holding = json.loads(watched.news(board.Asked()).text)["holding"]
    assert (holding["layers"], holding["any"], holding["why"]) == (4, 1, "")
    looked(watched)
    (job.run_dir / "events.jsonl").rename(job.run_dir / "before.jsonl")  # another attempt, in its first generation, too
    job.begin()
    found.append(PLANS)
    looked(watched)
    assert json.loads(watched.news(board.Asked()).text)["holding"]["layers"] == 4
    assert not found


def test_the_last_step_is_drawn(job, serve):
    job.begin()
    ask = serve()
    until(lambda: news(ask)["job"]["name"])
    found = news(ask, "/schedules")
    assert found["measured"] == {"svg": "", "about": "no such step was run so far", "idle": None}
    assert found["planned"]["about"] == "the plan is not known"
    ran(job)
    ran(job)
    until(lambda: news(ask)["job"].get("done") == 2)
    measured = news(ask, "/schedules")["measured"]
    assert measured["svg"].startswith("<svg")
    assert (measured["about"], measured["idle"]) == ("step 1, as it was run", pytest.approx(0.2))
    assert news(ask, "/schedules?which=interrupted")["measured"]["svg"] == ""


def test_steps_of_many_workers_are_not_drawn(job, monkeypatch):
    monkeypatch.setattr(board, "_DRAWN", 1)
    job.begin()
    ran(job)
    watched = board._Watched(job.run_dir)
    watched.look()
    measured = json.loads(watched.schedules(board.Asked()).text)["measured"]
    assert (measured["svg"], "drawn for up to 1 workers, here are 2" in measured["about"]) == ("", True)


def test_what_cannot_be_served_is_said(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["board", str(tmp_path), "--listen", f"127.0.0.1:{port}"]) == 2
    assert f"--listen 127.0.0.1:{port}: cannot be listened on: Address already in use" in capsys.readouterr().err
    assert main(["board", str(tmp_path), "--listen", "0.0.0.0:0"]) == 2
    assert "others reach it; expected --token-file" in capsys.readouterr().err


def test_it_is_ended_by_ctrl_c(job):
    line = [sys.executable, "-m", "holdfast", "board", str(job.run_dir), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        process.send_signal(2)
        assert process.wait(LIMIT_S) == 130
        assert process.stderr.read() == ""
