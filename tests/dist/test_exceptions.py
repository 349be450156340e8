"""Exceptions in the code of real workers: in one it is that worker's loss, in two it is the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import parse_job, train
from holdfast.data.sampler import TRIES, sample_indices
from holdfast.errors import ProgramFailed
from holdfast.optim.digest import digest_run
from holdfast.telemetry.events import Detected, ExceptionRaised, read_events

pytestmark = pytest.mark.dist

CODE = Path(__file__).with_name("raising_model.py")
STEPS, MICROBATCHES, SIZE, ITEMS, SEED = 4, 6, 2, 4096, 5


def job_of(*, steps: int = STEPS, model=None, data=None):
    return parse_job(
        {
            "name": "raising",
            "model": {
                "kind": "python",
                "target": f"{CODE}:build",
                "loss": f"{CODE}:loss",
                "arguments": model or {},
            },
            "data": {"kind": "python", "target": f"{CODE}:items", "arguments": data or {}},
            "grid": {"pipelines": 2, "stages": 2, "microbatches": MICROBATCHES // 2, "microbatch_size": SIZE},
            "optimizer": {"kind": "adamw", "lr": 1.0e-3},
            "train": {"steps": steps, "seed": SEED},
            "control": {"hang_s": 15},
        },
        (),
    )


def item_of(step: int, microbatch: int) -> int:
    """One that is needed then, and at no other time."""
    return sample_indices(SEED, step, microbatch, MICROBATCHES, SIZE, ITEMS)[0]


def raised(run_dir: Path) -> list[ExceptionRaised]:
    return [event for _, event in read_events(run_dir / "events.jsonl") if isinstance(event, ExceptionRaised)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """What such jobs end in when nothing raises, by their number of steps."""
    made = {}

    def run(steps: int = STEPS):
        if steps not in made:
            made[steps] = train(job_of(steps=steps), run_dir=tmp_path_factory.mktemp("healthy") / "run")
        return made[steps]

    run()
    return run


def test_one_worker_that_raises_is_lost_and_an_item_that_comes_back_is_waited_for(healthy, tmp_path):
    once, log = tmp_path / "raised", tmp_path / "readings"
    data = {"away": item_of(2, 1), "tries": TRIES - 1, "log": str(log)}
    summary = train(job_of(model={"once": str(once)}, data=data), run_dir=tmp_path / "run")
    assert once.exists()
    (event,) = raised(tmp_path / "run")
    assert (event.phase, event.layer, event.error) == ("forward", 1, "ValueError: a bit flipped")
    (lost,) = [event for _, event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Detected)]
    assert lost.worker == event.worker
    assert "forward of layer 1" in lost.how
    assert [failure.worker for failure in summary.report.failures] == [event.worker]
    assert log.stat().st_size >= TRIES, "it was tried in place"
    assert summary.weights_sha256 == healthy().weights_sha256
    assert summary.state_sha256 == healthy().state_sha256
    assert summary.final_loss == healthy().final_loss


def test_a_micro_batch_that_raises_wherever_it_is_run_is_the_program(healthy, tmp_path):
    """What lives is saved: every layer, as it was before that step."""
    poison = job_of(model={"poisonous_layer": 0}, data={"poison": item_of(2, 4)})
    with pytest.raises(ProgramFailed) as caught:
        train(poison, run_dir=tmp_path / "run")
    what, saved, *trace = str(caught.value).splitlines()
    first, second = raised(tmp_path / "run")
    assert (first.worker, second.worker) == ("1.0", "0.0")
    assert what.startswith("worker 1.0, step 2, forward of layer 0, micro-batch 4: ValueError: no such token; worker")
    assert what.endswith("it is the program")
    assert saved == f"the state before step 2 is saved in {tmp_path / 'run' / 'final'}"
    assert "raising_model.py" in "\n".join(trace)
    digest = digest_run(tmp_path / "run" / "final")
    assert digest.weights_sha256 == healthy(2).weights_sha256
    assert digest.state_sha256 == healthy(2).state_sha256


def test_an_item_that_cannot_be_read_is_the_program(tmp_path):
    """The first stage needs it for its inputs, the last for its targets."""
    item = item_of(1, 3)
    data = {"away": item, "tries": 10**6, "log": str(tmp_path / "readings")}
    with pytest.raises(ProgramFailed, match=rf"loading of item {item}: FileNotFoundError: .* it is the program"):
        train(job_of(data=data), run_dir=tmp_path / "run")
    reports = raised(tmp_path / "run")
    assert {event.item for event in reports} == {item}
    assert len({event.worker for event in reports}) >= 2
    assert (tmp_path / "readings").stat().st_size == TRIES * len(reports)
