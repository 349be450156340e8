"""Processes forked from a server of our own, which has loaded whatever takes long to import.

Python has one fork server per program, and what it loads is settled when it is first used. Were ours the same, then in
a program that had used it before, for a data loader say, each of our processes would import torch for itself, seconds
of CPU time for every one. Python also lets every such process run the program's main module again, as nothing of ours
needs: a job names its code by module or file. And it waits for its server without limit, whatever that does.

Ours ends with the thread that started it, and with it all that were forked from it, even stopped ones: the kernel sees
to that. It and each process forked from it have sessions of their own, so that what is sent to a whole group of
processes, as by a terminal, a batch system or ``timeout``, reaches the agent alone. What such a process leaves behind
when it ends becomes a child of the server, where it is found.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import popen_forkserver, process, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, set_spawning_popen
from multiprocessing.forkserver import read_signed
from multiprocessing.process import BaseProcess
from typing import Any

from holdfast.errors import ConfigError, InternalError, describe_exit
from holdfast.parent import PR_SET_PDEATHSIG, end_with
from holdfast.runtime.hardening import harden, outlast_readers
from holdfast.runtime.node.kin import Kin, below, end_all, look_at

__all__ = ["FORKS", "SERVER", "ForkServer", "ForkedProcess", "Patience", "is_gone"]

_PRELOAD = ["holdfast.cli.commands", "holdfast.runtime.preload"]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
_LOOK_S = 0.05
_REAP_S = 2.0
_REAPED_S = 0.002
_BEGIN = (
    "import ctypes, os, warnings; prctl = ctypes.CDLL(None).prctl; prctl({option}, {kill}); "
    "os.getppid() == {parent} or os._exit(1); os.setsid(); prctl({adopt}, 1); "
    "warnings.filterwarnings('ignore', 'forkserver: waitpid returned unexpected'); "  # an orphan that it has adopted
    "from multiprocessing.forkserver import main; main({listener}, {alive}, {preload})"
)
_PR_SET_CHILD_SUBREAPER = 36


def is_gone(pid: int) -> bool:
    """Whether nothing of a process can run any more, though its parent may not have taken note of its end."""
    found = look_at(pid)
    return found is None or found.gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a process may take to be forked.

    Attributes:
        limit_s: seconds.
        key: of the job file, where this limit is set; empty if nowhere.
        check: called now and then meanwhile; may raise, and nobody waits any more.
    """

    limit_s: float = math.inf
    key: str = ""
    check: Callable[[], None] = lambda: None

    def wait(self, ready: Callable[[float], object], overdue: Callable[[], str]) -> None:
        """Waits until something is ready.

        Args:
            ready: waits for at most as many seconds as it is told; returns whether it is.
            overdue: says what is wrong.

        Raises:
            InternalError: it was not within the limit.
        """
        until = time.monotonic() + self.limit_s
        while not ready(_LOOK_S):
            self.check()
            if time.monotonic() >= until:
                key = f" ({self.key})" if self.key else ""
                raise InternalError(f"{overdue()}: no process could be started within {self.limit_s:g} s{key}")


