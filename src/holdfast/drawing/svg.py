"""The elements that SVG pictures are made of, each as text. Coordinates are pixels, from the top left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from xml.sax.saxutils import escape, quoteattr

__all__ = ["canvas", "element", "legend", "rect", "text", "title", "upright"]


def element(name: str, inside: str = "", /, **attributes: object) -> str:
    """Returns an element.

    Args:
        name: of the element.
        inside: other elements, or escaped text.
        attributes: floats are written with two decimals; ``class_`` as ``class``, and first; ``font_size`` as
            ``font-size``.

    >>> element("line", x1=1.0, x2=2, stroke_width="0.5", class_="tick")
    '<line class="tick" x1="1.00" x2="2" stroke-width="0.5"/>'
    """
    ordered = sorted(attributes.items(), key=lambda attribute: attribute[0] != "class_")
    written = "".join(f" {key.rstrip('_').replace('_', '-')}={_quoted(value)}" for key, value in ordered)
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def _quoted(value: object) -> str:
    return quoteattr(f"{value:.2f}" if isinstance(value, float) else str(value))


def canvas(width: int, height: int, defined: str, parts: Iterable[str], **attributes: object) -> str:
    """Returns a whole picture, on white.

    Args:
        width: of the picture.
        height: of the picture.
        defined: the element with what the parts refer to: a style, or definitions.
        parts: what is drawn, each over those before.
        attributes: more of the picture's.
    """
    lines = [defined, element("rect", width="100%", height="100%", fill="white"), *parts]
    inside = "".join(f"\n{line}" for line in lines) + "\n"
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
    return element("svg", inside, xmlns="http://www.w3.org/2000/svg", **size, **attributes) + "\n"


def rect(x: float, y: float, width: float, height: float, inside: str = "", /, **attributes: object) -> str:
    """Returns a rectangle; ``inside`` may be its title."""
    return element("rect", inside, x=x, y=y, width=width, height=height, **attributes)


def text(x: float, y: float, words: str, /, **attributes: object) -> str:
    """Returns words, whatever they say; ``y`` is their base line."""
    return element("text", escape(words), x=x, y=y, **attributes)


def title(words: str) -> str:
    """Returns what is shown while the pointer is on the element that it is in."""
    return element("title", escape(words))


def upright(x: float, top: float, bottom: float, /, **attributes: object) -> str:
    """Returns an upright line."""
    return element("line", x1=x, x2=x, y1=top, y2=bottom, **attributes)


def legend(x: int, y: int, entries: Mapping[str, Mapping[str, object]], *, letter: int = 6) -> Iterator[str]:
    """Yields a box for each entry, and what it means beside it, in one line.

    Args:
        x: where the first box begins.
        y: the top of the boxes.
        entries: what each means, and the attributes of its box.
        letter: how wide letters are.
    """
    for words, attributes in entries.items():
        yield rect(x, y, 12, 12, **attributes)
        yield text(x + 16, y + 10, words)
        x += 34 + letter * len(words)
