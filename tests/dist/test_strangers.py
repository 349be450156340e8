"""Strangers on the same machine: what a run leaves for them is nothing, and what they do to it costs nothing."""

import contextlib
import random
import socket
import stat
import threading
from collections import Counter, deque
from pathlib import Path

import pytest

from holdfast.telemetry.events import StepOps, WorkerReady, read_events

pytestmark = pytest.mark.dist

PACE = "slow:2.0@1:6x"
LISTENS = "0A"
GREETING = b"holdfast link 1\n"
MOST_MORE = 32 << 20


def test_what_a_run_writes_is_for_its_user_alone(runs):
    directory = runs.healthy("gpt").run_dir
    modes = {path.relative_to(directory): stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
    assert len(modes) > 5
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {path: mode for path, mode in modes.items() if mode not in (0o600, 0o700)} == {}


class Crowd:
    """Calls at every port of every worker of a run, from its first moment on, over and over again.

    Attributes:
        calls: how many were made, by port and by how many workers were ready then.
    """

    def __init__(self, run_dir):
        self._log = run_dir / "events.jsonl"
        self._random = random.Random(0)
        self._silent = deque(maxlen=600)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._call_all, daemon=True)
        self.calls = Counter()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        for connection in self._silent:
            connection.close()

    def _call_all(self):
        while not self._over.wait(0.03):
            processes = self._processes()
            for port in {port for pid in processes for port in _ports(pid)}:
                for said in (b"", GREETING, self._random.randbytes(100)):
                    with contextlib.suppress(OSError):  # it is gone meanwhile
                        self._call(port, said)
                        self.calls[port, len(processes)] += 1

    def _processes(self):
        if not self._log.exists():
            return []
        return [event.pid for _, event in read_events(self._log) if isinstance(event, WorkerReady)]

    def _call(self, port, said):
        connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
        connection.sendall(said)
        if len(self._silent) == self._silent.maxlen:
            self._silent[0].close()
        self._silent.append(connection)


def _ports(pid):
    """Where a process listens."""
    own, rows = set(), []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                own.add(str(link.readlink()))
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


def most_memory(run_dir):
    return max(event.memory for _, event in read_events(run_dir / "events.jsonl") if isinstance(event, StepOps))


def test_strangers_at_every_port_disturb_no_build_no_step_no_recovery_and_no_join(runs):
    """The generations of a kill and of a join are built while they call; nobody but the killed worker is lost."""
    healthy, folder = runs.healthy("small"), runs.folder()
    with Crowd(folder) as crowd:
        runs.survives("small", PACE, "kill:1.1@8:backward", "join:1.1@16", run_dir=folder)
    assert len({port for port, _ in crowd.calls}) >= 7, "one port of every process, the one that came included"
    assert len({port for port, ready in crowd.calls if ready <= 6}) >= 6, "before the join"
    assert len({port for port, ready in crowd.calls if ready > 6}) >= 6, "behind it"
    assert most_memory(folder) < most_memory(healthy.run_dir) + MOST_MORE
