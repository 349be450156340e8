"""The whole state of one layer: as a value, as bytes, as a file, and digests over it.

A layer file is a safetensors file. Its tensors are ``parameter.<name>``, ``buffer.<name>`` and
``optimizer.<parameter>.<entry>``; its metadata has one key, ``holdfast-layer-1``, with the order of names, the
optimizer's plain numbers and, where losses are scaled, the scale, as JSON (one key, because the order of several in the
file is not fixed). What belongs to the job's state and to no layer is ``extra``, a text, and ``extra.<n>``, the tensors
that it refers to by number; all of it tensors, since a safetensors header ends at 100 MB. What the metadata tell
``about`` the state is for tools, and no part of it.

Digests (SHA-256), both over the layers by index:

- ``weights``: every parameter in registration order, as little-endian float32 (other floats converted); a weight tied
  between layers once, at its first use; frozen ones included; buffers not.
- ``state``: per layer the same bytes; then every persistent buffer in registration order; then, for every parameter in
  registration order that the weights count here, its optimizer entries by ascending name. Each buffer and entry is its
  name in UTF-8, a zero byte, and its bytes: a tensor's elements in its own type, little-endian, or a number's ``repr``.
  Where the loss is scaled, next ``loss_scale``, a zero byte, and value and streak as ``65536.0:7``. Where the layer has
  something extra, last ``extra``, a zero byte and the text in UTF-8; and then each tensor of that by its number, as
  ``extra.<n>``, a zero byte, its type and shape as ``torch.float32 (2, 3)``, a zero byte, and its bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as decode_tensors
from torch import Tensor

from holdfast.errors import ConfigError, CorruptBlob, MissingBlob
from holdfast.optim.loss_scale import LossScale
from holdfast.parsing import parsing

__all__ = [
    "STORED_TYPES",
    "LayerState",
    "RunDigest",
    "cloned_entries",
    "decode_layer",
    "digest_run",
    "digest_states",
    "encode_layer",
    "layer_file",
    "layer_sha256",
    "load_layer",
    "save_layer",
    "tensor_sha256",
    "tensors_sha256",
]

Number: TypeAlias = int | float | bool

_FORMAT = "holdfast-layer-1"
_PIECE_BYTES = 8 << 20
STORED_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The types that a layer file can hold, and what safetensors calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """All that one layer is at one step.

    Attributes:
        layer: index of the layer.
        step: updates made so far.
        parameters: by name, in registration order, frozen ones included.
        buffers: persistent buffers by name, in registration order.
        optimizer: per parameter name, the optimizer's entries; tensors or plain numbers. Empty before the first update.
        tied: names of parameters whose first use is in an earlier layer.
        loss_scale: what losses are scaled by in the next step; None where they are not.
        extra: what belongs to the job's state and to no layer; only whoever gives it reads it.
        extra_tensors: the tensors that ``extra`` refers to, by their numbers.
        about: what tools want to know of it, in the form of JSON; no part of the state, and not hashed.
    """

    layer: int
    step: int
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Tensor | Number]] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    loss_scale: LossScale | None = None
    extra: str = ""
    extra_tensors: Sequence[Tensor] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of its parameters and of their optimizer state."""
        return self.parameter_bytes + self.optimizer_bytes

    @property
    def parameter_bytes(self) -> int:
        """The size of its parameters."""
        return sum(value.nbytes for value in self.parameters.values())

    @property
    def optimizer_bytes(self) -> int:
        """The size of its optimizer state; plain numbers count nothing."""
        entries = [value for entry in self.optimizer.values() for value in entry.values()]
        return sum(value.nbytes for value in entries if isinstance(value, Tensor))

    def clone(self) -> LayerState:
        """Return a copy that shares no memory with this one."""
        return replace(
            self,
            parameters={name: value.clone() for name, value in self.parameters.items()},
            buffers={name: value.clone() for name, value in self.buffers.items()},
            optimizer={name: cloned_entries(entries) for name, entries in self.optimizer.items()},
            extra_tensors=tuple(value.clone() for value in self.extra_tensors),
        )


def cloned_entries(entries: Mapping[str, Tensor | Number]) -> dict[str, Tensor | Number]:
    """Copy what an optimizer keeps of one parameter."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}


class RunDigest(NamedTuple):
    """Digests of a whole model, as lower-case hexadecimal.

    Attributes:
        weights_sha256: over the parameters.
        state_sha256: over the parameters, the buffers and the optimizer's state.
    """

    weights_sha256: str
    state_sha256: str


def layer_file(directory: Path, layer: int) -> Path:
    """Return where a layer's file lies: ``layer-0003.safetensors``."""
    return directory / f"layer-{layer:04d}.safetensors"


