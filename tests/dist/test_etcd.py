"""Two coordinators and an etcd: any of them dies, and nothing of it can be seen in the weights."""

from __future__ import annotations

import base64
import copy
import os
import signal
import threading
import time
import zlib
from types import SimpleNamespace

import msgspec
import pytest
from tests.waiting import LIMIT_S, until

from holdfast import Fault, parse_job, train
from holdfast.errors import ConfigError, DecisionsLost
from holdfast.telemetry.events import CoordinatorLost, CoordinatorReady, Detected, FaultInjected, StepOps, read_events

pytestmark = pytest.mark.dist


JOB = {
    "name": "gpt",
    "model": {"kind": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2, "microbatch_size": 2},
    "train": {"steps": 80, "seed": 7},
    "control": {"hang_s": 15},
}


class Run:
    """One run, and what the test does to its processes meanwhile."""

    def __init__(self, folder, server, *faults, coordinators=2, restart_delay_s=0, technique="1f1b", steps=80):
        self.folder, self.server = folder / "run", server
        store = (
            f"control.store={server.url}",
            f"control.coordinators={coordinators}",
            f"control.restart_delay_s={restart_delay_s}",
            f"train.technique={technique}",
            f"train.steps={steps}",
        )
        self._job = parse_job(copy.deepcopy(JOB), store)
        self._faults = [Fault.parse(text) for text in faults]
        self._problem: list[BaseException] = []

    def events(self, kind):
        path = self.folder / "events.jsonl"
        return [(t, e) for t, e in read_events(path) if isinstance(e, kind)] if path.exists() else []

    def wait_for(self, condition):
        until(condition)

    def train(self, meanwhile=lambda: None):
        def guarded():
            try:
                meanwhile()
            except BaseException as error:  # noqa: BLE001 - told in the test's own thread
                self._problem.append(error)

        helper = threading.Thread(target=guarded, daemon=True)
        helper.start()
        summary = train(self._job, run_dir=self.folder, faults=self._faults)
        helper.join(LIMIT_S)
        assert not self._problem
        assert summary.unfired == ()
        return summary


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return train(parse_job(copy.deepcopy(JOB)), run_dir=tmp_path_factory.mktemp("healthy") / "run")


def same(summary, healthy):
    assert summary.weights_sha256 == healthy.weights_sha256
    assert summary.state_sha256 == healthy.state_sha256


def test_the_leader_is_killed_and_the_other_takes_over(tmp_path, etcd_server, healthy):
    """The dead one is not started again while the job lasts, so it is the one that stood by."""
    run = Run(tmp_path, etcd_server, "kill-coordinator@3", "kill:1.1@40:backward", restart_delay_s=900)
    summary = run.train()
    same(summary, healthy)
    (_, first), (_, second) = run.events(CoordinatorReady)
    assert second.pid != first.pid
    assert second.generation == 1
    assert [event.worker for _, event in run.events(Detected)] == ["1.1"]


@pytest.mark.parametrize("technique", ["1f1b", "staggered"])
def test_a_leader_that_dies_in_a_decision(tmp_path, etcd_server, healthy, technique):
    run = Run(tmp_path, etcd_server, "kill:1.1@5:backward", "kill-coordinator@5:broadcast", technique=technique)
    same(run.train(), healthy)


def test_etcd_is_killed_and_a_worker_too_before_it_is_back(tmp_path, etcd_server, healthy):
    """Training goes on without etcd; the answer to the death waits for it."""
    run = Run(tmp_path, etcd_server, "kill:1.1@40:backward", coordinators=1)
    times = {}

    def meanwhile():
        run.wait_for(lambda: run.events(StepOps))
        etcd_server.kill()
        times["away"] = time.monotonic()
        run.wait_for(lambda: run.events(FaultInjected))
        times["back"] = time.monotonic()
        etcd_server.start()

    same(run.train(meanwhile), healthy)
    steps = {event.step for at, event in run.events(StepOps) if times["away"] < at < times["back"]}
    assert len(steps) > 5, "training went on"
    ((detected, _),) = run.events(Detected)
    assert detected > times["back"]


