"""What an optimizer begins to keep after its first update: slow weights, averages that start at some step.

Which slots there are is found out before training, by one update of small stand-ins (`optimizer_slots`), and moves
and snapshots are laid out by that. A checkpoint has room for whatever is there, under the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.state.local_shards import Box, box_of

Slot = tuple[str, str]
"""Global name of a parameter, and what the optimizer calls what it keeps for it."""


def lazy_tensors(optimizer: RankOptimizer, known: Mapping[str, set[str]]) -> dict[Slot, torch.Tensor]:
    """Late tensors of this rank.

    Args:
        known: slots of each parameter that move as tensors.
    """
    state, updated = optimizer.holder.state, optimizer.updated()
    found: dict[Slot, torch.Tensor] = {}
    for name, parameter, plain in optimizer.local:
        for slot, value in state.get(plain, {}).items() if name in updated else ():
            if slot in known.get(name, ()) or not isinstance(value, torch.Tensor):
                continue
            # A part may have one element, as counters have.
            is_part = value.dim() > 0 and value.shape == plain.shape != parameter.shape
            if value.numel() != 1 or is_part:
                found[name, slot] = value
    return found


def allocate_lazy_tensors(
    optimizer: RankOptimizer, known: Mapping[str, set[str]], metadata: Metadata
) -> dict[Slot, torch.Tensor]:
    """New tensors for what was late in a checkpoint, as far as it is this rank's."""
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
    """Shape of the whole, and the box in it, of what is kept for `parameter` and has `shape` on this rank.

    It is cut as the parameter is, or, with another shape, whole. None: it is of another shape for a part of one.
    """
    whole, box = tuple(parameter.shape), box_of(parameter)
    if tuple(shape) == tuple(high - low for low, high in box):
        return whole, box
    if box != tuple((0, n) for n in whole):
        return None
    return tuple(shape), tuple((0, n) for n in shape)
