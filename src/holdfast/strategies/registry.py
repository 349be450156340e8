"""All strategies, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from holdfast.errors import ConfigError
from holdfast.strategies.adaptive import ADAPTIVE
from holdfast.strategies.auto import AUTO
from holdfast.strategies.checkfreq import CHECKFREQ
from holdfast.strategies.checkpoint_restart import CHECKPOINT_RESTART
from holdfast.strategies.lossy_forward import LOSSY_FORWARD
from holdfast.strategies.rollback import ROLLBACK
from holdfast.strategies.skip import SKIP
from holdfast.strategies.snapshots import SNAPSHOTS
from holdfast.strategies.strategy import Strategy
from holdfast.strategies.templates import TEMPLATES

__all__ = ["STRATEGIES", "names", "strategy_named"]

_ROWS = (
    AUTO,
    ADAPTIVE,
    TEMPLATES,
    CHECKPOINT_RESTART,
    CHECKFREQ,
    SNAPSHOTS,
    LOSSY_FORWARD,
    ROLLBACK,
    SKIP,
)
STRATEGIES: Mapping[str, Strategy] = MappingProxyType({row.name: row for row in _ROWS})


def strategy_named(name: str) -> Strategy:
    """Returns the strategy of this name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ConfigError(f"resilience.strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}") from None


def names(asked: Callable[[Strategy], bool]) -> tuple[str, ...]:
    """Returns the names of the strategies of which something is true."""
    return tuple(name for name, row in STRATEGIES.items() if asked(row))
