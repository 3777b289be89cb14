"""The coefficients of the performance model: what each means, its unit, and what is believed of it before measuring.

All are positive and fitted as logarithms: a prior of width 0.7 says "within a factor of 2, two times in three".
Figures of a data sheet or of a probe narrow the hardware's; what depends on the model stays wide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number of the model, and the prior of it."""

    name: str
    unit: str
    typical: float
    width: float  # standard deviation of the logarithm
    of: str  # "hardware": shared by all models on it; "model": differs with its code and precision
    meaning: str
    source: str


ALL: tuple[Coefficient, ...] = (
    Coefficient(
        "compute_rate",
        "operation/s",
        60e12,
        2.0,
        "model",
        "forward pass of a large micro-batch on one device",
        "data sheets at 20-50% of peak; wide for networks whose operations are not known",
    ),
    Coefficient(
        "launch_s",
        "s per layer and micro-batch",
        4e-4,
        0.8,
        "model",
        "part of a layer's forward pass that does not shrink with the micro-batch",
        "about 20 kernels of 10 us",
    ),
    Coefficient(
        "backward_ratio", "1", 2.0, 0.12, "model", "backward over forward", "two products for one: inputs and weights"
    ),
    Coefficient(
        "recompute_ratio",
        "1",
        0.93,
        0.1,
        "model",
        "forward work repeated in the backward pass under checkpointing",
        "the blocks, without embedding and loss",
    ),
    Coefficient(
        "unsharded_share",
        "1",
        0.04,
        0.8,
        "model",
        "part of the compute that tensor parallelism does not cut",
        "norms, dropout, residuals: a few percent",
    ),
    Coefficient(
        "parallel_path",
        "1",
        1.0,
        0.3,
        "model",
        "slowness of the code for tensor and pipeline parallelism",
        "another code path, often another framework",
    ),
    Coefficient(
        "crowding",
        "1",
        1e-3,
        0.01,
        "hardware",
        "power with which ranks on one host slow each other's compute",
        "none between GPUs, which share nothing that they compute with; CPU devices share caches and memory",
    ),
    Coefficient(
        "sharded_path", "1", 1.0, 0.04, "model", "slowness of forward and backward under ZeRO", "hooks and buckets"
    ),
    Coefficient(
        "overlap",
        "1",
        0.4,
        1.2,
        "model",
        "gradient traffic hides behind the backward pass: norm of 1 + this (1: in turn; infinite: fully)",
        "Pollux, section 3.2",
    ),
    Coefficient(
        "local_rate",
        "byte/s",
        120e9,
        1.0,
        "hardware",
        "of one rank's collective inside a host",
        "PCIe 12, NVLink 50 to 300 GB/s",
    ),
    Coefficient("network_rate", "byte/s", 10e9, 1.0, "hardware", "through one network card", "10 Gbit/s to 400 Gbit/s"),
    Coefficient(
        "card_growth",
        "1",
        1.0,
        0.25,
        "hardware",
        "power with which network bandwidth grows with the cards in use",
        "1: rails of their own; 0: one shared link",
    ),
    Coefficient(
        "local_latency_s", "s", 2e-5, 1.0, "hardware", "of one hop of a collective inside a host", "NCCL, 10 to 50 us"
    ),
    Coefficient(
        "network_latency_s",
        "s",
        2.5e-3,
        0.8,
        "hardware",
        "of a step's gradient traffic per further host",
        "tens of buckets, 20 to 100 us each",
    ),
    Coefficient(
        "tp_slowness",
        "1",
        1.0,
        0.4,
        "model",
        "tensor-parallel traffic over what bytes and bandwidth say",
        "small messages, 2 or 4 bytes a number",
    ),
    Coefficient(
        "tp_messages",
        "1",
        1.0,
        0.6,
        "model",
        "delays of tensor-parallel sums, relative to those of a hop",
        "what the framework does for each sum: on CPU hosts more than the sum takes",
    ),
    Coefficient(
        "pipe_slowness",
        "1",
        1.5,
        0.6,
        "model",
        "pipeline traffic over what bytes and bandwidth say",
        "no pipelining inside a message; 2 or 4 bytes a number",
    ),
    Coefficient(
        "gather_ratio",
        "1",
        1.0,
        0.4,
        "model",
        "ZeRO's gathering of parameters, relative to scattering gradients",
        "2 or 4 bytes a number, fewer buckets",
    ),
    Coefficient(
        "gather_messages",
        "1",
        2.5,
        0.6,
        "model",
        "delays of ZeRO's gathering of parameters, relative to those of summing gradients",
        "a message per tensor or partition instead of one per bucket",
    ),
    Coefficient(
        "scatter_messages",
        "1",
        1.0,
        0.2,
        "model",
        "delays of scattering one micro-batch's gradients, relative to half of summing them",
        "buckets on GPUs; a message per block with FSDP over gloo",
    ),
    Coefficient(
        "update_rate",
        "parameter/s",
        1.2e10,
        1.0,
        "model",
        "optimizer on the device",
        "Adam moves about 28 bytes a parameter",
    ),
    Coefficient(
        "host_update_rate",
        "parameter/s",
        1.5e9,
        0.8,
        "model",
        "optimizer on one host, all its cores in one rank",
        "DeepSpeed's CPU Adam, 1 to 2 billion a second",
    ),
    Coefficient(
        "thread_update_rate",
        "parameter/s",
        2.5e8,
        0.7,
        "model",
        "optimizer on the host, one thread",
        "a core moves 7 to 10 GB/s, Adam about 28 bytes a parameter",
    ),
    Coefficient(
        "host_sharing",
        "1",
        0.5,
        0.5,
        "model",
        "power with which ranks on one host slow each other's update",
        "0: each has cores of its own; 1: memory-bound",
    ),
    Coefficient(
        "copy_rate", "byte/s", 8e9, 0.8, "model", "between device and host, one rank", "PCIe 3 and 4, 6 to 25 GB/s"
    ),
    Coefficient(
        "offload_whole_rate",
        "parameter/s",
        6e9,
        0.8,
        "model",
        "of what each rank does for all it holds before sharding, when it offloads",
        "norms, casts, flattening of gradients on the way",
    ),
    Coefficient(
        "offload_s",
        "s",
        1e-2,
        1.0,
        "model",
        "of offloading, whatever the size",
        "synchronisation of streams, pinned buffers",
    ),
    Coefficient("step_s", "s", 5e-3, 1.0, "model", "of a step, whatever the plan", "logging, gradient norm, Python"),
    Coefficient(
        "sample_core_s",
        "core*s",
        1e-5,
        2.0,
        "model",
        "to load and prepare one sample on one CPU core",
        "tokens: microseconds; images: milliseconds",
    ),
)

