"""A job as its pods would run it: the containers' commands of the manifest, as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from tests.launched import LONGER, Launched, write_job
from tests.waiting import LIMIT_S, until

from holdfast.cli.main import main
from holdfast.telemetry.events import CoordinatorReady, JobStarted

pytestmark = pytest.mark.dist

START_ELSEWHERE = 75


class PodsHere(Launched):
    """The pods of a manifest, each a process group of its own."""

    def __init__(self, folder, manifest):
        super().__init__(folder)
        spec = yaml.safe_load(manifest.read_text())["spec"]["template"]["spec"]
        (self.container,) = spec["containers"]

    def begin_pod(self, index):
        """As the controller does, for the first time or again."""
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JOB_COMPLETION_INDEX": str(index),
            "POD_IP": "127.0.0.1",
        }
        with (self.folder / f"pod-{index}.txt").open("a") as out:
            line = [*self.container["command"], *self.container["args"]]
            pod = subprocess.Popen(line, env=environment, stdout=out, stderr=out, start_new_session=True)
        self.started.append(pod)
        return pod

    def lose_pod(self, pod):
        """Its node is gone."""
        for process in (*psutil.Process(pod.pid).children(recursive=True), pod):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        pod.wait(LIMIT_S)

    def complete(self, first, *others):
        """The first one ends well, and by that the Job: the controller ends the others."""
        assert first.wait(LIMIT_S) == 0, self.story()
        for pod in others:
            assert pod.poll() is None, self.story()
            pod.send_signal(signal.SIGTERM)
        for pod in others:
            pod.wait(LIMIT_S)


@pytest.fixture
def pods(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job()
    words = ("--image", "img", "--claim", f"data:{tmp_path.parent}", "--slots", "2", "--dry-run", "small.yaml")
    assert main(["launch", "--on", "kubernetes", *words]) == 0
    with contextlib.closing(PodsHere(tmp_path, Path("small.kubernetes.yaml"))) as made:
        yield made


def test_pods_are_evicted_and_lost_and_the_job_goes_on(pods, runs):
    """The first one, too; all are made anew, take part, and end well."""
    first, second, third = (pods.begin_pod(index) for index in range(3))
    until(lambda: pods.events(JobStarted), pods.story, first)
    until(lambda: pods.said("pod-1").count("stands by") + pods.said("pod-2").count("stands by") == 2, pods.story, first)
    pods.ran(3)
    first.send_signal(signal.SIGTERM)
    assert first.wait(LIMIT_S) == START_ELSEWHERE, pods.story()
    until(lambda: len(pods.events(CoordinatorReady)) == 2, pods.story, second)
    (name,) = {event.node for event in pods.events(CoordinatorReady)} - {"0"}
    lost, stays = (second, third) if name == "2" else (third, second)
    with pods.held(name):
        first = pods.begin_pod(0)
        until(lambda: "takes part in job small" in pods.said("pod-0"), pods.story, first)
        pods.lose_pod(lost)
        until(lambda: len(pods.lost()) == 2, pods.story, first)
        again = pods.begin_pod({"1": 2, "2": 1}[name])
        until(lambda: sum(pods.said(f"pod-{index}").count("takes part in job") for index in range(3)) == 4, pods.story)
    pods.complete(first, stays, again)
    assert pods.summary()["weights_sha256"] == runs.healthy("small", (LONGER,)).weights_sha256


def test_a_job_that_is_stopped_ends_its_first_pod_well(pods):
    first, *others = (pods.begin_pod(index) for index in range(3))
    until(lambda: pods.events(JobStarted), pods.story, first)
    pods.ran(3)
    pods.told("stop", pods.run_dir)
    pods.complete(first, *others)
