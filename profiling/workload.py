"""Workload of a job for the performance model: sizes of the model, and operations and bytes per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from clusterd.plans.model_shape import ModelShape
from clusterd.plans.stages import split_layers

_PLACES = 150.0
"""Uses of a parameter per sample in a convolutional network: 80 (ResNet-50) to 500 (YOLO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model with one global batch. Operations and bytes of 0 are unknown; the fit covers them."""

    name: str
    parameters: int  # of the whole model
    global_batch: int  # samples per step
    layers: int = 1  # blocks that tensor parallelism shards and between which pipeline stages are split
    flops_per_sample: float = 0.0  # of the forward pass
    boundary_bytes: float = 0.0  # per sample, from one pipeline stage to the next
    tp_bytes: float = 0.0  # per sample, all-reduced in one forward pass of the whole model
    bytes_per_parameter: float = 4.0  # of a gradient on the network
    layer_flops: tuple[float, ...] = ()  # of the forward pass, by layer; none: unknown, and alike
    layer_weights: tuple[int, ...] = ()  # by which these are cut into stages

    def __post_init__(self) -> None:
        if self.parameters < 1 or self.global_batch < 1 or self.layers < 1:
            raise ValueError(f"{self.name}: parameters, global batch and layers must be at least 1")
        work = (self.flops_per_sample, self.boundary_bytes, self.tp_bytes)
        if not all(0 <= amount < math.inf for amount in work) or not 0 < self.bytes_per_parameter < math.inf:
            raise ValueError(f"{self.name}: operations and bytes must be numbers that are not below 0")

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of the whole model."""
        return self.parameters * self.bytes_per_parameter

    def stage_share(self, pp: int) -> float:
        """Part of the operations that is on the pipeline stage with most of them."""
        return _stage_share(self.layer_flops, self.layer_weights, pp) if pp > 1 else 1.0

    @classmethod
    def from_sizes(
        cls, name: str, *, parameters: int, layers: int, hidden: int, seq_len: int, global_batch: int
    ) -> Workload:
        """Workload from the figures of a model card; `hidden` and `seq_len` are 0 for a convolutional network.

        A transformer block does 2 operations per parameter and token, plus attention; its forward pass has two
        all-reduces of activations of 2 bytes (Megatron-LM, section 3). A convolution uses each parameter some hundred
        times per sample; the exact number is left to the fit, whose prior of operations per second is therefore wide.
        Parameters beside the blocks are taken for an embedding that is the head, too, on the last pipeline stage.
        """
        tokens, width, depth = max(seq_len, 1), max(hidden, 0), max(layers, 1)
        activations = 2.0 * tokens * width
        attention = 4.0 * tokens * tokens * width
        head = max(parameters - 12 * depth * width * width, 0) if width else 0
        return cls(
            name=name,
            parameters=parameters,
            global_batch=global_batch,
            layers=depth,
            flops_per_sample=2.0 * parameters * (tokens if width and seq_len else max(tokens, _PLACES))
            + depth * attention,
            boundary_bytes=activations,
            tp_bytes=2.0 * depth * activations,
            layer_flops=(*[2.0 * tokens * (parameters - head) / depth + attention] * depth, 2.0 * tokens * head),
            layer_weights=(*[1] * depth, 0),
        )

    @classmethod
    def from_shape(cls, shape: ModelShape, name: str = "model") -> Workload:
        """Workload from the shape of a model that a rank has inspected."""
        trainable = [p for p in shape.parameters if p.trainable]
        size_bytes = sum(p.size_bytes for p in trainable)
        count = sum(p.size_bytes // max(p.dtype_bytes, 1) for p in trainable)
        inner = [layer.output_bytes for layer in shape.layers[:-1]]
        blocks = sum(layer.block for layer in shape.layers)
        return cls(
            name=name,
            parameters=max(count, 1),
            global_batch=shape.global_batch,
            layers=max(blocks or len(shape.layers), 1),
            flops_per_sample=float(shape.flops),
            boundary_bytes=float(max(inner, default=0)),
            tp_bytes=float(sum(layer.tp_reduced_bytes for layer in shape.layers)),
            bytes_per_parameter=size_bytes / count if count else 4.0,
            layer_flops=tuple(float(layer.flops) for layer in shape.layers),
            layer_weights=tuple(shape.layer_weights()),
        )


@lru_cache(maxsize=1024)  # many rows ask for few distinct ones
def _stage_share(flops: tuple[float, ...], weights: tuple[int, ...], pp: int) -> float:
    if sum(flops) == 0 or sum(weight > 0 for weight in weights) < pp:
        return 1.0 / pp
    return max(sum(flops[i] for i in stage) for stage in split_layers(weights, pp)) / sum(flops)