def test_a_leader_that_was_stopped_finds_another_one_and_decides_nothing(tmp_path, etcd_server, healthy):
    run = Run(tmp_path, etcd_server, "kill:1.1@70:backward")
    leader = []

    def meanwhile():
        run.wait_for(lambda: run.events(StepOps))
        leader.append(run.events(CoordinatorReady)[0][1].pid)
        os.kill(leader[0], signal.SIGSTOP)
        run.wait_for(lambda: len(run.events(CoordinatorReady)) == 2)
        os.kill(leader[0], signal.SIGCONT)
        run.wait_for(lambda: run.events(CoordinatorLost))

    summary = run.train(meanwhile)
    same(summary, healthy)
    assert [event.how for _, event in run.events(CoordinatorLost)] == ["exit code 3"], "it left by itself"
    (_, ready) = run.events(CoordinatorReady)[1]
    assert ready.pid != leader[0]
    assert [event.worker for _, event in run.events(Detected)] == ["1.1"]


def test_decisions_that_somebody_deleted_end_the_job_with_what_lives_saved(tmp_path, etcd_server):
    """The other coordinator takes over and finds none."""
    run = Run(tmp_path, etcd_server, steps=4000)

    def meanwhile():
        run.wait_for(lambda: run.events(StepOps))
        first, end = (base64.b64encode(key).decode() for key in (b"test/", b"test0"))
        deleted = etcd_server.etcd.call("kv/deleterange", {"key": first, "range_end": end})
        assert int(deleted["deleted"]) >= 2, "the decision and the leader's key"
        os.kill(run.events(CoordinatorReady)[0][1].pid, signal.SIGKILL)

    with pytest.raises(DecisionsLost, match="the store of decisions is empty, though some were made; step"):
        run.train(meanwhile)
    assert len(list((run.folder / "final").glob("layer-*"))) == 4


def exchanged(decision):
    return zlib.compress(msgspec.json.encode({**msgspec.json.decode(zlib.decompress(decision)), "job": "another"}))


def cut(decision):
    return decision[:-20]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (exchanged, "etcd://{place}/{prefix} holds the decisions of another job"),
        (
            cut,
            "etcd at {place}, {prefix}/decisions/ is corrupt: expected a decision, found Error -5 while decompressing",
        ),
    ],
    ids=["another job's", "cut"],
)
def test_a_decision_that_is_not_the_jobs_own_ends_the_job_with_what_lives_saved(tmp_path, etcd_server, spoil, said):
    run, spoilt = Run(tmp_path, etcd_server, coordinators=1, steps=4000), []

    def meanwhile():
        run.wait_for(lambda: run.events(StepOps))
        first, end = (base64.b64encode(key).decode() for key in (b"test/", b"test0"))
        there = etcd_server.etcd.call("kv/range", {"key": first, "range_end": end})["kvs"]
        decisions = [each for each in there if b"/decisions/" in base64.b64decode(each["key"])]
        (newest,) = decisions
        value = base64.b64encode(spoil(base64.b64decode(newest["value"]))).decode()
        etcd_server.etcd.call("kv/put", {"key": newest["key"], "value": value})
        spoilt.append(base64.b64decode(newest["key"]).decode().partition("/decisions/")[0])
        os.kill(run.events(CoordinatorReady)[0][1].pid, signal.SIGKILL)

    with pytest.raises(DecisionsLost) as caught:
        run.train(meanwhile)
    place = f"127.0.0.1:{etcd_server.port}"
    assert str(caught.value).startswith(said.format(place=place, prefix=spoilt[0]))
    assert len(list((run.folder / "final").glob("layer-*"))) == 4


def test_no_etcd_is_told_before_anything_is_started(tmp_path, etcd_server):
    etcd_server.kill()
    run = Run(tmp_path, etcd_server)
    with pytest.raises(ConfigError, match=rf"^control\.store: etcd at 127\.0\.0\.1:{etcd_server.port}: "):
        run.train()
    assert not run.folder.exists(), "else the corrected command would find it taken"


def test_a_store_that_is_none_is_told_before_anything_is_made(tmp_path):
    run = Run(tmp_path, SimpleNamespace(url="redis://127.0.0.1:1"), coordinators=1)
    with pytest.raises(ConfigError, match=r"^control\.store: expected etcd://HOST:PORT"):
        run.train()
    assert not run.folder.exists()
