"""The course of a step on one worker, whatever computes it: its verdict, updates ahead of it, and healing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from holdfast.core.placement import LayerRange
from holdfast.errors import InternalError

__all__ = ["ReducedLayers", "SteppedStage"]

ReducedLayers: TypeAlias = tuple[int, ...]
"""Layers whose owners sum a message: one layer for its own parameters, several for the weights tied between them."""

R = TypeVar("R")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Speculative(Generic[R]):
    """A step whose update was made ahead of its verdict, and what is needed to make it again: all its sums."""

    step: int
    reduced: dict[ReducedLayers, R]


class SteppedStage(ABC, Generic[R, V]):
    """What every compute engine does in the same way between the sums of a step and the next one.

    A step is settled by the tallies of all workers, before its updates or after. While the stage heals it has no state:
    updates are kept, and made when one comes.

    A subclass computes: it fills ``_reduced`` with the sums of each reduction, and has the methods below.

    Attributes:
        layer_range: the layers that this worker owns.
        unanimous: whether every owner of every layer was ready for the prepared generation in the step settled last.
    """

    layer_range: LayerRange
    unanimous: bool
    _as_is: V
    """The verdict on a step that counts and whose gradients are not scaled."""

    def __init__(self, layer_range: LayerRange) -> None:
        self.layer_range = layer_range
        self.unanimous = False
        self._step: int | None = None
        self._reduced: dict[ReducedLayers, R] = {}
        self._verdict: V | None = None
        self._missed: list[tuple[dict[ReducedLayers, R], V]] | None = None  # while healing: sums and verdict of a step
        self._speculative: _Speculative[R] | None = None

    # --- what a subclass computes -------------------------------------------------------------------------------------

    @abstractmethod
    def _forget(self, *, keep_sums: bool) -> None:
        """Drops whatever was computed of an unfinished step, but for the sums if they are to be kept."""

    @abstractmethod
    def _judge(self, tally: Any) -> V:
        """Returns the verdict that a complete tally comes to, the same on all workers."""

    @abstractmethod
    def _steps(self) -> dict[int, int]:
        """Returns the step that each own layer is at."""

    @abstractmethod
    def _update(self, layer: int, verdict: V) -> None:
        """Prepares a layer's next state from ``_reduced``."""

    @abstractmethod
    def _swap(self, layer: int) -> None:
        """Makes a layer's next state live."""

    @abstractmethod
    def _take_back(self, to_step: int) -> None:
        """Returns every layer that is one step ahead to ``to_step``."""

    @abstractmethod
    def restore(self, layer: int, data: bytes) -> None:
        """Replaces a layer's state."""

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Start a step: forget everything of the step before.

        Raises:
            InternalError: a layer is not at this step.
        """
        behind = {layer: at for layer, at in self.layer_steps().items() if at != step}
        if behind:
            raise InternalError(f"step {step} cannot begin: layers are at other steps: {behind}")
        self.discard()
        self._step = step

    def discard(self, *, keep_sums: bool = False) -> None:
        """Drop all that was computed of an unfinished step; what is speculative of the one before stays.

        Args:
            keep_sums: keep what was summed and counted so far, so that only the rest is computed again.
        """
        self._verdict, self._reduced = None, {}
        if not keep_sums:
            self._step = None
        self._forget(keep_sums=keep_sums)

    def conclude(self, tally: Any) -> None:
        """Settle the step's verdict before its updates.

        Args:
            tally: merged over all workers, so that all reach the same verdict.
        """
        self.unanimous = not bool(tally[:, 2].any())
        self._verdict = verdict = self._judge(tally)
        if self._missed is not None:
            self._missed.append((dict(self._reduced), verdict))

    def speculate(self) -> None:
        """Let `update` go ahead of the verdict, as if the step counted and its gradients were not scaled.

        What is needed to make the update again is kept until `settle`: the gradients of the step.

        Raises:
            InternalError: no step is running.
        """
        if self._step is None:
            raise InternalError("there is no step that could be updated ahead of its verdict")
        self._verdict = self._as_is
        self._speculative = _Speculative(self._step, self._reduced)  # which is filled as the sums come in

    def settle(self, tally: Any) -> bool:
        """Settle the speculative step, whether or not the next one has begun.

        Args:
            tally: merged over all workers.

        Returns:
            Whether the updates stand. If not, `roll_back` must come before anything else is updated.

        Raises:
            InternalError: no step is speculative.
        """
        speculative = self._require_speculative()
        self.unanimous = not bool(tally[:, 2].any())
        verdict = self._judge(tally)
        if verdict != self._as_is:
            self._verdict = verdict
            return False
        self._speculative = None
        if self._missed is not None:
            self._missed.append((dict(speculative.reduced), self._as_is))
        return True

    def roll_back(self) -> None:
        """Make the update of the speculative step again, from the state before it, as its verdict wants it.

        Bitwise what `conclude` and `update` would have made of it, where states are taken back bitwise; drops the step
        that has begun.

        Raises:
            InternalError: no step is speculative.
        """
        speculative, verdict = self._require_speculative(), self._verdict
        self.take_back(speculative.step)
        assert verdict is not None, "a step is rolled back once its verdict is known"
        self._make(speculative.reduced, verdict)

    def update(self, layer: int) -> None:
        """Prepare a layer's next state. What is live stays as it is; safe to repeat.

        While healing, the update is kept for later instead.

        Raises:
            InternalError: there is no verdict yet.
            WorkFailed: the optimizer raised.
        """
        if self._missed is not None:
            return
        if self._verdict is None:
            raise InternalError(f"update of layer {layer} before the verdict on the step")
        self._update(layer, self._verdict)

    def swap(self, layer: int) -> None:
        """Make a layer's next state live; the one before can be returned to until the next update."""
        if self._missed is None:
            self._swap(layer)

    def take_back(self, to_step: int) -> None:
        """Return every layer to a step, at most one back, and discard the step; safe to repeat.

        Raises:
            InternalError: a layer cannot return to that state.
        """
        self.discard()
        if self._speculative is not None and to_step <= self._speculative.step:
            self._speculative = None
        self._take_back(to_step)

    def layer_steps(self) -> dict[int, int]:
        """Return the step that each own layer is at; empty while healing: there is no state to speak of."""
        return {} if self._missed is not None else self._steps()

    # --- healing ------------------------------------------------------------------------------------------------------

    def begin_healing(self) -> None:
        """Take part in reductions without any state of our own: updates are kept until `heal` brings a state."""
        self.discard()
        self._speculative = None
        self._missed = []

    @property
    def healing(self) -> bool:
        """Whether updates are being kept for later."""
        return self._missed is not None

    def heal(self, states: Mapping[int, bytes]) -> None:
        """Take the state of all own layers at the step when healing began, and make the updates since then.

        Args:
            states: per own layer, what `snapshot` of another owner gave.

        Raises:
            CorruptBlob: a state is not a layer's.
            InternalError: it is another layer's, or we are not healing.

        After failure: still healing; safe to repeat.
        """
        if self._missed is None:
            raise InternalError("there is nothing to heal: the stage has a state")
        for layer, data in states.items():
            self.restore(layer, data)
        missed, self._missed = self._missed, None
        if self._speculative is not None:
            missed.append((self._speculative.reduced, self._as_is))
        for reduced, verdict in missed:
            self._make(reduced, verdict)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _make(self, reduced: dict[ReducedLayers, R], verdict: V) -> None:
        self._reduced, self._verdict = reduced, verdict
        for layer in self.layer_range.indices:
            self.update(layer)
            self.swap(layer)

    def _require_speculative(self) -> _Speculative[R]:
        if self._speculative is None:
            raise InternalError("no step is speculative")
        return self._speculative
