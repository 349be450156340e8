"""From a job to what is simulated of it: the same plans and rules that it would be trained by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import msgspec

from holdfast.config.job import Cluster, Job
from holdfast.core.placement import group_into_nodes
from holdfast.core.profile import Link, Profile
from holdfast.core.slots import slots_of
from holdfast.errors import ConfigError
from holdfast.planning.library import PlanLibrary
from holdfast.settings.planning import Settled, known_ties, plans_of, profile_of, rates_of, settled, tolerated
from holdfast.settings.rules import rules_of
from holdfast.settings.ways import decided
from holdfast.sim.engine import Prepared
from holdfast.sim.speeds import Speeds

__all__ = ["parse_cluster", "prepared", "profile_needed", "settled_on", "speeds_of"]

_FOREVER = 10**9


def parse_cluster(text: str, known: Cluster, measured: Mapping[str, float] = MappingProxyType({})) -> Cluster:
    """Return how fast a cluster is, where a text such as ``start_s=60,copy=1e9`` says otherwise.

    Args:
        text: it.
        known: what the job says.
        measured: what runs have shown, by name, which goes before that.

    Raises:
        ConfigError: it does not say so.
    """
    names = Cluster.__struct_fields__
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in names or not 0 < found[name] < 1e18:
            raise ConfigError(
                f"--speeds {part}: expected NAME=NUMBER above 0, with a name of {', '.join(sorted(names))}"
            )
    return msgspec.structs.replace(known, **{**measured, **found})


def speeds_of(profile: Profile, cluster: Cluster, *, sums: int = 0) -> Speeds:
    """Return how fast a cluster is on which layers take what a profile says.

    Args:
        profile: of the layers, and of the link between two workers.
        cluster: what it does not tell.
        sums: parts of contributions to sums of gradients; 0: these take no time.
    """
    pin = Link(latency_s=0.0, bytes_per_s=cluster.pin)
    return Speeds(rates=rates_of(profile, cluster, sums=sums), detect_s=cluster.detect_s, pin=pin)


def profile_needed(job: Job, layers: int | None) -> Profile:
    """Return the profile that a job names.

    Raises:
        ConfigError: it names none, or one of another model.
    """
    if job.train.profile is None:
        raise ConfigError(
            "train.profile: without it nothing is known of times: expected a file that `holdfast profile` has written, "
            "or --profile FILE"
        )
    profile = profile_of(job, layers)
    assert profile is not None, "it names one"
    return profile


def settled_on(job: Job, profile: Profile) -> Settled:
    """Return a job with its technique, and the plan of its whole grid, on the layers of a profile.

    Raises:
        ConfigError: the grid does not fit them.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    layers = len(profile.layers)
    return settled(job, layers, profile, known_ties(job, layers))


def prepared(job: Job, profile: Profile) -> Prepared:
    """Return a job as it would begin.

    Raises:
        ConfigError: its grid does not fit the profile's layers, it audits, or its logs would be behind.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    layers = len(profile.layers)
    ties = known_ties(job, layers)
    plans = plans_of(job, layers, profile, ties)
    told = decided(plans.job, plans.plan, profile)
    job, found = told.job, told.found
    if job.logging.use == "on" and (found.copy_s or 0.0) > (found.bubble_s or 0.0):
        raise ConfigError(
            f"logging.use: on: copying what crosses nodes takes a worker {found.copy_s:.3g} s of a step, in which it "
            f"has nothing else to do for {found.bubble_s:.3g} s, so steps would be left out of the logs, which is not "
            "simulated: expected logging.use: off"
        )
    nodes = group_into_nodes(plans.plan.workers, job.grid.workers_per_node)
    rules = rules_of(job, plans, ties=ties, nodes=nodes, job_id="simulated", directory="simulated")
    rules = replace(rules, steps=_FOREVER)
    planned_ahead = rules.terms is not None and tolerated(job) and slots_of(plans.plan) is not None
    return Prepared(
        rules=rules,
        plan=plans.plan,
        workers_per_machine=job.grid.workers_per_node,
        library=PlanLibrary(None) if planned_ahead else None,
    )
