"""What many measurements of the same thing come to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from holdfast.core.profile import Link

__all__ = ["fit_link", "spread"]

_FASTEST = 1e15


def spread(values: Sequence[float]) -> float:
    """Returns the distance between the quartiles; 0 for a single value.

    >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
    2.0
    """
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def fit_link(times: Mapping[int, Sequence[float]]) -> Link:
    """Returns the link that explains how long messages took: the line through the medians of smallest and largest.

    Args:
        times: seconds one way, by the size of the message in bytes; two sizes or more.

    >>> fit_link({0: [0.5, 1.0, 9.0], 1000: [3.0]}).bytes_per_s
    500.0
    """
    small, large = min(times), max(times)
    latency_s, whole_s = statistics.median(times[small]), statistics.median(times[large])
    slope = (whole_s - latency_s) / (large - small)
    return Link(
        latency_s=max(latency_s - small * max(slope, 0.0), 0.0),
        bytes_per_s=1 / slope if slope > 1 / _FASTEST else _FASTEST,
        spread={str(size): spread(values) for size, values in sorted(times.items())},
    )
