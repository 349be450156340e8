"""A study as text: a report in Markdown, a table, JSON, and a summary for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from holdfast.recovery.overhead import MODELLED, DataParallel, per_failure, per_run
from holdfast.study.findings import Finding, Findings
from holdfast.study.outcomes import Held

__all__ = ["to_csv", "to_json", "to_markdown", "to_text"]

_HOUR_S = 3600.0
_COLUMNS = (
    *("seed", "at", "strategy", "progress", "survivors", "steps", "loss", "accuracy"),
    *("baseline_loss", "baseline_accuracy", "minibatch_s", "baseline_s"),
    *("init_s", "restart_s", "replay_s", "replayed", "weights_sha256"),
)


def to_json(found: Findings) -> str:
    """Returns all of it: each scenario's figures, means over seeds, and costs."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def to_csv(found: Findings) -> str:
    """Returns a line for each scenario, seed and time after the failure, and for the state before; processor time."""
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(_COLUMNS)
    steps = _steps(found)
    for each in found.baselines:
        for at in steps:
            write((each.seed, at, "before", None, None, *_held(each.before[at], each.after[at][0]), *[None] * 7))
    by_seed = {each.seed: each for each in found.baselines}
    for outcome in found.outcomes:
        head = (outcome.seed, outcome.at, outcome.strategy, outcome.progress, outcome.survivors)
        parts = (part and part.cpu_s for part in (outcome.init, outcome.restart, outcome.replay))
        tail = (outcome.minibatch_s, outcome.baseline_s, *parts, outcome.replayed, outcome.weights_sha256)
        for ours, theirs in zip(outcome.after, by_seed[outcome.seed].after[outcome.at], strict=True):
            write((*head, *_held(ours, theirs), *tail))
    return file.getvalue()


def _held(ours: Held, theirs: Held) -> tuple[float | None, ...]:
    return ours.steps, ours.loss, ours.accuracy, theirs.loss, theirs.accuracy


