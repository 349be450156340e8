"""The page that ``holdfast simulate --format html`` writes: one file, which refers to no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from holdfast.cli.simulate_shown import ShownRuns, head_of, table_of
from holdfast.drawing.curves import Point, curves_to_svg
from holdfast.drawing.shares import shares_to_svg
from holdfast.sim.compare import Compared
from holdfast.sim.world import World

__all__ = ["throughput_of", "to_page"]

_SLICES = 240
_HOUR_S = 3600.0
_STYLE = """
body { font-family: sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } svg { max-width: 100%; height: auto; margin: 1rem 0 }
"""


def to_page(shown: ShownRuns) -> str:
    """Returns the page: what became of the job, of how much by each strategy, when, and what was lost by what."""
    title = f"{escape(shown.job)} under failures"
    head = "".join(f"<p><b>{escape(name)}</b>: {escape(text)}</p>\n" for name, text in head_of(shown))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n{head}{_table(table_of(shown))}\n"
        f"{''.join(_pictures(shown))}</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    first, *others = rows
    lines = ["".join(f"<th>{escape(text)}</th>" for text in first)]
    lines += ["".join(f"<td>{escape(text)}</td>" for text in row) for row in others]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _pictures(shown: ShownRuns) -> Iterator[str]:
    world, hours = shown.worlds[0], shown.worlds[0].lasts_s / _HOUR_S
    curves = {name: throughput_of(found) for name, found in shown.found.items()}
    yield curves_to_svg(curves, f"Samples per second by the hour, in the first run of {hours:.4g} h")
    yield curves_to_svg({"machines": _machines(world)}, "Machines that are there, by the hour, in the same run")
    lost = {name: found.lost for name, found in shown.found.items()}
    yield shares_to_svg(
        {
            name: {part: 100 * seconds / world.lasts_s for part, seconds in parts.items()}
            for name, parts in lost.items()
        },
        "Time that the whole grid would not have needed, by what it was lost to, in all runs",
        " %",
    )


def throughput_of(found: Compared) -> list[Point]:
    """Returns samples per second in the first run, by the hour: means of slices of it, as much lasts but seconds."""
    outcome = found.outcomes[0]
    rates = [*outcome.rates, (outcome.seconds, None)]
    each = outcome.seconds / _SLICES
    steps = [0.0] * _SLICES
    for (begin, step_s), (end, _) in pairwise(rates):
        if step_s is None:
            continue
        for number in range(int(begin / each), min(int(end / each), _SLICES - 1) + 1):
            within = min(end, (number + 1) * each) - max(begin, number * each)
            steps[number] += max(within, 0.0) / step_s
    return [((number + 0.5) * each / _HOUR_S, found.samples * made / each) for number, made in enumerate(steps)]


def _machines(world: World) -> list[Point]:
    """A line with a corner wherever one comes or goes."""
    points: list[Point] = []
    for at, count in world.available():
        if at > world.lasts_s:
            break
        if points:
            points.append((at / _HOUR_S, points[-1][1]))
        points.append((at / _HOUR_S, float(count)))
    return [*points, (world.lasts_s / _HOUR_S, points[-1][1])]
