"""The course of a step on one worker, whatever computes it: its verdict, updates ahead of it, and following layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeAlias, TypeVar

from holdfast.core.ids import Interval
from holdfast.core.instructions import Compute
from holdfast.core.placement import LayerRange
from holdfast.core.progress import Part, StepProgress
from holdfast.errors import InternalError
from holdfast.protocol.auditing import Digests

__all__ = ["BEFORE_ALL", "ReducedLayers", "SteppedStage", "Work", "part_of"]

ReducedLayers: TypeAlias = tuple[int, ...]
"""Layers whose owners sum a message: one layer for its own parameters, several for the weights tied between them."""

BEFORE_ALL = -1
"""Evaluations draw random numbers as if they were of the step before the first."""
R = TypeVar("R")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What was computed of a step and is not summed over its owners; see :class:`StepProgress`."""

    contexts: tuple[Part, ...] = ()
    halves: tuple[Part, ...] = ()
    counted: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class _Speculative(Generic[R]):
    """A step whose update was made ahead of its verdict, and what is needed to make it again: all its sums."""

    step: int
    reduced: dict[ReducedLayers, R]


@dataclass(frozen=True, slots=True)
class _Missed(Generic[R, V]):
    """A settled step that followed layers have yet to be updated with: their sums of it, and its verdict."""

    step: int
    reduced: dict[ReducedLayers, R]
    verdict: V


