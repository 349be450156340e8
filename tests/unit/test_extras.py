"""What an optional package is needed for says how it is installed, and every extra that is named is there."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.data.packaged import packaged_file
from holdfast.errors import ConfigError
from holdfast.planning.solvers import process

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TEXTS = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
TEXTS += sorted((ROOT / "examples").glob("*.py"))


def test_every_extra_that_is_named_is_there():
    named = {extra for text in TEXTS for extra in re.findall(r"(?:holdfast|'\.)\[(\w+)\]", text.read_text())}
    named |= {extra for text in TEXTS for extra in re.findall(r"""installing\(['"](\w+)""", text.read_text())}
    assert {"digits", "s3", "solver", "tls"} <= named
    assert named <= set(EXTRAS)


def test_certificates(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    assert main(["certs", "--out", str(tmp_path / "certs"), "--host", "127.0.0.1"]) == 2
    told = "needs the package cryptography; pip install 'holdfast[tls]', in a clone pip install -e '.[tls]'"
    assert told in capsys.readouterr().err


def test_digits(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"pip install 'holdfast\[digits\]', in a clone pip install -e '\.\[digits\]'"
    ):
        packaged_file("digits.csv.gz", "digits")


def test_the_solver(monkeypatch):
    monkeypatch.setattr(process, "installed", lambda: False)
    with pytest.raises(
        ConfigError, match=r"pip install 'holdfast\[solver\]', in a clone pip install -e '\.\[solver\]'"
    ):
        process.run_solver(None, {"time_limit_s": 1.0}, None)


@pytest.mark.parametrize("script", ["plain_digits.py", "ddp_digits.py"])
def test_an_example_without_its_extra_shows_how_to_install_it(script):
    block = "import sys, runpy; sys.modules['sklearn'] = sys.modules['sklearn.datasets'] = None; "
    command = [sys.executable, "-c", f"{block}runpy.run_path({str(ROOT / 'examples' / script)!r})"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "pip install -e '.[digits]'" in ended.stderr
