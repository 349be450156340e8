"""How often a checkpoint is made: by CheckFreq as often as its overhead allows, by Young as often as pays."""

from __future__ import annotations

import math

from holdfast.errors import ConfigError

__all__ = ["OVERHEAD", "checkpoint_interval", "youngs_interval"]

OVERHEAD = 0.035
"""What checkpoints may add to training, as a share of it: CheckFreq's own bound, also used by SWIFT (section 7.1)."""


def checkpoint_interval(stall_s: float, write_s: float, step_s: float, *, overhead: float = OVERHEAD) -> int:
    """Returns the smallest number of steps between checkpoints whose overhead stays within the bound.

    A checkpoint is not begun before the one before it is written, so that no more than one is under way.

    Source: CheckFreq, FAST '21 (Mohan, Phanishayee, Chidambaram), as used by SWIFT, section 7.1. There the stall is put
    together from the times of a copy and of the part of a step that it can hide behind; here it is measured as a whole.

    Args:
        stall_s: seconds for which training waits for one checkpoint.
        write_s: seconds from the beginning of a checkpoint until it is written.
        step_s: seconds of a step without checkpoints, more than 0.
        overhead: the bound, more than 0.

    Raises:
        ConfigError: a value is out of range.

    >>> checkpoint_interval(0.07, 0.5, 0.1)
    20
    >>> checkpoint_interval(0.0, 0.5, 0.1)
    5
    """
    if not (step_s > 0 and overhead > 0 and stall_s >= 0 and write_s >= 0):
        raise ConfigError(
            "expected stall_s and write_s of at least 0, step_s and overhead above 0, got "
            f"stall_s {stall_s}, write_s {write_s}, step_s {step_s}, overhead {overhead}"
        )
    return max(1, _ceil(stall_s / (overhead * step_s)), _ceil(write_s / step_s))


def youngs_interval(stall_s: float, write_s: float, step_s: float, between_s: float) -> int:
    """Returns the number of steps between checkpoints by which these and what is run again cost the least together.

    The root of 2 x (time for which one holds training up) x (time until one is needed); none is begun before the last
    one is written.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.

    Args:
        stall_s: seconds for which training waits for one checkpoint.
        write_s: seconds from the beginning of a checkpoint until it is written.
        step_s: seconds of a step without checkpoints, more than 0.
        between_s: seconds from one time that a checkpoint is needed to the next, on average.

    >>> youngs_interval(0.5, 3.0, 2.0, 3600.0)
    30
    """
    return max(1, round(math.sqrt(2 * stall_s * between_s) / step_s), _ceil(write_s / step_s))


def _ceil(steps: float) -> int:
    """The next whole number, but not one further for a rounding error."""
    return math.ceil(steps * (1 - 1e-12))
