"""Which groups does selective logging make, next to those that SWIFT printed, and how long do the best ones take?

Tables 6 and 7 and figure 11 of Zhong et al., "SWIFT", from the facts that :mod:`holdfast.reproduce` keeps,
with their sources.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.errors import ConfigError
from holdfast.planning.groups.chain import Grouping, MachineChain
from holdfast.planning.groups.costs import GroupCosts
from holdfast.planning.groups.merging import authors_groups, greedy_groups
from holdfast.planning.groups.programme import best_groups
from holdfast.reproduce.facts import facts
from measure import Recorder, print_table, progress

FACTS: dict[str, Any] = facts("swift_groups")
FLOAT32, MACHINES = 4, 16
TOKENS_50 = "vit_tokens_of_the_code"
TARGET_S = 1.0


def main() -> int:
    """Prints the tables and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 64 machines only")
    parser.add_argument("--tables", default="table7,table6,figure11,worse,times", help="which tables")
    args = parser.parse_args()
    recorder = Recorder(name="groups", settings=vars(args))
    tables: dict[str, Callable[[Recorder, bool], list[list[str]]]] = {
        "table7": table7,
        "table6": table6,
        "figure11": figure11,
        "worse": worse,
        "times": times,
    }
    for name in args.tables.split(","):
        recorder.begin()
        rows = tables[name](recorder, args.quick)
        print_table(name, rows[0], rows[1:])
    recorder.write({"tables": args.tables})
    return 0


def boundary_bytes(model: str, tokens: str, directions: int) -> int:
    """Bytes between two machines in a step, float32."""
    samples: int = FACTS[f"{model}_batch"] * FACTS[tokens]
    size: int = samples * FACTS["hidden"] * FLOAT32 * directions
    return size


def vit(limit: float, boundary: int, *, parallel: bool = False) -> MachineChain:
    """The ViT's 16 machines."""
    return MachineChain(
        compute_s=tuple(FACTS["vit_compute_s"]),
        boundary_bytes=(boundary,) * (MACHINES - 1),
        bandwidth=FACTS["bandwidth"],
        interval=FACTS["interval"],
        limit_bytes=limit,
        parallel=parallel,
    )


def shown(starts: Sequence[int], count: int = MACHINES) -> str:
    """Groups as first and last machines."""
    stops = [*starts[1:], count]
    return " ".join(
        f"{first}-{stop - 1}" if stop - first > 1 else str(first) for first, stop in zip(starts, stops, strict=True)
    )


def starts_of(found: Grouping) -> list[int]:
    """The first machine of each group."""
    return [group[0] for group in found.groups]


def table7(recorder: Recorder, quick: bool) -> list[list[str]]:
    """The ViT's groups: printed, by the authors' rule, by section 5.3's with their list of boundaries; and the best.

    The best are for the same numbers: one direction, 50 tokens, and no entry behind the last machine.
    """
    one_way = boundary_bytes("vit", "vit_tokens_of_the_code", 1)
    always = one_way * FACTS["interval"]
    table = [
        [
            "limit",
            "printed",
            "made by",
            "recovery, s",
            "best groups",
            "recovery, s",
            "printed is worse by",
            "of as many groups",
        ]
    ]
    for text, printed in FACTS["table7"].items():
        chain = vit(float(text), one_way)
        greedy = greedy_groups(replace(chain, limit_bytes=max(0, chain.limit_bytes - always)))
        made = {"authors": starts_of(authors_groups(chain, one_way)), "greedy": starts_of(greedy)}
        by = [name for name, starts in made.items() if starts == printed]
        rated, best = GroupCosts(chain).rated(printed), best_groups(chain)
        as_many = best_groups(replace(chain, limit_bytes=rated.storage_bytes))
        recorder.add(
            table="table7",
            limit_bytes=chain.limit_bytes,
            printed=printed,
            made=made,
            best=starts_of(best),
            printed_recovery_s=rated.recovery_s,
            best_recovery_s=best.recovery_s,
            as_many_recovery_s=as_many.recovery_s,
        )
        more = [f"{100 * (rated.recovery_s / other.recovery_s - 1):.1f} %" for other in (best, as_many)]
        seconds = (f"{rated.recovery_s:.3f}", f"{best.recovery_s:.3f}")
        table.append(
            [text, shown(printed), ", ".join(by) or "none", seconds[0], shown(starts_of(best)), seconds[1], *more]
        )
    return table