def encode_layer(state: LayerState) -> bytes:
    """Return a layer's state as the bytes of a layer file; equal states give equal bytes."""
    tensors = {f"parameter.{name}": value for name, value in state.parameters.items()}
    tensors |= {f"buffer.{name}": value for name, value in state.buffers.items()}
    numbers: dict[str, dict[str, Number]] = {}
    for name, entries in state.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    head = {
        "layer": state.layer,
        "step": state.step,
        "parameters": list(state.parameters),
        "buffers": list(state.buffers),
        "optimizer": {name: sorted(entries) for name, entries in state.optimizer.items()},
        "numbers": numbers,
        "tied": list(state.tied),
    }
    if state.loss_scale is not None:
        head["loss_scale"] = asdict(state.loss_scale)
    if state.extra:
        tensors["extra"] = torch.frombuffer(bytearray(state.extra.encode()), dtype=torch.uint8)
        tensors |= {f"extra.{number}": value for number, value in enumerate(state.extra_tensors)}
        head["extras"] = len(state.extra_tensors)
    if state.about:
        head["about"] = dict(state.about)
    return _encode(tensors, json.dumps(head, sort_keys=True))


def _encode(tensors: Mapping[str, Tensor], head: str) -> bytes:
    """Return a safetensors file; the interpreter's lock is never held for more than a piece of it.

    safetensors copies all of it at once, which stops every other thread of the process for as long.
    """
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))  # so that each is aligned
    table: dict[str, Any] = {"__metadata__": {_FORMAT: head}}
    at = 0
    for name, value in ordered:
        offsets = [at, at := at + value.nbytes]
        table[name] = {"dtype": STORED_TYPES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file = io.BytesIO()
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for _, value in ordered:
        data = _bytes(value)
        for start in range(0, len(data), _PIECE_BYTES):
            file.write(data[start : start + _PIECE_BYTES])
    return file.getvalue()


def decode_layer(data: bytes, *, name: str = "layer state") -> LayerState:
    """Return the state that `encode_layer` wrote.

    Args:
        data: the bytes.
        name: what to call them in an error.

    Raises:
        CorruptBlob: the bytes are not a layer file.
    """
    with parsing(lambda text: CorruptBlob(name, _FORMAT, text), SafetensorError):
        size = int.from_bytes(data[:8], "little")
        head = _head(json.loads(data[8 : 8 + size]).get("__metadata__"), name)
        return _assemble(head, decode_tensors(data))


def save_layer(path: Path, state: LayerState) -> None:
    """Write a layer file: to a temporary file beside it, synchronised, then renamed.

    Args:
        path: the file; its folder must exist.
        state: what to write.

    After failure: the old file, if any, is whole; a kill may leave a ``.tmp`` file. Safe to repeat.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(encode_layer(state))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_layer(path: Path) -> LayerState:
    """Read a layer file.

    Raises:
        MissingBlob: there is no such file.
        CorruptBlob: it is not a layer file.
    """
    try:
        with (
            parsing(lambda text: CorruptBlob(str(path), _FORMAT, text), SafetensorError),
            safe_open(str(path), framework="pt") as file,
        ):
            head = _head(file.metadata(), str(path))
            return _assemble(head, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  not a dict
    except FileNotFoundError as error:
        raise MissingBlob(f"{path} does not exist") from error


def _head(metadata: Mapping[str, str] | None, name: str) -> dict[str, Any]:
    if metadata is None or _FORMAT not in metadata:
        raise CorruptBlob(name, _FORMAT, f"metadata {sorted(metadata or {})}")
    head: dict[str, Any] = json.loads(metadata[_FORMAT])
    return head


def _assemble(head: dict[str, Any], tensors: Mapping[str, Tensor]) -> LayerState:
    def entry(name: str, key: str) -> Tensor | Number:
        number: Number | None = head["numbers"].get(name, {}).get(key)
        return tensors[f"optimizer.{name}.{key}"] if number is None else number

    scale: dict[str, Any] | None = head.get("loss_scale")
    names = [name for name in head["parameters"] if name in head["optimizer"]]
    return LayerState(
        layer=head["layer"],
        step=head["step"],
        parameters={name: tensors[f"parameter.{name}"] for name in head["parameters"]},
        buffers={name: tensors[f"buffer.{name}"] for name in head["buffers"]},
        optimizer={name: {key: entry(name, key) for key in head["optimizer"][name]} for name in names},
        tied=tuple(head["tied"]),
        loss_scale=None if scale is None else LossScale(value=scale["value"], streak=scale["streak"]),
        extra=_text(tensors["extra"]) if "extras" in head else head.get("extra", ""),
        extra_tensors=tuple(tensors[f"extra.{number}"] for number in range(head.get("extras", 0))),
        about=head.get("about", {}),
    )


def _text(data: Tensor) -> str:
    return bytes(_bytes(data)).decode()


def layer_sha256(state: LayerState) -> str:
    """Return the digest of one layer's step and whole state, tied weights included: equal on all owners."""
    digest = hashlib.sha256(f"{state.layer}:{state.step}".encode())
    _hash_weights(digest.update, state.parameters.values())
    _hash_rest(digest.update, state, state.parameters)
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bits, shape and type aside."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def tensors_sha256(tensors: Mapping[str, Tensor | None]) -> str:
    """Return the SHA-256 of named tensors, in the order of their names: names, types, shapes and bits.

    Two workers that compute the same of the same have the same digest; None is no tensor, such as no gradient.
    """
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        form = "none" if value is None else f"{value.dtype} {tuple(value.shape)}"
        digest.update(f"{name}\0{form}\0".encode())
        if value is not None:
            digest.update(_bytes(value))
    return digest.hexdigest()


def digest_states(states: Iterable[LayerState]) -> RunDigest:
    """Return the digests of a model.

    Args:
        states: every layer's state in ascending order; one is held at a time.

    Raises:
        ConfigError: a layer is missing or out of order, or the layers are not at one step.
    """
    weights, whole = hashlib.sha256(), hashlib.sha256()
    step: int | None = None
    for index, state in enumerate(states):
        if state.layer != index:
            raise ConfigError(f"expected the state of layer {index}, found that of layer {state.layer}")
        if step is not None and state.step != step:
            raise ConfigError(f"layer {index} is at step {state.step}, the layers before it are at step {step}")
        step = state.step
        counted = {name: value for name, value in state.parameters.items() if name not in state.tied}
        for update in (weights.update, whole.update):
            _hash_weights(update, counted.values())
        _hash_rest(whole.update, state, counted)
    if step is None:
        raise ConfigError("expected the state of at least one layer")
    return RunDigest(weights_sha256=weights.hexdigest(), state_sha256=whole.hexdigest())


def digest_run(directory: Path) -> RunDigest:
    """Return the digests of the model whose layer files lie in a folder.

    Args:
        directory: holds ``layer-0000.safetensors`` and so on, without a gap.

    Raises:
        ConfigError: a file is missing, or the files are not of one step.
        CorruptBlob: a file is not a layer file.
    """
    paths = sorted(directory.glob("layer-*.safetensors"))
    if not paths:
        raise ConfigError(f"{directory} holds no layer files (layer-0000.safetensors and so on)")
    return digest_states(_read(paths))


def _read(paths: Iterable[Path]) -> Iterator[LayerState]:
    for path in paths:
        yield load_layer(path)


_Update: TypeAlias = Callable[[memoryview | bytes], None]


def _hash_weights(update: _Update, values: Iterable[Tensor]) -> None:
    for value in values:
        update(_bytes(value.detach().to(torch.float32)))


def _hash_rest(update: _Update, state: LayerState, counted: Mapping[str, Tensor]) -> None:
    for name, buffer in state.buffers.items():
        update(name.encode() + b"\0")
        update(_bytes(buffer))
    for name in counted:
        for key, value in sorted(state.optimizer.get(name, {}).items()):
            update(f"{name}.{key}".encode() + b"\0")
            update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    if state.loss_scale is not None:
        update(f"loss_scale\0{state.loss_scale.value!r}:{state.loss_scale.streak}".encode())
    if state.extra:
        update(f"extra\0{state.extra}".encode())
    for number, value in enumerate(state.extra_tensors):
        update(f"extra.{number}\0{value.dtype} {tuple(value.shape)}\0".encode())
        update(_bytes(value))


def _bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as bytes. All supported machines are little-endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)
