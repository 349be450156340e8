"""Text that came from somewhere else, made fit to be shown: nothing in it moves a cursor or hides what follows."""

from __future__ import annotations

import re

__all__ = ["one_line", "plain"]

# Controls but tab and newline; what changes the direction of text or cannot be seen; halves of characters; no XML has
# any of the first and last kind.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
_BREAK = re.compile(r"[\t\n]\s*")
_LONGEST = 2_000


def plain(text: str) -> str:
    r"""Returns text in which whatever a terminal or an XML reader would not take as text is a replacement sign.

    >>> plain("red: \x1b[31m")
    'red: �[31m'
    """
    return _UNFIT.sub("\ufffd", text)


def one_line(text: str, longest: int = _LONGEST) -> str:
    r"""Returns plain text in one line, of at most so many characters.

    >>> one_line("first\n  second\x00")
    'first second�'
    """
    line = _BREAK.sub(" ", plain(text)).strip()
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
