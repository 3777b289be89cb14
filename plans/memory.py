"""Memory estimate of a rank under a plan, good enough to exclude plans that cannot fit.

With P the parameter bytes of one shard of the stage (replicated ones, and 1/tp of cut ones), T those of the trainable
among them, B the largest block's, m the samples of the largest micro-batch:

=================  ==================================================================================
parameters         P; ZeRO-2 and 3: P/dp; offload=parameters: 0
gathered           whole parameters that sharding materialises temporarily. ZeRO-2: P (from forward to backward
                   pass); ZeRO-3: 2B (the block in use, and the prefetched one)
gradients          T (beside activations less, as these go while gradients come, where a step is one pass and no
                   buckets stay); ZeRO-2 and 3: T/dp + 2B, but T/dp + T in a pipeline, where they are reduced once at
                   the end;
                   and T again for buckets under dp with tp or pp (`clusterd.train.parallel.gradient_sync`)
optimizer          ratio * T; ZeRO-1, 2, 3: ratio * T/dp; none on the device when offloaded
temporaries        of an update, on CUDA only, where torch updates all tensors at once: another ratio * T, or T/dp;
                   none when offloaded. Gathered parameters and activations are freed by then: the larger counts
activations        per micro-batch in flight m * (whole + cut/tp), or with checkpointing m * the blocks' inputs; plus
                   the largest block's once, when recomputing; plus the loss function's on the last stage. Where
                   activations are, also copies of parameters in another precision (autocast), for any m.
                   In flight: all under gpipe, min(accumulation, pp - stage) under 1f1b, 1 without pipeline
buffers            received by the pipeline: m * boundary bytes, forward for those in flight, backward for one
overhead           of the process: on CUDA the context and the buffers of each communicator (`Overhead`), learned from
                   measurements, and the workspaces of cuBLAS; elsewhere the interpreter with torch
host               offloaded: parameters, gradients and optimizer state. Pinned on CUDA
=================  ==================================================================================

ZeRO-1 moves whole parameters: a rank has at least the largest one's optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from clusterd.plans.model_shape import ModelShape, ParameterShape
from clusterd.plans.plan import Plan
from clusterd.plans.stages import split_layers

CPU_OVERHEAD_BYTES = 300 << 20
"""Of an empty rank: measured 220 MB resident after importing torch."""


WORKSPACES_BYTES = 64 << 20
"""Of cuBLAS, in torch's own memory, so that measurements of the overhead miss them: 32 MiB on a Hopper GPU for each of
the two threads that run forward and backward passes; smaller on older GPUs."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Device memory of a rank that no tensor uses: CUDA context and kernels, and so much for each communicator."""

    context_bytes: int = 840 << 20
    communicator_bytes: int = 150 << 20

    def of(self, plan: Plan) -> int:
        """Overhead of a rank of the plan."""
        return self.context_bytes + communicators(plan) * self.communicator_bytes


OVERHEAD = Overhead()
"""Prior of the overhead: 0.88 GB without communicators, as measured on an H100 (0.65 GB once a kernel has run, the rest
once a step has); for communicators by rule of thumb."""

PRIOR_WEIGHT = 0.1
"""Weight of the prior's share for a communicator, in measurements."""


def communicators(plan: Plan) -> int:
    """Number of communicators of a rank: of all ranks, and of each dimension of the plan unless that is all ranks.

    FSDP2 has one even for a single replica.
    """
    dimensions = sum((plan.pp > 1, plan.dp > 1 or plan.zero >= 2, plan.tp > 1))
    return dimensions if dimensions < 2 else 1 + dimensions


