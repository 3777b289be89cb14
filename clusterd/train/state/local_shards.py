"""Shards that this rank holds, read from its live objects: tensors under global names, and their boxes.

`plans.layout` computes the same from the plan alone. Before the state is moved or stored a rank compares the two here,
so that a difference between the computed layout and torch's sharding is an error and never a wrong weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from clusterd.plans.layout import Layout, Tensor
from clusterd.plans.model_shape import ModelShape, OddSlot
from clusterd.train.parallel import build
from clusterd.train.parallel.gradient_sync import local_tensor
from clusterd.train.process.plain_data import NotSerializable
from clusterd.train.state.training import Training

Box = tuple[tuple[int, int], ...]
"""One (low, high) per dimension, half-open, in the whole tensor."""


class ShardMismatch(NotSerializable):
    """Live objects are not sharded as their plan's layout says."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Local part of one tensor of the collection.

    Attributes:
        tensors: one per slot of this box, in the order in which slots migrate; None if the optimizer has not created it
            for this parameter yet.
        mirror: a copy of a parameter in host memory that must be kept equal (offload=optimizer).
    """

    box: Box
    tensors: tuple[torch.Tensor | None, ...]
    mirror: torch.Tensor | None = None


def local_shards(training: Training, shape: ModelShape) -> dict[tuple[str, str], LocalShard]:
    """All shards of this rank, by (global name, kind); empty ones are left out."""
    index = {p.name: i for i, p in enumerate(shape.parameters)}
    odd: dict[int, list[OddSlot]] = {}
    for odd_slot in shape.odd_slots:
        odd.setdefault(odd_slot.parameter, []).append(odd_slot)
    plain = {name: p for name, _, p in training.optimizer.local}
    updated = training.optimizer.updated()
    state = training.optimizer.holder.state
    found: dict[tuple[str, str], LocalShard] = {}
    for name, parameter in training.parallel.parameters:
        box = box_of(parameter)
        if any(high <= low for low, high in box):
            continue
        local = local_tensor(parameter).detach()
        mirror = plain.get(name) if training.optimizer.in_host_memory else None
        found[name, "parameter"] = LocalShard(box, (local,), mirror.detach() if mirror is not None else None)
        if name not in updated or name not in index:
            continue
        slot_values = state.get(plain[name], {})
        if slots := shape.slots_of(index[name]):
            found[name, "optimizer"] = LocalShard(box, tuple(_tensor(slot_values.get(slot)) for slot, _ in slots))
        for odd_slot in odd.get(index[name], ()):
            whole = tuple((0, n) for n in odd_slot.shape)
            found[name, f"optimizer.{odd_slot.name}"] = LocalShard(whole, (_tensor(slot_values.get(odd_slot.name)),))
    for name, buffer in training.parallel.module.named_buffers(remove_duplicate=False):
        if buffer.numel():
            found[build.global_name(name), "buffer"] = LocalShard(tuple((0, n) for n in buffer.shape), (buffer,))
    return found


def clone_changing(training: Training, live: dict[tuple[str, str], LocalShard], tensors: Iterable[Tensor]) -> None:
    """Replace those of `tensors` that the next forward pass may change by clones: buffers, and written parameters."""
    written = {*training.shape.written, *training.parallel.written}
    for tensor in tensors:
        if tensor.kind == "buffer" or (tensor.kind == "parameter" and tensor.name in written):
            key = tensor.name, tensor.kind
            live[key] = replace(live[key], tensors=tuple(t.clone() for t in live[key].tensors if t is not None))


def box_of(tensor: Any) -> Box:
    """Box of the part of `tensor` that lies on this rank: the whole, unless it is a sharded DTensor.

    Shards of several mesh dimensions nest: plain ones are cut first, strided ones (FSDP2 over tensor parallelism) then
    cut the remainder.
    """
    box = [(0, n) for n in tensor.shape]
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tuple(box)
    coordinates = tensor.device_mesh.get_coordinate()
    shards = [(hasattr(p, "split_factor"), i, p) for i, p in enumerate(placements) if hasattr(p, "dim")]
    for _, mesh_dim, placement in sorted(shards, key=lambda s: s[:2]):
        low, high = box[placement.dim]
        each = -(-(high - low) // tensor.device_mesh.size(mesh_dim))
        part = coordinates[mesh_dim]
        box[placement.dim] = (min(low + part * each, high), min(low + (part + 1) * each, high))
    return tuple(box)


def check_shards(training: Training, shape: ModelShape, layout: Layout, rank: int) -> dict[tuple[str, str], LocalShard]:
    """All shards of this rank, checked against `layout`.

    Args:
        shape: of the job's model, from which the layout was computed.
    Raises:
        ShardMismatch: names the first tensor that is not cut as computed, or is missing on either side.
    """
    live = local_shards(training, shape)
    computed = layout.boxes_of(rank)
    where = f"rank {rank} of {training.parallel.plan}"
    made = {(t.name, t.kind): t for t in layout.tensors}
    for (name, kind), shard in live.items():
        there, whole = made.get((name, kind)), tuple(high for _, high in shard.box)
        if there is None or (kind == "buffer" and there.shape != whole):
            was = f"of shape {there.shape}" if there is not None else "none"
            raise ShardMismatch(
                f"the {kind} {name} is of shape {whole}, but was {was} when the model was made, which is not "
                "supported: let the model's factory make all that it will have, with its final shape (pruning too)"
            )
    for key, box in computed.items():
        if key not in live:
            raise ShardMismatch(f"{where} should hold {_named(key, box)}, but has none of it")
        if live[key].box != box:
            raise ShardMismatch(f"{where} should hold {_named(key, box)}, but holds {_text(live[key].box)}")
    for key, shard in live.items():
        if key not in computed:
            raise ShardMismatch(f"{where} holds {_named(key, shard.box)}, which its plan assigns to other ranks")
    for key, shard in live.items():
        _check_tensors(where, key, shard, made[key].element_bytes)
    return live


def _check_tensors(where: str, key: tuple[str, str], shard: LocalShard, element_bytes: int) -> None:
    extent = tuple(high - low for low, high in shard.box)
    there = [t for t in shard.tensors if t is not None]
    odd = next((t for t in there if tuple(t.shape) != extent), None)
    if odd is None and len(there) == len(shard.tensors) and sum(t.element_size() for t in there) != element_bytes:
        odd = there[0]
    if odd is not None:
        form = f"as {odd.dtype} of shape {tuple(odd.shape)}"
        which = ": no rule cuts state whose form depends on values" if key[1].startswith("optimizer") else ""
        raise ShardMismatch(
            f"{where} holds {_named(key, shard.box)} {form}, not in {element_bytes} bytes per element{which}"
        )


def _named(key: tuple[str, str], box: Box) -> str:
    return f"{key[0]} ({key[1]}) {_text(box)}"


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


def _tensor(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) else None
