"""What people install: built from the source distribution, and used where nothing else of the project is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
JOB = {
    "model": {"kind": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 16},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2, "microbatch_size": 2},
    "train": {"steps": 4},
    "control": {"hang_s": 15},
}


def run(*words, cwd, **options):
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(target, source, folder):
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Of the source distribution, as others would build it."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(built("sdist", ROOT, folder / "sdist")) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.glob("holdfast-*")
    return built("wheel", source, folder / "wheel")


@pytest.fixture
def installed(wheel, tmp_path):
    """The command of an environment with the wheel, and with what it needs from this one."""
    place = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path)
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    run(*pip, cwd=tmp_path)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return place / "bin" / "holdfast"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    here = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "holdfast").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        there = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert there == {name for name in here if "__pycache__" not in name}
    assert {"holdfast/py.typed", "holdfast/cli/page/board.js"} <= there


def test_what_is_installed_trains_through_a_death(installed, tmp_path):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = run(
        installed.with_name("python"), "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path, env=environment
    )
    assert Path(own.strip()).is_relative_to(installed.parents[1])
    assert run(installed, "--version", cwd=tmp_path, env=environment).startswith("holdfast 0.")
    train = (installed, "train", "job.yaml", "--run-dir", "run", "--fault", "kill:1.1@2:backward")
    assert "lost worker 1.1 in step 2" in run(*train, cwd=tmp_path, env=environment)