def learn_overhead(measured: Mapping[int, int], prior: Overhead = OVERHEAD) -> Overhead:
    """Overhead of a type of device, from the largest measured bytes by number of communicators.

    A line through the measurements, drawn towards the prior's slope; raised until no measurement lies above it, because
    an estimate that is too small costs a job a start. Without measurements it is the prior.
    """
    if not measured:
        return prior
    count = len(measured)
    mean_x, mean_y = sum(measured) / count, sum(measured.values()) / count
    spread = sum((x - mean_x) ** 2 for x in measured)
    joint = sum((x - mean_x) * (y - mean_y) for x, y in measured.items())
    slope = max((joint + PRIOR_WEIGHT * prior.communicator_bytes) / (spread + PRIOR_WEIGHT), 0.0)
    context = max(y - slope * x for x, y in measured.items())
    return Overhead(max(math.ceil(context), 0), math.ceil(slope))


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank, by purpose."""

    parameters_bytes: int
    gathered_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    overhead_bytes: int
    host_bytes: int  # offloaded, in host memory
    build_bytes: int  # in host memory while the model is built, before the plan cuts it
    temporaries_bytes: int = 0  # of an update
    later_gradients_bytes: int = 0  # of the gradients, those that are not there yet while most activations are

    @property
    def device_bytes(self) -> int:
        """Bytes that must fit the device."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + max(self.gathered_bytes + self.activations_bytes - self.later_gradients_bytes, self.temporaries_bytes)
            + self.buffers_bytes
            + self.overhead_bytes
        )


def estimate(
    plan: Plan,
    shape: ModelShape,
    *,
    global_batch: int | None = None,
    kind: str = "cuda",
    stage: int | None = None,
    overhead: Overhead = OVERHEAD,
) -> MemoryEstimate:
    """Estimate the memory of a rank of `stage`, or of the stage that needs most on its device.

    Args:
        overhead: of a rank on a GPU.

    Raises:
        PlanError, ValueError: the plan is not legal for the model (`plans.legality.check`).
    """
    batch = shape.global_batch if global_batch is None else global_batch
    stages = split_layers(shape.layer_weights(), plan.pp) if plan.pp > 1 else [range(-1, len(shape.layers))]
    chosen = range(plan.pp) if stage is None else [stage]
    return max(
        (_estimate_stage(plan, shape, batch, kind, index, stages[index], overhead) for index in chosen),
        key=lambda e: e.device_bytes,
    )


