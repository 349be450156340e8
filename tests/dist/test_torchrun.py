"""A job on nodes where torchrun runs what runs there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launched import LONGER, Launched, write_job
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

from holdfast.cli.main import main
from holdfast.telemetry.events import JobStarted

pytestmark = pytest.mark.dist


class Torchruns(Launched):
    """One on each node."""

    def __init__(self, folder):
        super().__init__(folder)
        self.port = free_port()

    def call(self, rank):
        """Calls it on a node, for the first time or again."""
        path = Path("small.torchrun.sh")
        (line,) = (line for line in path.read_text().splitlines() if line.startswith("#     torchrun"))
        words = line.split()[1:]
        given = {"R": str(rank), "HOST": "127.0.0.1", "FILE": f"./{path}"}
        words = [str(Path(sys.executable).with_name("torchrun")), *(given.get(word, word) for word in words[1:])]
        words[1:1] = ["--master-port", str(self.port)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HOLDFAST_NODE": f"n{rank}",
        }
        with (self.folder / f"n{rank}.txt").open("a") as out:
            called = subprocess.Popen(words, env=environment, stdout=out, stderr=out, start_new_session=True)
        self.started.append(called)
        return called


@pytest.fixture
def nodes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_job()
    assert main(["launch", "--on", "torchrun", "--slots", "2", "small.yaml"]) == 0
    assert "call it as the file says, on each of 3 nodes" in capsys.readouterr().out
    with contextlib.closing(Torchruns(tmp_path)) as made:
        yield made


def test_a_node_is_lost_and_called_again_and_then_the_one_with_the_store(nodes, runs):
    first, second, third = (nodes.call(rank) for rank in range(3))
    until(lambda: nodes.events(JobStarted), nodes.story, first)
    nodes.stands_by("n1", "n2")
    nodes.ran(3)
    with nodes.held("n2"):
        nodes.lose("n1")
        until(lambda: len(nodes.lost()) == 2, nodes.story, first)
        second = nodes.call(1)
        until(lambda: nodes.said("n1").count("takes part in job small") == 2, nodes.story, second)
    nodes.lose("n0")
    until(lambda: len(nodes.lost()) == 4, nodes.story, third)
    assert (second.wait(LIMIT_S), third.wait(LIMIT_S)) == (0, 0), nodes.story()
    assert nodes.summary()["weights_sha256"] == runs.healthy("small", (LONGER,)).weights_sha256