@dataclass(slots=True)
class ForkServer:
    """The server: started when it is first needed, and again once it has died.

    Attributes:
        loads: modules that it loads besides, when it is started the next time; those that are not there it leaves out.
    """

    loads: tuple[str, ...] = ()
    _pid: int | None = None
    _door: int = -1
    _alive: int = -1
    _status: int | None = None
    _why: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _forked: set[int] = field(default_factory=set)
    _forking: threading.Lock = field(default_factory=threading.Lock)
    """Held while a process is forked whose number is not among these yet."""

    @property
    def pid(self) -> int | None:
        """Its process; None before the first."""
        return self._pid

    def start(self) -> None:
        """Starts it unless it runs; loading everything goes on after this returns."""
        with self._lock:
            if self._pid is None or self._look() is not None:
                self._launch()

    def died(self) -> str:
        """How it ended, for people; empty while it runs, and before it was started."""
        with self._lock:
            return "" if self._pid is None or self._look() is None else self._why or describe_exit(self._status)

    def awaited(self) -> str:
        """How it ended, for people, once that is known; to be called when it is seen to be gone."""
        with contextlib.suppress(InternalError):
            Patience(limit_s=_REAP_S).wait(self._died_within, self.excuse)
        return self.died() or "nobody knows how"

    def kill(self, why: str = "") -> None:
        """Ends it, and so all processes that were forked from it; ``why`` is told as how it ended.

        It is gone when this returns, so that the next process is forked from a new one.
        """
        with self._lock:
            if self._pid is None or self._look() is not None:
                return
            self._why = why
            os.kill(self._pid, signal.SIGKILL)
            until = time.monotonic() + _REAP_S
            while self._look() is None and time.monotonic() < until:
                time.sleep(_REAPED_S)

    @contextlib.contextmanager
    def forking(self) -> Iterator[Callable[[int], None]]:
        """Within it a process may be forked; yields what is to be told its number."""
        with self._forking:
            yield self._forked.add

    def forget(self, pid: int) -> None:
        """A process that was forked from it has ended."""
        self._forked.discard(pid)

    def end_orphans(self) -> None:
        """Ends what processes that were forked from it, and have ended, have left behind."""
        with self._forking:
            end_all(self._orphans)

    def _orphans(self) -> tuple[Kin, ...]:
        if self._pid is None:
            return ()
        orphans = [each for each in below(self._pid) if each.parent == self._pid and each.pid not in self._forked]
        return (*orphans, *(each for orphan in orphans for each in below(orphan.pid)))

    def excuse(self) -> str:
        """Why it may not answer, for people."""
        pid = self._pid
        if pid is not None and (found := look_at(pid)) is not None and found.state == "T":
            return f"the fork server, process {pid}, is stopped"
        return f"the fork server, process {pid}, does not answer"

    def ask(self, descriptors: list[int], patience: Patience) -> tuple[int, int]:
        """Asks for a process that holds copies of ``descriptors``; returns where it tells and where it is told.

        What is told first is its process id.
        """
        self.start()
        with socket.socket(socket.AF_UNIX) as client, contextlib.ExitStack() as stack:
            client.setblocking(False)
            patience.wait(lambda limit_s: self._connected(client, limit_s), self.excuse)
            tells, his_tells = os.pipe()
            his_told, told = os.pipe()
            for end in (his_tells, his_told):
                stack.callback(os.close, end)
            tracker: Any = resource_tracker.getfd()
            try:
                client.setblocking(True)
                reduction.sendfds(client, [his_told, his_tells, self._alive, tracker, *descriptors])
            except BaseException:
                os.close(tells)
                os.close(told)
                raise
        return tells, told

    def _connected(self, client: socket.socket, limit_s: float) -> bool:
        try:
            client.connect(f"/proc/self/fd/{self._door}")
        except BlockingIOError:  # too many wait already
            time.sleep(limit_s)
            return False
        return True

    def _died_within(self, limit_s: float) -> bool:
        time.sleep(limit_s)
        return bool(self.died())

    def _look(self) -> int | None:
        """Takes note of its end; returns its status, None while it runs.

        What was forked from it is ended, and that seen, a moment before its own end can be: that is waited for.
        """
        if self._status is None and self._pid is not None:
            found = look_at(self._pid)
            try:
                pid, status = os.waitpid(self._pid, 0 if found is not None and found.ending else os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:  # it is another program's, or somebody else took note of its end
                self._status = 255
        return self._status

    def _launch(self) -> None:
        for descriptor in (self._door, self._alive):
            if descriptor >= 0:
                os.close(descriptor)
        self._status, self._why = None, ""
        with socket.socket(socket.AF_UNIX) as listener:
            self._door = _listen_unseen(listener)  # before there is any process of ours: nothing is left behind later
            with _blocked():
                resource_tracker.ensure_running()
            his_alive, self._alive = os.pipe()
            command = _BEGIN.format(
                option=PR_SET_PDEATHSIG,
                adopt=_PR_SET_CHILD_SUBREAPER,
                kill=int(signal.SIGKILL),
                parent=os.getpid(),
                listener=listener.fileno(),
                alive=his_alive,
                preload=[*_PRELOAD, *self.loads],
            )
            executable: Any = spawn.get_executable()
            arguments = [executable, *util._args_from_interpreter_flags(), "-c", command]  # type: ignore[attr-defined]
            try:
                with _blocked(), _same_hashes():
                    self._pid = util.spawnv_passfds(executable, arguments, [listener.fileno(), his_alive])
            finally:
                os.close(his_alive)


@contextlib.contextmanager
def _same_hashes() -> Iterator[None]:
    """Within it, Python that is started gives texts the hashes of any other run: the order of a set is the same."""
    if "PYTHONHASHSEED" in os.environ:
        yield
        return
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        del os.environ["PYTHONHASHSEED"]


def _listen_unseen(listener: socket.socket) -> int:
    """Listens where only this process can find it, and nothing is left behind; returns what stands for the place."""
    try:
        folder = tempfile.mkdtemp(prefix="holdfast-")
    except OSError as error:
        raise ConfigError(f"TMPDIR: no folder can be made for temporary files: {error}") from None
    try:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{place}/forks"  # however long the folder's name is, a socket's may be short only
            listener.bind(path)
            listener.listen()
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(place)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """What is started meanwhile never hears of Ctrl-C, SIGTERM or what else is sent to whole groups."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


SERVER = ForkServer()
"""The server of this program."""


class _Popen(popen_forkserver.Popen):
    """As the one of the standard library, but for the server, the patience, and without the main module."""

    def _launch(self, process_obj: BaseProcess) -> None:
        assert isinstance(process_obj, ForkedProcess)
        SERVER.start()
        process_obj.server = SERVER.pid or 0
        with SERVER.forking() as tell:
            self._fork(process_obj)
            tell(self.pid)

    def _fork(self, process_obj: ForkedProcess) -> None:
        body, patience = self._body(process_obj), process_obj.patience
        try:
            self.sentinel, told = SERVER.ask(self._fds, patience)  # type: ignore[attr-defined]
            parents_end = os.dup(told)  # the child sees it closed when we end
            self.finalizer = util.Finalize(self, util.close_fds, (parents_end, self.sentinel))  # type: ignore[attr-defined]
            with open(told, "wb", buffering=0) as pipe:
                _write(pipe.fileno(), body, patience)
            patience.wait(lambda limit_s: wait([self.sentinel], limit_s), SERVER.excuse)
            self.pid = read_signed(self.sentinel)
        except (EOFError, BrokenPipeError, ConnectionError):
            raise InternalError(f"the fork server ended: {SERVER.awaited()}") from None
        except BaseException as error:
            SERVER.kill(str(error))  # whatever it may yet fork would be nobody's
            raise

    def _body(self, process_obj: BaseProcess) -> bytes:
        """What the process is told."""
        told = spawn.get_preparation_data(process_obj.name)
        settled = {key: value for key, value in told.items() if not key.startswith(("init_main_", "start_method"))}
        body = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(settled, body)
            reduction.dump(process_obj, body)
        finally:
            set_spawning_popen(None)
        return body.getvalue()


def _write(descriptor: int, body: bytes, patience: Patience) -> None:
    """Writes all of it, however little a pipe takes at once."""
    os.set_blocking(descriptor, False)
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    rest = memoryview(body)
    while rest:
        patience.wait(lambda limit_s: room.poll(limit_s * 1000), SERVER.excuse)
        rest = rest[os.write(descriptor, rest) :]


class ForkedProcess(BaseProcess):
    """A process forked from our server.

    Args:
        patience: with which its start is waited for.

    Attributes:
        server: the process that it is forked from, once that is known.
    """

    _start_method = None  # how it starts processes of its own is for it to say, and else as everywhere in Python

    def __init__(self, *args: Any, patience: Patience = Patience(), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.patience = patience
        self.server = 0

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_forkserver.Popen:
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, object]:
        """What the process itself is told: not how it was waited for."""
        return {key: value for key, value in self.__dict__.items() if key != "patience"}

    def start(self) -> None:
        """Starts it; Python is not to wait for it, without limit, when the program ends."""
        super().start()
        process._children.discard(self)  # type: ignore[attr-defined]

    def run(self) -> None:
        """Ends with the server from now on, in a session of its own. What Ctrl-C means, the agent alone decides."""
        end_with(self.server)
        os.setsid()
        harden()
        outlast_readers()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        super().run()


class _Context(ForkServerContext):
    Process = ForkedProcess  # type: ignore[assignment]


FORKS = _Context()
"""Starts processes, and makes the pipes that they are given."""
