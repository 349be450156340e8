"""The templates of a model that everybody knows, as text; and the picture in the documentation is the tool's own."""

from pathlib import Path

import pytest

from holdfast.cli.commands import run_command

ROOT = Path(__file__).parents[2]
COMMAND = (
    *("templates", "--profile", str(ROOT / "profiles" / "gpt3-6.7b.json"), "--nodes", "13", "--memory", "80e9"),
    *("--tolerate", "2", "--global-batch", "1024", "--microbatch-size", "2"),
)


@pytest.mark.parametrize(
    ("form", "file"),
    [
        ("table", Path(__file__).parent / "templates" / "gpt3-6.7b-13-nodes.txt"),
        ("svg", ROOT / "docs" / "pictures" / "templates.svg"),
    ],
)
def test_templates_are_as_before(capsys, form, file):
    assert run_command([*COMMAND, "--format", form]) == 0
    assert capsys.readouterr().out == file.read_text()
