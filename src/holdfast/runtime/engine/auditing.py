"""What a stage keeps of one layer's pass over one micro-batch, so that another owner can compute it a second time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.core.tensorspec import TensorSpec
from holdfast.optim.digest import tensors_sha256
from holdfast.protocol.auditing import CLAIMS_BYTES, Digests, pack_claims, unpack_claims
from holdfast.runtime.tensors import num_bytes, torch_dtype

__all__ = ["SampleInputs", "SampleWatch", "sample_bytes"]


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What a sample is computed of, as it travels.

    Attributes:
        input: of the layer; None: samples of the data, which every owner loads itself.
        gradient: of its output; None: of the loss, which every owner of the last layer computes itself.
    """

    input: Tensor | None
    gradient: Tensor | None

    def pack(self, claims: Sequence[Digests]) -> Tensor:
        """Returns it, and what was computed of it, as uint8."""
        parts = [_bytes_of(each) for each in (self.input, self.gradient) if each is not None]
        return torch.cat([*parts, torch.frombuffer(bytearray(pack_claims(claims)), dtype=torch.uint8)])

    @classmethod
    def unpack(
        cls, message: Tensor, specs: tuple[TensorSpec | None, TensorSpec | None], times: int, device: torch.device
    ) -> tuple[SampleInputs, tuple[Digests, ...]]:
        """Returns what ``pack`` was given; ``specs``: of input and gradient, None where there is none."""
        found, at = list[Tensor | None](), 0
        for spec in specs:
            size = 0 if spec is None else num_bytes(spec)
            part = message[at : at + size].clone()  # which is aligned
            found.append(None if spec is None else part.view(torch_dtype(spec)).view(spec.shape).to(device))
            at += size
        return cls(*found), unpack_claims(bytes(message[at:].numpy()), times)


def sample_bytes(specs: tuple[TensorSpec | None, TensorSpec | None]) -> int:
    """Returns how long the message of a sample is."""
    return sum(num_bytes(spec) for spec in specs if spec is not None) + CLAIMS_BYTES


@dataclass(slots=True)
class SampleWatch:
    """One sample: what goes into it and what comes out, hashed as soon as it is there.

    Attributes:
        layer: which.
        microbatch: its global number.
        first: whether the layer takes samples of the data.
        last: whether it hands its output to the loss.
        given: what it was computed of; complete once ``backward`` was told.
        message: that for others, once it was made.
    """

    layer: int
    microbatch: int
    first: bool = False
    last: bool = False
    given: SampleInputs = field(default_factory=lambda: SampleInputs(None, None))
    message: Tensor | None = None
    _into: str = ""
    _gradient: str = ""
    _output: str = ""
    _back: str = ""
    _weights: str = ""

    def forward(self, source: Tensor, output: Tensor, record: Tensor | None, target: Tensor | None) -> None:
        """The forward pass is done, and the loss of the last layer; ``target``: what that is compared with."""
        self.given = SampleInputs(None if self.first else source.detach().clone(), None)
        self._into = tensors_sha256({"input": source, "target": target})
        self._output = tensors_sha256({"output": output, "record": record})

    def backward(self, gradient: Tensor, found: Tensor | None) -> None:
        """The gradient of the input was found; that of the loss is a result, too."""
        self.given = SampleInputs(self.given.input, None if self.last else gradient.clone())
        self._gradient = tensors_sha256({"gradient": None if self.last else gradient})
        self._back = tensors_sha256({"loss": gradient if self.last else None, "input": found})

    def weights(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradients of the weights were found, and are not in any sum yet."""
        self._weights = tensors_sha256({str(place): each for place, each in enumerate(gradients)})

    @property
    def digests(self) -> Digests:
        """What it comes to."""
        return Digests(
            inputs=_joined(self._into, self._gradient),
            output=self._output,
            gradients=_joined(self._back, self._weights),
        )


def _joined(*digests: str) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
