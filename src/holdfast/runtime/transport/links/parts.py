"""How the contributions to a sum are cut: short ones, and those of two workers, are not."""

from __future__ import annotations

from holdfast.runtime.transport.links.wire import Kind

__all__ = ["goes_whole", "longest_parts"]

_WHOLE_BYTES = 1 << 20
"""Contributions are sent whole as long as nobody has to send more than this."""
_LONGEST_NUMBER = 8


def goes_whole(size: int, members: int) -> bool:
    """Whether everybody sends all of a contribution of so many bytes to all others."""
    return members == 2 or (members - 1) * size <= _WHOLE_BYTES


def longest_parts(size: int, members: int) -> dict[Kind, int]:
    """Returns how many bytes the messages of a sum have at most, by kind.

    Args:
        size: the most bytes that anybody contributes.
        members: how many sum.
    """
    if goes_whole(size, members):
        return {Kind.PART: size}
    share = size // members + _LONGEST_NUMBER
    return {Kind.PART: max(share, _WHOLE_BYTES // (members - 1)), Kind.TOTAL: share}
