"""Performance model: step time of any plan on any allocation, from the coefficients.

    step  = max'(forward + backward' + pipe + gather + update + constant, input), slower per doubling of hosts
    with s samples in the largest share, m micro-batches, p stages, t shards, d replicas, n = d t p ranks:

    forward, backward   one micro-batch through all stages, and m - 1 more at the pace of the stage with most
                        operations; of these, tensor parallelism shards all but a small part, and its all-reduces are
                        added; the device overlaps with launches of kernels, which take as long for a small micro-batch
    backward'           gradient traffic overlaps with the last micro-batch's backward pass: (a^k + b^k)^(1/k)
    gradient traffic    2 (d-1)/d of the gradients in a ring inside a host, or through the network cards in use on the
                        busiest host; ZeRO does half of it as a reduce-scatter, and gathers after the update
    network             slower where a host uses a card with part of its devices only; on more than two hosts,
                        collectives may use another algorithm
    pipe                stage boundaries crossed one after another, forward and backward
    update              on the device; or on the host, whose cores its ranks share, with copies over PCIe
    input               samples prepared by the job's cores while the step runs

All functions are vectorised over rows (a plan on an allocation) and over sets of coefficients, so that one call
computes a Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import INDEX, Array
from clusterd.profiling.placement import Allocation, traffic
from clusterd.profiling.workload import Workload

T = TypeVar("T")


class Features(NamedTuple, Generic[T]):
    """Features of a row, each a number; or of many rows, each an array of shape (rows,)."""

    share: T  # samples of the largest share of the batch, by the speed of its devices
    micro: T  # micro-batches
    dp: T
    tp: T
    pp: T
    stage_share: T  # of the operations, on the stage with most of them
    zero: T
    offload: T  # 1: any
    offload_parameters: T  # 1: parameters too
    checkpointing: T
    layers: T
    flops: T
    boundary_bytes: T
    tp_bytes: T
    gradient_bytes: T
    parameters: T
    batch: T
    tp_crosses: T
    tp_flows: T
    tp_devices: T
    dp_hosts: T
    dp_flows: T
    dp_devices: T
    pp_local: T
    pp_far: T
    pp_flows: T
    pp_devices: T
    host_ranks: T  # ranks on the busiest host
    cores: T
    speed: T  # of the slowest device
    hosts: T
    whole: T  # devices that every host has a multiple of


@dataclass(frozen=True, slots=True)
class Row:
    """One plan on one allocation for one workload, for which a step time is predicted or measured."""

    workload: Workload
    plan: Plan
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Structure:
    """Discrete properties of the cluster, inferred among a few possibilities."""

    devices_per_card: int = 2  # devices that share a network card on a host


DEFAULT_STRUCTURE = Structure()


class Rows:
    """Features of many rows as one array of shape (features, rows)."""

    __slots__ = ("values",)

    def __init__(self, values: Array) -> None:
        self.values = values  # shape (features, rows), in the order of `Features`

    def __len__(self) -> int:
        return int(self.values.shape[1])

    def __getitem__(self, chosen: Sequence[int] | Array) -> Rows:
        return Rows(self.values[:, np.asarray(chosen, dtype=np.intp)])

    @property
    def features(self) -> Features[Array]:
        """Each feature of all rows."""
        return Features(*self.values)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Rows:
        """Compute the features of `rows`.

        Raises:
            ValueError, PlanError: a plan does not match its allocation or its batch.
        """
        table = [_features(row) for row in rows]
        return cls(np.array(table, dtype=np.float64).T.reshape(len(Features._fields), len(table)))


def _features(row: Row) -> Features[float]:
    plan, load, allocation = row.plan, row.workload, row.allocation
    counts = allocation.counts
    t = traffic(plan.dp, plan.tp, plan.pp, counts)
    batch = load.global_batch
    if plan.shares or batch % plan.dp == 0:
        share = allocation.slowest_share(plan.dp, plan.tp, plan.pp, plan.batch_shares(batch))
    else:  # the batch is not divisible: the replica with the largest share is the slowest
        share = -(-batch // plan.dp) / allocation.slowest_speed()
    return Features(
        share=share,
        micro=plan.accumulation,
        dp=plan.dp,
        tp=plan.tp,
        pp=plan.pp,
        stage_share=load.stage_share(plan.pp),
        zero=plan.zero,
        offload=plan.offload != "none",
        offload_parameters=plan.offload == "parameters",
        checkpointing=plan.checkpointing,
        layers=load.layers,
        flops=load.flops_per_sample,
        boundary_bytes=load.boundary_bytes,
        tp_bytes=load.tp_bytes,
        gradient_bytes=load.gradient_bytes,
        parameters=load.parameters,
        batch=batch,
        tp_crosses=t.tp_crosses,
        tp_flows=t.tp_flows,
        tp_devices=t.tp_devices,
        dp_hosts=t.dp_hosts,
        dp_flows=t.dp_flows,
        dp_devices=t.dp_devices,
        pp_local=t.pp_local_hops,
        pp_far=t.pp_far_hops,
        pp_flows=t.pp_flows,
        pp_devices=t.pp_devices,
        host_ranks=max(counts),
        cores=allocation.cores,
        speed=allocation.slowest_speed(),
        hosts=len(counts),
        whole=math.gcd(*counts),
    )


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a step by phase, which add up to `step_s`; arrays of shape (..., rows)."""

    forward_s: Array
    backward_s: Array
    sync_s: Array  # gradient traffic that does not overlap with the backward pass
    pipe_s: Array
    gather_s: Array
    update_s: Array
    constant_s: Array
    input_s: Array  # waiting for samples

    @property
    def step_s(self) -> Array:
        """Seconds of the whole step."""
        total = self.forward_s
        for f in fields(self)[1:]:
            total = total + getattr(self, f.name)
        return total


