"""Gradient sums over replicas that are themselves spread over tensor-parallel shards or pipeline stages.

torch's DistributedDataParallel takes no DTensor parameters ("got mixed torch.Tensor and DTensor"), and miscounts its
buckets where the 1f1b schedule runs a forward pass before the backward pass of the one before ("rebuilt parameter
indices size is not same as original model parameters size"). `fully_shard` over groups of one keeps a second copy of
all parameters. So gradients are summed here, in buckets, while the backward pass still runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BUCKET_BYTES = 25 << 20


class GradientSum:
    """Sums gradients over a group once every parameter has seen all micro-batches of the step."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, *, micro_batches: int) -> None:
        self._group, self._micro_batches = group, micro_batches
        self._seen: dict[nn.Parameter, int] = {}
        self._bucket: list[torch.Tensor] = []
        self._bucket_bytes = 0
        self._in_flight: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def finish(self) -> None:
        """Waits until every gradient of the step is summed; to be called after the last backward pass.

        Raises:
            RuntimeError: the model left a parameter out of some micro-batches only: its gradient was not summed.
        """
        self._flush()
        for parameter, seen in self._seen.items():
            if seen < self._micro_batches:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} got a gradient in {seen} of {self._micro_batches} "
                    "micro-batches; under dp with tp or pp the model must use a parameter in all of them or in none"
                )
        for work, flat, gradients in self._in_flight:
            work.wait()
            for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(summed)
        self._in_flight.clear()
        self._seen.clear()

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self._seen[parameter] = seen = self._seen.get(parameter, 0) + 1
        if seen == self._micro_batches:
            gradient = local_gradient(parameter)
            self._bucket.append(gradient)
            self._bucket_bytes += gradient.nbytes
            if self._bucket_bytes >= BUCKET_BYTES:
                self._flush()

    def _flush(self) -> None:
        # Gradients come in the order of the backward pass, the same on every replica.
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in self._bucket:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            flat = _flatten_dense_tensors(gradients)
            self._in_flight.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, gradients))
        self._bucket, self._bucket_bytes = [], 0


def local_tensor(tensor: Any) -> torch.Tensor:
    """What of `tensor` lies on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """What of the gradient lies on this rank, laid out as the parameter is."""
    gradient: Any = parameter.grad
    if hasattr(gradient, "placements") and gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)
