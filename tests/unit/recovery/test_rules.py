"""What a job says once and for all: nothing of it is forgotten on the way from the job's keys."""

from __future__ import annotations

from dataclasses import MISSING, fields

from holdfast import parse_job
from holdfast.core.evaluation import Evaluating
from holdfast.core.placement import group_into_nodes
from holdfast.core.profile import uniform_profile
from holdfast.recovery.rules import JobRules
from holdfast.settings.planning import JobPlans, healthy_plan, keeping_of, rates_of, shapes_of, terms_of
from holdfast.settings.rules import rules_of

TREE = {
    "model": {"kind": "gpt", "layers": 4, "width": 8, "heads": 2},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 3, "stages": 2, "microbatches": 2},
    "train": {"steps": 9, "technique": "staggered", "audit_every": 4},
    "checkpoint": {"every": 3, "synchronous": True},
    "evaluate": {"every": 3, "data": {"kind": "digits"}},
    "resilience": {
        "strategy": "templates",
        "tolerate": 1,
        "failure_every_s": 60,
        "wait_for_replacement": 9,
        "step_log_bytes": 1000,
        "spares": 1,
    },
}
CHECKFREQ = {"strategy": "checkfreq", "wait_for_replacement": 9}
SNAPSHOTS = {"strategy": "snapshots", "snapshot_every": 2}


def rules(profile=None, **sections):
    job = parse_job(TREE | sections)
    layers, ties = 6, ((0, 5),)
    plan, terms = healthy_plan(job, layers, None, ties), terms_of(job, layers, None, ties)
    planned = JobPlans(
        job=job,
        plan=plan,
        terms=terms,
        shapes=shapes_of(job, layers, profile, terms),
        keeping=keeping_of(job, layers),
        rates=profile and rates_of(profile, job.cluster),
    )
    nodes = group_into_nodes(plan.workers, 1)
    return rules_of(job, planned, ties=ties, nodes=nodes, job_id="j", directory="final", evaluated=5)


def test_every_key_that_decisions_go_by_arrives():
    made = (
        rules(),
        rules(resilience=CHECKFREQ, checkpoint={"every": 0}),
        rules(resilience=SNAPSHOTS, checkpoint={"every": 0}),
        rules(resilience={"strategy": "adaptive"}, logging={"use": "on"}),
        rules(uniform_profile(6), resilience={"strategy": "auto"}, checkpoint={"every": "auto"}),
    )
    told = {each.name for rules in made for each in fields(JobRules) if getattr(rules, each.name) != each.default}
    assert told == {each.name for each in fields(JobRules)}
    assert [each.name for each in fields(JobRules) if each.default is MISSING] == ["steps"]
    assert rules(resilience={"strategy": "auto"}).shapes is None, "of what nothing is known no pipelines are made"
    assert rules(uniform_profile(6), resilience={"strategy": "adaptive"}).rates is None, "it compares nothing"
    assert made[0].evaluating == Evaluating(every=3, microbatches=5)
    assert (made[0].steps, made[0].wait_s, made[0].fewest, made[0].weighs) == (9, 9.0, 4, True)
