"""Jobs on several nodes, each with an agent of its own: what is struck there, and what comes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.conftest import EtcdServer
from tests.dist.conftest import JOBS, LOOP_SCRIPT, check_executed
from tests.metadata import metadata_of
from tests.networks import HOUR_S, an_hour_ahead, needs_networks
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

from holdfast import parse_job
from holdfast.config.load import dump_job
from holdfast.control.certificates import ANY_HOST, make_node_certificates
from holdfast.optim.digest import digest_run
from holdfast.runtime.isolation import Networks
from holdfast.runtime.launch.agents import this_node
from holdfast.telemetry.events import (
    Checkpointed,
    CoordinatorReady,
    Detected,
    JobEnded,
    Notice,
    Parted,
    StepOps,
    Synced,
    WorkerReady,
)
from holdfast.telemetry.report import report
from holdfast.telemetry.story import read_story

pytestmark = pytest.mark.dist

STEPS = "train.steps=80"
START_ELSEWHERE = 75
SCRIPT_STEPS = 160
LONGER = "train.steps=260"
"""Whoever is asked to come has come by then: the longer that takes, the slower are steps."""


class Cluster:
    """A job and its agents, as processes of their own; ``networks``: each is in a network of its own."""

    def __init__(self, folder, networks=None):
        self.folder, self.networks = folder, networks
        self.run_dir = folder / "run"
        self.head = None
        self.agents, self.started = [], []

    def begin(self, *words, node=None):
        """Starts the job, in the hub or on a node; returns once agents are invited."""
        words = (*words[:1], "--run-dir", self.run_dir, *words[1:])
        place = self.networks and (self.networks.hub if node is None else self.networks.node(node))
        self.head = self._start("head", place, *words)
        self.invitation = until(self._invitation, lambda: self.said("head"), self.head)

    def _invitation(self):
        found = re.search(r"by: holdfast (agent .*) --slots N", self.said("head"))
        return found and found[1].split()

    def again(self, name, command, *words):
        """Starts a command that begins the job once more."""
        return self._start(name, self.networks and self.networks.hub, command, "--run-dir", self.run_dir, *words)

    def followed(self):
        """Somebody who looks at the run directory until the job ends."""
        return self._start("follower", None, "inspect", self.run_dir, "--follow")

    def status(self, node):
        """How the job is, asked from a node, of whoever leads, as the run directory says."""
        words = ("status", self.run_dir, "--format", "json")
        assert self._start("status", self.networks.node(node), *words).wait(LIMIT_S) == 0, self.story()
        return json.loads(self.said("status"))

    def told(self, *words, code=0):
        """What a command says; it ends with this code."""
        assert self.tell(*words).wait(LIMIT_S) == code, self.story()
        return self.said("told")

    def tell(self, *words):
        """Starts such a command."""
        return self._start("told", None, *words)

    def join(self, slots, node, *words, clock=()):
        """Starts an agent on the node of this number, with a clock of its own if it is given one."""
        place = None if self.networks is None else self.networks.node(node)
        name = f"node-{len(self.agents)}"
        line = (*self.invitation, "--slots", slots, "--node", name, *words)
        self.agents.append(self._start(name, place, *line, clock=clock))
        return self.agents[-1]

    def _start(self, name, namespace, *words, clock=()):
        inside = () if namespace is None else ("nsenter", f"--net={namespace.path}")
        line = [*inside, *clock, sys.executable, "-m", "holdfast", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (self.folder / f"{name}.txt").open("w") as out:
            process = subprocess.Popen(line, cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        self.started.append(process)
        return process

    def said(self, name):
        return (self.folder / f"{name}.txt").read_text()

    def events(self, kind):
        return [event for _, event in read_story(self.run_dir) if isinstance(event, kind)]

    def ran(self, step):
        """Waits until somebody has run a step."""
        until(lambda: any(event.step >= step for event in self.events(StepOps)), self.story, self.head)

    def stands_by(self, *names):
        for name in names:
            until(lambda name=name: "a coordinator stands by at" in self.said(name), self.story, self.head)

    @contextlib.contextmanager
    def held(self, node):
        """Once whoever leads now has steps done, a worker of a node is stopped meanwhile: the job does not end."""
        done = len(self.events(StepOps))
        until(lambda: len(self.events(StepOps)) > done + 12, self.story)
        worker = psutil.Process([event for event in self.events(WorkerReady) if event.node == node][-1].pid)
        worker.suspend()
        try:
            yield
        finally:
            worker.resume()

    def came(self, worker):
        until(lambda: any(event.worker == worker for event in self.events(Synced)), self.story, self.head)

    def story(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.txt")))

    def end(self):
        """Waits until the job is done; returns what it says."""
        assert self.head.wait(LIMIT_S) == 0, self.story()
        return self.said("head")

    def close(self):
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                of_it = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for each in of_it:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(LIMIT_S)


@pytest.fixture
def cluster(tmp_path):
    with contextlib.closing(Cluster(tmp_path)) as made:
        yield made


@pytest.fixture
def apart(tmp_path):
    """Three nodes; the job is begun on a fourth."""
    with Networks(3) as networks, contextlib.closing(Cluster(tmp_path, networks)) as made:
        yield made


@pytest.fixture
def store_apart(apart, tmp_path_factory):
    """An etcd in the hub of these networks."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), apart.networks.hub)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "small.yaml"
    path.write_text(dump_job(parse_job(JOBS["small"], (STEPS, "control.hang_s=15"))))
    return path


