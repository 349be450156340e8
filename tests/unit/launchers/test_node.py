"""The script of a node: what it does behind each end of what it runs, which is played by another program here."""

import signal
import subprocess
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, until

from holdfast.launchers.job import LaunchedJob
from holdfast.launchers.node import NUMBER_0, WHOEVER_SAW_IT, node_script

PLAYED = """#!/bin/bash
# Plays `python -m holdfast`: its ends, one after another, are lines of the file `ends`: a code, and what it leaves.
[ "$3" != status ] || exec cat status
echo "$3" >> calls
read -r code what < ends
sed -i 1d ends
case $what in
    begins) echo "$RANDOM-$RANDOM" > run/job-id ;;
    leaves) trap "exit $code" TERM; echo >> waits; while true; do sleep 0.01; done ;;
    done | preempted | program)
        echo "$RANDOM-$RANDOM" > run/job-id
        echo '{"phase":"ended","ended":"'"$what"'","detail":""}' > status
        ;;
esac
exit "${code:-99}"
"""


NOTED = 'sleep() { echo "$1" >> slept; command sleep "$@"; }\n'


class Node:
    def __init__(self, folder, number, over):
        self.folder = folder
        (folder / "run").mkdir()
        (folder / "run" / "job-id").write_text("before\n")
        (folder / "status").write_text('{"job":"j","phase":"running","ended":""}\n')
        python = folder / "python"
        python.write_text(PLAYED)
        python.chmod(0o700)
        job = LaunchedJob(
            name="j",
            made_by="",
            folder=folder,
            run_dir=folder / "run",
            python=str(python),
            command=("train", "j.yaml"),
            nodes=2,
            slots=1,
            certificates=False,
        )
        text = node_script(job, number=str(number), address="here", over=over)
        self._text = NOTED + text.replace("pause=5", "pause=0").replace("sleep 20", "sleep 0")
        assert self._text.count("pause=0") == 2
        self._process = None

    def begin(self, *ends):
        (self.folder / "ends").write_text("".join(f"{end}\n" for end in ends))
        self._process = subprocess.Popen(["bash", "-c", self._text], stdout=subprocess.DEVNULL)

    def ends(self, *ends):
        """Its exit code, behind these ends of what it runs."""
        self.begin(*ends)
        return self.code()

    def code(self):
        return self._process.wait(LIMIT_S)

    def tell(self):
        self._process.send_signal(signal.SIGTERM)

    def pauses(self):
        """How often it has paused."""
        path = self.folder / "slept"
        return len(path.read_text().split()) if path.exists() else 0

    def calls(self):
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def node(tmp_path):
    made = []

    def make(number, over):
        made.append(Node(tmp_path, number, over))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(params=[NUMBER_0, WHOEVER_SAW_IT])
def replaced(request):
    """Where another one is made of one that has ended."""
    return request.param


def summed_up(node):
    (Path(node.folder) / "run" / "summary.json").write_text("{}")
    return node


@pytest.mark.parametrize(
    ("ends", "code", "times"),
    [
        (["0 done"], 0, 1),
        (["137", "0 done"], 0, 2),
        (["3 begins", "2", "1", "143", "0 done"], 0, 5),
        (["143 preempted"], 0, 1),
        (["1 program"], 1, 1),
        (["75"], 75, 1),
        (["0"], 0, 1),
    ],
)
def test_number_0_goes_on_until_the_job_is_over(node, replaced, ends, code, times):
    first = summed_up(node(0, replaced))
    assert first.ends(*ends) == code
    assert first.calls() == times * ["train"]


def test_what_an_attempt_before_has_come_to_is_no_end_of_this_one(node, replaced):
    first = node(0, replaced)
    (first.folder / "status").write_text('{"phase":"ended","ended":"preempted"}\n')
    assert first.ends("1", "143", "143 preempted") == 0
    assert first.calls() == 3 * ["train"]


def test_number_0_waits_for_what_is_told_of_a_job_that_is_done(node, replaced):
    first = node(0, replaced)
    first.begin("0 done")
    until(lambda: first.pauses() >= 2)
    assert first._process.poll() is None
    summed_up(first)
    assert first.code() == 0


def test_others_are_there_until_they_are_told_to_go(node):
    other = node(1, NUMBER_0)
    other.begin("0 done", "93", "0 done", "75 leaves")
    until((other.folder / "waits").exists)
    other.tell()
    assert other.code() == 75
    assert other.calls() == 4 * ["agent"]


def test_others_end_all_if_the_attempt_was_begun_while_they_were_there(node):
    other = summed_up(node(1, WHOEVER_SAW_IT))
    assert other.ends("0", "93", "0 preempted") == 0, "first another attempt ends, then this one is lost"
    assert other.calls() == 3 * ["agent"]


@pytest.mark.parametrize(("left", "code"), [("75", 75), ("0", 143), ("1", 143), ("143", 143)])
def test_who_is_told_to_go_ends_no_job(node, replaced, left, code):
    first = node(0, replaced)
    first.begin(f"{left} leaves")
    until((first.folder / "waits").exists)
    first.tell()
    assert first.code() == code


@pytest.mark.parametrize("end", ["0", "75", "93", "2", "1", "143"])
@pytest.mark.parametrize("number", [0, 1])
def test_where_none_is_replaced_each_ends_as_its_process_has(node, number, end):
    each = node(number, None)
    assert each.ends("137", end) == int(end)
    assert each.calls() == 2 * [["train"], ["agent"]][number]


def test_where_none_is_replaced_an_end_is_one_though_it_was_told_to_go(node):
    each = node(0, None)
    each.begin("0 leaves")
    until((each.folder / "waits").exists)
    each.tell()
    assert each.code() == 0
