"""The report: every number beside the printed one, as Markdown, as a page, and for programs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from holdfast.reproduce.facts import facts
from holdfast.reproduce.found import Found, Item, Row, Verdict
from holdfast.reproduce.registry import ELSEWHERE, FIRST

__all__ = ["section", "to_json", "to_markdown", "to_page"]

_HEAD = ("", "paper", "here", "range", "gap", "")
_STYLE = """
body { font-family: sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left } svg { max-width: 100%; height: auto }
"""
_ABOUT = (
    "Every table and figure of the four papers that simulation or computation can give, beside what they print. "
    "`holdfast reproduce all` makes this report; what is simulated are this package's own decisions, plans and "
    "prices ([simulate](simulate.md)), systems without a runtime here are models ([strategies](strategies.md)).",
    "A range is what comes out over what the papers leave open; one reading was chosen for all cells of a paper, "
    "and the constants say why. *met*: within 5 %, if nothing else is said; *better*: further in the direction that "
    "was wanted; *not given*: it takes something that is not published; *nothing can*: it contradicts a bound, or "
    "other numbers of the same paper; *fitted*: a constant was chosen so that it comes out, so it is no result.",
)


def to_markdown(found: Mapping[Item, Found]) -> str:
    """Returns the whole report; pictures are links into a folder ``pictures`` beside it."""
    parts = ["# The papers' tables and figures", *_ABOUT, _table(_first(found)), _table(_summary(found))]
    for item, each in found.items():
        parts.append(section(item, each))
    parts += ["## Not computed", _table([("", "stands for it"), *ELSEWHERE.items()]), "## Sources", _listed(_sources())]
    return "\n\n".join(parts) + "\n"


def section(item: Item, found: Found) -> str:
    """Returns what the report says of one item."""
    parts = [f"## {item.name}: {item.title}", *found.says, _table(_rows(found.rows))]
    if found.constants:
        parts.append(_listed(_constants(found)))
    parts += [f"![{name}](pictures/{name}.svg)" for name in found.pictures]
    return "\n\n".join(parts)


def to_page(found: Mapping[Item, Found]) -> str:
    """Returns the same as one HTML file, which refers to no other."""
    title = "The papers' tables and figures"
    body = [f"<h1>{escape(title)}</h1>", *map(_paragraph, _ABOUT), _html_table(_first(found))]
    body.append(_html_table(_summary(found)))
    for item, each in found.items():
        body.append(f'<h2 id="{escape(item.name)}">{escape(item.name)}: {escape(item.title)}</h2>')
        body += [*map(_paragraph, each.says), _html_table(_rows(each.rows))]
        body += [_html_list(_constants(each)), *each.pictures.values()]
    body += ["<h2>Not computed</h2>", _html_table([("", "stands for it"), *ELSEWHERE.items()])]
    body += ["<h2>Sources</h2>", _html_list(_sources())]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def to_json(found: Mapping[Item, Found]) -> str:
    """Returns the numbers; what is infinite is None."""
    told = {
        item.name: [
            {
                "what": row.what,
                "printed": row.printed,
                "ours": _finite(row.ours),
                "unit": row.unit,
                "range": None if row.reach is None else list(map(_finite, row.reach)),
                "verdict": row.verdict.value,
            }
            for row in each.rows
        ]
        for item, each in found.items()
    }
    return json.dumps(told, indent=1) + "\n"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _first(found: Mapping[Item, Found]) -> Iterator[Sequence[str]]:
    rows = {(item.name, row.what): row for item, each in found.items() for row in each.rows}
    told = [(name, rows[name, what]) for name, what in FIRST if (name, what) in rows]
    first, *others = _rows([row for _, row in told])
    yield ("", *first)
    for (name, _), row in zip(told, others, strict=True):
        yield (name, *row)


def _rows(rows: Iterable[Row]) -> Iterator[Sequence[str]]:
    yield _HEAD
    for row in rows:
        why = f"{row.verdict}: {row.why}" if row.why and row.verdict in (row.missed, Verdict.NOT_MET) else row.verdict
        yield (
            row.what,
            "" if row.printed is None else _number(row.printed, row.unit),
            _number(row.ours, row.unit),
            "" if row.reach is None else f"{_number(row.reach[0])} to {_number(row.reach[1])}",
            "" if row.gap is None else f"{round(100 * row.gap, 1) + 0.0:+.1f} %",
            "" if row.printed is None else str(why),
        )


def _number(value: float, unit: str = "") -> str:
    if not math.isfinite(value):
        return "none"
    text = (
        f"{value:,.0f}"
        if abs(value) >= 1000 or value == int(value)
        else f"{value:.3g}"
        if abs(value) < 100
        else f"{value:.1f}"
    )
    return f"{text} {unit}".rstrip()


def _summary(found: Mapping[Item, Found]) -> Iterator[Sequence[str]]:
    shown = (Verdict.MET, Verdict.BETTER, Verdict.FITTED, Verdict.NOT_MET, Verdict.OPEN, Verdict.NOTHING_CAN)
    yield ("", *(verdict.value for verdict in shown))
    for item, each in found.items():
        counts = Counter(row.verdict for row in each.rows)
        yield (f"{item.name}: {item.title}", *(str(counts[verdict] or "") for verdict in shown))


def _constants(found: Found) -> Iterator[str]:
    for each in found.constants:
        why = f"; {each.why}" if each.why else ""
        yield f"{each.name}: {each.value} ({each.origin.value}{why})"


def _sources() -> Iterator[str]:
    for paper in ("slipstream", "oobleck", "swift", "swift_groups", "nicolae"):
        known = facts(paper)
        yield from known.get("sources") or known["source"]


def _table(rows: Iterable[Sequence[str]]) -> str:
    first, *others = rows
    lines = [_line(first), _line(["---"] * len(first)), *map(_line, others)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


_LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


def _plain(text: str) -> str:
    """Without Markdown: the page stands for itself, whatever lies beside it."""
    return escape(_LINK.sub(r"docs/\2", text).replace("`", "").replace("*", ""))


def _paragraph(text: str) -> str:
    return f"<p>{_plain(text)}</p>"


def _html_table(rows: Iterable[Sequence[str]]) -> str:
    first, *others = rows
    lines = ["".join(f"<th>{_plain(cell)}</th>" for cell in first)]
    lines += ["".join(f"<td>{_plain(cell)}</td>" for cell in row) for row in others]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _html_list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_plain(line)}</li>" for line in lines) + "</ul>"
