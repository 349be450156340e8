"""``holdfast metrics``: a run in figures, printed and served."""

import contextlib
import json
import re
import select
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import LIMIT_S, until

from holdfast.cli import serving
from holdfast.cli.main import main
from holdfast.cli.serving import Page, Served, served
from holdfast.control.certificates import make_certificates
from holdfast.telemetry.events import Checkpointed, Detected, EventLog, Installed, JobEnded, JobStarted, StepOps

MONITORING = Path(__file__).parents[3] / "docs" / "monitoring"
NAMES = ("0.0", "1.0")
TOKEN = "a-token-of-whoever-looks"


class Job:
    """A job of two workers, by its log alone."""

    def __init__(self, folder):
        self.run_dir = folder / "run"
        self.step = 0
        self._log = None

    def begin(self):
        self.run_dir.mkdir(exist_ok=True)
        self._log = EventLog(self.run_dir / "events.jsonl")
        self.write(JobStarted(name='a "j"', workers=2, steps=10, samples_per_step=8, wall_time=time.time()))
        self.write(Installed(generation=1, workers=NAMES, strategy="", owners=2))

    def write(self, *events):
        for event in events:
            self._log.write(time.monotonic(), event)

    def steps(self, number):
        for _ in range(number):
            known = {"generation": 1, "step": self.step, "loss": 2.0, "omitted": False, "ops": ()}
            self.write(*(StepOps(worker=name, **known) for name in NAMES))
            self.step += 1

    def close(self):
        if self._log:
            self._log.close()


@pytest.fixture
def job(tmp_path):
    with contextlib.closing(Job(tmp_path)) as made:
        yield made


@pytest.fixture
def serve(job):
    """Has the figures served; returns what asks for a page: its status, and its text."""
    with contextlib.ExitStack() as stack:

        def start(*words, context=None, host="127.0.0.1"):
            line = [sys.executable, "-m", "holdfast", "metrics", str(job.run_dir), "--listen", f"{host}:0", *words]
            process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            said = process.stdout.readline()
            address = re.fullmatch(rf"figures of {re.escape(str(job.run_dir))} at (\S+)/metrics\n", said)[1]

            def ask(path, **headers):
                request = urllib.request.Request(f"{address}{path}", headers=headers)
                try:
                    with urllib.request.urlopen(request, timeout=LIMIT_S, context=context) as answer:
                        return answer.status, answer.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            ask.address = address
            return ask

        yield start


