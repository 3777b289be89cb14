"""Gradient clipping by the norm over the whole model, whatever part of it a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from clusterd.train.replicate import local_gradient
from plans.plan import Plan


def clip_gradients(parameters: Iterable[nn.Parameter], plan: Plan, device: torch.device, limit: float) -> torch.Tensor:
    """Scales gradients so that their global 2-norm is at most `limit`.

    Every element counts once: the squares of what a rank holds are divided by the number of ranks that hold the
    same, and summed over all ranks.

    Returns:
        The norm before clipping, on `device`.
    """
    gradients = [(local_gradient(p), _copies(p, plan)) for p in parameters if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies in sorted({c for _, c in gradients}):
        norms = [n.to(device) for n in torch._foreach_norm([g for g, c in gradients if c == copies and g.numel()])]
        if norms:
            total += torch.stack(norms).double().square().sum() / copies
    if dist.is_initialized():
        dist.all_reduce(total)
    norm = total.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient, _ in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for where, tensors in by_device.items():
        torch._foreach_mul_(tensors, scale.to(where, tensors[0].dtype))
    return norm


def _copies(parameter: nn.Parameter, plan: Plan) -> int:
    """Ranks of the stage that hold the same part of this parameter."""
    shards = 1
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard():
            shards *= parameter.device_mesh.size(dim)
    return plan.dp * plan.tp // shards