def hashes(text):
    return re.search(r"weights_sha256 (\w+)", text)[1]


def processes_below(process):
    return psutil.Process(process.pid).children(recursive=True)


@needs_networks
def test_nodes_die_and_come(apart, small, runs):
    """Of three nodes, one is killed, and another has room for its workers; a third one is cut off for a while."""
    options = ("--set", LONGER, "--set", "control.insecure=true")
    apart.begin("coordinator", small, "--listen", apart.networks.hub.host, *options)
    killed, cut = (apart.join(2, node) for node in range(2))
    for name in ("node-0", "node-1"):
        until(lambda name=name: "takes part" in apart.said(name), apart.story, apart.head)
    apart.invitation = ["agent", "--coordinator", str(apart.run_dir)]
    last = apart.join(4, 2, clock=an_hour_ahead())
    apart.ran(3)
    networks = {Path(f"/proc/{event.pid}/ns/net").readlink() for event in apart.events(WorkerReady)}
    assert len(networks) == 3, "two workers on each node"
    killed.send_signal(signal.SIGKILL)
    until(lambda: len(apart.events(Detected)) == 2, apart.story, apart.head)
    assert {event.how for event in apart.events(Detected)} == {"its node node-0 is gone"}
    apart.came(min(event.worker for event in apart.events(Detected)))
    apart.networks.cut(1)
    until(lambda: len({event.worker for event in apart.events(Detected)}) == 4, apart.story, apart.head)
    apart.networks.heal(1)
    until(lambda: "it takes part anew" in apart.said("node-1"), apart.story, apart.head)
    said = apart.end()
    assert hashes(said) == runs.healthy("small", (LONGER,)).weights_sha256
    assert [each.wait(LIMIT_S) for each in (cut, last)] == [0, 0]
    assert "6 workers begin on 3 nodes: any 2 of them may be lost" in [event.text for event in apart.events(Notice)]
    check_told(apart)


def test_agents_may_come_first_and_the_coordinator_may_die(cluster, small, runs):
    """All show certificates, each its own; what is another node's lets nobody in."""
    port = free_port()
    token = cluster.folder / "token"
    token.write_text("a-token-that-both-know")
    first, other = make_node_certificates(cluster.folder / "certs", (ANY_HOST,), (this_node().name, "node-0"))
    ca, cert, key = (first / f"{name}.pem" for name in ("ca", "cert", "key"))
    tls = ("--set", f"control.tls={{ca: {ca}, cert: {cert}, key: {key}}}")
    cluster.invitation = ["agent", "--coordinator", f"127.0.0.1:{port}", "--token-file", token, "--certs", other]
    cluster.join(3, 0)
    until(lambda: "waiting for the coordinator" in cluster.said("node-0"), process=cluster.agents[0])
    cluster.begin("train", small, "--listen", f"127.0.0.1:{port}", "--token-file", token, "--slots", 3, *tls)
    assert "--token-file" not in cluster.invitation
    stranger = cluster.join(1, 1, "--token-file", token, "--certs", other)
    assert stranger.wait(LIMIT_S) == 2
    assert f"{other / 'cert.pem'} speaks for node node-0 alone, and this is node-1" in cluster.said("node-1")
    cluster.ran(10)
    (coordinator,) = [process for process in processes_below(cluster.head) if _listens(process, port)]
    coordinator.kill()
    until(lambda: len(cluster.events(CoordinatorReady)) == 2, cluster.story, cluster.head)
    said = cluster.end()
    assert hashes(said) == runs.healthy("small", (STEPS,)).weights_sha256
    assert cluster.agents[0].wait(LIMIT_S) == 0
    assert not cluster.events(Detected)