def read(text):
    """The value of each figure."""
    families = text_string_to_metric_families(text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def printed(job, capsys):
    assert main(["metrics", str(job.run_dir)]) == 0
    return read(capsys.readouterr().out)


def test_a_run_is_told_in_figures(job, capsys):
    job.begin()
    job.steps(3)
    job.write(Checkpointed(step=3, url="u"), Detected(worker="1.0", how="its node n1 is gone", generation=1))
    found = printed(job, capsys)
    assert found["holdfast_job_info", 'a "j"'] == 1
    assert found["holdfast_running",] == 1
    assert (found["holdfast_steps_committed_total",], found["holdfast_steps_done",]) == (3, 3)
    assert found["holdfast_steps",] == 10
    assert (found["holdfast_step_seconds_count",], found["holdfast_step_seconds_bucket", "+Inf"]) == (2, 2)
    assert (found["holdfast_workers", "present"], found["holdfast_workers", "missing"]) == (1, 1)
    assert (found["holdfast_failures_total", "node"], found["holdfast_failures_total", "process"]) == (1, 0)
    assert found["holdfast_recovery_seconds_count", "resume"] == 0
    assert found["holdfast_layer_owners_min",] == 2
    assert 0 < found["holdfast_goodput_ratio",] <= 1
    assert 0 <= found["holdfast_checkpoint_age_seconds",] < LIMIT_S
    assert 0 <= found["holdfast_step_age_seconds",] < LIMIT_S
    job.write(JobEnded(outcome="done", step=3))
    found = printed(job, capsys)
    assert (found["holdfast_running",], found["holdfast_ended", "done"]) == (0, 1)
    assert ("holdfast_step_age_seconds",) not in found


def test_names_in_alerts_and_on_the_dashboard_are_those_that_there_are(job, capsys):
    job.begin()
    job.steps(2)
    job.write(Checkpointed(step=2, url="u"))
    assert main(["metrics", str(job.run_dir)]) == 0
    families = [*text_string_to_metric_families(capsys.readouterr().out)]
    job.write(JobEnded(outcome="lost", step=2))
    assert main(["metrics", str(job.run_dir)]) == 0
    families += text_string_to_metric_families(capsys.readouterr().out)
    known = {sample.name: sample.labels for family in families for sample in family.samples}
    rules = [
        rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    used = {name for text in expressions for name in re.findall(r"holdfast_\w+", text)}
    assert used <= known.keys()
    assert known.keys() - used <= {"holdfast_job_info", "holdfast_step_seconds_count", "holdfast_step_seconds_sum"} | {
        "holdfast_recovery_seconds_bucket"
    }
    for rule in rules:
        figure, *_ = re.split(r" and (?:ignoring\(state\) )?holdfast_running == 1$", rule["expr"])
        assert "holdfast_running" not in figure, "its own value is what a rule tells"
        assert ("state=" in figure) == ("ignoring(state)" in rule["expr"]), "both sides have the same labels"
    values = {value for rule in rules for value in re.findall(r'(?:kind|state)="([^"]*)"', rule["expr"])}
    told = {value for family in families for sample in family.samples for value in sample.labels.values()}
    assert values <= told
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


def test_it_is_served_before_the_job_begins_and_as_it_goes_on(job, serve):
    ask = serve()
    assert ask("/healthz") == (200, "ok\n")
    assert ask("/readyz") == (503, "no step was done so far\n")
    assert read(ask("/metrics")[1])["holdfast_running",] == 0
    job.begin()
    job.steps(2)
    until(lambda: read(ask("/metrics")[1])["holdfast_steps_committed_total",] == 2)
    assert ask("/readyz") == (200, "ok\n")
    job.steps(1)
    until(lambda: read(ask("/metrics")[1])["holdfast_steps_committed_total",] == 3)
    job.write(JobEnded(outcome="preempted", step=3))
    until(lambda: ask("/readyz") == (503, "the job has ended: preempted\n"))
    assert ask("/") == (404, "there are /metrics, /healthz, /readyz\n")
    (job.run_dir / "events.jsonl").rename(job.run_dir / "before.jsonl")
    job.step = 0
    job.begin()  # another attempt
    until(lambda: read(ask("/metrics")[1])["holdfast_running",] == 1)
    assert read(ask("/metrics")[1])["holdfast_steps_committed_total",] == 0


def test_whoever_shows_no_token_is_told_nothing_of_the_job(job, serve, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    ask = serve("--token-file", tmp_path / "token")
    for shown in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}):
        assert ask("/metrics", **shown) == (401, "expected Authorization: Bearer, with the token\n")
    assert ask("/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask("/healthz") == (200, "ok\n")
    assert ask("/readyz") == (503, "not ok\n")
    assert ask("/readyz", Authorization=f"Bearer {TOKEN}") == (503, "no step was done so far\n")


def test_beyond_this_machine_it_is_served_with_a_certificate(job, serve, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    ca, *_ = make_certificates(tmp_path / "certs", ("0.0.0.0", "127.0.0.1"))
    words = ("--token-file", tmp_path / "token", "--certs", tmp_path / "certs")
    ask = serve(*words, host="0.0.0.0", context=ssl.create_default_context(cafile=ca))
    assert ask.address.startswith("https://0.0.0.0:")
    assert ask("/metrics")[0] == 401
    assert ask("/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_who_says_nothing_keeps_nobody_waiting(job, serve, tmp_path):
    ca, *_ = make_certificates(tmp_path / "certs", ("127.0.0.1",))
    for words, context in (((), None), (("--certs", tmp_path / "certs"), ssl.create_default_context(cafile=ca))):
        ask = serve(*words, context=context)
        host, port = ask.address.rpartition("/")[2].split(":")
        with contextlib.ExitStack() as stack:
            for said in (b"", b"GET /metrics HTTP/1.1\r\n", bytes(2000), b"\x16\x03\x01"):
                stack.enter_context(socket.create_connection((host, int(port)))).sendall(said)
            assert ask("/healthz") == (200, "ok\n")


@pytest.fixture
def pages():
    """A page, served; returns where."""
    with served(Served(pages={"/": lambda asked: Page("well")}, public=frozenset()), "127.0.0.1:0") as address:
        yield address


@contextlib.contextmanager
def caller_of(address):
    """Somebody who begins to ask."""
    where = urlsplit(address)
    with socket.create_connection((where.hostname, where.port), LIMIT_S) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n")
        yield caller


def test_not_more_than_so_many_are_talked_with_at_once(pages, monkeypatch):
    monkeypatch.setattr(serving, "_AT_ONCE", 2)
    monkeypatch.setattr(serving, "_PATIENCE_S", 10 * LIMIT_S)
    with caller_of(pages), caller_of(pages), caller_of(pages) as third:
        assert hung_up(third)
    until(lambda: page_at(pages) == "well")


def test_who_speaks_slowly_is_not_listened_to_for_long(pages, monkeypatch):
    monkeypatch.setattr(serving, "_PATIENCE_S", 1.0)
    with caller_of(pages) as caller:
        until(lambda: speaks_in_vain(caller))


def speaks_in_vain(caller):
    """Says a little; returns whether the other end has ended the connection."""
    try:
        caller.sendall(b"X")
    except ConnectionError:
        return True
    return bool(select.select([caller], [], [], 0.05)[0]) and hung_up(caller)


def hung_up(caller):
    """Whether the other end has ended the connection; it is waited for."""
    with contextlib.suppress(ConnectionError):
        return caller.recv(1) == b""
    return True


def page_at(address):
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
        return answer.read().decode()


def test_a_page_that_cannot_be_made_is_said_to_be_none(capfd):
    what = Served(pages={"/": lambda asked: 1 / 0}, public=frozenset())
    with served(what, "127.0.0.1:0") as address, pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(address, timeout=LIMIT_S)
    assert "holdfast: / cannot be made: ZeroDivisionError" in capfd.readouterr().err


def test_a_log_of_another_machine_that_cannot_be_read_is_no_good_health(job, capsys):
    job.begin()
    other = job.run_dir / "node-n2"
    other.mkdir()
    (other / "events-abc-def.jsonl").write_text("no log of events\n")
    assert main(["metrics", str(job.run_dir)]) == 2
    assert "node n2: " in capsys.readouterr().err


def test_a_log_that_cannot_be_read_is_no_good_health(job, serve, capsys):
    job.begin()
    ask = serve()
    path = job.run_dir / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"no log of events\n" + whole)
    until(lambda: ask("/healthz")[0] == 503)
    assert "events.jsonl" in ask("/healthz")[1]
    assert main(["metrics", str(job.run_dir)]) == 2
    assert "events.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "is no run directory, it has no events.jsonl"),
        (("--listen", "9400"), "--listen 9400: expected HOST:PORT"),
        (("--listen", "0.0.0.0:0"), "--listen 0.0.0.0:0: others reach it; expected --token-file"),
        (("--listen", "0.0.0.0:0", "--token-file", "{token}"), "the token would travel in the clear; expected --certs"),
        (("--listen", "127.0.0.1:0", "--certs", "{folder}"), "--certs {folder}: cannot be used: No such file"),
        (("--listen", "127.0.0.1:{taken}"), "--listen 127.0.0.1:{taken}: cannot be listened on: Address already in"),
        (("--listen", "127.0.0.1:0", "--token-file", "{folder}/no"), "--token-file {folder}/no: cannot be read"),
    ],
)
def test_what_cannot_be_served_is_said(words, line, tmp_path, capsys):
    (tmp_path / "token").write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"folder": tmp_path, "token": tmp_path / "token", "taken": taken.getsockname()[1]}
        assert main(["metrics", str(tmp_path), *(word.format(**known) for word in words)]) == 2
    assert line.format(**known) in capsys.readouterr().err


def test_without_what_writes_figures_down_it_is_said_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["metrics", str(tmp_path)]) == 2
    assert "prometheus-client is not installed; expected pip install 'holdfast[metrics]'" in capsys.readouterr().err
