"""What an item of a loop must leave as it was, and what a script may put in the place of a tensor between two steps.

Any worker may run any item, once or twice, in any order; so an item may add to gradients and to nothing else. And what
is trained is the tensors that the optimizers have: another tensor under the name of one of them would never be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.runtime.loop.prepared import Prepared
from holdfast.runtime.tensors import Place, places, same_bits

__all__ = ["Guard"]


_Marks = list[list[int]]
"""Per tensor: which it is, and what changes with whatever is done to it, unless in the memory of its ``.data``."""


@dataclass(slots=True)
class Guard:
    """Compares what an item leaves with what it found: a few numbers per tensor, found without a call of Python's each.

    Attributes:
        prepared: what is trained.
        bits: whether what the next item leaves is compared bit by bit, with a copy of the whole model and its
            gradients: a change in the memory of a tensor's ``.data`` shows in nothing else.
        schedulers: those that the script steps by itself.
    """

    prepared: Prepared
    bits: bool = False
    schedulers: Sequence[Any] = ()
    _copies: list[Tensor] = field(default_factory=list)
    _places: list[Place] = field(init=False)
    _kept: list[Place] = field(init=False)
    _names: list[str] = field(init=False)
    _trained: list[nn.Parameter] = field(init=False)
    _guarded: list[Place] = field(default_factory=list)
    _but: frozenset[str] | None = None
    _before: _Marks = field(default_factory=list)
    _settings: list[dict[str, Any]] = field(default_factory=list)
    _gradients: _Marks = field(default_factory=list)
    _of_backward: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        """What there is to compare is found once."""
        model, buckets, named = self.prepared.model, self.prepared.buckets, self.prepared.named
        kept = {id(tensor) for bucket in buckets for tensor in (*bucket.parameters(), *bucket.buffers())}
        self._places = list(places(model))
        self._kept = [place for place in self._places if id(place.tensor) in kept]
        self._names, self._trained = list(named), list(named.values())

    def put_back(self) -> None:
        """Between two steps: copies what was put in the place of a tensor into that tensor, and puts it back.

        Raises:
            ConfigError: it has another shape or type, or there is nothing.
        """
        for place in self._kept:
            if place.now is not place.tensor:
                with torch.no_grad():
                    place.tensor.data.copy_(_fitting(place))
                place.owner[place.leaf] = place.tensor

    def begin(self, but: frozenset[str]) -> None:
        """An item begins; ``but``: buffers that it may change."""
        if but != self._but:
            self._but, self._guarded = but, [place for place in self._places if place.name not in but]
        self._copies = [place.tensor.detach().clone() for place in self._guarded] if self.bits else []
        self._before = self._marks_now()
        self._settings = self._settings_now()
        self._gradients, self._of_backward = [], []

    def note_gradients(self) -> None:
        """A backward pass is over."""
        self._gradients = self._gradients_now()
        if self.bits:
            there = map(_GRADIENT, self._trained)
            self._of_backward = [None if each is None else each.detach().clone() for each in there]

    def check_none(self) -> None:
        """Checks that no gradient is there before the first backward pass of an item.

        Raises:
            ConfigError: there is one; it names it.
        """
        for name, gradient in zip(self._names, map(_GRADIENT, self._trained), strict=True):
            if gradient is not None:
                raise ConfigError(
                    f"the gradient of {name} is there before step.backward(loss): some .backward() of its own has run, "
                    "which would count besides, without the weight or the scale of the loss; expected step.backward "
                    "for each loss, or for the sum of all"
                )

    def check_gradients(self) -> None:
        """Checks that gradients are as the last backward pass has left them.

        Raises:
            ConfigError: one is not; it names it.
        """
        if self._gradients and (now := self._gradients_now()) != self._gradients:
            raise _gradient_changed(_first_changed(self._names, self._gradients, now))
        for name, before, there in zip(self._names, self._of_backward, map(_GRADIENT, self._trained), strict=False):
            if not same_bits(before, there):
                raise _gradient_changed(name)

    def check(self) -> None:
        """Checks what an item has left.

        Raises:
            ConfigError: it has changed something; it names it.
        """
        self.check_gradients()
        if (now := self._marks_now()) != self._before:
            name = _first_changed([each.name for each in self._guarded], self._before, now)
            raise next(_changed(place) for place in self._guarded if place.name == name)
        for place, copy in zip(self._guarded, self._copies, strict=False):
            if not same_bits(copy, place.tensor):
                raise _changed(place)
        self.bits = False
        if self._settings_now() != self._settings:
            raise ConfigError(
                "a setting of an optimizer, such as its learning rate, was changed while an item ran, and workers run "
                "any number of items; expected hf.prepare(..., scheduler=), or the change between two steps"
            )

    def _marks_now(self) -> _Marks:
        there = [place.now for place in self._guarded]
        tensors = [_NOTHING if each is None else each for each in there]
        return [list(map(id, there)), list(map(_VERSION, tensors)), list(map(Tensor.data_ptr, tensors))]

    def _gradients_now(self) -> _Marks:
        there = list(map(_GRADIENT, self._trained))
        tensors = [_NOTHING if each is None else each for each in there]
        return [list(map(id, there)), list(map(_VERSION, tensors))]

    def _settings_now(self) -> list[dict[str, Any]]:
        groups = [dict(group) for optimizer in self.prepared.optimizers for group in optimizer.param_groups]
        return [*groups, {"steps of schedulers": [getattr(each, "last_epoch", None) for each in self.schedulers]}]


_VERSION, _GRADIENT = attrgetter("_version"), attrgetter("grad")
_NOTHING = torch.empty(0)


def _first_changed(names: Sequence[str], before: _Marks, now: _Marks) -> str:
    """Returns the first name whose numbers are others now."""
    pairs = zip(names, zip(*before, strict=True), zip(*now, strict=True), strict=True)
    return next(name for name, one, other in pairs if one != other)


def _fitting(place: Place) -> Tensor:
    ours, there = place.tensor, place.now
    if isinstance(there, Tensor) and (there.shape, there.dtype) == (ours.shape, ours.dtype):
        if there.requires_grad != ours.requires_grad:
            raise ConfigError(
                f"parameter {place.name} was replaced by one that has requires_grad={there.requires_grad}; expected "
                "the same parameters to be trained, or frozen, to the end of the loop"
            )
        return there
    now = f"{there.dtype} {tuple(there.shape)}" if isinstance(there, Tensor) else type(there).__name__
    raise ConfigError(
        f"{place.name} is {now} now, and was {ours.dtype} {tuple(ours.shape)} at hf.prepare; expected the same shape "
        "and type to the end of the loop"
    )


def _gradient_changed(name: str) -> ConfigError:
    return ConfigError(
        f"the gradient of {name} was changed behind step.backward(loss), where it is that of one item alone; expected "
        "hf.prepare(..., clip_norm=) instead of clip_grad_norm_, p.register_hook for whatever else is done to "
        "gradients, and zero_grad left out"
    )


def _changed(place: Place) -> ConfigError:
    trained = isinstance(place.tensor, nn.Parameter)
    what = "parameter" if trained else "buffer"
    why = "weights change between steps only" if trained else "only batch-norm's running statistics may change"
    return ConfigError(
        f"the model changed its {what} {place.name!r} while an item ran; {why}, because the order of items is not "
        "fixed: do it between steps"
    )