def _listens(process, port):
    with contextlib.suppress(psutil.Error):
        return any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections())
    return False


def test_a_script_runs_on_several_nodes(cluster, runs):
    """One is told to go in the middle: its worker leaves, and another one comes where there is room for it."""
    cluster.begin(
        "run",
        "--workers",
        4,
        "--slots",
        2,
        "--set",
        "control.hang_s=15",
        LOOP_SCRIPT,
        "--variant",
        "norm",
        "--steps",
        SCRIPT_STEPS,
    )
    told = cluster.join(1, 0)
    cluster.join(2, 1)
    cluster.ran(10)
    told.send_signal(signal.SIGTERM)
    said = cluster.end()
    assert told.wait(LIMIT_S) == START_ELSEWHERE
    assert "the workers of this node have left; the job goes on" in cluster.said("node-0")
    assert not cluster.events(Detected), "nothing was lost, and nothing run again"
    texts = [event.text for event in cluster.events(Notice)]
    assert [text for text in texts if "node-0" in text] == [
        "node node-0 was told to go: its workers leave",
        "node node-0 has left",
    ]
    with contextlib.closing(Cluster(cluster.folder / "alone")) as alone:
        alone.folder.mkdir()
        alone.begin("run", "--workers", 4, "--slots", 4, LOOP_SCRIPT, "--variant", "norm", "--steps", SCRIPT_STEPS)
        assert hashes(said) == hashes(alone.end())


def test_a_node_is_drained_and_then_the_job_is_stopped(cluster, small, runs):
    """Another node has room for its workers; nothing is lost, and the job goes on from where it was stopped."""
    options = ("--set", LONGER, "--set", "control.hang_s=200", "--set", "checkpoint.every=1000", "--resume", "auto")
    cluster.begin("train", small, "--slots", 3, *options)
    drained = cluster.join(3, 0)
    cluster.ran(3)
    with cluster.held(this_node().name):  # while processes are started: the job does not end meanwhile
        stays = cluster.join(3, 1)
        until(lambda: "takes part in job small" in cluster.said("node-1"), cluster.story, stays)
        draining = cluster.tell("drain", cluster.run_dir, "node-0")
        until(lambda: "the job is told: " in cluster.said("told"), cluster.story, draining)
    assert draining.wait(LIMIT_S) == 0, cluster.story()
    said = cluster.said("told")
    assert "the job is told: node node-0 is told that its workers are to leave: " in said
    assert said.endswith("node node-0 has left\n")
    assert drained.wait(LIMIT_S) == START_ELSEWHERE
    gone = {event.worker for event in cluster.events(Parted)}
    assert len(gone) == 3
    for worker in gone:
        cluster.came(worker)
    with cluster.held(this_node().name):
        assert "no node node-0; nodes: " in cluster.told("drain", cluster.run_dir, "node-0", code=2)
        stopping = cluster.tell("stop", cluster.run_dir)
        until(
            lambda: "the job is told: it makes a checkpoint, and ends" in cluster.said("told"), cluster.story, stopping
        )
    assert stopping.wait(LIMIT_S) == 0, cluster.story()
    assert cluster.head.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert stays.wait(LIMIT_S) == 0
    (made,) = {event.step for event in cluster.events(Checkpointed)}
    assert f"the checkpoint of step {made} is written; go on with" in cluster.said("head")
    assert not cluster.events(Detected)
    cluster.begin("train", small, "--slots", 6, *options)
    assert hashes(cluster.end()) == runs.healthy("small", (LONGER,)).weights_sha256


