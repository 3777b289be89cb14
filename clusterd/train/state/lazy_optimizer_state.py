"""Optimizer state that appears after the first update: slow weights, averages that start at some step.

Migrations and state snapshots are laid out by the slots that a trial update finds (`optimizer_slots`). A checkpoint
also stores these later tensors, under the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.state.local_shards import Box, box_of

Slot = tuple[str, str]
"""Global name of a parameter, and the optimizer's name of a slot."""


def lazy_tensors(optimizer: RankOptimizer, known: Mapping[str, set[str]]) -> dict[Slot, torch.Tensor]:
    """Lazily created tensors of this rank.

    Args:
        known: slots of each parameter that migrate as tensors.
    """
    state, updated = optimizer.holder.state, optimizer.updated()
    found: dict[Slot, torch.Tensor] = {}
    for name, parameter, plain in optimizer.local:
        for slot, value in state.get(plain, {}).items() if name in updated else ():
            if slot in known.get(name, ()) or not isinstance(value, torch.Tensor):
                continue
            # A shard may have one element, as counters do.
            is_part = value.dim() > 0 and value.shape == plain.shape != parameter.shape
            if value.numel() != 1 or is_part:
                found[name, slot] = value
    return found


def allocate_lazy_tensors(
    optimizer: RankOptimizer, known: Mapping[str, set[str]], metadata: Metadata
) -> dict[Slot, torch.Tensor]:
    """New tensors for this rank's part of the lazy state in a checkpoint."""
    updated = optimizer.updated()
    local = {name: (parameter, plain) for name, parameter, plain in optimizer.local if name in updated}
    found: dict[Slot, torch.Tensor] = {}
    for key, path in (metadata.planner_data or {}).items():
        there: Any = metadata.state_dict_metadata.get(key)
        if not isinstance(there, TensorStorageMetadata) or tuple(path[:2]) != ("optim", "state"):
            continue
        _, _, name, slot = path
        if name in local and slot not in known.get(name, ()) and there.size.numel() != 1:
            parameter, plain = local[name]
            size = plain.shape if there.size == parameter.shape else there.size
            found[name, slot] = torch.empty(size, dtype=there.properties.dtype, device=plain.device)
    return found


def box_in_whole(parameter: torch.Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], Box] | None:
    """Whole shape, and box in it, of optimizer state for `parameter` that has `shape` on this rank.

    State is cut like the parameter or, with another shape, not at all. None: it has another shape for a shard.
    """
    whole, box = tuple(parameter.shape), box_of(parameter)
    if tuple(shape) == tuple(high - low for low, high in box):
        return whole, box
    if box != tuple((0, n) for n in whole):
        return None
    return tuple(shape), tuple((0, n) for n in shape)
