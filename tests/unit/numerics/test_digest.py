import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors

from holdfast.errors import ConfigError, CorruptBlob, MissingBlob
from holdfast.optim.digest import (
    LayerState,
    decode_layer,
    digest_run,
    digest_states,
    encode_layer,
    layer_file,
    layer_sha256,
    load_layer,
    save_layer,
    tensors_sha256,
)


def state(layer: int, step: int = 3) -> LayerState:
    generator = torch.Generator().manual_seed(layer)
    return LayerState(
        layer=layer,
        step=step,
        parameters={"weight": torch.randn(3, 2, generator=generator), "bias": torch.randn(3, generator=generator)},
        buffers={"mean": torch.randn(3, generator=generator), "count": torch.tensor(layer)},
        optimizer={"weight": {"step": torch.tensor(3.0), "average": torch.ones(3, 2), "calls": 2, "rate": 0.5}},
        tied=("weight",) if layer else (),
    )


def test_a_layer_goes_through_a_file(tmp_path: Path) -> None:
    path = layer_file(tmp_path, 3)
    assert path.name == "layer-0003.safetensors"
    save_layer(path, state(3))
    found = load_layer(path)
    assert [p.name for p in tmp_path.iterdir()] == ["layer-0003.safetensors"]
    assert layer_sha256(found) == layer_sha256(state(3))
    assert list(found.parameters) == ["weight", "bias"]
    assert found.optimizer["weight"]["calls"] == 2
    assert (found.step, found.layer, found.tied) == (3, 3, ("weight",))
    assert path.read_bytes() == encode_layer(state(3))


def with_extra(text: str = "told {0}") -> LayerState:
    tensors = (torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor(True), torch.empty(0))
    return replace(state(1), extra=text, extra_tensors=tensors)


def test_a_layer_file_is_what_safetensors_makes_of_it_though_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_layer(with_extra())
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    assert data == encode_tensors(decode_tensors(data), metadata=metadata)
    monkeypatch.setattr("holdfast.optim.digest._PIECE_BYTES", 5)
    assert encode_layer(with_extra()) == data


def test_whatever_else_belongs_to_the_state_goes_along_however_large_it_is(tmp_path: Path) -> None:
    large = with_extra("\u00e4" * (51 << 20))  # a safetensors header ends at 100 MB
    for found in (decode_layer(encode_layer(large)), large.clone()):
        assert found.extra == large.extra
        assert [(each.dtype, each.shape, each.tolist()) for each in found.extra_tensors] == [
            (each.dtype, each.shape, each.tolist()) for each in large.extra_tensors
        ]
    save_layer(layer_file(tmp_path, 1), with_extra())
    assert layer_sha256(load_layer(layer_file(tmp_path, 1))) == layer_sha256(with_extra())


def test_what_else_belongs_to_the_state_is_hashed_as_stated() -> None:
    digest = hashlib.sha256(b"1:3")
    plain = layer_sha256(state(1))
    for part in (state(1).parameters["weight"], state(1).parameters["bias"]):
        digest.update(part.numpy().tobytes())
    for name, value in state(1).buffers.items():
        digest.update(name.encode() + b"\0" + value.numpy().tobytes())
    for key, entry in sorted(state(1).optimizer["weight"].items()):
        digest.update(f"weight.{key}\0".encode())
        digest.update(entry.numpy().tobytes() if isinstance(entry, torch.Tensor) else repr(entry).encode())
    assert digest.hexdigest() == plain, "without any, as ever"
    digest.update(b"extra\0told {0}")
    digest.update(b"extra.0\0torch.bfloat16 (1, 2)\0" + bytes.fromhex("c03f00c0"))
    digest.update(b"extra.1\0torch.bool ()\0\x01extra.2\0torch.float32 (0,)\0")
    assert layer_sha256(with_extra()) == digest.hexdigest()


def test_the_extra_of_an_older_file_is_read() -> None:
    head = {"layer": 0, "step": 1, "parameters": [], "buffers": [], "optimizer": {}, "numbers": {}, "tied": []}
    metadata = {"holdfast-layer-1": json.dumps({**head, "extra": "told"})}
    found = decode_layer(encode_tensors({"unused": torch.ones(1)}, metadata=metadata))
    assert (found.extra, found.extra_tensors) == ("told", ())


def test_a_layer_file_survives_a_power_cut(tmp_path: Path, power_cuts: Any) -> None:
    path = layer_file(tmp_path, 0)
    for step in (3, 4):
        save_layer(path, state(0, step))
        assert power_cuts.spare(path)


