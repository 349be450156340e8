"""Devices that compute late and are right but for one mark or hold: whatever runs on them is to find that."""

from tests.accelerator import MACHINE, Late

__all__ = ["WRONG", "WRONG_BESIDE", "ForgetsWhatIsSent"]


class Deaf:
    """A stream that waits for no mark."""

    def __init__(self, stream):
        self.stream = stream

    def record_event(self):
        return MACHINE.mark(self.stream)

    def wait_event(self, mark):
        """Goes on."""


class _OneIsDeaf(Late):
    """One of its streams waits for nothing."""

    def _on(self, stream):
        return MACHINE.on(getattr(stream, "stream", stream))

    def _hold(self, tensor, stream):
        MACHINE.hold(tensor, getattr(stream, "stream", stream))


class ComputesAtOnce(_OneIsDeaf):
    """Does not wait for what is brought."""

    def __init__(self):
        super().__init__()
        self._compute = Deaf(self._compute)


class CopiesAtOnce(_OneIsDeaf):
    """Does not wait until what it copies is computed."""

    def __init__(self):
        super().__init__()
        self._out = Deaf(self._out)


class ForgetsWhatIsSent(Late):
    """Keeps no memory for the stream that copies to the host."""

    def _hold(self, tensor, stream):
        if stream is not self._out:
            super()._hold(tensor, stream)


class ForgetsWhatIsBrought(Late):
    """Keeps no memory for the stream that computes."""

    def _hold(self, tensor, stream):
        if stream is not self._compute:
            super()._hold(tensor, stream)


class SumsAtOnce(_OneIsDeaf):
    """Does not wait, beside the computation, for what is summed."""

    def __init__(self):
        super().__init__()
        self._beside = Deaf(self._beside)


class ForgetsWhatIsSummed(Late):
    """Keeps no memory for what is beside the computation."""

    def _hold(self, tensor, stream):
        if stream is not self._beside:
            super()._hold(tensor, stream)


WRONG = (CopiesAtOnce, ComputesAtOnce, ForgetsWhatIsSent, ForgetsWhatIsBrought)
WRONG_BESIDE = (SumsAtOnce, ComputesAtOnce, ForgetsWhatIsSummed, ForgetsWhatIsBrought)
"""With others: what is exchanged and summed with them."""
