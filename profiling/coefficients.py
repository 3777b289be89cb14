"""Coefficients of the performance model: meaning, unit and prior of each.

All are positive and fitted as logarithms: a prior of width 0.7 means "within a factor of 2 with probability 2/3". Data
sheets and probes narrow the priors of the hardware's coefficients; those that depend on the model stay wide.
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
    """One coefficient of the performance model, with its prior."""

    name: str
    unit: str
    typical: float
    width: float  # standard deviation of the logarithm
    of: str  # "hardware": shared by all models on it; "model": differs with its code and precision
    meaning: str
    source: str
    varies: float = 0.05  # of "hardware": standard deviation of the logarithm between models on it


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
        "hardware",
        "time in which the host launches a layer's forward pass, which does not shrink with the micro-batch",
        "about 20 kernels of 10 us",
        varies=0.3,  # layers of models differ in their number of kernels
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
        "part of the compute that tensor parallelism does not shard",
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
        "none between GPUs; CPU devices share caches and memory",
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
        "overlap of gradient traffic with the backward pass: norm of 1 + this (0: none; infinite: full)",
        "Pollux, section 3.2",
    ),
    Coefficient(
        "local_rate",
        "byte/s",
        120e9,
        1.0,
        "hardware",
        "bandwidth of one rank's collective inside a host",
        "PCIe 12, NVLink 50 to 300 GB/s",
        varies=0.3,  # message sizes of models differ, and with them the part of the rate that is reached
    ),
    Coefficient(
        "further_ranks",
        "1",
        1.05,
        0.2,
        "hardware",
        "bandwidth inside a host with twice as many ranks in the collective, relative to that with two",
        "rings of many devices use links that a pair has not; those behind one PCIe switch share it",
    ),
    Coefficient(
        "network_rate",
        "byte/s",
        10e9,
        1.0,
        "hardware",
        "bandwidth of one network card",
        "10 Gbit/s to 400 Gbit/s",
        varies=0.3,  # as above
    ),
    Coefficient(
        "card_growth",
        "1",
        1.0,
        0.5,
        "hardware",
        "power with which network bandwidth grows with the cards in use",
        "1: a link per card; 0: one shared link",
    ),
    Coefficient(
        "part_used_card",
        "1",
        0.05,
        1.8,
        "model",
        "further time of network traffic where a host uses a network card with part of its devices only",
        "none for most models, several times the traffic for some: mostly small, seldom large",
    ),
    Coefficient(
        "further_hosts",
        "1",
        1.0,
        0.2,
        "hardware",
        "network bandwidth on more than two hosts, relative to that on two",
        "collectives choose between rings and trees by the number of hosts",
    ),
    Coefficient(
        "host_slowness",
        "1",
        1.0,
        0.06,
        "hardware",
        "factor on the step time per doubling of hosts beyond two",
        "the slowest host sets the pace; switches that are shared by more hosts",
    ),
    Coefficient(
        "local_latency_s",
        "s",
        2e-5,
        1.0,
        "hardware",
        "latency of one hop of a collective inside a host",
        "NCCL, 10 to 50 us",
    ),
    Coefficient(
        "network_latency_s",
        "s",
        2.5e-3,
        0.8,
        "hardware",
        "latency that each doubling of hosts adds to a step's gradient traffic",
        "tens of buckets, 20 to 100 us each; trees of collectives grow by a level",
    ),
    Coefficient(
        "tp_slowness",
        "1",
        1.0,
        0.4,
        "model",
        "time of tensor-parallel traffic, relative to bytes over bandwidth",
        "small messages, 2 or 4 bytes a number",
    ),
    Coefficient(
        "tp_messages",
        "1",
        1.0,
        0.6,
        "model",
        "latency of a tensor-parallel all-reduce, relative to that of a hop",
        "overhead of the framework per all-reduce: on CPU hosts more than the all-reduce itself",
    ),
    Coefficient(
        "pipe_slowness",
        "1",
        1.5,
        0.6,
        "model",
        "time of pipeline traffic, relative to bytes over bandwidth",
        "no pipelining inside a message; 2 or 4 bytes a number",
    ),
    Coefficient(
        "gather_ratio",
        "1",
        1.0,
        0.4,
        "model",
        "time of ZeRO's all-gather of parameters, relative to the reduce-scatter of gradients",
        "2 or 4 bytes a number, fewer buckets",
    ),
    Coefficient(
        "gather_messages",
        "1",
        2.5,
        0.6,
        "model",
        "latency of ZeRO's all-gather of parameters, relative to that of the gradients' all-reduce",
        "a message per tensor or partition instead of one per bucket",
    ),
    Coefficient(
        "scatter_messages",
        "1",
        1.0,
        0.2,
        "model",
        "latency of a micro-batch's reduce-scatter of gradients, relative to half an all-reduce",
        "buckets on GPUs; a message per block with FSDP over gloo",
    ),
    Coefficient(
        "update_rate",
        "parameter/s",
        1.2e10,
        1.0,
        "model",
        "optimizer step on the device",
        "Adam moves about 28 bytes a parameter",
    ),
    Coefficient(
        "host_update_rate",
        "parameter/s",
        1.5e9,
        0.8,
        "model",
        "optimizer step on one host, all its cores in one rank",
        "DeepSpeed's CPU Adam, 1 to 2 billion a second",
    ),
    Coefficient(
        "thread_update_rate",
        "parameter/s",
        2.5e8,
        0.7,
        "model",
        "optimizer step on the host, one thread",
        "a core moves 7 to 10 GB/s, Adam about 28 bytes a parameter",
    ),
    Coefficient(
        "host_sharing",
        "1",
        0.5,
        0.5,
        "model",
        "power with which ranks on one host slow each other's update",
        "0: bound by each rank's own cores; 1: bound by the host's memory",
    ),
    Coefficient(
        "copy_rate",
        "byte/s",
        8e9,
        0.8,
        "model",
        "copies of one rank between device and host",
        "PCIe 3 and 4, 6 to 25 GB/s",
    ),
    Coefficient(
        "offload_whole_rate",
        "parameter/s",
        6e9,
        0.8,
        "model",
        "work of an offloading rank on its unsharded parameters",
        "norms, casts and flattening of gradients",
    ),
    Coefficient(
        "offload_s",
        "s",
        1e-2,
        1.0,
        "model",
        "constant time of offloading per step",
        "synchronisation of streams, pinned buffers",
    ),
    Coefficient(
        "step_s", "s", 5e-3, 1.0, "model", "constant time of a step under any plan", "logging, gradient norm, Python"
    ),
    Coefficient(
        "sample_core_s",
        "core*s",
        1e-5,
        2.0,
        "model",
        "time to load and prepare one sample on one CPU core",
        "tokens: microseconds; images: milliseconds",
    ),
)

NAMES: tuple[str, ...] = tuple(c.name for c in ALL)
INDEX: Mapping[str, int] = {name: i for i, name in enumerate(NAMES)}
LINKS = (INDEX["local_rate"], INDEX["network_rate"])
HARDWARE: tuple[int, ...] = tuple(i for i, c in enumerate(ALL) if c.of == "hardware")


@dataclass(frozen=True, slots=True)
class Prior:
    """Prior of the coefficients: mean and standard deviation of each logarithm, shape (coefficients,), as `NAMES`."""

    mean: Array
    width: Array

    @classmethod
    def typical(cls, *, known: Mapping[str, float] | None = None, known_width: float = 0.25) -> Prior:
        """Prior for any accelerator, narrowed by `known`.

        Args:
            known: figures of a data sheet or of probes by coefficient, in its unit.
            known_width: largest standard deviation of the logarithm of a known coefficient.
        Raises:
            ValueError: a name is not a coefficient, or a figure is not positive.
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

    @property
    def whitening(self) -> Array:
        """Matrix that turns deviations of the logarithms from their means into independent standard normal ones.

        Bandwidth of links grows with the compute rate, since hosts are built so that links keep pace with devices:
        one trial on a device of another speed moves both. Knowledge of a link itself replaces this tie.
        """
        matrix = np.diag(1.0 / self.width)
        for link in LINKS:
            tie = min(self.width[link] / ALL[link].width, 1.0) ** 2
            matrix[link, INDEX["compute_rate"]] = -tie / self.width[link]
        return matrix

    def holding(self, name: str, typical: float, width: float) -> Prior:
        """The same prior with another value and width for one coefficient."""
        mean, widths = self.mean.copy(), self.width.copy()
        mean[INDEX[name]], widths[INDEX[name]] = math.log(typical), width
        return Prior(mean, widths)

    def scaled(self, factor: float) -> Prior:
        """The same prior with all widths multiplied by `factor`."""
        return Prior(self.mean, self.width * factor)
