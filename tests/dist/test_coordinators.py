"""Two coordinators and what both see: any of them dies, and nothing of it can be seen in the weights."""

from __future__ import annotations

import base64
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib

import msgspec
import pytest
import yaml
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

    def __init__(self, folder, url, *faults, coordinators=2, restart_delay_s=0, technique="1f1b", steps=80):
        self.folder = folder / "run"
        store = (
            f"control.store={url}",
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


@pytest.fixture(params=["etcd", "folder"])
def url(request, tmp_path):
    """Of a store that both see."""
    return request.getfixturevalue("etcd_server").url if request.param == "etcd" else str(tmp_path / "decisions")


def test_the_leader_is_killed_and_the_other_takes_over(tmp_path, url, healthy):
    """The dead one is not started again while the job lasts, so it is the one that stood by."""
    run = Run(tmp_path, url, "kill-coordinator@3", "kill:1.1@40:backward", restart_delay_s=900)
    summary = run.train()
    same(summary, healthy)
    (_, first), (_, second) = run.events(CoordinatorReady)
    assert second.pid != first.pid
    assert second.generation == 1
    assert [event.worker for _, event in run.events(Detected)] == ["1.1"]


@pytest.mark.parametrize("technique", ["1f1b", "staggered"])
def test_a_leader_that_dies_in_a_decision(tmp_path, etcd_server, healthy, technique):
    run = Run(tmp_path, etcd_server.url, "kill:1.1@5:backward", "kill-coordinator@5:broadcast", technique=technique)
    same(run.train(), healthy)


def test_etcd_is_killed_and_a_worker_too_before_it_is_back(tmp_path, etcd_server, healthy):
    """Training goes on without etcd; the answer to the death waits for it."""
    run = Run(tmp_path, etcd_server.url, "kill:1.1@40:backward", coordinators=1)
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


def test_by_a_bucket_too(tmp_path, bucket, s3_environment, healthy):
    """In processes of their own, whose environment says where it is; signs of life come less often there."""
    run_dir, job = tmp_path / "run", tmp_path / "job.yaml"
    control = {"store": bucket, "coordinators": 2, "restart_delay_s": 900, "hang_s": 15}
    job.write_text(yaml.safe_dump({**JOB, "control": control}))
    faults = ["--fault", "kill-coordinator@3", "--fault", "kill:1.1@40:backward"]
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "train", str(job), "--run-dir", str(run_dir), "--quiet", *faults],
        env={**os.environ, **s3_environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == healthy.weights_sha256
    events = [event for _, event in read_events(run_dir / "events.jsonl")]
    assert [event.how for event in events if isinstance(event, CoordinatorLost)] == ["signal 9"]
    assert len([event for event in events if isinstance(event, FaultInjected)]) == 2


def test_a_leader_that_was_stopped_finds_another_one_and_decides_nothing(tmp_path, url, healthy):
    run = Run(tmp_path, url, "kill:1.1@70:backward")
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
    run = Run(tmp_path, etcd_server.url, steps=4000)

    def meanwhile():
        run.wait_for(lambda: run.events(StepOps))
        first, end = (base64.b64encode(key).decode() for key in (b"test/", b"test0"))
        deleted = etcd_server.etcd.call("kv/deleterange", {"key": first, "range_end": end})
        assert int(deleted["deleted"]) == 2, "the newest decision and the sign of life"
        os.kill(run.events(CoordinatorReady)[0][1].pid, signal.SIGKILL)

    with pytest.raises(DecisionsLost, match="the store of decisions is empty, though some were made; step"):
        run.train(meanwhile)
    assert len(list((run.folder / "final").glob("layer-*"))) == 4


def exchanged(decision):
    entry = msgspec.json.decode(zlib.decompress(decision))
    return zlib.compress(msgspec.json.encode({**entry, "decision": {**entry["decision"], "job": "another"}}))


def cut(decision):
    return decision[:-20]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (exchanged, "expected the decisions of this job, found those of another"),
        (cut, "expected a decision, found Error -5 while decompressing"),
    ],
    ids=["another job's", "cut"],
)
def test_a_decision_that_is_not_the_jobs_own_ends_the_job_with_what_lives_saved(tmp_path, etcd_server, spoil, said):
    run, spoilt = Run(tmp_path, etcd_server.url, coordinators=1, steps=4000), []

    def meanwhile():
        run.wait_for(lambda: run.events(StepOps))
        first, end = (base64.b64encode(key).decode() for key in (b"test/", b"test0"))
        there = etcd_server.etcd.call("kv/range", {"key": first, "range_end": end})["kvs"]
        (newest,) = (each for each in there if base64.b64decode(each["key"]).endswith(b"/newest"))
        value = base64.b64encode(spoil(base64.b64decode(newest["value"]))).decode()
        etcd_server.etcd.call("kv/put", {"key": newest["key"], "value": value})
        spoilt.append(base64.b64decode(newest["key"]).decode())
        os.kill(run.events(CoordinatorReady)[0][1].pid, signal.SIGKILL)

    with pytest.raises(DecisionsLost) as caught:
        run.train(meanwhile)
    where = f"etcd at 127.0.0.1:{etcd_server.port}, {spoilt[0]}"
    assert str(caught.value).startswith(f"{where} is corrupt: {said}")
    assert len(list((run.folder / "final").glob("layer-*"))) == 4


def test_no_etcd_is_told_before_anything_is_started(tmp_path, etcd_server):
    etcd_server.kill()
    run = Run(tmp_path, etcd_server.url)
    with pytest.raises(ConfigError, match=rf"^control\.store: etcd at 127\.0\.0\.1:{etcd_server.port}: "):
        run.train()
    assert not run.folder.exists(), "else the corrected command would find it taken"


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "decisions", "file://decisions"])
def test_a_store_that_is_none_is_told_before_anything_is_made(tmp_path, url):
    run = Run(tmp_path, url, coordinators=1)
    with pytest.raises(ConfigError, match=r"^control\.store: expected sqlite, etcd://HOST:PORT"):
        run.train()
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: folder.write_text("no folder"), "decisions/try-[0-9a-f]+: cannot be written: "),
        (lambda folder: "s3://bucket-that-is-not-there-7/decisions", "s3://bucket-that-is-not-there-7/decisions/try-"),
    ],
    ids=["a file", "no bucket"],
)
def test_a_store_that_cannot_be_written_is_told_before_anything_is_made(tmp_path, bucket, spoil, said):
    folder = tmp_path / "decisions"
    url = spoil(folder)
    run = Run(tmp_path, url if isinstance(url, str) else folder)
    with pytest.raises(ConfigError, match=rf"^control\.store: .*{said}"):
        run.train()
    assert not run.folder.exists()
