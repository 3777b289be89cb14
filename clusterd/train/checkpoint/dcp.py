"""Checkpoints in the format of `torch.distributed.checkpoint`, readable under any plan and by plain torch.

Keys are those of torch's own ``get_state_dict``: ``model.NAME``, ``optim.state.NAME.SLOT``, ``optim.param_groups``;
beside them ``step`` and ``clusterd.scalars.RANK``. The state is copied between two steps, each byte by one of the
ranks that hold it, and written by a thread during training, over a process group of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from clusterd.plans.layout import Layout
from clusterd.plans.model_shape import ModelShape
from clusterd.train.checkpoint import dcp_files as files
from clusterd.train.checkpoint import same_plan
from clusterd.train.checkpoint.dcp_files import Key, Staged, StagedTensor
from clusterd.train.data.stream import Position
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.plain_data import NotSerializable, plain_value
from clusterd.train.state import lazy_optimizer_state, parameter_groups, scalars
from clusterd.train.state.local_shards import check_shards, local_shards
from clusterd.train.state.training import Training


def stage(training: Training, shape: ModelShape, layout: Layout) -> Staged:
    """Copy this rank's part of the checkpoint, between two steps.

    Args:
        layout: of the current plan.
    Raises:
        NotSerializable: optimizer or scheduler hold values that need pickle, or state that no rule cuts.
    """
    rank = training.context.rank
    slots_of, tensor_slots = _slots(shape), scalars.tensor_slots(shape)
    rank_scalars = scalars.collect(training, shape, lazy_saved_separately=True)  # first: it refuses unsupported state
    live = check_shards(training, shape, layout, rank)
    mine = layout.deduplicated().boxes_of(rank)
    sizes = {(t.name, t.kind): t.shape for t in layout.tensors}
    tensors = [
        StagedTensor(at, sizes[key], live[key].box, tensor.detach().to("cpu", copy=True).contiguous())
        for key in mine
        for at, tensor in zip(_keys(*key, slots_of), live[key].tensors, strict=True)
        if tensor is not None
    ]
    parameters = dict(training.parallel.parameters)
    lazy = lazy_optimizer_state.lazy_tensors(training.optimizer, tensor_slots)
    for (name, slot), tensor in lazy.items():
        if (place := lazy_optimizer_state.box_in_whole(parameters[name], tensor.shape)) is None:
            raise NotSerializable(f"{name}: {slot} is of shape {tuple(tensor.shape)} for a shard of the parameter")
        if tensor.numel():  # all holders of the shard have it; torch writes it once
            at = ("optim", "state", name, slot)
            tensors.append(StagedTensor(at, *place, tensor.detach().to("cpu", copy=True).contiguous()))
    values: dict[Key, Any] = {("clusterd", "scalars", str(rank)): rank_scalars}
    for name, slots in training.optimizer.state_by_name().items():
        for slot, value in slots.items():
            at = ("optim", "state", name, slot)
            if slot in tensor_slots[name] or value is None or (name, slot) in lazy:
                continue
            if isinstance(value, torch.Tensor):  # all holders of the parameter have it; torch writes it once
                whole = tuple((0, n) for n in value.shape)
                tensors.append(StagedTensor(at, tuple(value.shape), whole, value.detach().to("cpu", copy=True)))
            else:
                values[at] = plain_value(value, f"{name}: {slot}")
    if rank == 0:
        values["step",] = training.step
        values["optim", "param_groups"] = _groups(rank_scalars, shape)
        if rank_scalars["scheduler"] is not None:
            values["scheduler",] = rank_scalars["scheduler"]
    return Staged(training.step, tensors, values)


def stream_position(directory: str) -> tuple[int, Position | None]:
    """Step of a checkpoint, and the position of the stream after it; None: it has none."""
    values: dict[str, Any] = {}
    if "clusterd.scalars.0" in files.metadata(directory).state_dict_metadata:
        values = {"clusterd.scalars.0": None, "step": None}
        files.read(directory, {}, values)
    return int(values.get("step") or 0), values.get("clusterd.scalars.0", {}).get("stream")


def restore(training: Training, shape: ModelShape, directory: str) -> None:
    """Restore a rank, whose optimizer state is allocated, from a checkpoint of any plan.

    Raises:
        Refused: there is no checkpoint, or it is of another model.
        PlanRefused: the plan cannot cut some of its state.
    """
    if same_plan.is_for(directory, training.context.plan):
        same_plan.restore(training, shape, directory)
        return
    metadata = files.metadata(directory)
    known = metadata.state_dict_metadata
    ranks = sorted(key for key in known if key.startswith("clusterd.scalars."))
    if not ranks:
        raise Refused(f"the checkpoint in {directory} was not written by clusterd: it has no clusterd.scalars")
    values: dict[str, Any] = dict.fromkeys([*ranks, "step"])
    files.read(directory, {}, values)
    rank_scalars = [values[key] for key in ranks]
    parameter_groups.add_groups(training.optimizer, rank_scalars)
    absent = {name for source in rank_scalars for name in source["absent"]}
    sizes = {p.name: p.shape for p in shape.parameters}
    slots_of = _slots(shape)
    wanted: dict[str, files.Wanted] = {}
    live = local_shards(training, shape)
    for (name, kind), shard in live.items():
        if kind.startswith("optimizer") and name in absent:
            continue
        whole = sizes[name] if kind in ("parameter", "optimizer") else tuple(high for _, high in shard.box)
        for at, tensor in zip(_keys(name, kind, slots_of), shard.tensors, strict=True):
            assert tensor is not None
            wanted[".".join(at)] = whole, shard.box, tensor
    for key, (whole, _, _) in wanted.items():
        there = known.get(key)
        if not isinstance(there, TensorStorageMetadata) or tuple(there.size) != whole:
            has = tuple(there.size) if isinstance(there, TensorStorageMetadata) else "nothing"
            raise Refused(f"the checkpoint in {directory} has {has} for {key}, but the model needs {whole}")
    parameters = dict(training.parallel.parameters)
    lazy = lazy_optimizer_state.allocate_lazy_tensors(training.optimizer, scalars.tensor_slots(shape), metadata)
    for (name, slot), tensor in lazy.items():
        if (place := lazy_optimizer_state.box_in_whole(parameters[name], tensor.shape)) is None:
            raise PlanRefused(f"the checkpoint in {directory} has a {slot} for {name} that the plan cannot cut")
        if tensor.numel():
            wanted[f"optim.state.{name}.{slot}"] = *place, tensor
    files.read(directory, wanted, {})
    for shard in live.values():
        if shard.mirror is not None and (local := shard.tensors[0]) is not None:
            shard.mirror.copy_(local)
    takes_scripts_schedule = scalars.restore(training, shape, rank_scalars, lazy)
    plain = {name: p for name, _, p in training.optimizer.local}
    for (name, slot), tensor in lazy.items():
        training.optimizer.holder.state[plain[name]][slot] = tensor
    training.step = int(values["step"])
    if takes_scripts_schedule and training.schedule is not None:
        training.schedule.advance(training.step)


def _keys(name: str, kind: str, slots: dict[str, list[str]]) -> list[Key]:
    if kind in ("parameter", "buffer"):
        return [("model", name)]
    of = slots[name] if kind == "optimizer" else [kind.partition(".")[2]]
    return [("optim", "state", name, slot) for slot in of]


def _slots(shape: ModelShape) -> dict[str, list[str]]:
    """Names of each parameter's slots of its own shape, in order."""
    return {p.name: [name for name, _ in shape.slots_of(i)] for i, p in enumerate(shape.parameters)}


def _groups(rank_scalars: scalars.Scalars, shape: ModelShape) -> list[dict[str, Any]]:
    """Parameter groups of the whole model, with the values of this rank."""
    names = [[shape.parameters[i].name for i in group] for group in shape.parameter_groups]
    if len(names) != len(rank_scalars["groups"]):
        names = [group["names"] for group in rank_scalars["groups"]]
    return [{"params": n, **g["values"]} for n, g in zip(names, rank_scalars["groups"], strict=True)]
