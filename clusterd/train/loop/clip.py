"""Gradient clipping by the norm over the whole model, whatever part of it a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from clusterd.train.parallel.gradient_sync import local_gradient
from plans.plan import Plan


def clip_gradients(parameters: Iterable[nn.Parameter], plan: Plan, device: torch.device, limit: float) -> torch.Tensor:
    """Scales gradients so that their global 2-norm is at most `limit`.

    Every element counts once: the squares of what a rank holds are divided by the number of ranks that hold the
    same, and summed over all ranks.

    Returns:
        The norm before clipping, on `device`.
    """
    alike: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and (gradient := _elements(parameter)).numel():
            # A norm in bfloat16 has three digits: others for a shard and for the whole.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            alike.setdefault((_copies(parameter, plan), gradient.device, wide), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, _, wide), gradients in alike.items():
        norms = torch.stack(torch._foreach_norm(gradients, dtype=wide))
        total += (norms.double().square().sum() / copies).to(device)
    if dist.is_initialized():
        dist.all_reduce(total)
    norm = total.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for (_, where, _), gradients in alike.items():
        torch._foreach_mul_(gradients, scale.to(where))
    return norm


def _elements(parameter: nn.Parameter) -> torch.Tensor:
    """What of the gradient is on this rank and not zero by itself; a sparse one has each row once then."""
    gradient = local_gradient(parameter)
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    values: torch.Tensor = parameter.grad.values()
    return values


def _copies(parameter: nn.Parameter, plan: Plan) -> int:
    """Ranks of the stage that hold the same part of this parameter."""
    shards = 1
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate():
            shards *= parameter.device_mesh.size(dim)
    return plan.dp * plan.tp // shards
