"""What is made of a script that torchrun has started."""

import pytest

from holdfast.errors import ConfigError
from holdfast.runtime.loop.launched import command_of


def environment(rank, **more):
    return {"LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", **more}


def test_the_first_process_runs_all_workers_and_the_others_end():
    told = environment(0, HOLDFAST_RUN="--set 'name=two words' --fault kill:1.0@3")
    assert command_of(told, "train.py", ["--lr", "0.1"]) == (
        *("-m", "holdfast", "run", "--workers", "4", "--set", "name=two words", "--fault", "kill:1.0@3"),
        *("train.py", "--lr", "0.1"),
    )
    assert command_of(environment(1), "train.py", []) is None


@pytest.mark.parametrize(
    ("told", "script", "text"),
    [
        (environment(1, WORLD_SIZE="8"), "train.py", "8 processes on several machines"),
        (environment(1), None, "started with -m; expected the path of a script"),
        (environment(0, HOLDFAST_RUN="--set 'name"), "train.py", "HOLDFAST_RUN=--set 'name: No closing quotation"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(told, script, text):
    with pytest.raises(ConfigError, match=text):
        command_of(told, script, [])
