"""From a job to what is simulated of it: the same plans and rules that it would be trained by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from holdfast.config.job import Job
from holdfast.core.placement import group_into_nodes
from holdfast.core.plan import Plan
from holdfast.core.profile import Link, Profile
from holdfast.errors import ConfigError
from holdfast.recovery.rates import Rates
from holdfast.settings.planning import healthy_plan, known_ties, plans_of, profile_of
from holdfast.settings.rules import rules_of
from holdfast.settings.ways import decided
from holdfast.sim.engine import Prepared, Speeds

__all__ = ["DEFAULTS", "Assumed", "parse_assumed", "plan_of", "prepared", "profile_needed", "speeds_of"]

_FOREVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a profile does not tell of a cluster: seconds, and bytes per second.

    Attributes:
        detect_s: from a machine's loss until the coordinator knows.
        control_s: of a message between the coordinator and a worker, in one direction.
        message_s: of a message between workers that carries no tensor of a micro-batch.
        connect_s: until the workers of a generation are connected.
        start_s: until a new process is there.
        copy: bytes per second at which a worker is given state by its peers.
        load: at which it reads a checkpoint.
        save: at which it writes one.
        pin: at which it copies its state in its own memory, for a checkpoint.
    """

    detect_s: float = 0.01
    control_s: float = 0.001
    message_s: float = 0.0005
    connect_s: float = 0.01
    start_s: float = 5.0
    copy: float = 350e6
    load: float = 500e6
    save: float = 250e6
    pin: float = 4e9

    def __str__(self) -> str:
        """Each by its name."""
        return ", ".join(f"{each.name} {getattr(self, each.name):g}" for each in dataclasses.fields(self))


DEFAULTS = Assumed()
"""About what was measured with processes of one machine (docs/benchmarks.md): say your own."""


def parse_assumed(text: str, measured: Mapping[str, float] = MappingProxyType({})) -> Assumed:
    """Return what is assumed, where a text such as ``start_s=60,copy=1e9`` says otherwise.

    Args:
        text: it.
        measured: what runs have shown, by name, which goes before what is assumed else.

    Raises:
        ConfigError: it does not say so.
    """
    names = {each.name for each in dataclasses.fields(Assumed)}
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
    return replace(DEFAULTS, **{**measured, **found})


def speeds_of(profile: Profile, assumed: Assumed, *, sums: int = 0) -> Speeds:
    """Return how fast a cluster is on which layers take what a profile says.

    Args:
        profile: of the layers, and of the link between two workers.
        assumed: what it does not tell.
        sums: sizes of the parameters that contributions to sums of gradients have; 0: these take no time.
    """

    def link(bytes_per_s: float) -> Link:
        return Link(latency_s=0.0, bytes_per_s=bytes_per_s)

    rates = Rates(
        profile=profile,
        message_s=assumed.message_s,
        control_s=assumed.control_s,
        connect_s=assumed.connect_s,
        start_s=assumed.start_s,
        copy=link(assumed.copy),
        load=link(assumed.load),
        save=link(assumed.save),
        sums=sums,
    )
    return Speeds(rates=rates, detect_s=assumed.detect_s, pin=link(assumed.pin))


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


def plan_of(job: Job, profile: Profile) -> Plan:
    """Return the plan of a job's whole grid, on the layers of a profile.

    Raises:
        ConfigError: the grid does not fit them.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    layers = len(profile.layers)
    return healthy_plan(job, layers, profile, known_ties(job, layers))


def prepared(job: Job, profile: Profile) -> Prepared:
    """Return a job as it would begin.

    Raises:
        ConfigError: its grid does not fit the profile's layers, it audits, or its logs would be behind.
        InfeasiblePlan: a worker's memory cannot hold one micro-batch.
    """
    layers = len(profile.layers)
    ties = known_ties(job, layers)
    plans = plans_of(job, layers, profile, ties)
    told = decided(job, plans.plan, profile)
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
    return Prepared(rules=rules, plan=plans.plan, shapes=plans.shapes, workers_per_machine=job.grid.workers_per_node)
