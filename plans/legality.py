"""Legality of plans: rules of arithmetic, of the model and of torch. Each refusal is a sentence.

What torch cannot do between CPU ranks has no field in `Plan`, or is implemented differently in `apply_plan`
(`tests/plans/test_equivalence.py` tries each, and expects it to fail):

- context parallelism: "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy";
- FSDP1: "FSDP needs a non-CPU accelerator device"; FSDP2 is used everywhere;
- `CPUOffloadPolicy()` by default: "Cannot access accelerator device when none is available"; on CPU it pins nothing;
- DistributedDataParallel over tensor-parallel shards: "got mixed torch.Tensor and DTensor", and under the 1f1b
  schedule: "rebuilt parameter indices size is not same as original model parameters size"; `GradientSum` replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clusterd.plans.model_shape import ModelShape, ParameterShape
from clusterd.plans.plan import Plan, PlanError
from clusterd.plans.stages import split_layers


def check(
    plan: Plan, shape: ModelShape | None = None, *, global_batch: int | None = None, kinds: Iterable[str] = ()
) -> list[str]:
    """Reasons why `plan` cannot run; empty if it can.

    Args:
        shape: of the model, if known; without it only model-independent rules are checked, and the ranks check the
            rest.
        global_batch: samples per step; default: the shape's; not checked if neither is known.
        kinds: of the devices it would run on ("cuda", "cpu").
    """
    batch = shape.global_batch if global_batch is None and shape is not None else global_batch
    reasons = [*_batch(plan, batch), *_sharding(plan), *_devices(kinds)]
    if shape is not None:
        reasons += [*_samples(batch, shape), *check_model(plan, shape)]
    return reasons


def check_model(plan: Plan, shape: ModelShape) -> list[str]:
    """Reasons why the model cannot be cut this way, whatever its batch and the number of replicas."""
    return [
        *_alternation(plan, shape),
        *_pipeline(plan, shape),
        *_tensor_parallelism(plan, shape),
        *_optimizer(plan, shape),
        *_parameters(plan, shape),
        *_parameter_writes(plan, shape),
    ]


def _batch(plan: Plan, batch: int | None) -> Iterator[str]:
    if plan.pp > 1 and plan.schedule == "1f1b" and plan.accumulation < plan.pp:
        yield (
            f"the 1f1b schedule over pp={plan.pp} needs at least {plan.pp} micro-batches, "
            f"accumulation is {plan.accumulation}"
        )
    if batch is None:
        return
    try:
        shares = plan.batch_shares(batch)
    except PlanError as error:
        yield str(error)
        return
    for share in sorted(set(shares)):
        if share < plan.accumulation:
            yield f"a share of {share} samples cannot be cut into accumulation={plan.accumulation} micro-batches"
        elif plan.pp > 1 and share % plan.accumulation:
            yield (
                f"under pp={plan.pp} micro-batches must be of one size: a share of {share} samples cannot be cut "
                f"into {plan.accumulation} equal ones"
            )


def _sharding(plan: Plan) -> Iterator[str]:
    lone_offload = plan.zero == 3 and plan.offload == "parameters"
    if plan.zero and plan.dp == 1 and not lone_offload:
        yield f"zero={plan.zero} shards over replicas: it needs dp of at least 2"
    if plan.offload == "parameters" and plan.zero != 3:
        yield f"offload=parameters is implemented by FSDP2: it needs zero=3, not zero={plan.zero}"
    if plan.offload == "optimizer" and plan.zero == 1:
        yield (
            "offload=optimizer is not supported with zero=1, whose update sends whole parameters between replicas; "
            "zero=2 keeps the same share of optimizer state in host memory"
        )


def _devices(kinds: Iterable[str]) -> Iterator[str]:
    if len(different := sorted(set(kinds))) > 1:
        yield (
            f"ranks of one job need devices of one kind, not {' and '.join(different)}: "
            "torch's collectives cannot mix them"
        )


def _samples(batch: int | None, shape: ModelShape) -> Iterator[str]:
    if batch is not None and 0 < shape.samples < batch:
        yield f"the data set has {shape.samples} samples, fewer than the global batch of {batch}"


def _alternation(plan: Plan, shape: ModelShape) -> Iterator[str]:
    others = plan.tp > 1 or plan.pp > 1 or plan.zero or plan.offload != "none" or plan.checkpointing
    if shape.parts and others:
        yield (
            f"{plan} is not supported with several losses and optimizers (of {' and '.join(shape.parts)}): they call "
            "parts of the model, which only dp and accumulation leave whole"
        )


def _pipeline(plan: Plan, shape: ModelShape) -> Iterator[str]:
    if plan.pp == 1:
        return
    if not shape.pipeline:
        yield f"pp={plan.pp} needs the model's layers in order: pass `layers` to clusterd.train.run"
        return
    if outside := [p.name for p in shape.parameters if p.layer < 0]:
        yield f"pp={plan.pp} needs every parameter in one of the layers; {outside[0]} is in none"
        return
    if outside := [b.name for b in shape.buffers if b.layer < 0]:
        yield f"pp={plan.pp} needs every buffer in one of the layers; {outside[0]} is in none"
        return
    if shape.pipeline_refused:
        yield f"pp={plan.pp} is impossible: {shape.pipeline_refused}"
        return
    weights = shape.layer_weights()
    try:
        stages = split_layers(weights, plan.pp)
    except ValueError:
        yield f"pp={plan.pp} needs {plan.pp} layers with parameters; the model has {sum(w > 0 for w in weights)}"
        return
    trained = {i for group in shape.parameter_groups for i in group}
    layers = {p.layer for i, p in enumerate(shape.parameters) if p.trainable and (i in trained or not trained)}
    for index, stage in enumerate(stages):
        if layers.isdisjoint(stage):
            yield f"stage {index} of pp={plan.pp} would have nothing to train"
    for names in shape.tied:
        owners = {next(i for i, s in enumerate(stages) if _layer_of(name, shape) in s) for name in names}
        if len(owners) > 1:
            yield f"pp={plan.pp} would put {' and '.join(names)}, which are one parameter, on different stages"


def _tensor_parallelism(plan: Plan, shape: ModelShape) -> Iterator[str]:
    if plan.tp > 1 and shape.hooked:
        yield f"tp={plan.tp} cuts gradients too, but the hook on {shape.hooked} needs it whole"
        return
    if plan.tp == 1 or plan.tp in shape.tp_degrees:
        return
    if not shape.tp_plan:
        yield f"tp={plan.tp} needs to know how to cut the model's tensors: pass `tp_plan` to clusterd.train.run"
        return
    why = dict(shape.tp_refused).get(plan.tp, "the model was not tried with this number of shards")
    works = ", ".join(map(str, shape.tp_degrees)) or "none"
    yield f"tp={plan.tp} does not divide this model: {why} (valid: {works})"


def _optimizer(plan: Plan, shape: ModelShape) -> Iterator[str]:
    if not shape.optimizer_by_tensor and (plan.tp > 1 or plan.pp > 1 or plan.zero):
        yield (
            f"{plan} updates parts of the model separately, but trial updates of {shape.optimizer} do not show that a "
            "tensor alone is updated as beside the others; dp leaves the model whole"
        )
    elif not shape.optimizer_elementwise and (plan.tp > 1 or plan.zero >= 2):
        yield (
            f"{plan} cuts tensors, but {shape.optimizer} does not treat every element alike: its update of a shard is "
            "not the shard of its update; dp, zero=1 and pp leave tensors whole"
        )


def _parameters(plan: Plan, shape: ModelShape) -> Iterator[str]:
    if shape.gathers and plan.accumulation > 1:
        yield f"accumulation={plan.accumulation} cuts batches, of which train.gather needs all samples at once"
    yield from _fully_sharded(plan, shape) if plan.zero >= 2 else ()
    trainable = [p for p in shape.parameters if p.trainable]
    if plan.zero == 1 and (other := [p for p in trainable if p.dtype_bytes != trainable[0].dtype_bytes]):
        yield (
            "zero=1 is implemented by ZeroRedundancyOptimizer, which needs parameters of one dtype: "
            f"{trainable[0].name} has {trainable[0].dtype_bytes} bytes per element, {other[0].name} "
            f"{other[0].dtype_bytes}"
        )
    if plan.dp > 1 and plan.zero < 2 and (plan.tp > 1 or plan.pp > 1) and shape.sparse:
        yield f"{plan} sums gradients in buckets, but that of {shape.sparse} is sparse"


def _parameter_writes(plan: Plan, shape: ModelShape) -> Iterator[str]:
    """Refuse plans under which a write of the forward pass into parameters is lost, repeated or differs."""
    trained = next((p.name for p in shape.parameters if p.trainable and p.name in shape.written), "")
    if plan.dp > 1 and shape.written_by_samples:
        yield (
            f"dp={plan.dp} would let replicas diverge: the forward pass writes values into {shape.written_by_samples} "
            "that depend on its own samples (as max_norm does)"
        )
    elif plan.zero >= 2 and shape.written:
        yield (
            f"zero={plan.zero} gathers parameters for a pass, and would lose what the forward pass writes into "
            f"{shape.written[0]}"
        )
    elif (plan.zero or plan.offload == "optimizer") and trained:
        technique = f"zero={plan.zero}" if plan.zero else "offload=optimizer"
        yield f"{technique} updates copies of parameters, and would lose what the forward pass writes into {trained}"
    if shape.written_anew and not shape.pipeline_refused and (repeats := _repeated_passes(plan)):
        yield (f"{repeats} runs several forward passes per step, each of which would write into {shape.written_anew}")


def _repeated_passes(plan: Plan) -> str:
    if plan.pp > 1:
        return f"pp={plan.pp}"
    return f"accumulation={plan.accumulation}" if plan.accumulation > 1 else "checkpointing" * plan.checkpointing


def _fully_sharded(plan: Plan, shape: ModelShape) -> Iterator[str]:
    fsdp2 = f"zero={plan.zero} is implemented by FSDP2, which"
    if empty := next((p.name for p in shape.parameters if 0 in p.shape), ""):
        yield f"{fsdp2} cannot cut a parameter without elements: {empty} has none"
    if shape.noncontiguous:
        yield f"{fsdp2} needs contiguous parameters: {shape.noncontiguous} is not"
    if shape.sparse:
        yield f"{fsdp2} does not support sparse gradients, as that of {shape.sparse} is"
    if shape.hooked:
        yield f"{fsdp2} shards gradients, but the hook on {shape.hooked} needs it whole"
    if shape.repeated_block and plan.zero == 3 and plan.checkpointing:
        yield f"{fsdp2} cannot gather {shape.repeated_block} again for recomputation: it is in the model more than once"
    if shape.find_unused_parameters:
        yield f"{fsdp2} sums gradients blindly, but replicas may use different parameters (find_unused_parameters)"
    first: dict[int, ParameterShape] = {}
    for parameter in shape.parameters:
        if not parameter.trainable:
            continue
        in_block = parameter.layer >= 0 and shape.layers[parameter.layer].block
        beside = first.setdefault(parameter.layer if in_block else -1, parameter)
        if beside.dtype_bytes != parameter.dtype_bytes:
            yield (
                f"{fsdp2} needs one dtype in each block: {beside.name} has {beside.dtype_bytes} bytes per element, "
                f"{parameter.name} {parameter.dtype_bytes}"
            )
            return


def _layer_of(name: str, shape: ModelShape) -> int:
    """Index of the layer that contains a name, also for the second name of a tied parameter."""
    return max(
        (i for i, layer in enumerate(shape.layers) if name == layer.name or name.startswith(layer.name + ".")),
        default=-1,
    )
