"""The factor on the loss that keeps small gradients of a model in half precision from becoming 0 on their way."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LARGEST", "LossScale", "LossScaling"]

LARGEST = 2.0**64
"""No scale is larger: float32 holds it, its inverse and their products with any gradient that is worth having."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale at one step: a part of every layer's state, equal on all layers of one step.

    Attributes:
        value: what the loss is multiplied by; a power of two, so that dividing the gradients by it is exact.
        streak: steps in a row that counted since the scale changed last.
    """

    value: float
    streak: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """How the scale changes: a pure function of which steps were omitted.

    Attributes:
        initial: the scale before the first step, a power of two from 1 to ``LARGEST``.
        growth_every: the scale is doubled after so many steps in a row that counted.
    """

    initial: float = 65536.0
    growth_every: int = 2000

    @property
    def first(self) -> LossScale:
        """The scale before the first step."""
        return LossScale(value=self.initial)

    def after(self, scale: LossScale, *, counted: bool) -> LossScale:
        """Return the scale after one more step, which counted or was omitted.

        >>> scaling = LossScaling(initial=8.0, growth_every=2)
        >>> scaling.after(scaling.first, counted=False)
        LossScale(value=4.0, streak=0)
        >>> scaling.after(scaling.after(scaling.first, counted=True), counted=True)
        LossScale(value=16.0, streak=0)

        Source: Micikevicius et al., Mixed Precision Training, 2018, and the defaults of torch's ``GradScaler``. We
        differ: there are limits at both ends.
        """
        if not counted:
            return LossScale(value=max(scale.value / 2, 1.0))
        if scale.streak + 1 < self.growth_every:
            return LossScale(value=scale.value, streak=scale.streak + 1)
        return LossScale(value=min(scale.value * 2, LARGEST))
