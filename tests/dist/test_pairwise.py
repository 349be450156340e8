"""What a job may be asked for, pairwise, each with a kill at a point of a step or of its recovery: the same bits.

Point x model x technique x commit x store x TLS x spares x what is kept of a step: any two values of two of them meet
in some run.
"""

from __future__ import annotations

import itertools
import uuid

import pytest
from tests.soak import some

from holdfast.control.certificates import make_certificates

pytestmark = pytest.mark.dist

IN_A_STEP = ["start", "forward", "backward", "reduce", "verdict", "update", "commit"]
IN_A_RECOVERY = ["detect", "install", "replay"]
FACTORS = {
    "point": [*IN_A_STEP, *IN_A_RECOVERY],
    "model": ["small", "convnet", "bert", "vit"],
    "technique": ["1f1b", "gpipe", "decoupled", "staggered"],
    "commit": ["shadow", "undo"],
    "store": ["embedded", "etcd"],
    "tls": ["open", "tls"],
    "spares": ["no spare", "spare"],
    "step": ["kept", "whole"],
}
PLAIN = ("train.steps=5", "grid.stages=2", "grid.microbatches=2")
TOLERANCE = 1e-7
"""Of a run whose steps were taken back by inverting them: relative L2 distance of all weights."""


def pairs_of(run):
    return set(itertools.combinations(zip(FACTORS, run, strict=True), 2))


def pairwise():
    """Yields runs until every pair of values is in one: always the first of those that add most pairs."""
    candidates = {run: pairs_of(run) for run in itertools.product(*FACTORS.values())}
    missing = set().union(*candidates.values())
    while missing:
        best = max(candidates, key=lambda run: len(candidates[run] & missing))
        missing -= candidates[best]
        yield best


RUNS = sorted(pairwise(), key=lambda run: FACTORS["point"].index(run[0]))


def test_the_runs_below_cover_every_pair():
    wanted = set().union(*map(pairs_of, itertools.product(*FACTORS.values())))
    assert set().union(*map(pairs_of, RUNS)) == wanted
    assert len(RUNS) <= 45


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    ca, cert, key = make_certificates(tmp_path_factory.mktemp("certs") / "certs", ("127.0.0.1",))
    return tuple(f"control.tls.{name}={path}" for name, path in (("ca", ca), ("cert", cert), ("key", key)))


@pytest.mark.parametrize(tuple(FACTORS), some(RUNS, RUNS[::2]), ids=map("-".join, RUNS))
def test_a_kill(runs, request, point, model, technique, commit, store, tls, spares, step):
    second = "2.0" if technique == "staggered" else "2.1"  # staggered, 2.1 may be a step ahead of 1.0
    faults = [f"kill:1.0@2:{point}"] if point in IN_A_STEP else ["kill:1.0@2:backward", f"kill:{second}@2:{point}"]
    overrides = [*PLAIN, f"train.technique={technique}", f"resilience.commit={commit}"]
    if store == "etcd":
        overrides.append(f"control.store={request.getfixturevalue('shared_etcd')}/{uuid.uuid4().hex}")
    if step == "whole":
        overrides.append("resilience.step_log=false")
    if spares == "spare":
        overrides.append("resilience.spares=1")
    if tls == "tls":
        overrides += request.getfixturevalue("certificates")
    healthy = runs.healthy(model, PLAIN)
    if commit == "shadow":
        runs.survives(model, *faults, overrides=tuple(overrides), healthy=healthy)
        return
    summary = runs.train(model, *faults, overrides=tuple(overrides))
    assert (summary.unfired, summary.steps) == ((), healthy.steps)
    assert runs.distance(summary, healthy) <= TOLERANCE
