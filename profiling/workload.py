"""Workload of a job for the performance model: sizes of the model, and operations and bytes per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterd.plans.model_shape import ModelShape

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

    @classmethod
    def from_sizes(
        cls, name: str, *, parameters: int, layers: int, hidden: int, seq_len: int, global_batch: int
    ) -> Workload:
        """Workload from the figures of a model card; `hidden` and `seq_len` are 0 for a convolutional network.

        A transformer block does 2 operations per parameter and token, plus attention; its forward pass has two
        all-reduces of activations of 2 bytes (Megatron-LM, section 3). A convolution uses each parameter some hundred
        times per sample; the exact number is left to the fit, whose prior of operations per second is therefore wide.
        """
        tokens, width, depth = max(seq_len, 1), max(hidden, 0), max(layers, 1)
        activations = 2.0 * tokens * width
        return cls(
            name=name,
            parameters=parameters,
            global_batch=global_batch,
            layers=depth,
            flops_per_sample=2.0 * parameters * (tokens if width and seq_len else max(tokens, _PLACES))
            + 4.0 * depth * tokens * tokens * width,
            boundary_bytes=activations,
            tp_bytes=2.0 * depth * activations,
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
        )
