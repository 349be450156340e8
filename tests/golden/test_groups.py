"""The groups of the documentation, and its picture, are the tool's own."""

from pathlib import Path

import pytest

from holdfast.cli.commands import run_command
from holdfast.reproduce.facts import facts

ROOT = Path(__file__).parents[2]
FACTS = facts("swift_groups")
COMMAND = (
    *("groups", "--compute", ",".join(f"{seconds:.3f}" for seconds in FACTS["vit_compute_s"])),
    *("--boundary-bytes", "1644167168", "--limit", "1.2e12", "--bandwidth", "1.5e9", "--interval", "100"),
)


def test_the_picture_is_as_before(capsys):
    assert run_command([*COMMAND, "--format", "svg"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "pictures" / "groups.svg").read_text()


@pytest.mark.parametrize("flags", [(), ("--algorithm", "greedy"), ("--parallel",)])
def test_the_tables_are_as_before(capsys, flags):
    assert run_command([*COMMAND, *flags]) == 0
    page = (ROOT / "docs" / "groups.md").read_text()
    assert "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines()) in page
    shown = " ".join(COMMAND[1:]).replace("--limit", "\\\n        --limit")
    assert f"    $ holdfast groups {shown}\n" in page
