"""How the contributions to a sum are cut: short ones, and those of two workers, are not."""

from __future__ import annotations

from holdfast.core.summing import SumSize
from holdfast.runtime.transport.links.wire import Kind

__all__ = ["COUNT_BYTES", "goes_whole", "longest_parts"]

_WHOLE_BYTES = 1 << 20
"""Contributions are sent whole as long as nobody has to send more than this."""
_LONGEST_NUMBER = 8
COUNT_BYTES = 4
"""How many bytes tell how many parts a contribution has, before its header."""


def goes_whole(size: int, members: int) -> bool:
    """Whether everybody sends all of each part, of so many bytes, to all others."""
    return members == 2 or (members - 1) * size <= _WHOLE_BYTES


def longest_parts(size: SumSize, members: int) -> dict[Kind, int]:
    """Returns how many bytes the messages of a sum have at most, by kind.

    Args:
        size: the most that anybody contributes.
        members: how many sum.
    """
    header = {Kind.HEADER: COUNT_BYTES + size.header}
    if goes_whole(size.part, members):
        return header | {Kind.PART: size.part}
    share = size.part // members + _LONGEST_NUMBER
    return header | {Kind.PART: share, Kind.TOTAL: share}
