"""What of a job systems are modelled by."""

from __future__ import annotations

from functools import cache

from holdfast.config.job import Job
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes
from holdfast.core.routes import Visit
from holdfast.errors import ConfigError, InfeasiblePlan
from holdfast.planning.reshaping import Shapes
from holdfast.planning.templates.instances import best_instance
from holdfast.planning.templates.sizes import make_templates
from holdfast.recovery.rates import step_seconds
from holdfast.schedule.builders import assigned_plan, regular_plan
from holdfast.sim.engine import Prepared
from holdfast.sim.speeds import Speeds
from holdfast.sim.systems.rows import Facts

__all__ = ["facts_of"]


def facts_of(job: Job, prepared: Prepared, speeds: Speeds, shapes: Shapes | None = None) -> Facts:
    """Return what is known of a job. Schedules are 1F1B's, whatever the job's technique is.

    Args:
        job: it.
        prepared: the same, as it would begin.
        speeds: of the cluster.
        shapes: by which it would make other pipelines; None: no system that does so is asked for.

    Raises:
        ConfigError: its pipelines are not alike.
        InfeasiblePlan: its workers have no memory for any pipeline.
    """
    grid, rates, placed = job.grid, speeds.rates, prepared.plan
    if grid.layout or len(set(grid.depths)) > 1:
        raise ConfigError("grid: systems without a runtime here are modelled for pipelines that are alike")
    total, room, workers = job.global_microbatches, grid.workers_per_node, placed.workers
    stages = tuple(held for worker, held in placed.placement.ranges if worker.pipeline == 0)
    templates = (
        {}
        if shapes is None
        else make_templates(shapes.table, len(workers), 0, total, minimum=max(1, shapes.minimum)).templates
    )
    paces = {size: template.pace for size, template in templates.items()}

    @cache
    def of_pipelines(count: int) -> float | None:
        """With as many micro-batches in all: the pipeline that has the most of them is waited for."""
        return step_seconds(regular_plan(count, stages, -(-total // count)), rates) if count else None

    @cache
    def of_templates(machines: int) -> float | None:
        try:
            best = best_instance(paces, machines * room, 1, total)
        except InfeasiblePlan:
            return None
        rows = [
            [Visit(WorkerId(number, stage), each.layers) for stage, each in enumerate(templates[size].stages)]
            for number, size in enumerate(best.sizes)
        ]
        return step_seconds(assigned_plan(rows, placed.routes.microbatches, best.microbatches), rates)

    def of_grids(machines: int) -> float | None:
        return of_pipelines(len(grid.depths) * machines // len(nodes))

    nodes = group_into_nodes(workers, room)
    healthy_s = of_pipelines(len(grid.depths))
    assert healthy_s is not None, "there is at least one"
    pin_s, save_s = speeds.checkpoint(placed)
    return Facts(
        pipelines_of=tuple(frozenset(worker.pipeline for worker in node) for node in nodes),
        pipelines=len(grid.depths),
        job_s=step_seconds(placed, rates, updates_ahead=prepared.rules.staggered),
        healthy_s=healthy_s,
        of_pipelines=of_pipelines,
        of_grids=of_grids,
        of_templates=of_templates,
        detect_s=speeds.detect_s,
        start_s=rates.start_s,
        load_s=max(rates.loading_s(placed.placement.layers_of(worker)) for worker in workers),
        save_s=save_s,
        pin_s=pin_s,
    )