def _estimate_stage(
    plan: Plan, shape: ModelShape, batch: int, kind: str, stage: int, layers: range, overhead: Overhead
) -> MemoryEstimate:
    own = [p for p in shape.parameters if p.layer in layers]
    whole = _bytes(own, plan)
    trainable = _bytes([p for p in own if p.trainable], plan)
    block = max((_bytes([p for p in own if p.layer == index], plan) for index in layers), default=0)
    shard = -(-trainable // plan.dp) if plan.zero >= 2 else trainable

    parameters = whole
    gathered = 0
    gradients = trainable
    if plan.zero >= 2:
        parameters = -(-whole // plan.dp)
        # FSDP2 keeps parameters outside of blocks gathered until the backward pass, which begins with them.
        outside = _bytes([p for p in own if p.layer < 0 or not shape.layers[p.layer].block], plan)
        gathered = min(outside + 2 * block, whole) if plan.zero == 3 else whole
        gradients = shard + (trainable if plan.pp > 1 else min(2 * block, trainable))
    elif plan.dp > 1 and plan.tp * plan.pp > 1:
        gradients += trainable

    updated = shard
    if plan.zero == 1:
        largest = max((p.local_bytes(plan.tp) for p in own if p.trainable), default=0)
        updated = max(-(-trainable // plan.dp), largest)
    state = int(shape.optimizer_state_ratio * updated)
    temporaries = int(shape.optimizer_temporaries_ratio * updated) if kind == "cuda" else 0

    host = 0
    if plan.offload != "none":
        parts = plan.dp if plan.zero >= 2 else 1
        each = [-(-p.local_bytes(plan.tp) // parts) for p in own if p.trainable]
        # Parameters and gradients; torch pins memory in powers of two.
        host = state + 2 * sum(1 << (n - 1).bit_length() if kind == "cuda" and n else n for n in each)
        state, temporaries = 0, 0
    if plan.offload == "parameters":
        parameters = 0
        gradients -= shard

    share = max(plan.batch_shares(batch))
    samples = -(-share // plan.accumulation)
    in_flight = 1
    if plan.pp > 1:
        in_flight = plan.accumulation if plan.schedule == "gpipe" else min(plan.accumulation, plan.pp - stage)
    return MemoryEstimate(
        parameters_bytes=parameters,
        gathered_bytes=gathered,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        activations_bytes=samples * _activations(plan, shape, stage, layers, in_flight)
        + _casts(plan, shape, own, layers, in_flight),
        buffers_bytes=samples * _boundaries(plan, shape, stage, layers, in_flight),
        overhead_bytes=overhead.of(plan) + WORKSPACES_BYTES if kind == "cuda" else CPU_OVERHEAD_BYTES,
        host_bytes=host,
        build_bytes=shape.parameter_bytes,
        temporaries_bytes=temporaries,
        later_gradients_bytes=_later_gradients(plan, shape, own, samples),
    )


def _bytes(parameters: list[ParameterShape], plan: Plan) -> int:
    return sum(p.local_bytes(plan.tp) for p in parameters)


def _later_gradients(plan: Plan, shape: ModelShape, own: list[ParameterShape], samples: int) -> int:
    """Gradients that are not there yet at the worst moment of a backward pass, as it frees activations meanwhile.

    None where gradients stay from pass to pass, or buckets for them do. The bytes of the largest layer's gradients are
    left in, for what its backward pass needs itself (measured: half).
    """
    if plan.ranks > plan.tp or plan.accumulation > 1 or plan.zero >= 2:
        return 0
    trained = [p for p in own if p.trainable]
    there = _bytes([p for p in trained if p.layer < 0], plan)  # of no layer: when they appear is not known
    freed = largest = 0
    most = there
    for index in reversed(range(len(shape.layers))):
        gradients = _bytes([p for p in trained if p.layer == index], plan)
        there, largest = there + gradients, max(largest, gradients)
        most = max(most, there - freed)
        freed += samples * _saved(plan, shape, index)
    return max(there - most - largest, 0)


def _activations(plan: Plan, shape: ModelShape, stage: int, layers: range, in_flight: int) -> int:
    """Activation bytes per sample, over all micro-batches in flight."""
    saved, recomputed = 0, 0
    for index in layers:
        if index < 0:
            continue
        saved += _saved(plan, shape, index)
        if plan.checkpointing and shape.layers[index].block:
            recomputed = max(recomputed, _whole(plan, shape, index))
    # The last stage frees its loss before the next micro-batch begins, except under gpipe.
    loss = shape.loss_bytes if stage == plan.pp - 1 else 0
    return in_flight * (saved + loss) + recomputed


def _saved(plan: Plan, shape: ModelShape, index: int) -> int:
    """Activation bytes per sample that a layer keeps for the backward pass."""
    if plan.checkpointing and shape.layers[index].block:
        return shape.layers[index - 1].output_bytes if index else 0
    return _whole(plan, shape, index)


def _whole(plan: Plan, shape: ModelShape, index: int) -> int:
    layer = shape.layers[index]
    return layer.activation_bytes + -(-layer.activation_tp_bytes // plan.tp)


def _casts(plan: Plan, shape: ModelShape, own: list[ParameterShape], layers: range, in_flight: int) -> int:
    """Copies of parameters in another precision, over all micro-batches in flight."""
    saved, recomputed = 0, 0
    for index in layers:
        if index < 0 or not (layer := shape.layers[index]).cast_bytes:
            continue
        parameters = [p for p in own if p.layer == index or (p.layer < 0 and not layer.name)]
        whole = sum(p.size_bytes for p in parameters)
        cast = layer.cast_bytes * _bytes(parameters, plan) // max(whole, 1)
        if plan.checkpointing and layer.block:
            recomputed = max(recomputed, cast)
        else:
            saved += cast
    return in_flight * saved + recomputed


def _boundaries(plan: Plan, shape: ModelShape, stage: int, layers: range, in_flight: int) -> int:
    """Bytes per sample: activations received from the previous stage, gradients from the next one."""
    if plan.pp == 1:
        return 0
    received = shape.layers[layers.start - 1].output_bytes if stage else 0
    returned = shape.layers[layers.stop - 1].output_bytes if stage < plan.pp - 1 else 0
    return in_flight * received + returned