def test_a_spot_machine_is_taken_away(cluster, small, runs):
    with metadata_of("aws") as metadata:
        cluster.begin("train", small, "--slots", 4, "--set", LONGER, "--set", "control.hang_s=200")
        spot = cluster.join(2, 0, "--preempt", f"aws={metadata.url}")
        cluster.ran(3)
        metadata.taken = True
        assert spot.wait(LIMIT_S) == START_ELSEWHERE, cluster.story()
    said = cluster.said("node-0")
    assert "aws takes this machine away: it is to terminate at " in said
    assert "SIGTERM: the workers of this node leave between two steps" in said
    assert len({event.worker for event in cluster.events(Parted)}) == 2
    assert hashes(cluster.end()) == runs.healthy("small", (LONGER,)).weights_sha256
    assert not cluster.events(Detected)


def test_the_machine_where_the_job_was_begun_leaves_as_any_other(cluster, small, runs):
    """Others lead, with nothing lost; the same command takes part again, and is drained."""
    options = ("--set", LONGER, "--set", "control.hang_s=200", "--listen", "127.0.0.1", "--slots", 2)
    command = ("train", small, *options, "--resume", "auto", "--notice", "leave")
    cluster.begin(*command)
    agents = [cluster.join(3, number) for number in range(2)]
    cluster.stands_by("node-0", "node-1")
    cluster.ran(3)
    cluster.head.send_signal(signal.SIGTERM)
    assert cluster.head.wait(LIMIT_S) == START_ELSEWHERE, cluster.story()
    assert "the workers of this node have left; the job goes on" in cluster.said("head")
    until(lambda: len(cluster.events(CoordinatorReady)) == 2, cluster.story, agents[0])
    with cluster.held("node-0"):
        again = cluster.again("again", *command)
        until(lambda: "takes part in job small" in cluster.said("again"), cluster.story, again)
        nodes = json.loads(cluster.told("status", cluster.run_dir, "--format", "json"))["nodes"]
        (name,) = {node["name"] for node in nodes} - {"node-0", "node-1"}
        assert cluster.told("drain", cluster.run_dir, name).endswith(f"node {name} has left\n")
    assert again.wait(LIMIT_S) == START_ELSEWHERE
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0], cluster.story()
    assert not cluster.events(Detected)
    summary = json.loads((cluster.run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == runs.healthy("small", (LONGER,)).weights_sha256


ALONE = ("--set", "control.store=sqlite")
"""No coordinator stands by."""


def test_agents_end_with_their_workers_when_the_machine_of_the_only_coordinator_is_gone(cluster, small):
    cluster.begin("coordinator", small, *ALONE, "--set", "control.reattach_s=2")
    agent = cluster.join(6, 0)
    cluster.ran(3)
    workers = processes_below(agent)
    assert len(workers) >= 6
    for process in (*processes_below(cluster.head), cluster.head):
        process.kill()
    assert agent.wait(LIMIT_S) == 1
    assert "coordinator at 127.0.0.1" in cluster.said("node-0")
    until(lambda: not any(process.is_running() for process in workers), "the end of its workers")


def test_agents_take_part_in_the_next_attempt(cluster, small, runs):
    """The machine where the job was begun dies; the same command goes on, and nobody is left of the attempt before."""
    port = free_port()
    same = ("--listen", f"127.0.0.1:{port}", *ALONE, "--set", "checkpoint.every=2", "--resume", "auto")
    cluster.begin("coordinator", small, *same)
    agent = cluster.join(6, 0)
    cluster.ran(10)
    for process in (*processes_below(cluster.head), cluster.head):
        process.kill()
    cluster.head.wait(LIMIT_S)
    cluster.begin("coordinator", small, *same)
    said = cluster.end()
    assert "went on from the checkpoint" in said
    assert hashes(said) == runs.healthy("small", (STEPS,)).weights_sha256
    assert agent.wait(LIMIT_S) == 0
    assert "the job was begun anew" in cluster.said("node-0")


def test_who_cannot_take_part_is_told_why(cluster, small):
    cluster.begin("coordinator", small)
    wrong = cluster.folder / "wrong"
    wrong.write_text("not-the-token-of-this-job")
    address = cluster.invitation[:3]
    (cluster.run_dir / "job-id").rename(cluster.folder / "job-id")
    refused, elsewhere = (cluster.join(6, 0, *words) for words in (("--token-file", wrong), ()))
    assert [refused.wait(LIMIT_S), elsewhere.wait(LIMIT_S)] == [2, 2]
    assert "wrong or missing job token" in cluster.said("node-0")
    assert "expected a directory that all machines share" in cluster.said("node-1")
    assert "not-the-token-of-this-job" not in cluster.story()
    (cluster.folder / "job-id").rename(cluster.run_dir / "job-id")
    cluster.invitation = address
    nothing = cluster.join(6, 0)
    assert nothing.wait(LIMIT_S) == 2
    assert "expected a file with the job's token" in cluster.said("node-2")


def test_a_machine_that_computes_other_bits_is_refused(cluster, small, monkeypatch):
    cluster.begin("coordinator", small)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    other = cluster.join(6, 0)
    assert other.wait(LIMIT_S) == 2
    assert "all have to compute the same bits" in cluster.said("node-0")


@needs_networks
def test_the_machine_where_the_job_was_begun_dies(apart, small, runs):
    """Its coordinator and two workers with it: another one leads, on a node with room for the two.

    The same command, as somebody may start it again by itself, takes part in the job while that goes on, or is refused
    if it has no room for workers: one of its workers is stopped meanwhile. All agents have clocks of their own.
    """
    options = ("--set", LONGER, "--set", "control.insecure=true", "--set", "control.hang_s=200")
    apart.begin("train", small, "--listen", apart.networks.hub.host, "--slots", 2, *options)
    agents = [apart.join(slots, node, clock=an_hour_ahead()) for node, slots in enumerate((2, 4))]
    apart.stands_by("node-0", "node-1")
    apart.ran(3)
    for process in (*processes_below(apart.head), apart.head):
        process.kill()
    until(lambda: apart.events(Detected), apart.story)
    names = ("node-0", "node-1")
    stopped = psutil.Process(next(each.pid for each in apart.events(WorkerReady) if each.node in names))
    stopped.suspend()
    command = (small, "--listen", apart.networks.hub.host, "--resume", "auto", *options)
    assert apart.again("without", "coordinator", *command).wait(LIMIT_S) == 2, apart.story()
    assert "its job goes on, led by a coordinator on another machine" in apart.said("without")
    again = apart.again("again", "train", *command, "--slots", 2)
    until(lambda: "takes part in job small, with room for 2" in apart.said("again"), apart.story, again)
    follower = apart.followed()
    until(lambda: "running (led from another machine)" in apart.said("follower"), apart.story, follower)
    status = apart.status(node=1)
    nodes = {node["name"]: node["room"] for node in status["nodes"]}
    assert (status["workers"], nodes) == (6, {"node-0": 0, "node-1": 0, this_node().name: 2})
    lost = {event.worker for event in apart.events(Detected)}
    assert [{*each["workers"]} for each in status["failures"]] == [lost]
    assert len(status["alive"]) == 4, "those that come have no state yet"
    assert not lost & {*status["alive"]}
    stopped.resume()
    assert [each.wait(LIMIT_S) for each in (*agents, again)] == [0, 0, 0], apart.story()
    healthy = runs.healthy("small", (LONGER,))
    assert digest_run(apart.run_dir / "final").weights_sha256 == healthy.weights_sha256
    assert len({event.worker for event in apart.events(Detected)}) == 2
    summary = json.loads((apart.run_dir / "summary.json").read_text())
    told = ("weights_sha256", "state_sha256", "final_loss", "steps", "reasons")
    assert [summary[key] for key in told] == [getattr(healthy, key) for key in told], "whoever led wrote it"
    assert follower.wait(LIMIT_S) == 0
    assert apart.said("follower").endswith("ended: done at step 260\n")
    check_told(apart)


def check_told(cluster):
    """The logs of all machines make one story, by one clock, though theirs are an hour apart."""
    timed = read_story(cluster.run_dir)
    ended = [event.outcome for _, event in timed if isinstance(event, JobEnded)]
    assert ended == ["done"], "once, though each agent has said it"
    told = report(timed)
    assert ([step for step, _ in told.commits], told.missing) == (list(range(260)), ""), "whoever made them"
    assert timed[-1][0] - timed[0][0] < HOUR_S / 2
    own = list(cluster.run_dir.glob("node-*/events-*.jsonl"))
    assert own, "whoever has a clock of its own has a log of its own"
    check_executed(cluster.run_dir)


@needs_networks
def test_the_machine_where_the_job_was_begun_is_cut_off_from_all_others_and_the_store(apart, small, runs, store_apart):
    """Another coordinator leads; what the first one decides is none. Back again, it has room for workers once more."""
    options = ("--set", LONGER, "--set", "control.insecure=true", "--set", f"control.store={store_apart.url}")
    apart.begin("train", small, "--listen", apart.networks.node(0).host, "--slots", 2, *options, node=0)
    agents = [apart.join(slots, node) for node, slots in ((1, 2), (2, 4))]
    apart.stands_by("node-0", "node-1")
    apart.ran(3)
    apart.networks.cut(0)
    until(lambda: len(apart.events(Detected)) == 2, apart.story, apart.head)
    ready = apart.events(CoordinatorReady)
    assert len({event.pid for event in ready}) == 2
    apart.networks.heal(0)
    until(lambda: "it takes part anew" in apart.said("head"), apart.story, apart.head)
    said = apart.end()
    assert [each.wait(LIMIT_S) for each in agents] == [0, 0], apart.story()
    assert hashes(said) == runs.healthy("small", (LONGER,)).weights_sha256
    assert len(apart.events(Detected)) == 2, "nobody else was held to be gone"


@needs_networks
def test_who_alone_reaches_the_store_goes_on_and_all_others_come_again(apart, small, runs):
    """The machine where the job was begun is cut off from all others, but not from the folder of decisions."""
    options = ("--set", LONGER, "--set", "control.insecure=true")
    apart.begin("train", small, "--listen", apart.networks.node(0).host, "--slots", 2, *options, node=0)
    agents = [apart.join(2, node) for node in (1, 2)]
    apart.stands_by("node-0", "node-1")
    apart.ran(3)
    apart.networks.cut(0)
    until(lambda: len(apart.events(Detected)) == 4, apart.story, apart.head)
    apart.networks.heal(0)
    for name in ("node-0", "node-1"):
        until(lambda name=name: "it takes part anew" in apart.said(name), apart.story, apart.head)
    said = apart.end()
    assert [each.wait(LIMIT_S) for each in agents] == [0, 0], apart.story()
    assert hashes(said) == runs.healthy("small", (LONGER,)).weights_sha256
    assert len(apart.events(CoordinatorReady)) == 1


@pytest.mark.parametrize("begun", [True, False])
def test_who_ends_the_job_where_it_was_begun_ends_it_everywhere(cluster, small, begun):
    """No coordinator of an agent goes on with it, whether all workers were there or not."""
    cluster.begin("train", small, "--slots", 2, "--set", LONGER)
    agent = cluster.join(4 if begun else 3, 0)
    cluster.stands_by("node-0")
    if begun:
        cluster.ran(3)
    workers = processes_below(agent)
    cluster.head.send_signal(signal.SIGINT)
    assert cluster.head.wait(LIMIT_S) == 128 + signal.SIGINT
    assert agent.wait(LIMIT_S) == 93
    assert "the job has ended: interrupted" in cluster.said("node-0")
    until(lambda: not any(process.is_running() for process in workers), "the end of its workers")


def test_a_coordinator_that_cannot_live_on_an_agents_machine_costs_nothing_but_itself(cluster, small, runs):
    """It is killed as often as it is started, until it is not started again."""
    cluster.begin("train", small, "--slots", 2, "--set", LONGER)
    agent = cluster.join(4, 0)
    cluster.stands_by("node-0")
    port = int(re.search(r"stands by at [\d.]+:(\d+)", cluster.said("node-0"))[1])

    def given_up():
        for process in processes_below(agent):
            if _listens(process, port):
                process.kill()
        return "no coordinator stands by here any more: the coordinator died 6 times" in cluster.said("node-0")

    until(given_up, cluster.story, cluster.head)
    said = cluster.end()
    assert agent.wait(LIMIT_S) == 0
    assert hashes(said) == runs.healthy("small", (LONGER,)).weights_sha256
    assert not cluster.events(Detected)
