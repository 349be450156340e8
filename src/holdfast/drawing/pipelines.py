"""Draws how pipelines are made of nodes, stages and layers as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.placement import LayerRange
from holdfast.drawing.svg import canvas, element, rect, text, title

__all__ = ["DrawnPipeline", "DrawnStage", "pipelines_to_svg"]

_ROW, _BETWEEN, _LEFT, _TOP, _LAYERS, _RIGHT = 30, 12, 90, 34, 640, 230
_CHARACTER = 7
"""What one takes at most, on average, of the text that is used here."""
_COLOURS = ("#9ec5e8", "#b5d99c", "#f2c48d", "#e9a6a6", "#c9b6e4", "#f0e2a0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStage:
    """One stage of a pipeline.

    Attributes:
        node: on which of the pipeline's nodes it is.
        layers: its layers.
        gpus: how many GPUs it has.
        busy: how busy it is, from 0 to 1, of the slowest stage's time.
    """

    node: int
    layers: LayerRange
    gpus: int
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPipeline:
    """One row.

    Attributes:
        name: what stands before it.
        note: what stands behind it.
        stages: its stages, from the first layer to the last.
    """

    name: str
    note: str
    stages: tuple[DrawnStage, ...]


def pipelines_to_svg(pipelines: Sequence[DrawnPipeline], caption: str) -> str:
    """Returns a picture: a row per pipeline, from the first layer to the last; a colour per node, a box per stage.

    In a box stands its number of GPUs, where there is room. The bar below it is as long as it is busy.
    """
    layers = max(pipeline.stages[-1].layers.stop for pipeline in pipelines)
    body = [
        text(_LEFT, 20, f"layers 0 to {layers - 1}; a colour per node, a box per stage with its GPUs; below: how busy")
    ]
    for place, pipeline in enumerate(pipelines):
        top = _TOP + place * (_ROW + _BETWEEN)
        body.append(text(_LEFT - 8, top + 19, pipeline.name, text_anchor="end"))
        for stage in pipeline.stages:
            body += _box(stage, top, _LAYERS / layers)
        body.append(text(_LEFT + _LAYERS + 10, top + 19, pipeline.note))
    height = _TOP + len(pipelines) * (_ROW + _BETWEEN) + 24
    body.append(text(_LEFT, height - 10, caption))
    right = max(_RIGHT, 20 + _CHARACTER * max(len(pipeline.note) for pipeline in pipelines))
    style = element("style", "text { font-family: sans-serif; font-size: 12px }")
    return canvas(_LEFT + _LAYERS + right, height, style, body)


def _box(stage: DrawnStage, top: int, scale: float) -> Iterator[str]:
    left, width = _LEFT + stage.layers.start * scale, len(stage.layers.indices) * scale
    about = title(f"node {stage.node}: layers {stage.layers} on {stage.gpus} GPU(s), {stage.busy:.0%} busy")
    yield rect(left, top, width, _ROW - 6, about, fill=_COLOURS[stage.node % len(_COLOURS)], stroke="#555")
    if width >= 16:
        yield text(left + width / 2, top + 16, str(stage.gpus), text_anchor="middle")
    yield rect(left, top + _ROW - 5, width * stage.busy, 4, fill="#777")
