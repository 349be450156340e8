"""Real network namespaces: nodes reach each other, a cut link loses what is sent, and nothing stays behind."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.networks import in_thread, inside, needs_networks
from tests.waiting import LIMIT_S, until

from holdfast.errors import ConfigError, InternalError
from holdfast.runtime.isolation import Networks, wait_until_cut

SILENCE_S = 0.5


pytestmark = needs_networks


def links(namespace):
    shown = inside(namespace, lambda: subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True))
    return {line.split(": ")[1].partition("@")[0] for line in shown.stdout.splitlines()}


class Link:
    """A connection from one namespace to a listener in another."""

    def __init__(self, stack, listening, calling):
        self._stack = stack
        self._calling = calling
        listener = stack.enter_context(inside(listening, lambda: socket.create_server((listening.host, 0))))
        self._address = listener.getsockname()
        self.near = self.connect()
        self.far = stack.enter_context(listener.accept()[0])
        self.far.settimeout(LIMIT_S)

    def connect(self, limit_s=LIMIT_S):
        return self._stack.enter_context(
            inside(self._calling, lambda: socket.create_connection(self._address, timeout=limit_s))
        )

    def carries(self, data):
        self.near.sendall(data)
        return self.far.recv(len(data)) == data

    def is_silent(self):
        """Nothing arrives, and neither end is told that anything is wrong."""
        self.near.sendall(b"lost")
        self.far.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            self.far.recv(4)
        self.far.settimeout(LIMIT_S)
        return True


@pytest.fixture
def networks():
    with Networks(3) as made:
        yield made


@pytest.fixture
def link():
    with contextlib.ExitStack() as stack:
        yield lambda listening, calling: Link(stack, listening, calling)


def test_nodes_and_the_hub_reach_each_other(networks, link):
    places = [networks.hub, networks.node(0), networks.node(2)]
    assert [place.host for place in places] == ["10.77.0.1", "10.77.0.2", "10.77.0.4"]
    for listening in places:
        for calling in places:
            assert link(listening, calling).carries(b"hello")


def test_a_process_in_a_node_is_cut_off_until_the_link_is_healed(networks, link):
    there = link(networks.node(1), networks.node(0))
    others = link(networks.node(2), networks.hub)
    assert there.carries(b"before")
    networks.cut(1)
    assert there.is_silent()
    with pytest.raises(TimeoutError):
        there.connect(SILENCE_S)
    assert others.carries(b"all the while")
    networks.heal(1)
    assert there.far.recv(4) == b"lost", "the connection stood all the time"
    assert there.carries(b"after")


def test_a_node_can_wait_until_it_is_cut(networks):
    until(lambda: is_up(networks.node(0)))  # the kernel says so a little after it was made
    with pytest.raises(InternalError, match=r"still up after 0\.1 s"):
        inside(networks.node(0), lambda: wait_until_cut(0.1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inside, networks.node(0), wait_until_cut)
        networks.cut(1)
        assert not waiting.done(), "that was another node"
        networks.cut(0)
        assert waiting.result(LIMIT_S) is None


def is_up(node):
    try:
        inside(node, lambda: wait_until_cut(0.0))
    except InternalError:
        return True
    return False


def test_the_hub_is_cut_off_from_the_node_too(networks, link):
    control = link(networks.hub, networks.node(1))
    networks.cut(1)
    assert control.is_silent()
    assert link(networks.node(1), networks.node(1)).carries(b"within the node")


def test_nothing_of_it_is_on_the_host(networks):
    before = set(os.listdir("/sys/class/net"))
    with Networks(2) as more:
        assert set(os.listdir("/sys/class/net")) == before
        assert links(more.node(0)) == {"lo", "eth0"}
        assert links(more.hub) == {"lo", "bridge", "link0", "link1"}
        listener = inside(more.hub, lambda: socket.create_server((more.hub.host, 0)))
        port = f":{listener.getsockname()[1]:04X} "
        assert port not in Path("/proc/net/tcp").read_text()
        assert port in inside(more.hub, lambda: Path("/proc/thread-self/net/tcp").read_text())
        listener.close()


def test_jobs_do_not_see_each_other(networks, link):
    with Networks(3) as others:
        assert others.hub.host == networks.hub.host
        theirs = inside(others.hub, lambda: socket.create_server((others.hub.host, 5000)))
        ours = inside(networks.hub, lambda: socket.create_server((networks.hub.host, 5000)))
        others.cut(0)
        assert link(networks.hub, networks.node(0)).carries(b"ours")
        theirs.close()
        ours.close()


def test_a_socket_in_a_folder_however_long_its_name_leads_from_outside_into_the_hub(networks, tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    path = Path(networks.open_door(folder).removeprefix("unix:"))
    assert path.parent.samefile(folder)

    def listen():
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        return listener

    with inside(networks.hub, listen) as listener, socket.socket(socket.AF_UNIX) as ours:
        ours.connect(str(path))
        with listener.accept()[0] as theirs:
            ours.sendall(b"hello")
            assert theirs.recv(5) == b"hello"


def test_close_removes_everything(tmp_path):
    open_before = namespaces_open()
    networks = Networks(2)
    path = Path(networks.open_door(tmp_path).removeprefix("unix:"))
    path.touch()
    with kept(networks.hub) as hub:
        networks.close()
        networks.close()
        assert list(tmp_path.iterdir()) == []
        until(lambda: links(hub) == {"lo", "bridge"})  # a node's end takes the hub's end with it when the node is gone
        with pytest.raises(InternalError, match="network namespace"):
            networks.hub.enter()
    assert namespaces_open() == open_before


@contextlib.contextmanager
def kept(namespace):
    """Holds a namespace open, whatever becomes of who made it."""
    descriptor = os.open(namespace.path, os.O_RDONLY)
    try:
        yield type(namespace)(path=f"/proc/self/fd/{descriptor}", host=namespace.host)
    finally:
        os.close(descriptor)


MAKER = """
import threading
from holdfast.runtime.isolation import Networks
networks = Networks(2)
print(networks.hub.path, networks.hub.host, flush=True)
threading.Event().wait()
"""


def test_no_namespace_is_left_when_who_made_it_is_killed(networks, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", MAKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as maker:
        path, host = maker.stdout.readline().split()
        with kept(type(networks.hub)(path=path, host=host)) as hub:
            assert links(hub) == {"lo", "bridge", "link0", "link1"}
            os.kill(maker.pid, signal.SIGKILL)
            until(lambda: links(hub) == {"lo", "bridge"})


def namespaces_open():
    """The network namespaces that this process keeps open; other threads open and close files meanwhile."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("net:"):
                found.add((name, target))
    return found


