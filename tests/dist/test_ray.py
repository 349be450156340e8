"""A job on a real Ray cluster: several raylets on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from tests.launched import LONGER, Launched, write_job
from tests.waiting import LIMIT_S, until

from holdfast.cli.main import main
from holdfast.telemetry.events import CoordinatorReady, JobStarted, Parted, WorkerReady

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray"),
]

SERVER = """
import sys
from ray.cluster_utils import Cluster

few = {"num_cpus": 0, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args=few)
print(cluster.address, flush=True)
nodes = {}
for line in sys.stdin:
    command, name = line.split()
    if command == "add":
        nodes[name] = cluster.add_node(**{**few, "num_cpus": 2}, node_name=name)
    else:
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    print(line, end="", flush=True)
cluster.shutdown()
"""


class RayNodes(Launched):
    """A cluster of Ray, and the job that runs on it."""

    def __init__(self, folder, temporary):
        super().__init__(folder)
        self.temporary = Path(temporary)
        environment = {**os.environ, "RAY_TMPDIR": temporary, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (folder / "server.txt").open("w") as err:
            self.server = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        self.started.append(self.server)
        self.address = self._answer()

    def _answer(self):
        answer = self.server.stdout.readline().strip()
        assert answer, self.story()
        return answer

    def has(self, command, name):
        """Adds a node, or kills one."""
        print(command, name, file=self.server.stdin, flush=True)
        assert self._answer() == f"{command} {name}"

    def nodes_of(self, kind):
        return {event.node for event in self.events(kind)}

    def scripts(self):
        """What runs on nodes, by number."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                number = process.environ().get("NUMBER", "") if process.name() == "bash" else ""
                if number and process.cwd() == str(self.folder):
                    found[int(number)] = process
        return found

    def story(self):
        logs = [*self.folder.glob("*.txt"), *self.temporary.glob("ray/session_2*/logs/worker-*.???")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(logs))

    def close(self):
        self.server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(LIMIT_S)
        super().close()
        self.server.stdout.close()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Three nodes with room for two workers each."""
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of its sockets are to be short
    try:
        with contextlib.closing(RayNodes(tmp_path, temporary)) as made:
            for name in ("m0", "m1", "m2"):
                made.has("add", name)
            monkeypatch.setenv("RAY_ADDRESS", made.address)
            monkeypatch.chdir(tmp_path)
            yield made
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def test_a_node_is_lost_and_another_one_comes_and_an_actor_is_killed(cluster, runs, capfd):
    write_job()
    for _ in range(2):  # the second time nothing more is started
        assert main(["launch", "--on", "ray", "--slots", "2", "small.yaml"]) == 0, cluster.story()
        assert ": runs on 3 nodes" in capfd.readouterr().out
    until(lambda: cluster.events(JobStarted), cluster.story)
    cluster.ran(3)
    assert len(cluster.scripts()) == 3
    (leads,) = cluster.nodes_of(CoordinatorReady)
    lost = min({"m0", "m1", "m2"} - {leads})
    with cluster.held(leads):
        cluster.lose(lost)
        cluster.has("remove", lost)
        until(lambda: len(cluster.lost()) == 2, cluster.story)
        cluster.has("add", "m3")
        until(lambda: "m3" in cluster.nodes_of(WorkerReady), cluster.story)
    cluster.scripts()[0].parent().kill()  # its node's workers leave, if Ray does not kill them before
    until(lambda: len(cluster.lost() | {event.worker for event in cluster.events(Parted)}) == 4, cluster.story)
    assert cluster.summary()["weights_sha256"] == runs.healthy("small", (LONGER,)).weights_sha256
    until(lambda: not cluster.scripts(), cluster.story)


def test_a_job_that_is_stopped_gives_its_nodes_back_though_its_first_one_is_gone(cluster):
    write_job("train.steps=5000")
    assert main(["launch", "--on", "ray", "--slots", "2", "small.yaml"]) == 0, cluster.story()
    until(lambda: cluster.events(JobStarted), cluster.story)
    cluster.ran(3)
    (first,) = cluster.nodes_of(CoordinatorReady)
    assert cluster.scripts()[0].environ()["HOLDFAST_NODE"] == first
    cluster.lose(first)
    cluster.has("remove", first)
    until(lambda: len(cluster.lost()) == 2, cluster.story)
    assert "the job has ended: preempted" in cluster.told("stop", cluster.run_dir)
    until(lambda: not cluster.scripts(), cluster.story)
