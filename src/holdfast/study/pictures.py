"""The figures of a study, each as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

from holdfast.drawing.bars import Bar, bars_to_svg
from holdfast.drawing.curves import curves_to_svg
from holdfast.study.findings import Finding, Findings
from holdfast.study.scenarios import STRATEGIES

__all__ = ["draw"]

_bars = partial(bars_to_svg, groups=("before", "baseline", *STRATEGIES))


def draw(found: Findings) -> Iterator[tuple[str, str]]:
    """Yields the name of each file, and the picture."""
    steps = tuple(dict.fromkeys(each.at for each in found.findings))
    for at in steps:
        rows = found.after(at)
        yield f"loss-step-{at}.svg", _bars(_losses(rows), f"Held-out loss after step {at}; {_means(found)}")
        if all(each.accuracy is not None for each in rows):
            caption = f"Held-out accuracy after step {at}, percent; {_means(found)}"
            yield f"accuracy-step-{at}.svg", _bars(_accuracies(rows), caption)
        costs = [each for each in found.costs if each.at == at and each.strategy != "checkpoint-restart"]
        told = [Bar(name=c.name, value=c.slowdown, group=c.strategy, told=f"{c.slowdown:.2f}x") for c in costs]
        caption = f"Duration of the mini-batch of step {at} by the baseline's (processor time)"
        yield (
            f"slowdown-step-{at}.svg",
            _bars([Bar(name="baseline", value=1.0, group="baseline"), *told], caption),
        )
    marks = {f"{at}": float(at) for at in steps}
    yield "curve-loss.svg", curves_to_svg(_curve(found, accuracy=False), "Held-out loss by step", marks=marks)
    if found.baselines[0].curve[0].accuracy is not None:
        caption = "Held-out accuracy by step, percent"
        yield "curve-accuracy.svg", curves_to_svg(_curve(found, accuracy=True), caption, marks=marks)
    if found.parts.init:
        yield "replay.svg", _replay(found)


def _means(found: Findings) -> str:
    return f"means of {len(found.seeds)} seed(s), difference to the baseline behind each"


def _losses(rows: tuple[Finding, ...]) -> list[Bar]:
    return [
        Bar(name=each.name, value=each.loss, group=each.strategy, told=f"{100 * each.loss_difference:.2f} %")
        for each in rows
    ]


def _accuracies(rows: tuple[Finding, ...]) -> list[Bar]:
    return [
        Bar(
            name=each.name,
            value=100 * (each.accuracy or 0.0),
            group=each.strategy,
            told=f"{100 * (each.accuracy_difference or 0.0):+.2f}",
        )
        for each in rows
    ]


def _curve(found: Findings, *, accuracy: bool) -> dict[str, list[tuple[float, float]]]:
    """Means at the steps at which all runs were looked at."""
    runs = [{each.steps: each for each in baseline.curve} for baseline in found.baselines]
    points = []
    for step in runs[0]:
        column = [run[step] for run in runs if step in run]
        if len(column) == len(runs):
            values = (100 * (each.accuracy or 0.0) if accuracy else each.loss for each in column)
            points.append((float(step), statistics.fmean(values)))
    return {"baseline": points}


def _replay(found: Findings) -> str:
    """Seconds of the replay by the position in the epoch: the formula's line, and what was measured."""
    epoch = found.baselines[0].steps_per_epoch
    mean_s = found.parts.minibatch_s
    measured = [
        (float(each.replayed), each.replay.cpu_s)
        for each in found.outcomes
        if each.replay is not None and each.replayed is not None
    ]
    return curves_to_svg(
        {"mini-batches since the epoch began x mean duration": [(0.0, 0.0), (float(epoch), epoch * mean_s)]},
        "Replay of checkpoint-restart by mini-batches since the epoch began (processor seconds)",
        points={"measured": measured},
        unit=" s",
    )