NAMES: tuple[str, ...] = tuple(c.name for c in ALL)
INDEX: Mapping[str, int] = {name: i for i, name in enumerate(NAMES)}
HARDWARE: tuple[int, ...] = tuple(i for i, c in enumerate(ALL) if c.of == "hardware")


@dataclass(frozen=True, slots=True)
class Prior:
    """Belief before any measurement: mean and width of each logarithm, in the order of `NAMES`."""

    mean: Array
    width: Array

    @classmethod
    def typical(cls, *, known: Mapping[str, float] | None = None, known_width: float = 0.25) -> Prior:
        """Of any accelerator; `known` are figures of a data sheet or of probes, in the coefficients' units.

        Raises:
            ValueError: a name that is no coefficient, or a figure that is not positive.
        """
        mean = np.array([math.log(c.typical) for c in ALL])
        width = np.array([c.width for c in ALL])
        for name, value in (known or {}).items():
            if name not in INDEX:
                raise ValueError(f"there is no coefficient {name!r}; there are {', '.join(NAMES)}")
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0 {ALL[INDEX[name]].unit}")
            mean[INDEX[name]] = math.log(value)
            width[INDEX[name]] = min(width[INDEX[name]], known_width)
        return cls(mean, width)

    def holding(self, name: str, typical: float, width: float) -> Prior:
        """The same beliefs but for one coefficient."""
        mean, widths = self.mean.copy(), self.width.copy()
        mean[INDEX[name]], widths[INDEX[name]] = math.log(typical), width
        return Prior(mean, widths)

    def scaled(self, factor: float) -> Prior:
        """The same beliefs, held less (above 1) or more firmly."""
        return Prior(self.mean, self.width * factor)