def test_weights_are_hashed_as_stated() -> None:
    states = [state(0), state(1)]
    expected = hashlib.sha256()
    for value in (states[0].parameters["weight"], states[0].parameters["bias"], states[1].parameters["bias"]):
        expected.update(value.numpy().astype("<f4").tobytes())
    assert digest_states(states).weights_sha256 == expected.hexdigest()


def test_state_is_hashed_as_stated() -> None:
    one = state(0)
    expected = hashlib.sha256()
    for value in one.parameters.values():
        expected.update(value.numpy().astype("<f4").tobytes())
    expected.update(b"mean\0" + one.buffers["mean"].numpy().tobytes() + b"count\0" + np.int64(0).tobytes())
    expected.update(b"weight.average\0" + np.ones((3, 2), dtype="<f4").tobytes() + b"weight.calls\x002")
    expected.update(b"weight.rate\x000.5" + b"weight.step\0" + np.float32(3.0).tobytes())
    assert digest_states([one]).state_sha256 == expected.hexdigest()


def test_half_precision_is_hashed_as_float32() -> None:
    values = torch.randn(4).bfloat16()
    found = digest_states([LayerState(layer=0, step=0, parameters={"w": values})])
    assert found.weights_sha256 == hashlib.sha256(values.float().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("part", ["buffers", "optimizer"])
def test_state_sees_what_weights_do_not(part: str) -> None:
    one, other = state(0), state(0)
    target = other.buffers["mean"] if part == "buffers" else other.optimizer["weight"]["average"]
    target[0] += 1
    assert digest_states([one]).weights_sha256 == digest_states([other]).weights_sha256
    assert digest_states([one]).state_sha256 != digest_states([other]).state_sha256
    assert layer_sha256(one) != layer_sha256(other)


def test_a_folder_is_digested_in_order(tmp_path: Path) -> None:
    for layer in (2, 0, 1):
        save_layer(layer_file(tmp_path, layer), state(layer))
    assert digest_run(tmp_path) == digest_states([state(0), state(1), state(2)])
    layer_file(tmp_path, 1).unlink()
    with pytest.raises(ConfigError, match="expected the state of layer 1"):
        digest_run(tmp_path)


def test_layers_of_different_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer 1 is at step 4"):
        digest_states([state(0), state(1, step=4)])
    with pytest.raises(ConfigError, match="no layer files"):
        digest_run(tmp_path)
    with pytest.raises(ConfigError, match="at least one"):
        digest_states([])


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = layer_file(tmp_path, 0)
    with pytest.raises(MissingBlob):
        load_layer(path)
    data = encode_layer(state(0))
    for broken in (b"", data[:40], data[:-5], b"x" * 100, _other_format()):
        path.write_bytes(broken)
        with pytest.raises(CorruptBlob):
            load_layer(path)
        with pytest.raises(CorruptBlob):
            decode_layer(broken)


def test_a_file_of_other_tensors_is_told_apart() -> None:
    with pytest.raises(CorruptBlob) as caught:
        decode_layer(_other_format())
    assert caught.value.actual == "metadata ['format']"


def _other_format() -> bytes:
    head = json.dumps({"__metadata__": {"format": "other"}}).encode()
    return len(head).to_bytes(8, "little") + head


def test_digests_of_named_tensors_tell_every_bit_name_type_and_shape() -> None:
    tensors = {"output": torch.tensor([1.0, 0.0]), "weight": torch.arange(4.0).view(2, 2), "bias": None}
    same = {name: tensors[name] for name in ("bias", "weight", "output")}
    assert tensors_sha256(same) == tensors_sha256(tensors)
    assert tensors_sha256({**tensors, "weight": torch.arange(4.0).view(2, 2).t().contiguous().t()}) == tensors_sha256(
        tensors
    ), "whatever the strides are"
    others: list[dict[str, Any]] = [
        {**tensors, "output": torch.tensor([1.0, -0.0])},
        {**tensors, "output": torch.tensor([1.0, 0.0], dtype=torch.float64)},
        {**tensors, "weight": torch.arange(4.0)},
        {**tensors, "bias": torch.empty(0)},
        {"output": tensors["output"], "weight": tensors["weight"]},
        {**tensors, "outpus": None},
        {},
    ]
    digests = [tensors_sha256(tensors), *(tensors_sha256(each) for each in others)]
    assert len(set(digests)) == len(digests)