def table6(recorder: Recorder, quick: bool) -> list[list[str]]:
    """BERT's groups: whether they fit the limit. No times of its machines are published, so no rule can be run."""
    table = [["limit", "printed", "groups", "logs one way", "fit", "logs both ways", "fit", "most entries one way"]]
    entry = boundary_bytes("bert", "bert_tokens", 1) * FACTS["interval"]
    for text, printed in FACTS["table6"].items():
        limit, logged = float(text), (len(printed) - 1) * entry
        fits = ["yes" if size <= limit else "no" for size in (logged, 2 * logged)]
        entries = min(MACHINES, int(limit // entry))
        recorder.add(
            table="table6", limit_bytes=limit, printed=printed, logged=[logged, 2 * logged], fits=fits, entries=entries
        )
        cells = (f"{logged:.3g}", fits[0], f"{2 * logged:.3g}", fits[1], str(entries))
        table.append([text, shown(printed), str(len(printed)), *cells])
    return table


def figure11(recorder: Recorder, quick: bool) -> list[list[str]]:
    """The ViT's recovery against the limit: the figure's measured seconds, and what groups come to for a lost step."""
    both, one_way = (boundary_bytes("vit", tokens, way) for tokens, way in (("vit_tokens", 2), (TOKENS_50, 1)))
    table = [
        ["limit", "figure, s", "authors, s", "greedy, s", "best, s", "both ways: greedy, s", "best, s", "parallel, s"]
    ]
    for limit, measured in FACTS["figure11"]["ViT"]:
        theirs, whole = vit(limit, one_way), vit(limit, both)
        found = {
            "authors": authors_groups(theirs, one_way),
            "greedy": greedy_groups(theirs),
            "best": best_groups(theirs),
            "both_greedy": greedy_groups(whole),
            "both_best": best_groups(whole),
            "both_parallel": best_groups(replace(whole, parallel=True)),
        }
        seconds = {name: each.recovery_s for name, each in found.items()}
        groups = {name: starts_of(each) for name, each in found.items()}
        recorder.add(table="figure11", limit_bytes=limit, measured_s=measured, recovery_s=seconds, groups=groups)
        table.append([f"{limit:.1e}", f"{measured:.1f}", *(f"{each:.3f}" for each in seconds.values())])
    return table


def worse(recorder: Recorder, quick: bool) -> list[list[str]]:
    """By how much the greedy is above the best, for every number of the ViT's boundaries that may be logged."""
    table = [["tokens, directions", "parallel", "worst by", "with limit", "on average by"]]
    for tokens, directions in (("vit_tokens", 2), (TOKENS_50, 1)):
        boundary = boundary_bytes("vit", tokens, directions)
        for parallel in (False, True):
            ratios = []
            for entries in range(MACHINES):
                chain = vit(entries * boundary * FACTS["interval"], boundary, parallel=parallel)
                ratio = greedy_groups(chain).recovery_s / best_groups(chain).recovery_s - 1
                ratios.append((ratio, chain.limit_bytes))
            labels = {"tokens": FACTS[tokens], "directions": directions, "parallel": parallel}
            recorder.add(table="worse", **labels, ratios=ratios)
            average = sum(ratio for ratio, _ in ratios) / len(ratios)
            worst = (f"{100 * max(ratios)[0]:.1f} %", f"{max(ratios)[1]:.3g}", f"{100 * average:.1f} %")
            table.append([f"{FACTS[tokens]}, {directions}", "yes" if parallel else "no", *worst])
    return table


def _alike(rng: random.Random, count: int) -> MachineChain:
    return _chain([rng.uniform(1, 3) for _ in range(count)], [8e8] * (count - 1))


def _unlike(rng: random.Random, count: int) -> MachineChain:
    return _chain([rng.uniform(1, 3) for _ in range(count)], [rng.randint(1, 10**9) for _ in range(count - 1)])


def _by_bytes(rng: random.Random, count: int) -> MachineChain:
    sizes = [rng.randint(10**8, 10**9) for _ in range(count - 1)]
    return _chain([size / 1e9 for size in [*sizes, 5 * 10**8]], sizes)


def _sums(rng: random.Random, count: int) -> MachineChain:
    return _chain([0.0] * count, [rng.randint(10**8, 10**9) for _ in range(count - 1)])


def _chain(compute: Sequence[float], sizes: Sequence[float]) -> MachineChain:
    return MachineChain(
        compute_s=tuple(compute), boundary_bytes=tuple(sizes), bandwidth=1.5e9, interval=100, limit_bytes=sum(sizes)
    )


KINDS = {"boundaries alike": _alike, "unlike": _unlike, "time by bytes": _by_bytes, "no computing": _sums}


def times(recorder: Recorder, quick: bool) -> list[list[str]]:
    """The slowest of some limits, parallel and not: 10, 50 and 90 % of what all boundaries take."""
    table = [
        [
            "machines",
            "kind",
            "exact, s, worst",
            "target, s",
            "greedy, s, worst",
            "greedy is above by, worst",
            "given up",
        ]
    ]
    for count in (16, 64) if quick else (16, 64, 256, 1024):
        for kind, make in KINDS.items():
            progress(f"{count} machines, {kind}")
            recorder.begin()
            rng, runs = random.Random(count), []
            for part in (0.1, 0.5, 0.9):
                for parallel in (False, True):
                    chain = replace(make(rng, count), parallel=parallel)
                    runs.append(_timed(replace(chain, limit_bytes=int(part * chain.interval * chain.limit_bytes))))
            recorder.add(table="times", machines=count, kind=kind, runs=runs, target_s=TARGET_S)
            above = [run["above"] for run in runs if run["above"] is not None]
            slowest = (f"{max(run[name] for run in runs):.2f}" for name in ("exact_s", "greedy_s"))
            lost = f"{len(runs) - len(above)} of {len(runs)}"
            exact_s, greedy_s = slowest
            worst = f"{100 * max(above):.1f} %" if above else "-"
            table.append([str(count), kind, exact_s, str(TARGET_S), greedy_s, worst, lost])
    return table


def _timed(chain: MachineChain) -> dict[str, Any]:
    begun = time.perf_counter()
    greedy = greedy_groups(chain)
    between = time.perf_counter()
    try:
        above: float | None = greedy.recovery_s / best_groups(chain).recovery_s - 1
    except ConfigError:
        above = None
    return {"greedy_s": between - begun, "exact_s": time.perf_counter() - between, "above": above}


if __name__ == "__main__":
    raise SystemExit(main())