def test_a_failure_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    tool = tmp_path / "ip"
    tool.write_text("#!/bin/sh\necho 'RTNETLINK answers: Operation not supported' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_before = namespaces_open()
    with pytest.raises(ConfigError, match="virtual Ethernet and a bridge; `ip` failed: RTNETLINK answers"):
        Networks(2)
    assert namespaces_open() == open_before
    assert os.listdir(tmp_path) == ["ip"]


def test_a_missing_tool_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the tool `ip`; install iproute2"):
        Networks(2)


def test_another_system_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        Networks(2)


def test_more_nodes_than_addresses_are_refused():
    with pytest.raises(ConfigError, match="at most 65533 nodes; this job has 65534"):
        Networks(65534)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def give_up_capabilities():
    """The calling thread, and those that it starts, may no more than an ordinary user."""
    libc = ctypes.CDLL(None, use_errno=True)
    none = (ctypes.c_uint32 * 6)()
    assert libc.capset(ctypes.byref(_Header(version=0x20080522, pid=0)), none) == 0


def test_without_root_it_says_so():
    def attempt():
        give_up_capabilities()
        with pytest.raises(ConfigError, match=r"needs root \(CAP_SYS_ADMIN\): Operation not permitted"):
            Networks(2)

    in_thread(attempt)
