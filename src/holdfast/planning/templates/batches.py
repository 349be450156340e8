"""Distribution of the global batch over pipelines that are not alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace

from holdfast.errors import ConfigError
from holdfast.planning.templates.pace import Pace

__all__ = ["count_microbatches", "even_shares", "fastest_shares", "nearest_batch"]


def nearest_batch(global_batch: int, microbatch_size: int, pipelines: int) -> int:
    """Returns the global batch nearest to one that can be split into whole micro-batches, at least one per pipeline.

    >>> nearest_batch(100, 8, 3), nearest_batch(10, 8, 3)
    (96, 24)
    """
    return microbatch_size * max(pipelines, round(Fraction(global_batch, microbatch_size)))


def count_microbatches(global_batch: int, microbatch_size: int, pipelines: int) -> int:
    """Returns how many micro-batches a global batch has.

    Raises:
        ConfigError: it cannot be split into micro-batches so that each pipeline has one; names the nearest that can,
            which is a recommendation: nothing ever changes the batch that was asked for.
    """
    count, rest = divmod(global_batch, microbatch_size)
    if rest or count < pipelines:
        raise ConfigError(
            f"a global batch of {global_batch} cannot be split into micro-batches of {microbatch_size} for {pipelines} "
            f"pipeline(s): expected {nearest_batch(global_batch, microbatch_size, pipelines)}, the nearest that can"
        )
    return count


def fastest_shares(paces: Sequence[Pace], microbatches: int) -> tuple[int, ...]:
    """Returns how many micro-batches each pipeline gets so that the slowest is done as soon as possible, exactly.

    Args:
        paces: of the pipelines.
        microbatches: of all; at least one for each.

    Each next micro-batch goes where it is done first. That is optimal, as a pipeline's time only grows with its share;
    it begins with what all of them get within a time in which not all micro-batches are done.
    """
    _check(len(paces), microbatches)
    shares = _shares_before(paces, microbatches)
    queue = [(pace.seconds(share + 1), index) for index, (pace, share) in enumerate(zip(paces, shares, strict=True))]
    heapify(queue)
    for _ in range(microbatches - sum(shares)):
        index = queue[0][1]
        shares[index] += 1
        heapreplace(queue, (paces[index].seconds(shares[index] + 1), index))
    return tuple(shares)


def _shares_before(paces: Sequence[Pace], microbatches: int) -> list[int]:
    """Returns the shares that fit into some time, the longest found that leaves none over."""

    def within(seconds: float) -> list[int]:
        most = {pace: max(1, pace.most_within(seconds, microbatches)) for pace in set(paces)}
        return [most[pace] for pace in paces]

    shares, low, high = [1] * len(paces), 0.0, max(pace.seconds(microbatches) for pace in paces)
    for _ in range(40):
        middle = (low + high) / 2
        found = within(middle)
        if sum(found) > microbatches:
            high = middle
        else:
            shares, low = found, middle
    return shares


def even_shares(steady_s: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """Returns how many micro-batches each pipeline gets so that their times ``N_b,i T_i`` vary least, exactly.

    Args:
        steady_s: T_i, the time per micro-batch of pipeline i, above 0.
        microbatches: of all; at least one for each.

    The variance is the least, over all c, of the mean of ``(N_b,i T_i - c)^2``, and for one c the best shares come of
    giving each next micro-batch where it adds least. As c grows these shares change by one exchange at a time, so all
    that can be best are met one after another; c is bounded by what the first of them is worth.

    Source: Oobleck, section 4.2.2, equation 6, where T_i must be the steady time per micro-batch. Its sum over
    pipelines counts micro-batches, not pipelines of a template.

    Cost: in whole numbers of any size; some milliseconds for tens of pipelines.
    """
    _check(len(steady_s), microbatches)
    if min(steady_s) <= 0:
        raise ConfigError(f"times per micro-batch of {min(steady_s)} cannot be balanced: expected more than 0")
    times = _proportional(steady_s)
    centre = Fraction(microbatches) / sum(Fraction(1, time) for time in times)
    shares = _for_centre(times, microbatches, centre)
    spread = math.isqrt(_deviation(times, shares) // len(times)) + 1
    slack = spread * math.sqrt(sum(time**-2 for time in times)) / sum(1 / time for time in times)
    reach = Fraction(math.ceil(slack * (1 + 1e-9)) + 1)
    met = _met(times, _for_centre(times, microbatches, centre - reach), centre + reach)
    return min(met, key=lambda each: _deviation(times, each))


def _check(pipelines: int, microbatches: int) -> None:
    if not 1 <= pipelines <= microbatches:
        raise ConfigError(
            f"{microbatches} micro-batches cannot be shared by {pipelines} pipelines: expected at least one for each"
        )


def _proportional(values: Sequence[float]) -> list[int]:
    """Returns the least whole numbers that are to each other as these, exactly, of whatever size."""
    exact = [Fraction(repr(float(value))) for value in values]
    common = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * common) for value in exact]
    divisor = math.gcd(*whole)
    return [value // divisor for value in whole]


def _deviation(times: Sequence[int], shares: Sequence[int]) -> int:
    """Returns the variance times the square of the number of pipelines."""
    each = [time * share for time, share in zip(times, shares, strict=True)]
    return len(each) * sum(value * value for value in each) - sum(each) ** 2


def _for_centre(times: Sequence[int], microbatches: int, centre: Fraction) -> tuple[int, ...]:
    """Returns the shares with the least sum of ``(N T - c)^2``."""
    shares = [1] * len(times)
    queue = [(_adds(time, 1, centre), index) for index, time in enumerate(times)]
    heapify(queue)
    for _ in range(microbatches - len(times)):
        index = queue[0][1]
        shares[index] += 1
        heapreplace(queue, (_adds(times[index], shares[index], centre), index))
    return tuple(shares)


def _adds(time: int, share: int, centre: Fraction) -> Fraction:
    """Returns by how much ``(N T - c)^2`` grows with one micro-batch more."""
    return time * (time * (2 * share + 1) - 2 * centre)


def _met(times: Sequence[int], shares: tuple[int, ...], end: Fraction) -> Iterator[tuple[int, ...]]:
    """Yields shares that are best for some c, from where the first ones are to an end."""
    while True:
        yield shares
        by_share = sorted(range(len(times)), key=lambda index: shares[index])
        giving = {times[index]: index for index in by_share if shares[index] > 1}
        taking = {times[index]: index for index in reversed(by_share)}
        turns = [
            (_turn(quicker, shares[gives] - 1, slower, shares[takes]), gives, takes)
            for quicker, gives in giving.items()
            for slower, takes in taking.items()
            if slower > quicker
        ]
        if not turns:
            return
        at, gives, takes = min(turns)
        if at > end:
            return
        changed = list(shares)
        changed[gives], changed[takes] = shares[gives] - 1, shares[takes] + 1
        shares = tuple(changed)


def _turn(gives: int, left: int, takes: int, has: int) -> Fraction:
    """Returns the c from which on a micro-batch is better off with the slower pipeline."""
    return Fraction(takes * takes * (2 * has + 1) - gives * gives * (2 * left + 1), 2 * (takes - gives))
