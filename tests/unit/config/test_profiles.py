"""Profiles as files: what is written comes back, what is wrong is named."""

import json

import msgspec
import pytest

from holdfast.config.profiles import load_profile, save_profile
from holdfast.core.profile import GpuProfile, LayerProfile, Link, Profile, uniform_profile
from holdfast.errors import ConfigError

PROFILE = Profile(
    layers=(
        LayerProfile(
            name="block",
            forward_s=0.5,
            backward_input_s=0.25,
            backward_weight_s=0.125,
            held_after_forward_bytes=10,
            held_after_input_bytes=4,
            boundary_bytes=100,
            parameter_bytes=7,
            optimizer_bytes=14,
            optimizer_s=0.5,
            backward_s=0.3,
            split_s=0.075,
            spread={"forward_s": 0.01},
            by_gpus={"2": GpuProfile(forward_s=0.3, backward_input_s=0.2, backward_weight_s=0.1)},
        ),
    ),
    link=Link(latency_s=1e-4, bytes_per_s=1e9),
    machine={"processor": "some", "threads": 1, "load": 0.5},
    iterations=100,
)


def test_what_is_saved_is_loaded(tmp_path):
    save_profile(PROFILE, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_made_up_profile_can_be_saved_too(tmp_path):
    made = uniform_profile(3, forward_s=0.02)
    save_profile(made, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == made


def test_the_contract_of_the_command_line_is_enough(tmp_path):
    """The keys of the JSON form, without those that we add."""
    layer = {
        "name": "a",
        "forward_s": 1,
        "backward_input_s": 2,
        "backward_weight_s": 3,
        "held_after_forward_bytes": 4,
        "held_after_input_bytes": 3,
        "boundary_bytes": 2,
        "parameter_bytes": 1,
        "optimizer_bytes": 1,
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": [layer], "link": {"latency_s": 0, "bytes_per_s": 1}, "machine": {}}))
    assert load_profile(path).layers[0].forward_s == 1.0


def test_saving_where_nothing_can_be_written_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"none/profile\.json: cannot be written: No such file"):
        save_profile(PROFILE, tmp_path / "none" / "profile.json")


def changed(**changes):
    return msgspec.to_builtins(PROFILE) | changes


def in_layer(**changes):
    return changed(layers=[msgspec.to_builtins(PROFILE.layers[0]) | changes])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (changed(layer=[]), r"layer: unknown key; did you mean layers\?"),
        (in_layer(forwards_s=1), r"layers\[0\]\.forwards_s: unknown key; did you mean forward_s\?"),
        (changed(link={"latency_s": 0, "bandwidth": 1}), r"link\.bandwidth: unknown key"),
        (in_layer(by_gpus={"2": {"zzz": 1}}), r"layers\[0\]\.by_gpus\[2\]\.zzz: unknown key; known: forward_s, "),
        (in_layer(forward_s="x"), r"layers\[0\]\.forward_s: expected `float`, got `str`"),
        (in_layer(parameter_bytes=1.5), r"layers\[0\]\.parameter_bytes: expected `int`, got `float`"),
        (changed(link={"latency_s": 0}), r"link: missing required field `bytes_per_s`"),
        (changed(layers=3), r"layers: expected `array`, got `int`"),
        (changed(layers=[]), "a profile needs at least one layer"),
        (changed(iterations=-1), "iterations = -1"),
        (in_layer(forward_s=-1), "layer 'block': forward_s = -1.0 is impossible"),
        (in_layer(split_s=1), "split_s = 1.0 is more than I and W"),
        (changed(link={"latency_s": 0, "bytes_per_s": 0}), "a link needs"),
        ([1], "is no JSON object; expected a profile"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, tree, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=message) as raised:
        load_profile(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_a_missing_file_and_one_that_is_no_json(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: No such file or directory; expected a profile, as `holdfast"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: is not JSON"):
        load_profile(tmp_path / "bad.json")
