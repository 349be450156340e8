"""How ``holdfast templates`` shows templates and pipelines: as a table, JSON or a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType

from holdfast.drawing.pipelines import DrawnPipeline, DrawnStage, pipelines_to_svg
from holdfast.planning.templates.instances import Instance
from holdfast.planning.templates.reconfigure import Pipelines
from holdfast.planning.templates.sizes import TemplateSet
from holdfast.planning.templates.template import Template

__all__ = ["FORMATS", "RECONFIGURED", "ShownTemplates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTemplates:
    """Templates, the pipelines that are made of them, and what there is to say of both.

    Attributes:
        templates: the templates.
        instance: the pipelines.
        global_batch: samples of a step.
        step_s: how long a step takes the slowest pipeline, by the evaluator.
    """

    templates: TemplateSet
    instance: Instance
    global_batch: int
    step_s: float

    @property
    def throughput(self) -> float | None:
        """Samples per second; None if a step takes no time."""
        return self.global_batch / self.step_s if self.step_s else None


def _to_json(shown: ShownTemplates) -> str:
    instance = shown.instance
    found = {
        "sizes": list(shown.templates.sizes),
        "planning_microbatches": shown.templates.microbatches,
        "templates": {
            str(size): {
                "stages": [[stage.layers.start, stage.layers.stop, stage.gpus] for stage in template.stages],
                "iteration": template.iteration_s,
            }
            for size, template in shown.templates.templates.items()
        },
        "pipelines": [
            {"size": size, "microbatches": count}
            for size, count in zip(instance.sizes, instance.microbatches, strict=True)
        ],
        "throughput": shown.throughput,
        "dormant": instance.dormant,
        "wasteful_nodes": list(shown.templates.wasteful_nodes),
    }
    return json.dumps(found) + "\n"


def _to_table(shown: ShownTemplates) -> str:
    templates = shown.templates
    lines = ["nodes  stages  iteration s  layers on GPUs of each node"]
    for size, template in templates.templates.items():
        iteration = f"{template.iteration_s:.6g}"
        lines.append(f"{size:5d}  {len(template.stages):6d}  {iteration:>11}  {_by_node(template)}")
    lines.append(f"iteration is for {templates.microbatches} micro-batches")
    lines += ["", *_pipelines(shown), "", _guarantee(templates)]
    return "\n".join(lines) + "\n"


def _by_node(template: Template) -> str:
    stages = zip(template.node_of_stage, template.stages, strict=True)
    parts = [[f"{stage.layers} on {stage.gpus}" for _, stage in part] for _, part in groupby(stages, itemgetter(0))]
    return " | ".join(map(", ".join, parts))


def _pipelines(shown: ShownTemplates) -> list[str]:
    instance = shown.instance
    alike = Counter(zip(instance.sizes, instance.microbatches, strict=True))
    lines = [
        f"pipelines   {count} of {size} node(s) with {microbatches} micro-batches"
        for (size, microbatches), count in sorted(alike.items())
    ]
    if instance.dormant:
        lines.append(f"dormant     {instance.dormant} node(s): no pipelines of these sizes use all")
    if shown.throughput is not None:
        lines.append(f"throughput  {shown.throughput:.6g} samples/s, {shown.step_s:.6g} s a step, by the evaluator")
    return lines


def _guarantee(templates: TemplateSet) -> str:
    least, failures = templates.fewest_nodes, templates.tolerate
    told = f"guarantee   any {least} to {templates.nodes} nodes form {failures + 1} pipeline(s) or more"
    if wasteful := templates.wasteful_nodes:
        return f"{told}, but of {', '.join(map(str, wasteful))} nodes some would be dormant"
    return f"{told}, and none is dormant"


def _to_svg(shown: ShownTemplates) -> str:
    instance = shown.instance
    alike = Counter(zip(instance.sizes, instance.microbatches, strict=True))
    rows = []
    for size, template in shown.templates.templates.items():
        used = [f"{count} x {share} mb" for (of, share), count in sorted(alike.items()) if of == size]
        note = f"{template.iteration_s:.4g} s" + (f"; used {', '.join(used)}" if used else "")
        rows.append(DrawnPipeline(name=f"{size} node(s)", note=note, stages=_drawn(template)))
    told = (
        f"times are of {shown.templates.microbatches} micro-batches; mb: the micro-batches of a pipeline that is used"
    )
    return pipelines_to_svg(rows, told)


def _drawn(template: Template) -> tuple[DrawnStage, ...]:
    longest = template.steady_s
    return tuple(
        DrawnStage(node=node, layers=stage.layers, gpus=stage.gpus, busy=seconds / longest if longest else 1.0)
        for node, stage, seconds in zip(template.node_of_stage, template.stages, template.stage_s, strict=True)
    )


FORMATS: Mapping[str, Callable[[ShownTemplates], str]] = MappingProxyType(
    {"json": _to_json, "svg": _to_svg, "table": _to_table}
)
"""The name of every form, and what makes it."""


def _pipelines_to_json(pipelines: Pipelines) -> str:
    return json.dumps({"pipelines": [list(pipeline) for pipeline in pipelines.pipelines]}) + "\n"


def _pipelines_to_table(pipelines: Pipelines) -> str:
    lines = [f"pipeline {place}  nodes {' '.join(map(str, each))}" for place, each in enumerate(pipelines.pipelines)]
    return "\n".join(lines) + "\n"


RECONFIGURED: Mapping[str, Callable[[Pipelines], str]] = MappingProxyType(
    {"json": _pipelines_to_json, "table": _pipelines_to_table}
)
"""The forms of pipelines after a reconfiguration."""
