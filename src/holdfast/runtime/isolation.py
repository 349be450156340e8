"""Nodes in network namespaces of their own, on this machine, so that a node's link can be cut for real.

    hub (coordinator)   bridge 10.77.0.1 --- link0 ... linkN
                                               |         |
    nodes (workers)                          eth0 ... eth0    10.77.0.2, 10.77.0.3, ...

No namespace has a link to the host: nothing of a job listens on the host's own addresses, and several jobs can use the
same addresses side by side. The agent stays outside and reaches the coordinator over a socket in the file system.

The namespaces have no names. They live as long as the agent holds them open or a process is in them, so none is left
behind, however the agent ends. The socket is in the run directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from holdfast.errors import ConfigError, InternalError

__all__ = ["Namespace", "Networks", "wait_until_cut"]

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40
_INTERFACE = "16sh22x"  # struct ifreq: the name, then flags
_POLL_S = 0.001
_SOCKET = "control.sock"
_SUBNET = ipaddress.IPv4Network("10.77.0.0/16")
_HUB = 1  # host numbers within the subnet
_FIRST_NODE = 2
MAX_NODES = _SUBNET.num_addresses - _FIRST_NODE - 1
_NEEDS = "faults of kind partition run every node in a network namespace of its own, which needs"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A network namespace, as a process is told of it that is to move there.

    Attributes:
        path: the file that stands for it, as long as the agent lives.
        host: the address that a process has there, besides 127.0.0.1.
    """

    path: str
    host: str

    def enter(self) -> None:
        """Moves the calling process there; it must have one thread and no socket yet.

        Raises:
            InternalError: it is gone, or this process may not.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InternalError(f"network namespace {self.path}: {error.strerror}") from None
        try:
            _move_to(descriptor)
        finally:
            os.close(descriptor)


class Networks:
    """The namespaces of one job; a context manager that removes them.

    Args:
        num_nodes: how many nodes, numbered from 0.

    Raises:
        ConfigError: this machine or user cannot have network namespaces; says what is missing. Nothing is left.

    Attributes:
        hub: where the coordinator belongs.
    """

    def __init__(self, num_nodes: int) -> None:
        if num_nodes > MAX_NODES:
            raise ConfigError(f"{_NEEDS} at most {MAX_NODES} nodes; this job has {num_nodes}")
        self._ip_tool = _find_tool()
        with contextlib.ExitStack() as stack:
            self._hub = _open_namespace(stack)
            self._nodes = tuple(_open_namespace(stack) for _ in range(num_nodes))
            self.hub = _described(self._hub, _HUB)
            self._connect()
            self._stack = stack.pop_all()

    def __enter__(self) -> Networks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def node(self, index: int) -> Namespace:
        """Where the workers of a node belong."""
        return _described(self._nodes[index], _FIRST_NODE + index)

    def open_door(self, folder: Path) -> str:
        """Returns an address for gRPC, in a private folder, where the coordinator can be reached from outside.

        It is short, however long the folder's name is, and good for as long as the agent lives.
        """
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._stack.callback(os.close, descriptor)
        self._stack.callback((folder / _SOCKET).unlink, missing_ok=True)
        return f"unix:{_path(descriptor)}/{_SOCKET}"

    def cut(self, node: int) -> None:
        """Takes a node's link down: what is sent to or from it is lost, without a word to either end."""
        self._ip(self._hub, [f"link set link{node} down"])

    def heal(self, node: int) -> None:
        """Takes a node's link up again; connections that stand go on."""
        self._ip(self._hub, [f"link set link{node} up"])

    def part(self, node: int, other: int) -> None:
        """Loses what a node sends to another one, so that the two cannot talk; all others reach both."""
        self._ip(self._nodes[node], [f"route add blackhole {_SUBNET[_FIRST_NODE + other]}"])

    def close(self) -> None:
        """Lets go of the namespaces; the kernel removes each once no process is in it. May be repeated."""
        self._stack.close()

    def _connect(self) -> None:
        """Makes the hub's bridge and joins each node to it by a pair of virtual Ethernet ends."""
        hub = ["link set lo up", "link add bridge type bridge", f"address add {_address(_HUB)} dev bridge"]
        for index, node in enumerate(self._nodes):
            hub.append(f"link add link{index} type veth peer name eth0 netns {_path(node)}")
            hub.append(f"link set link{index} master bridge up")
        self._ip(self._hub, [*hub, "link set bridge up"])
        for index, node in enumerate(self._nodes):
            address = _address(_FIRST_NODE + index)
            self._ip(node, ["link set lo up", f"address add {address} dev eth0", "link set eth0 up"])

    def _ip(self, namespace: int, commands: list[str]) -> None:
        """Runs commands of the tool ``ip`` in a namespace."""
        given = "\n".join(commands)

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run([self._ip_tool, "-batch", "-"], input=given, capture_output=True, text=True)

        done = _inside(namespace, run)
        if done.returncode != 0:
            raise ConfigError(f"{_NEEDS} virtual Ethernet and a bridge; `ip` failed: {done.stderr.strip()}")


def wait_until_cut(limit_s: float = 10.0) -> None:
    """Returns when the link of the node that this thread is in is down.

    Args:
        limit_s: seconds after which it ought to be.

    Raises:
        InternalError: it is still up by then.
    """
    deadline = time.monotonic() + limit_s
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        while _is_up(asking):
            if time.monotonic() > deadline:
                raise InternalError(f"the link that was to be cut is still up after {limit_s} s")
            time.sleep(_POLL_S)


def _is_up(asking: socket.socket) -> bool:
    answer = fcntl.ioctl(asking, _SIOCGIFFLAGS, struct.pack(_INTERFACE, b"eth0", 0))
    return bool(struct.unpack(_INTERFACE, answer)[1] & _IFF_RUNNING)


def _find_tool() -> str:
    if sys.platform != "linux":
        raise ConfigError(f"{_NEEDS} Linux")
    found = shutil.which("ip")
    if found is None:
        raise ConfigError(f"{_NEEDS} the tool `ip`; install iproute2")
    return found


def _described(namespace: int, number: int) -> Namespace:
    return Namespace(path=_path(namespace), host=str(_SUBNET[number]))


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _address(number: int) -> str:
    return f"{_SUBNET[number]}/{_SUBNET.prefixlen}"


def _open_namespace(stack: contextlib.ExitStack) -> int:
    """Makes a namespace; returns a descriptor that keeps it, closed with the stack."""
    descriptor = _in_thread(_make_namespace)
    stack.callback(os.close, descriptor)
    return descriptor


def _make_namespace() -> int:
    """Leaves the calling thread in a new namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise ConfigError(f"{_NEEDS} root (CAP_SYS_ADMIN): {os.strerror(ctypes.get_errno())}")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _inside(namespace: int, work: Callable[[], _T]) -> _T:
    """Does something in a namespace; the process itself stays where it is."""

    def move_and_work() -> _T:
        _move_to(namespace)
        return work()

    return _in_thread(move_and_work)


def _in_thread(work: Callable[[], _T]) -> _T:
    """Namespaces are a thread's own: does something in a thread that ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _move_to(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise InternalError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")
