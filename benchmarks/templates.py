"""How long do the exact best template, and the best pipelines for large clusters, take?

The models are made up: layers take 1 to 3 s, on d GPUs a d^0.9th of it, so that stages have to weigh pipelining against
more GPUs. Where memory binds, a GPU has a part of what the best template would need without a limit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.planning.templates.instances import best_instance
from holdfast.planning.templates.mapping import best_templates
from holdfast.planning.templates.reconfigure import Pipelines, reconfigured
from holdfast.planning.templates.sizes import make_templates
from holdfast.planning.templates.stages import StageTable
from holdfast.planning.templates.template import Template
from measure import Recorder, print_table, progress

LAYERS, NODES, GPUS = (24, 32, 64, 96), (8, 16, 24), (1, 4, 8)
PARTS = (0.97, 0.9, 0.8, 0.7)
FREE_S, BOUND_S, LARGE_S = 0.1, 2.0, 10.0


def main() -> int:
    """Prints the tables and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models and clusters only")
    parser.add_argument("--tables", default="free,bound,large,losses", help="which tables")
    args = parser.parse_args()
    recorder = Recorder(name="templates", settings=vars(args))
    tables: dict[str, Callable[[Recorder, bool], list[list[str]]]] = {
        "free": free,
        "bound": bound,
        "large": large,
        "losses": losses,
    }
    best_templates(_model(4, 2), [2], 8)  # what is loaded once
    for name in args.tables.split(","):
        rows = tables[name](recorder, args.quick)
        print_table(name, rows[0], rows[1:])
        recorder.write({"tables": args.tables})
    return 0


def _model(layers: int, gpus: int) -> StageTable:
    rng = random.Random(layers)
    times = [rng.uniform(1, 3) for _ in range(layers)]
    return StageTable(
        layer_s=tuple(tuple(each / count**0.9 for each in times) for count in range(1, gpus + 1)),
        state_bytes=(10,) * layers,
        held_bytes=tuple(rng.randint(1, 3) for _ in range(layers)),
        recomputed_bytes=(0,) * layers,
    )


def _timed(table: StageTable, nodes: int, microbatches: int) -> tuple[float, Template | None]:
    started = time.perf_counter()
    found = best_templates(table, [nodes], microbatches)
    return time.perf_counter() - started, found.get(nodes)


def _needed(table: StageTable, template: Template) -> float:
    """Bytes per GPU that a template needs."""
    return max(
        sum(
            table.state_bytes[layer] + (len(template.stages) - place) * table.held_bytes[layer]
            for layer in stage.layers.indices
        )
        / stage.gpus
        for place, stage in enumerate(template.stages)
    )


def _cells(quick: bool) -> list[tuple[int, int, int]]:
    layers = LAYERS[:2] if quick else LAYERS
    return [(count, nodes, gpus) for nodes in NODES for gpus in GPUS for count in layers]


def free(recorder: Recorder, quick: bool) -> list[list[str]]:
    """Table 3's cells, without a limit of memory."""
    table = [["layers", "nodes", "GPUs per node", "stages", "target, s", "s"]]
    for layers, nodes, gpus in _cells(quick):
        recorder.begin()
        model, microbatches = _model(layers, gpus), 4 * min(layers, nodes * gpus)
        runs = [_timed(model, nodes, microbatches) for _ in range(3)]
        seconds, template = statistics.median(each for each, _ in runs), runs[0][1]
        assert template is not None
        cell = {"layers": layers, "nodes": nodes, "gpus": gpus}
        recorder.add(table="free", **cell, seconds=seconds, target_s=FREE_S, stages=len(template.stages))
        table.append([*map(str, cell.values()), str(len(template.stages)), str(FREE_S), f"{seconds:.3f}"])
    return table


def bound(recorder: Recorder, quick: bool) -> list[list[str]]:
    """The same where memory binds: the slowest of some limits, and of how many of them there is no template."""
    table = [["layers", "nodes", "GPUs per node", "limits without", "target, s", "s, worst"]]
    for layers, nodes, gpus in _cells(quick):
        progress(f"{layers} layers, {nodes} nodes of {gpus}")
        recorder.begin()
        model, microbatches = _model(layers, gpus), 4 * min(layers, nodes * gpus)
        template = _timed(model, nodes, microbatches)[1]
        assert template is not None
        needed = _needed(model, template)
        runs = [_timed(replace(model, memory_bytes=int(part * needed)), nodes, microbatches) for part in PARTS]
        worst, without = max(each for each, _ in runs), sum(found is None for _, found in runs)
        cell = {"layers": layers, "nodes": nodes, "gpus": gpus}
        recorder.add(table="bound", **cell, seconds=[each for each, _ in runs], target_s=BOUND_S, without=without)
        table.append([*map(str, cell.values()), f"{without} of {len(PARTS)}", str(BOUND_S), f"{worst:.3f}"])
    return table


def large(recorder: Recorder, quick: bool) -> list[list[str]]:
    """All templates and the best pipelines of 1,024 nodes of 8 GPUs."""
    nodes, layers, gpus = (64, 32, 4) if quick else (1024, 128, 8)
    table = [["nodes", "layers", "n0", "templates, s", "pipelines, s", "target, s", "sizes used"]]
    for minimum in (1, 4):
        recorder.begin()
        started = time.perf_counter()
        found = make_templates(_model(layers, gpus), nodes, 1, 4 * nodes // 2, minimum=minimum)
        made = time.perf_counter()
        paces = {size: template.pace for size, template in found.templates.items()}
        instance = best_instance(paces, nodes, 2, 4 * nodes)
        ended = time.perf_counter()
        labels = {"nodes": nodes, "layers": layers, "minimum": minimum}
        recorder.add(table="large", **labels, seconds=[made - started, ended - made], target_s=LARGE_S)
        sizes = ", ".join(map(str, sorted(set(instance.sizes))))
        times = (f"{made - started:.2f}", f"{ended - made:.2f}", str(LARGE_S))
        table.append([str(nodes), str(layers), str(minimum), *times, sizes])
    return table


def losses(recorder: Recorder, quick: bool) -> list[list[str]]:
    """What becomes of 256 pipelines of 4 nodes of which a tenth of the nodes are lost at once."""
    pipelines = 16 if quick else 256
    before = Pipelines(pipelines=tuple(tuple(range(4 * place, 4 * place + 4)) for place in range(pipelines)))
    lost = random.Random(1).sample(sorted(before.nodes), 4 * pipelines // 10)
    recorder.begin()
    started = time.perf_counter()
    after = reconfigured(before, lost, 4)
    seconds = time.perf_counter() - started
    recorder.add(table="losses", pipelines=pipelines, lost=len(lost), seconds=seconds)
    return [
        ["pipelines", "nodes lost", "pipelines left", "s"],
        [str(pipelines), str(len(lost)), str(len(after.pipelines)), f"{seconds:.4f}"],
    ]


if __name__ == "__main__":
    raise SystemExit(main())
