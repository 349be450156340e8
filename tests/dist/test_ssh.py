"""A job on machines that a real sshd lets us in to: three addresses of this one."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launched import LONGER, Launched, write_job
from tests.ports import free_port
from tests.waiting import until

from holdfast.cli.main import main

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(SSHD is None, reason="needs an sshd; Debian: apt-get install openssh-server"),
]

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


class Machines(Launched):
    """Those that run one job."""

    def story(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def said_by(self, host):
        path = self.folder / f"small-{host}.log"
        return path.read_text() if path.exists() else ""

    def close(self):
        super().close()
        for host in HOSTS:
            self.lose(host)


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Launches the job of this folder; returns what that says."""
    monkeypatch.chdir(tmp_path)
    port = free_port()
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
    write_job()
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
        until(lambda: len(machines.lost()) == 2, machines.story)
        said = launch()
        assert f"{first}: runs already" in said
        assert f"{other}: runs already" in said
        until(lambda: "takes part in job small" in machines.said_by(lost), machines.story)
    assert machines.summary()["weights_sha256"] == runs.healthy("small", (LONGER,)).weights_sha256
    until(lambda: not any(map(machines.processes_of, HOSTS)), machines.story)
