"""What a run leaves for others on the same machine: nothing."""

import stat

import pytest

pytestmark = pytest.mark.dist


def test_what_a_run_writes_is_for_its_user_alone(runs):
    directory = runs.healthy("gpt").run_dir
    modes = {path.relative_to(directory): stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
    assert len(modes) > 5
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {path: mode for path, mode in modes.items() if mode not in (0o600, 0o700)} == {}
