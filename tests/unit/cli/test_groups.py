"""``holdfast groups``: its forms, and what it refuses."""

import json

import pytest

from holdfast.cli.commands import run_command

FLAGS = {
    "--compute": "1,2,3,4",
    "--boundary-bytes": "10,20,30",
    "--limit": "80",
    "--bandwidth": "10",
    "--interval": "2",
}


@pytest.fixture
def groups(capsys):
    def run(*more, exits=0, **changed):
        flags = {**FLAGS, **{f"--{name.replace('_', '-')}": value for name, value in changed.items()}}
        try:
            code = run_command(["groups", *(part for flag in flags.items() for part in flag), *more])
        except SystemExit as ended:
            code = ended.code
        told = capsys.readouterr()
        assert code == exits
        return told.err if exits else told.out

    return run


def test_the_json_form(groups):
    assert json.loads(groups("--format", "json")) == {
        "groups": [[0], [1, 2], [3]],
        "recovery_s": (1 + 2 * (2 + 3 + 2) + 4) / 4,
        "storage_bytes": 80,
    }
    assert json.loads(groups("--format", "json", "--algorithm", "greedy"))["groups"] == [[0], [1], [2, 3]]
    parallel = json.loads(groups("--format", "json", "--parallel"))
    assert parallel["recovery_s"] == (1 / 4 + 2 * (2 + 3 + 2) / 2 + 4 / 4) / 4


def test_one_number_is_of_all_boundaries(groups):
    told = [groups("--format", "json", boundary_bytes=sizes, limit="4e1") for sizes in ("10", "10,10,10")]
    assert told[0] == told[1]


def test_the_table(groups):
    assert groups() == (
        "groups    3 of 4 machine(s): 0, 1-2, 3\n"
        "recovery  4.75 s for a lost step, each machine as likely to be lost as any other\n"
        "storage   80 of 80 bytes, for 2 step(s)\n"
    )


def test_the_picture(groups):
    picture = groups("--format", "svg")
    assert picture.startswith("<svg")
    assert all(name in picture for name in ("exact", "greedy", "authors"))


def test_the_authors_list_has_an_entry_for_the_last_machine(groups):
    def made(sizes):
        told = groups("--algorithm", "authors", "--format", "json", boundary_bytes=sizes, limit="120")
        return json.loads(told)["groups"]

    assert made("10,20,30,0") == [[0], [1], [2], [3]]
    assert made("10,20,30,1") == [[0], [1], [2, 3]]
    assert made("10,20,30") == made("10,20,30,30"), "left out, it is as large as the last one"


def test_one_machine(groups):
    found = json.loads(groups("--format", "json", compute="2", limit="0", boundary_bytes="7"))
    assert found == {"groups": [[0]], "recovery_s": 2.0, "storage_bytes": 0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compute": "1,,2"}, "nothing: expected seconds of each machine"),
        ({"compute": "1,x"}, "x: expected seconds of each machine"),
        ({"compute": "1,-2,3,4"}, "-2 is impossible: expected seconds of each machine, 0 or more"),
        ({"compute": "1,nan,3,4"}, "nan is impossible"),
        ({"boundary_bytes": "10,20"}, "--boundary-bytes has 2 numbers for 4 machine(s): expected 1 number or 3"),
        ({"boundary_bytes": "1,2,3,4"}, "--boundary-bytes has 4 numbers for 4 machine(s): expected 1 number or 3"),
        ({"boundary_bytes": "1,inf,3"}, "inf is impossible"),
        ({"limit": "-1"}, "-1 is impossible: expected bytes, 0 or more"),
        ({"limit": "nan"}, "nan is impossible"),
        ({"bandwidth": "0"}, "0 is impossible"),
        ({"interval": "0"}, "0 is impossible"),
        ({"interval": "1.5"}, "1.5 is impossible"),
        ({"algorithm": "best"}, "invalid choice"),
        ({"compute": "1e308,1e308,1,1"}, "compute and boundaries are too large"),
        ({"compute": ",".join(["1"] * 1025)}, "--compute has 1025 machines: expected at most 1024"),
    ],
)
def test_bad_input_is_refused_in_one_line(groups, changed, message):
    told = groups(exits=2, **changed)
    assert message in told
    assert told.count("\n") == 1


def test_the_authors_rule_takes_one_number_more(groups):
    told = groups("--algorithm", "authors", exits=2, boundary_bytes="1,2")
    assert "expected 1 number or 3 or 4" in told
