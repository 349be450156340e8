"""What a pipeline's step takes by the evaluator: F and B apart, and messages between stages."""

from __future__ import annotations

from holdfast.core.placement import split_evenly
from holdfast.core.profile import Costs, Profile
from holdfast.planning.templates.template import Template
from holdfast.schedule.builders import regular_plan
from holdfast.schedule.evaluate import evaluate

__all__ = ["predicted_seconds"]


def predicted_seconds(profile: Profile, template: Template, microbatches: int) -> float:
    """Returns how long so many micro-batches take a pipeline by 1F1B, from the first F to the last B, in seconds.

    Cost: some microseconds for each operation, two for each micro-batch and stage.
    """
    stages = len(template.stages)
    costs = _stage_costs(profile, template)
    return evaluate(regular_plan(1, split_evenly(stages, stages), microbatches), costs).makespan


def _stage_costs(profile: Profile, template: Template) -> Costs:
    """Returns costs in which every stage is one layer."""
    nothing = (0.0,) * len(template.stages)
    forward = tuple(
        sum(profile.layers[layer].on(stage.gpus).forward_s for layer in stage.layers.indices)
        for stage in template.stages
    )
    return Costs(
        forward=forward,
        input=tuple(max(0.0, both - time) for both, time in zip(template.stage_s, forward, strict=True)),
        weight=nothing,
        optimizer=nothing,
        comm=tuple(
            profile.link.seconds_of(profile.layers[stage.layers.stop - 1].boundary_bytes)
            for stage in template.stages[:-1]
        ),
        takes=nothing,
        gives_input=nothing,
        gives_weight=nothing,
    )
