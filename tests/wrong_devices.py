"""Devices that compute late and are right but for one mark or hold: whatever runs on them is to find that."""

from tests.accelerator import MACHINE, Late

__all__ = ["WRONG"]


class Deaf:
    """A stream that waits for no mark."""

    def __init__(self, stream):
        self.stream = stream

    def record_event(self):
        return MACHINE.mark(self.stream)

    def wait_event(self, mark):
        """Goes on."""


class ComputesAtOnce(Late):
    """Does not wait for what is brought."""

    @property
    def _compute(self):
        return Deaf(MACHINE.current)


class CopiesAtOnce(Late):
    """Does not wait until what it copies is computed."""

    def __init__(self):
        super().__init__()
        self._out_stream, self._out = self._out, Deaf(self._out)

    def _on(self, stream):
        return MACHINE.on(self._out_stream if stream is self._out else stream)

    def _hold(self, tensor, stream):
        MACHINE.hold(tensor, self._out_stream if stream is self._out else stream)


class Forgetful(Late):
    """Keeps no memory for a stream that is yet to use it."""

    def _hold(self, tensor, stream):
        """Does nothing."""


WRONG = (CopiesAtOnce, ComputesAtOnce, Forgetful)
