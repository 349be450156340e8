"""Shared by all tests: an etcd of a test's own, on loopback, that can be killed and started again."""

import shutil
import socket
import subprocess
import time

import pytest

from holdfast.control.etcd import Etcd
from holdfast.errors import StorageError

LIMIT_S = 30.0


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class EtcdServer:
    """One server with its data in ``folder``."""

    def __init__(self, folder):
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed; Debian: apt-get install etcd-server")
        self._folder, self.port, self._peer_port = folder, _free_port(), _free_port()
        self.url = f"etcd://127.0.0.1:{self.port}/test"
        self.etcd = Etcd(host="127.0.0.1", port=self.port)
        self.start()

    def start(self):
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        flags = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        flags += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        with (self._folder / "etcd.log").open("ab") as log:
            command = ["etcd", "--data-dir", str(self._folder / "data"), "--log-level", "error", *flags]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + LIMIT_S
        while not self.answers():
            assert time.monotonic() < until, (self._folder / "etcd.log").read_text()
            time.sleep(0.05)

    def answers(self):
        try:
            return bool(self.etcd.call("maintenance/status", {}))
        except StorageError:
            return False

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def etcd_server(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()
