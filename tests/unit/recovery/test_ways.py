"""What a job does about the loss of a node: what is left to ``auto``, what overrides it, and what is told of it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from holdfast import parse_job
from holdfast.core.profile import uniform_profile
from holdfast.recovery.choice import Sizes, Way
from holdfast.settings.planning import healthy_plan
from holdfast.settings.ways import decided

LAYERS, SIZE, STATE = 4, 1000, 5000
JOB = {
    "model": {"kind": "gpt", "layers": LAYERS - 2, "width": 8, "heads": 2, "context": 8},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 1, "stages": 2, "microbatches": 4},
    "train": {"steps": 4},
    "checkpoint": {"every": 2},
}
SIZES = Sizes(boundary_bytes=(SIZE,) * LAYERS, state_bytes=(STATE,) * LAYERS)
CROSSING = "8000 bytes cross nodes in a step, 0.4 times the 20000 bytes of the model; up to 10 times are worth it"
WAITS = "resilience.wait_for_replacement=9"


def profile_of(boundary_bytes=SIZE):
    plain = uniform_profile(
        LAYERS, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, boundary_bytes=boundary_bytes
    )
    return replace(plain, layers=tuple(replace(each, parameter_bytes=STATE) for each in plain.layers))


def decide(*overrides, known=SIZES, **options):
    """Decides for a pipeline of two nodes, changed by some overrides."""
    job = parse_job(copy.deepcopy(JOB), overrides)
    return job, decided(job, healthy_plan(job, LAYERS), known, **options)


def test_a_pipeline_over_two_nodes_with_checkpoints_and_a_profile_is_logged():
    job, found = decide(known=profile_of())
    assert (found.choice.way, found.choice.advised) == (Way.LOG, Way.LOG)
    assert found.choice.why == CROSSING
    assert found.choice.reasons == (
        "no other node has an owner of layer(s) 0-3",
        CROSSING,
        "copying takes the most pressed sender 3.33e-07 s of a step, in which it has nothing else to do for 6 s",
        "where every layer keeps an owner, only what was lost of the interrupted step is run again: each worker keeps "
        "what it hands on, 4000 bytes at most",
    )
    assert found.job.logging.use == "on"
    assert parse_job(copy.deepcopy(JOB), ("logging.use=on",)) == found.job, "nothing else is changed"
    assert job.logging.use == "auto"


def test_the_event_has_every_figure():
    told = decide(known=profile_of())[1].chosen.figures()
    reasons = told.pop("reasons")
    assert len(reasons) == 4
    assert told == {
        "way": "log",
        "advised": "log",
        "why": CROSSING,
        "logging": True,
        "alone": (0, 1, 2, 3),
        "spares": 0,
        "crossing_bytes": 2 * 4 * SIZE,
        "state_bytes": LAYERS * STATE,
        "copy_s": 4 * SIZE / 12e9,
        "bubble_s": pytest.approx(6.0),
        "step_log": True,
        "step_log_bytes": 4 * SIZE,
    }


def test_without_a_profile_sizes_decide_and_it_is_said_that_times_are_not_known():
    _, found = decide()
    assert found.choice.way is Way.LOG
    assert found.choice.reasons[2] == (
        "without a profile it is not known whether copying fits into the time in which senders wait; a step that "
        "cannot be logged in time is left out"
    )
    assert found.chosen.copy_s is None
    assert found.chosen.bubble_s is None
    assert found.chosen.crossing_bytes == 8 * SIZE


@pytest.mark.parametrize(("spares", "way"), [(0, Way.REROUTE), (1, Way.REPLICATE)])
def test_replicas_on_other_nodes_log_nothing(spares, way):
    _, found = decide("grid.pipelines=2", f"resilience.spares={spares}")
    assert (found.choice.way, found.choice.advised) == (way, way)
    assert found.job.logging.use == "off"
    assert found.chosen.crossing_bytes == 0


def test_logs_beside_replicas_are_kept_where_somebody_wants_them_and_a_loss_is_re_routed():
    _, found = decide("grid.pipelines=2", "logging.use=on")
    assert found.choice.way is Way.REROUTE
    assert found.job.logging.use == "on"
    assert any(text.startswith("logs are kept all the same, logging.use: on") for text in found.choice.reasons)


@pytest.mark.parametrize(
    ("overrides", "known", "why"),
    [
        ((), replace(SIZES, boundary_bytes=(10**6,) * LAYERS), "8 MB cross nodes in a step, 400 times"),
        (("logging.bandwidth=1",), profile_of(), "copying takes the most pressed sender 4e+03 s of a step"),
        (("grid.workers_per_node=2",), SIZES, "nothing crosses nodes"),
    ],
)
def test_checkpoints_where_logs_are_not_worth_it_unless_somebody_wants_them(overrides, known, why):
    _, found = decide(*overrides, known=known)
    assert (found.choice.way, found.choice.advised) == (Way.CHECKPOINT, Way.CHECKPOINT)
    assert found.choice.why.startswith(why)
    assert found.job.logging.use == "off"
    _, told = decide(*overrides, "logging.use=on", known=known)
    assert (told.choice.way, told.choice.advised) == (Way.LOG, Way.CHECKPOINT)
    assert told.job.logging.use == "on"
    assert told.choice.why == "logging.use: on"
    assert told.choice.reasons == found.choice.reasons, "the figures are told all the same"


@pytest.mark.parametrize(
    ("overrides", "way", "why"),
    [
        (("logging.use=off",), Way.CHECKPOINT, "logging.use: off"),
        (("checkpoint.every=0",), Way.STOP, "no checkpoints are made, checkpoint.every: 0"),
        (("resilience.strategy=templates",), Way.CHECKPOINT, "logs need resilience.strategy: auto or adaptive"),
        (("resilience.strategy=checkfreq", WAITS), Way.CHECKPOINT, "resilience.strategy: checkfreq"),
        (
            ("resilience.strategy=snapshots", "resilience.snapshot_every=1"),
            Way.CHECKPOINT,
            "logs need resilience.strategy: auto or adaptive",
        ),
        (("grid.gpus_per_stage=2", "grid.workers_per_node=2"), Way.CHECKPOINT, "logs need grid: stages of one GPU"),
        (
            ("train.numerics=fast", "grid.gpus_per_stage=2", "grid.microbatch_size=2"),
            Way.CHECKPOINT,
            "logs need grid: stages of one GPU",
        ),
    ],
)
def test_what_the_figures_speak_for_is_not_done(overrides, way, why):
    """Somebody decided otherwise, or the job cannot log."""
    _, found = decide(*overrides)
    assert found.job.logging.use == "off"
    assert (found.choice.way, found.choice.advised, found.choice.why) == (way, Way.LOG, why)
    assert str(found.choice).startswith(f"{way} ({why}; the figures speak for log)\n  no other node has an owner")


def test_without_checkpoints_of_its_own_a_job_goes_back_to_the_one_that_it_went_on_from():
    assert decide("checkpoint.every=0", restorable=True)[1].choice.way is Way.CHECKPOINT
    _, alone = decide("checkpoint.every=0", "grid.workers_per_node=2")
    assert (alone.choice.way, alone.choice.advised) == (Way.STOP, Way.CHECKPOINT)


def test_who_restarts_from_checkpoints_does_so_in_spite_of_replicas():
    _, found = decide("grid.pipelines=2", "resilience.strategy=checkpoint-restart", WAITS)
    assert (found.choice.way, found.choice.advised) == (Way.CHECKPOINT, Way.REROUTE)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("resilience.step_log=false", "resilience.step_log: false"),
        ("resilience.strategy=checkpoint-restart", "resilience.strategy: checkpoint-restart"),
    ],
)
def test_nothing_is_kept_of_a_step(override, why):
    _, found = decide(override, WAITS)
    assert found.choice.reasons[-1] == f"the interrupted step is run again from its beginning: {why}"
    assert (found.chosen.step_log, found.chosen.step_log_bytes) == (False, 0)


def test_what_is_kept_of_a_step_has_a_limit():
    assert decide("resilience.step_log_bytes=300")[1].step_log_bytes == 300
    assert decide("train.technique=staggered")[1].step_log_bytes == 2 * 4 * SIZE
