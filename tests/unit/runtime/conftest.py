"""Shared by the tests of what runs in threads."""

from __future__ import annotations

import threading

import pytest


class Announced(threading.Condition):
    """A condition that tells when somebody really waits."""

    def __init__(self):
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout=None):
        self.waiting.set()
        return super().wait(timeout)


@pytest.fixture
def announced():
    return Announced()
