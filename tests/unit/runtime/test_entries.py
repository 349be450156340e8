"""Entry points are named where nobody loads them: each name must stand for a function."""

from importlib import import_module

import pytest

from holdfast.profiling import processes
from holdfast.runtime.node import entries
from holdfast.runtime.node.entries import EntryPoint

ALL = [value for module in (entries, processes) for value in vars(module).values() if isinstance(value, EntryPoint)]


def test_all_are_found():
    assert len(ALL) == 16


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_each_is_a_public_function(entry):
    module, _, function = entry.function.partition(":")
    assert function in import_module(module).__all__
