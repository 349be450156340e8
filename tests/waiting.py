"""How tests wait: for an event, up to a limit that no slow machine reaches. How fast something is, benchmarks say."""

import time

LIMIT_S = 120.0
"""What has not come by then never will: this keeps a test from waiting for ever, and measures nothing."""


def until(condition, what="what is waited for", process=None):
    """Waits until a condition holds; returns what it said. A process that is to bring it about must not end before.

    ``what`` is a text, or a function that makes one when it is needed.
    """
    end = time.monotonic() + LIMIT_S
    while True:
        ended = process is not None and process.poll() is not None  # before looking: what it brought about is there
        if found := condition():
            return found
        assert not ended, f"{_told(what)} never came: {process.communicate()}"
        assert time.monotonic() < end, f"{_told(what)} did not come within {LIMIT_S:g} s"
        time.sleep(0.01)


def _told(what):
    return what() if callable(what) else what
