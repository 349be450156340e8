"""How faults are carried out on a simulated process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from holdfast.control.messages import Dormant
from holdfast.core.ids import WorkerId
from holdfast.errors import InternalError
from holdfast.telemetry.events import Event
from holdfast.testing.world import World

if TYPE_CHECKING:
    from holdfast.testing.virtual_worker import VirtualWorker

__all__ = ["VirtualMeans"]


class VirtualMeans:
    """See :class:`holdfast.runtime.injection.worker.Means`.

    Args:
        process: that is struck.
        world: that it is in.
    """

    def __init__(self, process: VirtualWorker, world: World) -> None:
        self._process = process
        self._world = world

    def signal(self, number: int) -> None:
        """See Means."""
        process = self._process
        if number == signal.SIGKILL:
            process.kill()
        elif number == signal.SIGSTOP:
            process.stop()
        elif number == signal.SIGTERM:
            process.leave()
        else:
            process.driver.dormant = number == signal.SIGUSR1
            process.say(Dormant(worker=process.worker, dormant=process.driver.dormant))

    def stand_still(self) -> None:
        """See Means: it beats on, unless it is cut off."""
        self._process.stand_still()

    def wait_until_cut(self) -> None:
        """See Means: the whole process is out of reach then."""
        self._process.make_no_call()

    def sleep(self, seconds: float) -> None:
        """See Means."""
        self._process.sleep(seconds)

    def note(self, event: Event) -> None:
        """See Means."""
        self._world.log.write(self._world.time.now, event)

    def wait_until_begun(self, workers: Collection[WorkerId], step: int, over: Callable[[], bool]) -> None:
        """See Means: whoever is behind here stays so, as tests choose who runs when."""

    def wait_until_summed(self, workers: Collection[WorkerId], step: int, sums: int) -> None:
        """See Means: what others hold they write down for real processes only."""
        raise InternalError("faults in the middle of sums are for real processes")

    def wait_until_noted(self, workers: Collection[WorkerId], step: int) -> None:
        """See Means."""
        raise InternalError("faults in the middle of sums are for real processes")
