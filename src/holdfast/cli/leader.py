"""Commands that talk with whoever leads a job, and with whoever leads next."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

from holdfast.cli.arguments import reach_from
from holdfast.control.messages import Ended
from holdfast.control.reach import Reach
from holdfast.errors import ConfigError, CoordinatorUnavailable, NobodyLeads

__all__ = ["talk_with_leader"]

_AGAIN_S = 0.5
_PATIENCE_S = 15.0
"""How long nobody may answer who has: longer than it takes until another coordinator leads."""


def talk_with_leader(
    args: argparse.Namespace, talk: Callable[[Reach], Iterator[int | None]], ended: Callable[[Ended], int]
) -> int:
    """Talks with each coordinator that leads, one after another, until that comes to something.

    Args:
        args: as ``add_coordinator`` reads them.
        talk: with one of them; yields with each of its answers: the exit code, None while there is none yet.
        ended: tells how the job has ended, if it has; returns the exit code.

    Returns:
        The exit code; 1 if somebody has answered, and nobody who leads does any more.

    Raises:
        ConfigError: nobody has answered; or something of the arguments is wrong.
    """
    find = reach_from(args)
    answered_at: float | None = None
    while True:
        try:
            reach = find()
            if isinstance(reach, Ended):
                return ended(reach)
            for code in talk(reach):
                answered_at = time.monotonic()
                if code is not None:
                    return code
        except CoordinatorUnavailable as error:
            if answered_at is None and isinstance(error, NobodyLeads):
                answered_at = time.monotonic()
            if answered_at is None:
                raise ConfigError(f"{error}; expected where a job listens (`holdfast train --listen`)") from None
            if time.monotonic() > answered_at + _PATIENCE_S:
                gone = "the job has ended, or its coordinators are gone"
                why = f"nobody has led for {_PATIENCE_S:.0f} s" if isinstance(error, NobodyLeads) else gone
                print(f"holdfast: {error}: {why}", file=sys.stderr)
                return 1
        time.sleep(_AGAIN_S)
