"""Exceptions as data: what somebody's model, data or optimizer raises, where, on whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.ids import WorkerId
from holdfast.core.placement import LayerRange
from holdfast.core.schedule import OpKind
from holdfast.core.work import WorkPhase, working
from holdfast.protocol.worker import Engine

__all__ = ["Raise", "RaisingStage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """An exception that is to come; whatever is None may be any.

    Attributes:
        phase: what the worker does then.
        worker: which; None: whoever gets there, again and again.
        step: in which step.
        layer: on which layer.
        microbatch: for which micro-batch, its global number, which is the number of the item, too.
        kind: the class.
        breaks: whether it leaves the layer half-changed.
        once: whether it comes once only: whoever takes the worker's place does not meet it again.
    """

    phase: WorkPhase
    worker: WorkerId | None = None
    step: int | None = None
    layer: int | None = None
    microbatch: int | None = None
    kind: type[Exception] = ValueError
    breaks: bool = False
    once: bool = False

    def __str__(self) -> str:
        of = [None if value is None else str(value) for value in (self.worker, self.step, self.layer, self.microbatch)]
        return f"raise-{self.kind.__name__}:{self.phase}:" + "/".join(each or "*" for each in of)

    def strikes(self, phase: WorkPhase, worker: WorkerId, step: int, layer: int | None, microbatch: int | None) -> bool:
        """Whether it comes here."""
        wanted = (self.worker, self.step, self.layer, self.microbatch)
        found = (worker, step, layer, microbatch)
        fits = all(want is None or want == have for want, have in zip(wanted, found, strict=True))
        return self.phase is phase and fits


class RaisingStage:
    """A compute engine in which exceptions come as scheduled, as if the code of the user's model had raised them.

    Args:
        stage: what computes.
        worker: whose.
        raises: all that is scheduled.
        fired: called with each that comes.
        took_time: called after each operation, or part of one.
        saved: called with a layer that is to be saved, instead of writing it: digests are enough here.
    """

    def __init__(
        self,
        stage: Engine,
        worker: WorkerId,
        raises: Iterable[Raise],
        *,
        fired: Callable[[Raise], None],
        took_time: Callable[[], None],
        saved: Callable[[int, str | None], None],
    ) -> None:
        self._stage = stage
        self._worker = worker
        self._raises = tuple(raises)
        self._fired = fired
        self._took_time = took_time
        self._saved = saved
        self._whole = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    @property
    def whole(self) -> bool:
        """See Engine.whole."""
        return self._whole

    def forward(
        self, step: int, microbatch: int, activation: Any, layers: LayerRange | None = None, *, adds: bool = True
    ) -> Any:
        """See StepEngine.forward."""
        assert layers is not None, "a program says which layers an operation runs"
        if layers.start == 0:
            self._reach(WorkPhase.LOADING, step, microbatch=microbatch)
        for layer in layers.indices:
            self._reach(WorkPhase.FORWARD, step, layer, microbatch)
        result = self._stage.forward(step, microbatch, activation, layers, adds=adds)
        if result is None:
            self._reach(WorkPhase.LOADING, step, microbatch=microbatch)
            self._reach(WorkPhase.LOSS, step, microbatch=microbatch)
        self._took_time()
        return result

    def backward(
        self,
        kind: OpKind,
        step: int,
        microbatch: int,
        gradient: Any,
        layers: LayerRange | None = None,
        *,
        adds: bool = True,
    ) -> Any:
        """See StepEngine.backward."""
        assert layers is not None, "a program says which layers an operation runs"
        for layer in layers.indices:
            self._reach(WorkPhase.BACKWARD, step, layer, microbatch)
        result = self._stage.backward(kind, step, microbatch, gradient, layers, adds=adds)
        self._took_time()
        return result

    def evaluate(self, number: int, value: Any, layers: LayerRange) -> Any:
        """See Engine.evaluate."""
        for layer in layers.indices:
            self._reach(WorkPhase.EVALUATION, self._stage.layer_steps()[layer], layer, number)
        result = self._stage.evaluate(number, value, layers)
        self._took_time()
        return result

    def update(self, layer: int) -> None:
        """See StepEngine.update."""
        if layer not in self._stage.followed:
            self._reach(WorkPhase.UPDATE, self._stage.layer_steps()[layer], layer)
        self._stage.update(layer)

    def save(self, layer: int, directory: Path) -> None:
        """See Engine.save."""
        self._reach(WorkPhase.SAVING, self._stage.layer_steps()[layer], layer)
        self._saved(layer, self._stage.layer_digest(layer))

    def _reach(self, phase: WorkPhase, step: int, layer: int | None = None, microbatch: int | None = None) -> None:
        for each in self._raises:
            if each.strikes(phase, self._worker, step, layer, microbatch):
                self._fired(each)
                self._whole = self._whole and not each.breaks
                item = microbatch if phase is WorkPhase.LOADING else None
                with working(phase, layer=layer, item=item, microbatch=microbatch if item is None else None):
                    raise each.kind(str(each))