def predict(logs: Array, rows: Rows, structure: Structure = DEFAULT_STRUCTURE) -> Array:
    """Step times in seconds of each row under each set of coefficients, shape (..., rows).

    Args:
        logs: logarithms of the coefficients, shape (..., coefficients), in the order of `coefficients.NAMES`.
    """
    return phases(logs, rows, structure).step_s


def phases(logs: Array, rows: Rows, structure: Structure = DEFAULT_STRUCTURE) -> Phases:
    """Step times by phase; arguments as of `predict`."""
    k = np.exp(np.clip(logs, -80.0, 80.0))

    def c(name: str) -> Array:
        return k[..., INDEX[name], None]

    row = rows.features
    dp, tp, pp, zero, share, micro = row.dp, row.tp, row.pp, row.zero, row.share, row.micro
    parameters, layers, cores = row.parameters, row.layers, row.cores
    local, network, growth = c("local_rate"), c("network_rate"), c("card_growth")
    # Sums fall to the poorest channel, and a card that only part of its devices use is a poor one.
    network = network / np.where(row.whole % structure.devices_per_card > 0, 1.0 + c("part_used_card"), 1.0)
    network = network * np.where(row.hosts > 2, c("further_hosts"), 1.0)

    def inside(ranks: Array) -> Array:
        """Bandwidth of each of so many ranks of a collective inside a host in byte/s."""
        return local * c("further_ranks") ** np.log2(np.maximum(ranks / 2.0, 1.0))

    def through_network(flows: Array, devices: Array) -> Array:
        """Bandwidth of each of `flows` in byte/s."""
        return network * np.ceil(devices / structure.devices_per_card) ** growth / flows

    parallel = (tp > 1) | (pp > 1)
    path = np.where(parallel, c("parallel_path"), 1.0) * np.where(zero > 1, c("sharded_path"), 1.0)
    path = path * row.host_ranks ** c("crowding")
    unsharded = np.minimum(c("unsharded_share"), 1.0)
    cut = np.where(tp > 1, unsharded + (1.0 - unsharded) / tp, 1.0)

    # One micro-batch through all stages; the others follow at the pace of the stage with most operations.
    through = (micro - 1.0) * row.stage_share + 1.0
    slots = micro + pp - 1.0
    samples = share / micro
    computing = samples * np.maximum(row.flops, 1.0) / c("compute_rate") * cut * path
    launching = c("launch_s") * layers / row.speed * path
    tp_rate = np.where(row.tp_crosses > 0, through_network(np.maximum(row.tp_flows, 1.0), row.tp_devices), inside(tp))
    tp_delay = np.where(row.tp_crosses > 0, c("network_latency_s") / 20.0, c("local_latency_s"))
    tp_delay = tp_delay * c("tp_messages")
    tp_volume = 2.0 * (tp - 1.0) / tp * samples * row.tp_bytes
    tp_s = tp_volume / tp_rate * c("tp_slowness") + 4.0 * layers * np.log2(tp) * tp_delay
    summed = np.where(tp > 1, tp_s, 0.0)
    again = np.where(row.checkpointing > 0, c("recompute_ratio"), 0.0)
    gradients = c("backward_ratio") + again
    # The host launches kernels ahead of the device: small ones wait for the launch, large ones hide it.
    forward = through * np.hypot(computing + summed, launching)
    backward = through * np.hypot(gradients * computing + np.where(again > 0, 2.0, 1.0) * summed, gradients * launching)

    # Gradients, and ZeRO's parameters.
    held = row.gradient_bytes / (tp * pp)
    ring = np.where(dp > 1, (dp - 1.0) / dp, 0.0) * held
    rate = np.where(
        row.dp_flows > 0,
        1.0 / (1.0 / through_network(np.maximum(row.dp_flows, 1.0), row.dp_devices) + 0.3 / local),
        inside(dp),
    )
    delay = np.where(dp > 1, np.log2(row.dp_hosts) * c("network_latency_s") + dp * c("local_latency_s"), 0.0)
    one_way = ring / rate + delay
    gather = np.where(zero > 0, c("gather_ratio") * ring / rate + c("gather_messages") * delay, 0.0)
    scatter = ring / rate + c("scatter_messages") * delay
    # ZeRO-2 and 3 reduce-scatter gradients after each micro-batch; other plans all-reduce them after the last. ZeRO-3
    # gathers parameters for the forward and backward pass of each micro-batch, overlapped like gradient traffic.
    hidden = np.where(zero > 1, micro * scatter, 2.0 * one_way) + np.where(zero > 2, 2.0 * micro * gather, 0.0)
    gather = np.where(zero > 2, 0.0, gather)
    norm = 1.0 + c("overlap")
    last = np.where(zero > 2, forward + backward, np.where(zero > 1, backward, backward / through * row.stage_share))
    sync = np.where(dp > 1, (hidden**norm + last**norm) ** (1.0 / norm) - last, 0.0)

    far = (
        row.boundary_bytes * samples / through_network(np.maximum(row.pp_flows, 1.0), row.pp_devices)
        + c("network_latency_s") / 20.0
    )
    near = row.boundary_bytes * samples / local + c("local_latency_s")
    pipe = np.where(pp > 1, 2.0 * c("pipe_slowness") * (row.pp_far * far + row.pp_local * near) * slots / pp, 0.0)

    mine = parameters / (tp * pp) / np.where(zero > 0, dp, 1.0)
    on_device = mine / c("update_rate") / row.speed
    # A rank's threads speed the update up until the host's memory bandwidth limits it.
    threads = cores / (dp * tp * pp)
    on_threads = np.where(cores > 0, mine / c("thread_update_rate") / np.maximum(threads, 1.0), 0.0)
    on_host = (
        np.maximum(mine / c("host_update_rate") * row.host_ranks ** c("host_sharing"), on_threads)
        + mine * (row.gradient_bytes / parameters) * 2.0 / c("copy_rate")
        + parameters / (tp * pp) / c("offload_whole_rate")
        + c("offload_s")
    )
    streamed = np.where(row.offload_parameters > 0, 2.0 * micro * held / dp / c("copy_rate"), 0.0)
    update = np.where(row.offload > 0, on_host + streamed, on_device)

    constant = c("step_s") + np.zeros_like(update)
    busy = forward + backward + sync + pipe + gather + update + constant
    loading = np.where(cores > 0, row.batch * c("sample_core_s") / np.maximum(cores, 1.0), 0.0)
    waiting = (busy**8 + loading**8) ** 0.125 - busy
    slowness = c("host_slowness") ** np.log2(np.maximum(row.hosts / 2.0, 1.0))
    return Phases(*(slowness * part for part in (forward, backward, sync, pipe, gather, update, constant, waiting)))
