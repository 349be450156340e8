"""Profiles of GPT-3 Medium, 3.35B and 6.7B on an A100-80GB, from operations and bytes; see profiles/README.md."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.profile import LayerProfile, Link, Profile

__all__ = ["SHAPES", "Shape", "estimate"]

PEAK_FLOPS = 312e12
"""Dense bf16 of an A100."""
EFFICIENCY = 0.5
"""Of the peak, in matrix products."""
MEMORY_BYTES_PER_S = 2.039e12
"""HBM2e of the 80 GB model."""
MEMORY_EFFICIENCY = 0.8
LINK = Link(latency_s=30e-6, bytes_per_s=10e9)
"""80 Gbit/s between nodes."""
HALF = 2
"""Bytes of a bf16 number: weights, activations, gradients of activations."""
STATE_BYTES = 12
"""Per parameter: master copy and two moments of Adam, in fp32."""
UPDATE_BYTES = 2 * STATE_BYTES + HALF + 4
"""Per parameter, read or written by an update: the state both, the bf16 weight, the fp32 sum of gradients."""
VOCABULARY = 50_257
CONTEXT = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT-3 model and the micro-batch that it is trained with."""

    name: str
    blocks: int
    width: int
    microbatch: int

    @property
    def boundary(self) -> int:
        """Numbers in the tensor between two blocks."""
        return self.microbatch * CONTEXT * self.width


SHAPES = (
    Shape(name="gpt3-medium-350m", blocks=24, width=1024, microbatch=8),
    Shape(name="gpt3-3.35b", blocks=28, width=3072, microbatch=1),
    Shape(name="gpt3-6.7b", blocks=32, width=4096, microbatch=1),
)


def computing_s(flops: float) -> float:
    """Seconds of matrix products."""
    return flops / (PEAK_FLOPS * EFFICIENCY)


def moving_s(size_bytes: float) -> float:
    """Seconds of reading and writing memory."""
    return size_bytes / (MEMORY_BYTES_PER_S * MEMORY_EFFICIENCY)


def layer(name: str, shape: Shape, parameters: int, seconds: tuple[float, ...], held: tuple[int, int]) -> LayerProfile:
    """A layer's profile; ``seconds`` of F, I and W, ``held`` bytes after F and after I."""
    forward_s, input_s, weight_s = seconds
    return LayerProfile(
        name=name,
        forward_s=forward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        held_after_forward_bytes=held[0],
        held_after_input_bytes=held[1],
        boundary_bytes=HALF * shape.boundary,
        parameter_bytes=HALF * parameters,
        optimizer_bytes=STATE_BYTES * parameters,
        optimizer_s=moving_s(UPDATE_BYTES * parameters),
    )


def embedding(shape: Shape) -> LayerProfile:
    """Two look-ups and their sum; I has nothing to do, W adds rows."""
    parameters = (VOCABULARY + CONTEXT) * shape.width
    moved = moving_s(4 * HALF * shape.boundary)
    return layer("embedding", shape, parameters, (moved, 0.0, moved), (shape.boundary, shape.boundary))


def block(index: int, shape: Shape) -> LayerProfile:
    """A transformer block with a fused attention that keeps no scores."""
    tokens, width = shape.microbatch * CONTEXT, shape.width
    products = 24 * tokens * width**2  # with the weights: 12 width^2 of them, a multiplication and an addition each
    scores = 4 * tokens * CONTEXT * width  # of all positions, as kernels without a causal short cut compute them
    elementwise = 20 * HALF * shape.boundary  # two norms, two dropouts, two sums, one GELU four times as wide
    seconds = (
        computing_s(products + scores) + moving_s(elementwise),
        computing_s(products + 2.5 * scores) + moving_s(1.5 * elementwise),
        computing_s(products),
    )
    held = (34 * shape.boundary, 32 * shape.boundary)
    return layer(f"block {index}", shape, 12 * width**2 + 13 * width, seconds, held)


def head(shape: Shape) -> LayerProfile:
    """Norm, product with the tied embedding, cross entropy."""
    tokens = shape.microbatch * CONTEXT
    product = computing_s(2 * tokens * shape.width * VOCABULARY)
    logits = tokens * VOCABULARY
    seconds = (product + moving_s(3 * HALF * logits), product + moving_s(2 * HALF * logits), product)
    held = HALF * (logits + 2 * shape.boundary)
    return layer("head", shape, VOCABULARY * shape.width, seconds, (held, held))


def estimate(shape: Shape) -> Profile:
    """The whole model's profile."""
    blocks = (block(index, shape) for index in range(shape.blocks))
    return Profile(
        layers=(embedding(shape), *blocks, head(shape)),
        link=LINK,
        machine={"device": "NVIDIA A100-SXM4-80GB", "microbatch": shape.microbatch, "context": CONTEXT},
        estimated=True,
    )
