"""Shared by all tests: places for blobs (folders, a small disk, S3), an etcd, and how long a test may take."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import boto3
import pytest
import torch
from hypothesis import settings
from tests.happened import happened, logs_since
from tests.networks import inside
from tests.ports import free_port
from tests.waiting import LIMIT_S, until

from holdfast.control.chain.etcd import Etcd
from holdfast.errors import StorageError

settings.register_profile("untimed", deadline=None)  # how long one example takes says more of the machine
settings.load_profile("untimed")


def pytest_configure():
    """Whoever started the tests may have them ignore SIGINT, as a shell does in the background; no job is to."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # `make mutate` runs without that plugin
def pytest_xdist_auto_num_workers():
    """``-n auto``: one process for each processor, and one for every two, as some tests wait."""
    processors = len(os.sched_getaffinity(0))
    return processors + processors // 2


def pytest_collection_finish():
    """What was imported so far stays: looking for garbage in it takes a tenth of a second, again and again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run what `make test` leaves out, too: see docs/testing.md")


def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU are skipped where there is none; those of a soak are left out of every other run."""
    soaks = [] if config.getoption("--soak") else [item for item in items if item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=soaks)
    items[:] = [item for item in items if item not in soaks]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU that it can use"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails shows what its runs wrote down."""
    report = yield
    if call.when == "call" and report.failed and "tmp_path_factory" in item.funcargs:
        with contextlib.suppress(OSError):  # its processes may still move their files
            for log in logs_since(item.funcargs["tmp_path_factory"].getbasetemp(), call.start):
                report.sections.append((f"what happened in {log.parent}", happened(log)))
    return report


LONG_S = {"unit": 5.0, "dist": 25.0}
"""How long a test of a folder may take on two quiet cores before it is named at the end: it holds everybody up."""


def pytest_terminal_summary(terminalreporter, config):
    """Names the tests that take longer than their folder's: to be made shorter, not to be red on a slow machine."""
    long = [report for report in terminalreporter.getreports("passed") if report.duration > _long_s(report.nodeid)]
    if long:
        terminalreporter.section("longer than a test of their folder should take")
    for report in sorted(long, key=lambda report: -report.duration):
        terminalreporter.write_line(f"{report.duration:7.1f} s of {_long_s(report.nodeid):g}  {report.nodeid}")


def _long_s(name):
    """The limit of a test by its folder; the name is relative to the root, as ``tests/unit/...``."""
    return LONG_S.get(Path(name).parts[1], float("inf"))


SERVER = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
moto, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

def one_at_a_time(environ, start):
    with lock:  # moto looks whether an object is there, then makes it: of two requests S3 would grant one, moto both
        return moto(environ, start)

server = make_server("127.0.0.1", 0, one_at_a_time, True, request_handler=MotoRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("%s:%d" % server.server_address[:2], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_endpoint():
    """The address of a server that ends with the tests."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield "http://" + process.stdout.readline().decode().strip()
    finally:
        process.communicate(timeout=LIMIT_S)


@pytest.fixture
def s3_environment(s3_endpoint):
    """What tells AWS's tools to speak to our server."""
    return {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "no_proxy": "127.0.0.1",
    }


@pytest.fixture
def bucket(s3_environment, monkeypatch):
    """The url of a new bucket's prefix."""
    for key, value in s3_environment.items():
        monkeypatch.setenv(key, value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    client.close()
    return f"s3://{name}/some/prefix"


@pytest.fixture(params=["folder", "s3"])
def url(request, tmp_path: Path) -> str:
    """A place for blobs that is empty."""
    return str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("bucket")


@pytest.fixture
def make_disk(tmp_path: Path):
    """Makes a small file system of its own: a function from its size, as mount takes it, to its folder."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    made = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk-{len(made)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class EtcdServer:
    """One server with its data in ``folder``; in a network of its own, if a namespace is given."""

    def __init__(self, folder, namespace=None):
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed; Debian: apt-get install etcd-server")
        self._folder, self.port, self._peer_port = folder, free_port(), free_port()
        self._host = "127.0.0.1" if namespace is None else namespace.host
        self._namespace = namespace
        self.url = f"etcd://{self._host}:{self.port}/test"
        self.etcd = Etcd(host=self._host, port=self.port)
        self.start()

    def start(self, *more):
        """Starts it, with ``more`` flags."""
        client, peer = f"http://{self._host}:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        there = [] if self._namespace is None else ["nsenter", f"--net={self._namespace.path}"]
        flags = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        flags += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        with (self._folder / "etcd.log").open("ab") as log:
            command = [*there, "etcd", "--data-dir", str(self._folder / "data"), "--log-level", "error", *flags, *more]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        log = self._folder / "etcd.log"
        until(self.answers, lambda: f"the first answer of etcd, which says {log.read_text()!r},", self._process)

    def answers(self):
        def ask():
            return self.etcd.call("maintenance/status", {})

        try:
            return bool(ask() if self._namespace is None else inside(self._namespace, ask))
        except StorageError:
            return False

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory):
    """The url of an etcd that lives as long as the tests; each takes a prefix of its own."""
    server = EtcdServer(tmp_path_factory.mktemp("shared-etcd"))
    yield server.url
    server.kill()


@pytest.fixture
def etcd_server(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


class PowerCuts:
    """What is synchronised, with its size then, and named, in order; everything is really done, too."""

    def __init__(self, monkeypatch):
        self._synchronise = os.fsync
        self._done = []
        monkeypatch.setattr(os, "fsync", self._noted_sync)
        for name in ("replace", "link"):
            monkeypatch.setattr(os, name, partial(self._noted_name, getattr(os, name)))

    def _noted_sync(self, descriptor):
        self._synchronise(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._done.append(("sync", path, os.fstat(descriptor).st_size))

    def _noted_name(self, give, source, target, **how):
        give(source, target, **how)
        self._done.append(("name", Path(source), Path(target)))

    def spare(self, path):
        """Whether a file's bytes were on the disk before it got its name, and the name is there by now."""
        at = max(i for i, (what, _, target) in enumerate(self._done) if (what, target) == ("name", path))
        content = ("sync", self._done[at][1], path.stat().st_size) in self._done[:at]
        name = any((what, where) == ("sync", path.parent) for what, where, _ in self._done[at:])
        return content and name


@pytest.fixture
def power_cuts(monkeypatch):
    """Tells whether what is written from now on would survive one."""
    return PowerCuts(monkeypatch)
