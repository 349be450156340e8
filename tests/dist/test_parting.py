"""Workers of a script that have other bits find that out while they train, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import Fault, parse_job, train
from holdfast.errors import InternalError
from holdfast.telemetry.events import StepOps, read_events

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("parting_script.py")
EVERY, STEPS = 5, 40


def run(folder, *arguments, faults=(), every=EVERY, workers=3):
    job = parse_job(
        {
            "name": "parting",
            "model": {"kind": "script", "path": str(SCRIPT), "arguments": list(arguments)},
            "data": {"kind": "script"},
            "grid": {"pipelines": workers, "stages": 1, "microbatches": 1},
            "train": {"steps": 1, "compare_every": every},
            "control": {"hang_s": 15},
        }
    )
    summary = train(job, run_dir=folder, faults=[Fault.parse(text) for text in faults])
    assert summary.unfired == ()
    return summary


def last_step(folder):
    return max(event.step for _, event in read_events(folder / "events.jsonl") if isinstance(event, StepOps))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone") / "run", every=0, workers=1).weights_sha256


def test_a_bit_that_one_worker_has_otherwise_is_found_within_so_many_steps(tmp_path):
    with pytest.raises(InternalError, match=r"ReplicaDiverged: .* before step 15 .*: worker\(s\) 1\.0"):
        run(tmp_path / "run", "--parts", "weights")
    assert last_step(tmp_path / "run") >= 13, "the first comparison behind step 11 is that before step 15"
    assert not list((tmp_path / "run").glob("final/layer-*")), "nothing is saved as if it were right"


def test_of_two_workers_nobody_knows_which(tmp_path):
    with pytest.raises(InternalError, match=r"ReplicaDiverged: .* before step 15 .*; something in the"):
        run(tmp_path / "run", "--parts", "weights", workers=2)


def test_draws_of_its_own_that_the_probe_has_not_seen_are_found(tmp_path):
    """Sums are the same everywhere, and so are weights: only an item that two workers run tells.

    Both may have made as many draws by then, which then are the same: that is found another time.
    """
    with pytest.raises(InternalError, match=r"other bits, of what came of an item of step (4|9|14|19) that two"):
        run(tmp_path / "run", "--parts", "draws")


@pytest.mark.parametrize(
    "faults",
    [
        (),
        ("kill:0.0@4:backward", "kill:2.0@9:verdict"),
        ("kill:2.0@4:commit", "join:new@6"),
        ("kill:1.0@3:backward", "kill-coordinator@4:persist"),
    ],
)
def test_who_has_the_same_bits_is_not_stopped_whoever_dies(tmp_path, alone, faults):
    summary = run(tmp_path / "run", faults=faults)
    assert summary.steps == STEPS
    assert summary.weights_sha256 == alone


def test_how_often_is_known_by_the_first_item(tmp_path):
    with pytest.raises(InternalError, match=r"ReplicaDiverged: .* two workers ran"):
        run(tmp_path / "run", "--parts", "draws", "--steps", "20000", every=None)
