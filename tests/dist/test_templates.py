"""Strategy `templates` on real processes: re-routed at once, other pipelines while all train, the same bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.soak import some

from holdfast.config.profiles import save_profile
from holdfast.control.chain.opening import plans_in
from holdfast.core.ids import WorkerId
from holdfast.core.placement import lacking
from holdfast.core.profile import uniform_profile
from holdfast.optim.digest import encode_layer, load_layer
from holdfast.telemetry.events import (
    Agreed,
    FaultInjected,
    HandingOver,
    Installed,
    Notice,
    Parted,
    Resumed,
    StepOps,
    Synced,
    WorkerReady,
    read_events,
)

pytestmark = pytest.mark.dist

JOB = ("train.steps=24", "model.layers=6")
TEMPLATES = (*JOB, "resilience.strategy=templates", "resilience.smallest_pipeline=3")


def events_of(summary, kind):
    return [event for _, event in read_events(summary.run_dir / "events.jsonl") if isinstance(event, kind)]


def survived(runs, *faults, overrides=(), started=12):
    healthy = runs.healthy("gpt", JOB)
    summary = runs.survives("gpt", *faults, overrides=(*TEMPLATES, *overrides), healthy=healthy)
    assert events_of(summary, HandingOver), "layers have moved"
    assert len(events_of(summary, WorkerReady)) == started, "nobody was started anew"
    return summary


def works_last(summary):
    """How many workers computed in the last step."""
    return len({e.worker for e in events_of(summary, StepOps) if e.step == summary.steps - 1 and e.ops})


CUT_ANEW = [
    ("1f1b", ["kill:1.2@2:backward"]),
    ("decoupled", ["kill:1.2@2:backward"]),
    ("staggered", ["kill:1.2@2:backward", "kill:0.2@3:update"]),
]


@pytest.mark.parametrize(("technique", "faults"), some(CUT_ANEW, CUT_ANEW[1:]))
def test_a_pipeline_that_has_lost_a_worker_is_cut_anew(runs, technique, faults):
    """Where updates are staggered, one loss of twelve is hidden by re-routing alone; two of one stage are not."""
    summary = survived(runs, *faults, overrides=(f"train.technique={technique}",))
    told = [e.text for e in events_of(summary, Notice) if "pipelines of" in e.text]
    assert told[-1].startswith(f"{12 - len(faults)} workers become pipelines of ")
    assert len(events_of(summary, Agreed)) == 1 + len(faults), "to begin, and after losses: not to change pipelines"
    assert [event.strategy for event in events_of(summary, Installed)][1] == "templates"


def test_two_kills_a_hang_and_one_more_while_layers_move(runs):
    survived(runs, "kill:1.2@2:backward", "kill:1.1@5:reduce", "hang:0.3@9:forward")


@pytest.mark.parametrize(("victim", "role"), [("0.2", "gives 4:6"), ("1.0", "takes 2:3")])
def test_whoever_gives_or_takes_a_layer_dies_during_the_copy(runs, victim, role):
    """Without 1.2, 1.0 takes a layer of whoever had stage 1, and 1.1 two of 0.2 and 2.2."""
    summary = survived(runs, "kill:1.2@2:backward", f"kill:{victim}@3:copy")
    events = [event for _, event in read_events(summary.run_dir / "events.jsonl")]
    handing = next(at for at, event in enumerate(events) if isinstance(event, HandingOver))
    struck = next(at for at, event in enumerate(events) if isinstance(event, FaultInjected) and event.point == "copy")
    assert handing < struck
    assert events[handing].takes == (("1.0", "2:3"), ("1.1", "4:6"))
    assert any(isinstance(event, Synced) for event in events[struck:]), (
        f"layers move although {victim}, that {role}, died"
    )
    assert works_last(summary) == 10


TWO_AT_ONCE = [
    (["kill:1.2@2:backward", "kill:0.1@2:backward"], ()),
    (["kill-node:2@2:backward"], ("grid.workers_per_node=2",)),
]


@pytest.mark.parametrize(("faults", "overrides"), some(TWO_AT_ONCE, TWO_AT_ONCE[1:]))
def test_two_are_lost_in_one_instant(runs, faults, overrides):
    summary = survived(runs, *faults, overrides=overrides)
    told = [e.text for e in events_of(summary, Notice) if "pipelines of" in e.text]
    assert told[-1].startswith("10 workers become pipelines of 3 + 3 + 4: steps are 23% faster, ")
    assert works_last(summary) == 10


def test_one_comes_and_one_leaves_in_one_instant_while_layers_move(runs):
    faults = ("slow:2.0@3:10x", "kill:1.2@2:backward", "join:1.2@5", "leave:0.1@5:start")
    summary = survived(runs, *faults, started=13)
    assert [event.worker for event in events_of(summary, Parted)] == ["0.1"]
    told = [event.text for event in events_of(summary, Notice)]
    for_ten = any(text.startswith("10 workers become pipelines of") for text in told)  # who comes a little later waits
    assert works_last(summary) == 11 - for_ten, "of twelve, one was lost, one has left, and one has come"


def test_the_fewest_bytes_are_copied_and_nothing_else(runs):
    """Two pipelines of two and a worker become 2 + 3; one may be seated at any of the five places."""
    job = ("train.steps=16", "model.layers=4", "grid.microbatches=4")
    healthy = runs.healthy("small", job)
    layers = [load_layer(path) for path in sorted((healthy.run_dir / "final").glob("layer-*"))]
    sizes = [len(encode_layer(layer)) for layer in layers]
    alike = uniform_profile(len(sizes), forward_s=1, backward_input_s=1, backward_weight_s=1)
    costed = tuple(replace(layer, parameter_bytes=size) for layer, size in zip(alike.layers, sizes, strict=True))
    profile = runs.folder() / "profile.json"
    save_profile(replace(alike, layers=costed), profile)

    overrides = (*job, "resilience.strategy=templates", "resilience.smallest_pipeline=2", f"train.profile={profile}")
    overrides += ("resilience.failure_every_s=100000",)  # by this profile a layer's operation takes a second
    summary = runs.survives("small", "kill:1.1@2:backward", overrides=overrides, healthy=healthy)
    plans = plans_in(summary.run_dir / "control.db")
    before, after = plans[1].placement.without([WorkerId(1, 1)]), plans[max(plans)]
    rows = {route.workers: route.visits for route in after.routes.routes}
    assert sorted(map(len, rows)) == [2, 3]

    takes = lacking(before, after.placement)
    assert events_of(summary, HandingOver)[0].takes == tuple((str(worker), str(part)) for worker, part in takes)
    taken = [layer for _, part in takes for layer in part.indices]
    synced = events_of(summary, Synced)
    (entered,) = {event.entered for event in synced}
    came = sum(event.bytes for event in synced)
    assert came == sum(len(encode_layer(replace(layers[layer], step=entered))) for layer in taken)
    assert came == sum(event.sent_state for event in events_of(summary, StepOps)), "as the links have counted"
    places = [visit.layers.indices for visits in rows.values() for visit in visits]
    held = {worker: set(before.held_layers(worker)) for worker in before.workers}
    assert sum(sizes[layer] for layer in taken) == min(
        sum(sizes[layer] for worker, place in zip(seated, places, strict=True) for layer in set(place) - held[worker])
        for seated in itertools.permutations(held)
    )
    assert len({event.pid for event in events_of(summary, WorkerReady)}) == 6, "the processes are those that began"
    assert not events_of(summary, Resumed)
    assert not list(summary.run_dir.glob("checkpoints*")), "there is no checkpoint to read"
