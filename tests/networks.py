"""Network namespaces, and clocks of their own, for tests that make some."""

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

__all__ = ["HOUR_S", "an_hour_ahead", "in_thread", "inside", "needs_networks"]

HOUR_S = 3600

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


def may_make_networks():
    """Whether this process has the capabilities, and the machine the tool, that the thing under test asks for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    needed = 1 << CAP_NET_ADMIN | 1 << CAP_SYS_ADMIN
    return effective & needed == needed and shutil.which("ip") is not None


needs_networks = pytest.mark.skipif(not may_make_networks(), reason="needs root (CAP_SYS_ADMIN) and `ip` (iproute2)")


def an_hour_ahead():
    """What a command has in front that is to run by a clock of its own, an hour ahead of this one."""
    words = ("unshare", "--time", "--monotonic", str(HOUR_S), "--boottime", str(HOUR_S))
    shown = subprocess.run(
        [*words, sys.executable, "-c", "import time; print(time.monotonic())"], stdout=subprocess.PIPE
    )
    if shown.returncode or float(shown.stdout) < time.monotonic() + HOUR_S / 2:
        pytest.skip(
            "needs `unshare --time` (util-linux) and a kernel that moves a process to another clock as it begins"
        )
    return words


def in_thread(work):
    """Does something in a thread of its own, whose namespace is its own, too."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(LIMIT_S)


def inside(namespace, work):
    """Does something in a namespace; sockets and threads that it makes stay there."""

    def move_and_work():
        namespace.enter()
        return work()

    return in_thread(move_and_work)