class SteppedStage(ABC, Generic[R, V]):
    """What every compute engine does in the same way between the sums of a step and the next one.

    A step is settled by the votes of all workers, before its updates or after. Of a layer that is followed there is
    no state yet: its updates are kept, and made when one comes.

    A subclass computes: it fills ``_reduced`` with the sums of each reduction, and has the methods below.

    Attributes:
        layers: the layers that this worker holds or follows, ascending.
        unanimous: whether every owner of every layer was ready for the prepared generation in the step settled last.
    """

    layers: tuple[int, ...]
    unanimous: bool
    _as_is: V
    """The verdict on a step that counts and whose gradients are not scaled."""
    repeated: tuple[int, ...] = ()
    """The steps whose micro-batches are run once more in the step behind; they are other ones for data and seeds."""
    ends: int | None = None
    """The step before which all is over, whatever the job says; None: nobody has stopped it."""
    _num_microbatches: int
    """Of a step, over all pipelines."""
    ahead = False
    """Whether layers are those of the next step already, so that there is no state of before the one that runs."""
    at_a_stretch = False
    """Whether it can run several operations; see `StepEngine.run`."""
    returns = True
    """Whether a layer that is taken back is the one that it was, bit by bit."""
    norm: float | None = None
    """See `Engine.norm`."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = tuple(layers)
        self.unanimous = False
        self._step: int | None = None
        self._reduced: dict[ReducedLayers, R] = {}
        self._verdict: V | None = None
        self._since: dict[int, int] = {}  # followed layers: the step whose state is to come
        self._missed: list[_Missed[R, V]] = []
        self._speculative: _Speculative[R] | None = None

    def rate(self, step: int) -> float | None:
        """See `Engine.rate`."""
        return None

    # --- what a subclass computes -------------------------------------------------------------------------------------

    @abstractmethod
    def _forget(self) -> None:
        """Drops whatever was computed of an unfinished step."""

    @abstractmethod
    def _work(self) -> Work:
        """Returns what was computed of the step that is running."""

    @abstractmethod
    def _dissent_from(self, reduction: ReducedLayers) -> None:
        """Notes that not all owners of a reduction, whose sum is here, are ready for what is prepared."""

    @abstractmethod
    def _leave_out(self, microbatches: frozenset[int]) -> None:
        """Counts these in no reduction that is not complete, and all others."""

    @abstractmethod
    def _judge(self, vote: Any) -> V:
        """Returns the verdict that a complete vote comes to, the same on all workers."""

    @abstractmethod
    def _steps(self) -> dict[int, int]:
        """Returns the step that each layer is at; of no meaning for those that are followed."""

    @abstractmethod
    def _update(self, layer: int, verdict: V) -> None:
        """Prepares a layer's next state from ``_reduced``."""

    @abstractmethod
    def _swap(self, layer: int) -> None:
        """Makes a layer's next state live."""

    @abstractmethod
    def _take_back(self, layer: int, to_step: int) -> None:
        """Returns a layer to ``to_step`` if it is one step ahead."""

    @abstractmethod
    def _adopt(self, layer: int, other: Self) -> None:
        """Takes a layer over from another stage, with its state."""

    @abstractmethod
    def restore(self, layer: int, data: bytes) -> None:
        """Replaces a layer's state."""

    def run(self, step: int, computes: Sequence[Compute], ran: Callable[[Compute], bool]) -> None:
        """Run several operations: only where all of them take and hand on nothing; see `StepEngine.run`."""
        raise InternalError(
            f"{len(computes)} operations of step {step} at a stretch: each takes, or hands on, something"
        )

    def evaluate(self, number: int, value: Any, layers: LayerRange) -> Any:
        """Run a micro-batch that a job is evaluated by: only where layers are; a script's loop does it by itself."""
        raise InternalError(f"micro-batch {number} of an evaluation, layers {layers}: this engine runs items of a loop")

    # --- samples: an engine has those of layers, or those of items ----------------------------------------------------

    def watch(self, layer: int, microbatch: int) -> None:
        """Keep what is computed of a layer and micro-batch: only where layers are run one by one."""
        raise InternalError(f"layer {layer}, micro-batch {microbatch}: this engine runs items, and samples these")

    def audit_message(self, times: int) -> Any:
        """Return a layer's sample; see `watch`."""
        raise InternalError("there is no sample of a layer: this engine runs items, and samples these")

    def audit_bytes(self, layer: int) -> int:
        """Return how long such a sample is; see `watch`."""
        raise InternalError(f"layer {layer}: this engine runs items, and samples these")

    def audit(
        self, layer: int, microbatch: int, message: Any, times: int
    ) -> tuple[tuple[Digests, ...], tuple[Digests, ...]]:
        """Compute a layer's sample again; see `watch`."""
        raise InternalError(f"layer {layer}, micro-batch {microbatch}: this engine runs items, and samples these")

    def sample_item(self, step: int, number: int, *, runs: bool) -> None:
        """Keep a digest of what comes of a micro-batch: only where micro-batches are run whole."""
        raise InternalError(f"micro-batch {number} of step {step}: this engine runs layers, and samples these")

    def sampled_item(self, step: int) -> tuple[tuple[int, str], ...]:
        """Return what is kept of a step: nothing."""
        return ()

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, counted: tuple[Interval, ...] | None = None) -> None:
        """Start a step: forget everything of the step before.

        Args:
            step: which.
            counted: the micro-batches that its sums expect; None: all that a step has.

        Raises:
            InternalError: a layer is not at this step.
        """
        behind = {layer: at for layer, at in self.layer_steps().items() if at != step}
        if behind:
            raise InternalError(f"step {step} cannot begin: layers are at other steps: {behind}")
        self.discard()
        self._step = step
        self._leave_out(self._uncounted(counted))

    def _uncounted(self, counted: tuple[Interval, ...] | None) -> frozenset[int]:
        """The micro-batches of a step that its sums do not expect."""
        if counted is None or counted == ((0, self._num_microbatches),):
            return frozenset()
        expected = {number for start, stop in counted for number in range(start, stop)}
        return frozenset(range(self._num_microbatches)) - expected

    def discard(self) -> None:
        """Drop all that was computed of an unfinished step; what is speculative of the one before stays."""
        self._verdict, self._reduced = None, {}
        self._step = None
        self._forget()

    def conclude(self, vote: Any) -> None:
        """Settle the step's verdict before its updates.

        Args:
            vote: merged over all workers, so that all reach the same verdict.
        """
        self.unanimous = not bool(vote[:, 2].any())
        self._verdict = verdict = self._judge(vote)
        self._miss(self._step, self._reduced, verdict)

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

    def settle(self, vote: Any) -> bool:
        """Settle the speculative step, whether or not the next one has begun.

        Args:
            vote: merged over all workers.

        Returns:
            Whether the updates stand. If not, `remake_update` must come before anything else is updated.

        Raises:
            InternalError: no step is speculative.
        """
        speculative = self._require_speculative()
        self.unanimous = not bool(vote[:, 2].any())
        verdict = self._judge(vote)
        if verdict != self._as_is:
            self._verdict = verdict
            return False
        self._speculative = None
        self._miss(speculative.step, speculative.reduced, self._as_is)
        return True

    def remake_update(self) -> None:
        """Make the update of the speculative step again, from the state before it, as its verdict wants it.

        Bitwise what `conclude` and `update` would have made of it, where states are taken back bitwise; drops the step
        that has begun.

        Raises:
            InternalError: no step is speculative.
        """
        speculative, verdict = self._require_speculative(), self._verdict
        self.take_back(speculative.step)
        assert verdict is not None, "an update is made again once the verdict is known"
        self._miss(speculative.step, speculative.reduced, verdict)
        self._make(self.layer_steps(), speculative.reduced, verdict)

    def update(self, layer: int) -> None:
        """Prepare a layer's next state. What is live stays as it is; safe to repeat.

        That of a layer that is followed is kept for later instead.

        Raises:
            InternalError: there is no verdict yet.
            WorkFailed: the optimizer raised.
        """
        if layer in self._since:
            return
        if self._verdict is None:
            raise InternalError(f"update of layer {layer} before the verdict on the step")
        self._update(layer, self._verdict)

    def swap(self, layer: int) -> None:
        """Make a layer's next state live; the one before can be returned to until the next update."""
        if layer not in self._since:
            self._swap(layer)

    def take_back(self, to_step: int) -> None:
        """Return every layer that is held to a step, at most one back, and discard the step; safe to repeat.

        Raises:
            InternalError: a layer cannot return to that state.
        """
        self.discard()
        if self._speculative is not None and to_step <= self._speculative.step:
            self._speculative = None
        self._forget_missed(to_step)
        for layer in self.layer_steps():
            self._take_back(layer, to_step)

    def layer_steps(self) -> dict[int, int]:
        """Return the step that each layer is at, of those that are held: there is no state of others to speak of."""
        return {layer: step for layer, step in self._steps().items() if layer not in self._since}

    # --- a step that is interrupted -----------------------------------------------------------------------------------

    def progress(self) -> tuple[StepProgress, ...]:
        """Return what is kept of the steps that are not settled here, without what is logged."""
        found = [] if self._step is None else [self._progress_of(self._step, self._reduced, self._work())]
        ahead = self._speculative
        if ahead is not None and ahead.step != self._step:
            found.append(self._progress_of(ahead.step, ahead.reduced, Work()))
        return tuple(found)

    def _progress_of(self, step: int, reduced: dict[ReducedLayers, R], work: Work) -> StepProgress:
        return StepProgress(
            step=step,
            contexts=work.contexts,
            halves=work.halves,
            counted=work.counted,
            complete=tuple(sorted(reduced)),
        )

    def resume(self, step: int, standing: Iterable[ReducedLayers], counted: tuple[Interval, ...] | None = None) -> None:
        """Go on with a step that was interrupted: what `progress` told of it is kept, all else is dropped.

        Layers that were updated with it, ahead of its verdict, return to the state before.

        Args:
            step: the one to go on with; one that was never begun here begins.
            standing: the reductions that some owner has completed; those whose sum is not here come by `take_sum`.
                Until then they are added to as all others, since whoever has them may be lost.
            counted: the micro-batches that all other reductions expect; nothing is kept of others. None: all.

        Raises:
            InternalError: a layer cannot return to that state; or what is left out was added to what is not.
        """
        ahead = self._speculative
        if self._step != step:
            self.discard()
            self._step = step
        if ahead is not None and ahead.step == step:
            self._reduced = ahead.reduced
        self._speculative, self._verdict = None, None
        for layer in self.layer_steps():
            self._take_back(layer, step)
        for reduction in self._reduced.keys() & frozenset(standing):
            self._dissent_from(reduction)
        self._leave_out(self._uncounted(counted))

    # --- layers that are followed -------------------------------------------------------------------------------------

    @property
    def followed(self) -> frozenset[int]:
        """The layers whose state is still to come."""
        return frozenset(self._since)

    def follow(self, layers: Iterable[int], step: int) -> None:
        """Take part in the reductions of layers without their state: updates are kept until `heal` brings it.

        Args:
            layers: some of ours; those that are followed already begin anew.
            step: before which this is, between two steps: the state to come is of then.
        """
        self.discard()
        self._speculative = None
        self._since |= dict.fromkeys(layers, step)
        self._forget_missed(step)

    def heal(self, states: Mapping[int, bytes]) -> None:
        """Take the state of layers at the step when they began to be followed, and make the updates since then.

        Args:
            states: per layer that is followed, what `snapshot` of an owner gave.

        Raises:
            CorruptBlob: a state is not a layer's.
            InternalError: it is another layer's, or of a layer that is not followed.

        After either: they are still followed; safe to repeat.
        """
        if strangers := states.keys() - self._since.keys():
            raise InternalError(f"there is nothing to heal: layers {sorted(strangers)} are not followed")
        for layer, data in states.items():
            self.restore(layer, data)
        missed = [*self._missed]
        if self._speculative is not None:
            missed.append(_Missed(self._speculative.step, self._speculative.reduced, self._as_is))
        since = {layer: self._since.pop(layer) for layer in states}
        for each in missed:
            behind = [layer for layer, step in since.items() if step <= each.step]
            self._make(behind, each.reduced, each.verdict)
        self._forget_missed()

    def inherit(self, other: Any) -> None:
        """Take over all layers of another stage that are ours, too, held or followed; it is over then.

        Between two steps: nothing of an unfinished or speculative step goes along.
        """
        for layer in set(other.layers) & set(self.layers):
            self._adopt(layer, other)
        self._since = {layer: step for layer, step in other._since.items() if layer in self.layers}
        self._missed = list(other._missed) if self._since else []

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _miss(self, step: int | None, reduced: dict[ReducedLayers, R], verdict: V) -> None:
        """Keeps what followed layers will need of a settled step."""
        if not self._since:
            return
        assert step is not None, "a step that is settled has begun"
        sums = {unit: found for unit, found in reduced.items() if not self._since.keys().isdisjoint(unit)}
        self._missed.append(_Missed(step, sums, verdict))

    def _forget_missed(self, beyond: int | None = None) -> None:
        """Drops the steps that no followed layer needs, and those from ``beyond`` on, which are run again."""
        earliest = min(self._since.values(), default=None)
        self._missed = [
            each
            for each in self._missed
            if earliest is not None and earliest <= each.step and (beyond is None or each.step < beyond)
        ]

    def _make(self, layers: Iterable[int], reduced: dict[ReducedLayers, R], verdict: V) -> None:
        self._reduced, self._verdict = reduced, verdict
        for layer in layers:
            self.update(layer)
            self.swap(layer)

    def _all(self) -> LayerRange:
        return LayerRange(self.layers[0], self.layers[-1] + 1)

    def _require_speculative(self) -> _Speculative[R]:
        if self._speculative is None:
            raise InternalError("no step is speculative")
        return self._speculative


def part_of(
    what: str, before: str, left: Mapping[int, LayerRange], layers: LayerRange | None
) -> tuple[int, LayerRange]:
    """Return which of the passes over a micro-batch an operation goes back over, and the part of it.

    Args:
        what: the operation, for people.
        before: the one that makes such a pass, for people.
        left: the layers that are left of each, by a name.
        layers: the last ones that are left of one of them; None: all that are left, where there is one.

    Raises:
        InternalError: there is none.
    """
    if not left:
        raise InternalError(f"{what} without its {before}")
    for name, each in left.items():
        if layers is None and len(left) == 1:
            return name, each
        if layers is not None and layers.stop == each.stop and layers.start >= each.start:
            return name, layers
    there = ", ".join(map(str, left.values()))
    wanted = "all layers of one pass" if layers is None else f"layers {layers}"
    raise InternalError(f"{what} on {wanted}, and {there} are left: expected the last of these")
