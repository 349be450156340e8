"""A job on machines that a real sshd lets us in to: three addresses of this one."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.dist.conftest import JOBS
from tests.dist.test_agents import Cluster
from tests.waiting import until

from holdfast import parse_job
from holdfast.cli.main import main
from holdfast.config.load import dump_job
from holdfast.telemetry.events import Detected

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(SSHD is None, reason="needs an sshd; Debian: apt-get install openssh-server"),
]

LONGER = "train.steps=260"
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SERVER = """
Port {port}
ListenAddress 0.0.0.0
HostKey {folder}/host
AuthorizedKeysFile {folder}/own.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
SetEnv PYTHONPATH={path}
"""
CLIENT = """
Port {port}
User {user}
IdentityFile {folder}/own
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
LogLevel ERROR
"""


class Machines(Cluster):
    """Those that run one job."""

    def __init__(self, folder):
        super().__init__(folder)
        self.run_dir = folder / "runs" / "small"

    def events(self, kind):
        return super().events(kind) if (self.run_dir / "events.jsonl").exists() else []

    def story(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def said_by(self, host):
        path = self.folder / f"small-{host}.log"
        return path.read_text() if path.exists() else ""

    def processes_of(self, host):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.cwd() == str(self.folder)
                if ours and process.environ().get("HOLDFAST_NODE") == host:
                    found.append(process)
        return found

    def lose(self, host):
        """It has no power any more."""
        while found := self.processes_of(host):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def close(self):
        super().close()
        for host in HOSTS:
            self.lose(host)


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Launches the job of this folder; returns what that says."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("host", "own"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], check=True)
    known = {
        "port": port,
        "folder": tmp_path,
        "user": getpass.getuser(),
        "path": os.pathsep.join(filter(None, sys.path)),
    }
    Path("server").write_text(SERVER.format(**known))
    Path("client").write_text(CLIENT.format(**known))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # Debian's service makes it, too
    job = parse_job(JOBS["small"], (LONGER, "control.hang_s=200", "checkpoint.every=100"))
    Path("small.yaml").write_text(dump_job(job))
    with (
        Path("sshd.log").open("w") as out,
        subprocess.Popen([SSHD, "-D", "-e", "-f", tmp_path / "server"], stderr=out) as sshd,
    ):
        until(lambda: "Server listening" in Path("sshd.log").read_text(), Path("sshd.log").read_text, sshd)

        def run():
            words = ("--hosts", ",".join(HOSTS), "--slots", "2", "--option=-F", f"--option={tmp_path}/client")
            capfd.readouterr()
            assert main(["launch", "--on", "ssh", *words, "small.yaml"]) == 0, capfd.readouterr()
            return capfd.readouterr().out

        yield run
        sshd.kill()


@pytest.fixture
def machines(tmp_path):
    with contextlib.closing(Machines(tmp_path)) as made:
        yield made


def test_a_machine_is_lost_and_has_power_again(launch, machines, runs):
    said = launch()
    assert [f"{host}: started, and writes into small-{host}.log" in said for host in HOSTS] == [True] * 3
    machines.ran(3)
    first, lost, other = HOSTS
    with machines.held(first):
        machines.lose(lost)
        until(lambda: len({event.worker for event in machines.events(Detected)}) == 2, machines.story)
        said = launch()
        assert f"{first}: runs already" in said
        assert f"{other}: runs already" in said
        until(lambda: "takes part in job small" in machines.said_by(lost), machines.story)
    until((machines.run_dir / "summary.json").exists, machines.story)
    summary = json.loads((machines.run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == runs.healthy("small", (LONGER,)).weights_sha256
    until(lambda: not any(map(machines.processes_of, HOSTS)), machines.story)
