"""Devices of a person's own code."""

import pytest

from holdfast.devices.device import HOST, Host
from holdfast.errors import ConfigError
from holdfast.runtime.engine.device_of import device_of

CODE = """
from holdfast.devices.device import Host

class Own(Host):
    settled = False

    def settle(self):
        self.settled = True

def number():
    return 3

def failing():
    raise OSError("no driver")
"""


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return path


def test_a_device_of_their_own_is_settled_where_bits_count(code):
    for exact in (False, True):
        device = device_of(f"{code}:Own", exact=exact)
        assert isinstance(device, Host)
        assert device.settled is exact


def test_others_are_built_in():
    assert device_of("cpu", exact=True) is HOST


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", r"returns int; expected a holdfast\.devices\.device\.Device \(docs/gpu\.md\)$"),
        ("failing", r"failed: OSError: no driver \(own\.py, line 14\)$"),
        ("missing", r"own\.py has no function 'missing'$"),
    ],
)
def test_what_is_no_device_is_refused(code, name, said):
    with pytest.raises(ConfigError, match=f"^train.device: .*{said}"):
        device_of(f"{code}:{name}", exact=True)
