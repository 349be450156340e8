"""Processes that end leave nothing behind in the one that started them, and ending them takes limited time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, until

from holdfast.errors import InternalError
from holdfast.runtime.node import forks
from holdfast.runtime.node.children import Children
from holdfast.runtime.node.forks import SERVER, ForkedProcess, Patience, is_gone


def descriptors():
    return {(path.name, os.readlink(path)) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


@pytest.fixture(scope="module", autouse=True)
def light_server():
    """A server that has loaded nothing: these tests end it again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "_PRELOAD", [])
        SERVER.kill()
        await_end()
        yield
        SERVER.kill()
    await_end()


def await_end():
    until(lambda: SERVER.pid is None or SERVER.died())


@pytest.fixture
def children():
    made = Children()
    made.attend(made.start(time.sleep, 0, name="first"))  # the server is there from now on
    assert made.end(LIMIT_S) == ()
    yield made
    made.end()


def started_and_ended() -> None:
    """Starts and ends processes, and says which descriptors are left of them; run in a program of its own."""
    children = Children()
    children.attend(children.start(time.sleep, 0, name="first"))  # the server is there from now on
    assert children.end(LIMIT_S) == ()
    before = descriptors()
    ended = []
    for main, argument in ((time.sleep, 0), (os._exit, 7), (os.abort, None), (time.sleep, 3600)):
        child = children.start(main, *[argument] * (argument is not None), name="child")
        children.attend(child, lambda child: ended.append(child.status))
        if argument == 3600:
            children.kill(child)
        assert child.ended.wait(LIMIT_S)
    assert children.end(LIMIT_S) == ()
    assert [*ended, child.status][:4] == [0, 7, -signal.SIGABRT, -signal.SIGKILL]
    print("left:", *sorted(descriptors() - before))


def test_those_that_have_ended_leave_no_descriptor():
    """Other tests of this program may open and close some meanwhile, in threads that end when they please."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_children as here; "
        "here.forks._PRELOAD = []; here.started_and_ended()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "left:\n"


def test_one_that_has_ended_can_be_killed_in_vain(children):
    child = children.start(time.sleep, 0, name="child")
    children.attend(child)
    assert child.ended.wait(LIMIT_S)
    children.kill(child)
    assert child.status == 0


def test_all_are_ended_though_their_server_is_stopped(children):
    child = children.start(time.sleep, 3600, name="child")
    children.attend(child)
    os.kill(SERVER.pid, signal.SIGSTOP)
    assert children.end() == ()
    assert is_gone(child.pid)
    await_end()


def test_a_server_is_found_wherever_temporary_files_are(children, tmp_path, monkeypatch):
    """The name of a socket may have 107 bytes; that of a folder, thousands."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    SERVER.kill()
    await_end()
    child = children.start(time.sleep, 0, name="child")
    children.attend(child)
    assert child.ended.wait(LIMIT_S)
    assert child.status == 0
    assert list(folder.iterdir()) == []


def test_a_stopped_server_is_named_and_replaced(children):
    patient = Children(process=lambda **told: ForkedProcess(**told, patience=Patience(limit_s=0.3, key="some.key")))
    stopped = SERVER.pid
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(InternalError) as caught:
        patient.start(time.sleep, 0, name="child")
    assert str(caught.value) == (
        f"the fork server, process {stopped}, is stopped: no process could be started within 0.3 s (some.key)"
    )
    await_end()
    assert "is stopped" in SERVER.died()
    child = children.start(time.sleep, 0, name="child")
    children.attend(child)
    assert child.ended.wait(LIMIT_S)
    assert SERVER.pid != stopped


def test_who_waits_for_a_start_may_give_up(children):
    class GivenUp(Exception):
        pass

    def give_up():
        raise GivenUp

    os.kill(SERVER.pid, signal.SIGSTOP)
    with pytest.raises(GivenUp):
        ForkedProcess(target=time.sleep, args=(0,), patience=Patience(check=give_up)).start()
    await_end()
