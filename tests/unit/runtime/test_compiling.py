"""Whether it is seen that something is compiled, with what torch tells and without."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from holdfast.core.work import Busy
from holdfast.protocol.progress_monitor import ProgressMonitor
from holdfast.runtime.compiling import watch_compiling


@pytest.fixture
def busy():
    monitor = ProgressMonitor()
    monitor.move(waiting=False)
    return monitor


def imported(monkeypatch, **tells):
    """torch's compiler with these functions."""
    callback = ModuleType("torch._dynamo.callback")
    vars(callback).update(tells)
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", callback)


def test_what_is_compiled_counts_as_that_until_it_is_done(monkeypatch, busy):
    called = {}
    imported(
        monkeypatch, on_compile_start=lambda f: called.update(start=f), on_compile_end=lambda f: called.update(end=f)
    )
    assert watch_compiling(busy)
    assert busy.busy()[0] is Busy.COMPUTING
    called["start"]("whatever it tells")
    assert busy.busy()[0] is Busy.COMPILING
    called["end"]()
    assert busy.busy()[0] is Busy.COMPUTING


def test_a_torch_that_does_not_tell_is_known_to(monkeypatch, busy):
    imported(monkeypatch)
    assert not watch_compiling(busy)


def test_a_process_that_compiles_nothing_imports_no_compiler(monkeypatch, busy):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert watch_compiling(busy)
    assert "torch._dynamo" not in sys.modules
