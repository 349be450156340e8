"""The documentation: it is built without a warning, and what it has people type does what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LONG_S = 500.0


def run(words, folder, **environment):
    """What it prints; whatever it has started ends with it."""
    process = subprocess.Popen(
        [*map(str, words)],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LONG_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()
    assert process.returncode == 0, said
    return said


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    """Of each link its target is there, and each page can be reached: Sphinx warns of any other."""
    build = (
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        tmp_path / "trees",
        DOCS,
        tmp_path / "site",
    )
    assert run(build, tmp_path) == ""
    pages = {str(path.relative_to(tmp_path / "site")): path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    assert {"first_run.html", "adr/README.html"} <= pages.keys()
    assert "holdfast.train" in pages["python.html"], "it is made from the code"
    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*")
    assert {name: found for name, text in pages.items() if (found := loaded.findall(text))} == {}


def test_the_notebook_trains_kills_and_draws(tmp_path):
    notebook = Path(shutil.copy(ROOT / "examples" / "kill_and_compare.ipynb", tmp_path))
    assert not any(cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"]), "as it is kept"
    execute = (Path(sys.executable).with_name("jupyter-execute"), "--inplace", notebook)
    run(execute, tmp_path)
    outputs = [output for cell in json.loads(notebook.read_text())["cells"] for output in cell.get("outputs", ())]
    said = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    assert "lost worker 1.1 in step 10" in said
    assert len(re.findall(r"^[0-9a-f]{64}$", said, re.MULTILINE)) == 2, "which it has compared"
    assert len([output for output in outputs if "image/svg+xml" in output.get("data", ())]) == 2


def test_what_the_first_page_has_people_type_does_what_it_says(tmp_path):
    typed = "".join(re.findall(r"```sh\n(.*?)```", (DOCS / "first_run.md").read_text(), re.DOTALL))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    said = run(("bash", "-euo", "pipefail", "-c", typed), tmp_path, PATH=path)
    summaries = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in ("healthy", "killed")}
    assert len({summary["weights_sha256"] for summary in summaries.values()}) == 1
    assert [failure["worker"] for failure in summaries["killed"]["failures"]] == ["1.1"]
    assert "went on from the checkpoint of step 12" in said
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