def to_text(found: Findings) -> str:
    """Returns a table for people: what was right after each step, and what it cost."""
    lines = [f"{found.workers} workers, {found.steps} steps, {len(found.seeds)} seed(s); difference: to the baseline"]
    for at in _steps(found):
        costs = {each.name: each for each in found.costs if each.at == at}
        lines.append(f"\nstep {at:<23}{'loss':>9}{'difference':>12}{'accuracy':>10}{'slowdown':>10}")
        for each in found.after(at):
            cost = costs.get(each.name)
            slow = f"{cost.slowdown:.2f}x" if cost is not None and cost.strategy != "checkpoint-restart" else ""
            difference = f"{100 * each.loss_difference:.2f} %"
            lines.append(f"{each.name:28}{each.loss:9.4f}{difference:>12}{_percent(each.accuracy):>10}{slow:>10}")
    lines += ["", *_judged(found)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def to_markdown(found: Findings) -> str:
    """Returns the report."""
    parts = [
        "# Failures of data-parallel training\n",
        f"{found.workers} workers, {found.steps} steps, {found.baselines[0].steps_per_epoch} mini-batches per epoch, "
        f"seeds {', '.join(map(str, found.seeds))}. Trained on {found.baselines[0].samples[0]} samples, judged by "
        f"{found.baselines[0].samples[1]} that are held out. Differences are to the run without failures.\n",
        "![loss](curve-loss.svg)\n",
        *_judged(found),
        "",
        "## Costs\n",
        *_overheads(found),
        "",
    ]
    if found.parts.init:
        parts.append("![replay](replay.svg)\n")
    for at in _steps(found):
        parts += [f"## Step {at}\n", f"![loss](loss-step-{at}.svg)\n", *_table(found, at, "loss", _loss), ""]
        if all(each.accuracy is not None for each in found.after(at)):
            parts += [f"![accuracy](accuracy-step-{at}.svg)\n", *_table(found, at, "accuracy", _accuracy), ""]
        parts.append(f"![slowdown](slowdown-step-{at}.svg)\n")
    return "\n".join(parts)


def _steps(found: Findings) -> tuple[int, ...]:
    return tuple(dict.fromkeys(each.at for each in found.findings))


def _table(found: Findings, at: int, what: str, cell: Callable[[Finding], str]) -> Iterator[str]:
    """One figure and its difference right after a step, later, and at the end."""
    rows = [each for each in found.findings if each.at == at]
    times = sorted({each.later for each in rows if each.later >= 0})
    cells = {(each.name, max(0, each.later)): cell(each) for each in rows}  # what is before it: in the first column
    heads = ["end" if each == found.steps - at - 1 else f"+{each}" for each in times]
    yield "| scenario | " + " | ".join(f"{what} {head} | difference" for head in heads) + " |"
    yield "|---|" + "---:|---:|" * len(times)
    for name in dict.fromkeys(each.name for each in rows):
        yield f"| {name} | " + " | ".join(cells.get((name, later), " | ") for later in times) + " |"


def _loss(found: Finding) -> str:
    return f"{found.loss:.4f} | {100 * found.loss_difference:.2f} %"


def _accuracy(found: Finding) -> str:
    return f"{_percent(found.accuracy)} | {100 * (found.accuracy_difference or 0.0):+.2f}"


def _judged(found: Findings) -> Iterator[str]:
    """Yields what the published study found, and in how many cases it is so here."""
    lossy = [each for each in found.findings if each.strategy == "lossy-forward" and each.later == 0]
    back = {
        (each.at, each.progress): each.loss_difference
        for each in found.findings
        if each.strategy == "rollback" and each.later == 0
    }
    pairs = [each.loss_difference <= back[each.at, each.progress] for each in lossy if (each.at, each.progress) in back]
    if pairs:
        yield f"- lossy-forward differs no more than rollback in {sum(pairs)} of {len(pairs)} scenarios"
    more = {
        "with more survivors": _falls(lossy, "survivors", "progress"),
        "with more progress": _falls(lossy, "progress", "survivors"),
    }
    for what, falls in more.items():
        if falls:
            yield f"- lossy-forward differs less {what} in {sum(falls)} of {len(falls)} comparisons"
    near = [each.near for each in found.costs]
    yield (
        "- costs are as predicted, within 10 % or a quarter of a mini-batch (adaptive: at most so much), in "
        f"{sum(near)} of {len(near)} scenarios"
    )


def _falls(rows: Sequence[Finding], along: str, fixed: str) -> list[bool]:
    """Of any two neighbours along one key, all else being equal: whether the difference falls."""
    found = []
    groups = dict.fromkeys((each.at, getattr(each, fixed)) for each in rows)
    for group in groups:
        row = sorted((e for e in rows if (e.at, getattr(e, fixed)) == group), key=lambda e: getattr(e, along) or 0)
        found += [b.loss_difference < a.loss_difference for a, b in pairwise(row)]
    return found


def _overheads(found: Findings) -> Iterator[str]:
    """Yields the parts of overheads, what each scenario cost beside the formula, and what the formulas say of a run."""
    parts = found.parts
    yield "| part | processor s | by the clock, s |"
    yield "|---|---:|---:|"
    yield f"| mini-batch, all workers | {parts.minibatch_s:.4f} | |"
    named = (("checkpoint", parts.checkpoint), ("initialisation", parts.init), ("restart", parts.restart))
    for name, spent in named:
        if spent is not None:
            yield f"| {name} | {spent.cpu_s:.4f} | {spent.wall_s:.4f} |"
    yield ""
    yield "| step | scenario | measured, s | predicted, s | within 10 % or a quarter of a mini-batch |"
    yield "|---:|---|---:|---:|---|"
    for each in found.costs:
        near = "yes" if each.near else "no"
        yield f"| {each.at} | {each.name} | {each.measured_s:.3f} | {each.predicted_s:.3f} | {near} |"
    if parts.init is not None:  # else nothing is known of what formulas need
        yield from _expected(found.data_parallel(_HOUR_S))


def _expected(of: DataParallel) -> Iterator[str]:
    yield (
        "\nBy the formulas, if a mini-batch of all workers, side by side, took as long as here one after another; of "
        "`adaptive` one worker fails:\n"
    )
    yield "| strategy | a failure on average, s | a run with one failure an hour, s |"
    yield "|---|---:|---:|"
    for strategy in MODELLED:
        yield f"| {strategy} | {per_failure(strategy, of).seconds:.3f} | {per_run(strategy, of):.3f} |"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
