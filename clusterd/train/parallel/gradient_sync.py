"""Gradient reduction over replicas that are themselves tensor-parallel shards or pipeline stages.

torch's DistributedDataParallel rejects DTensor parameters ("got mixed torch.Tensor and DTensor"), and miscounts its
buckets when the 1f1b schedule runs a forward pass before the previous backward pass ("rebuilt parameter indices size is
not same as original model parameters size"). `fully_shard` over groups of one keeps a second copy of all parameters.
So gradients are summed here, in buckets, while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from clusterd.train.process.exits import SAVES_SHARDS, PlanRefused

BUCKET_BYTES = 25 << 20


class GradientSum:
    """Sums gradients over a group, in buckets that are the same on every replica.

    A bucket is sent once all its parameters have seen all micro-batches of the step and the buckets before it are in
    flight. A parameter that a replica did not use counts as zero there; one that no replica used gets no gradient.
    Backward passes of the script's own, outside of steps, sum nothing.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, *, micro_batches: int) -> None:
        self._group, self._micro_batches = group, micro_batches
        self._buckets = _buckets(parameters)
        self._bucket_of = {p: number for number, bucket in enumerate(self._buckets) for p in bucket}
        self.drop()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def finish(self) -> None:
        """Wait until every gradient of the step is summed; call after the last backward pass."""
        while len(self._in_flight) < len(self._buckets):
            self._send()
        for bucket, (work, flat) in zip(self._buckets, self._in_flight, strict=True):
            work.wait()
            gradients, used = flat[: -len(bucket)], flat[-len(bucket) :]
            by_any = used.tolist() if any(p.grad is None for p in bucket) else [1.0] * len(bucket)
            parts = _unflatten_dense_tensors(gradients, [local_tensor(p.detach()) for p in bucket])
            for parameter, summed, count in zip(bucket, parts, by_any, strict=True):
                if count:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    local_tensor(parameter.grad).copy_(summed)
        self.drop()

    def begin(self) -> None:
        """Begin a step."""
        self.drop()
        self._in_step = True

    def drop(self) -> None:
        """End a step, and free its buckets if it is unfinished."""
        self._in_step = False
        self._seen: dict[nn.Parameter, int] = {}
        self._lacking = [len(bucket) for bucket in self._buckets]
        self._in_flight: list[tuple[Any, torch.Tensor]] = []

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if not self._in_step:
            return
        self._seen[parameter] = seen = self._seen.get(parameter, 0) + 1
        if seen == self._micro_batches:
            self._lacking[self._bucket_of[parameter]] -= 1
            while len(self._in_flight) < len(self._buckets) and not self._lacking[len(self._in_flight)]:
                self._send()

    def _send(self) -> None:
        """Send the next bucket: its gradients, and a flag for each that exists."""
        bucket = self._buckets[len(self._in_flight)]
        gradients = [
            torch.zeros_like(local_tensor(p.detach())) if p.grad is None else local_gradient(p) for p in bucket
        ]
        used = gradients[0].new_ones(len(bucket))
        for index, parameter in enumerate(bucket):
            if parameter.grad is None:
                used[index] = 0.0
        flat = _flatten_dense_tensors([*gradients, used])
        self._in_flight.append((dist.all_reduce(flat, group=self._group, async_op=True), flat))


def mean_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients as DistributedDataParallel would, after the backward pass of a step.

    DistributedDataParallel finds unused parameters by walking the graph of the outputs, which lacks the operations
    inside reentrant checkpoints (`torch.utils.checkpoint`): it takes their parameters for unused, and fails when their
    gradients arrive.
    """
    sum_gradients(parameters, group)
    replicas = dist.get_world_size(group)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(replicas)


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradient of each parameter over the group; a parameter without gradient on all ranks gets none."""
    kinds = [0 if p.grad is None else 2 if p.grad.is_sparse else 1 for p in parameters]
    known = torch.tensor(kinds, device=parameters[0].device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX, group=group)
    kind_of = dict(zip(parameters, known.tolist(), strict=True))
    for bucket in _buckets([p for p in parameters if kind_of[p] == 1]):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local_gradient(p) for p in bucket]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(summed)
    for parameter in (p for p in parameters if kind_of[p] == 2):
        gradient = torch.sparse_coo_tensor(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        gradient = (gradient if parameter.grad is None else parameter.grad).coalesce()
        dist.all_reduce(gradient, group=group)
        parameter.grad = gradient


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Buckets of one dtype each, in the likely order of the backward pass."""
    done: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(local_tensor(p.detach()).nbytes for p in bucket) >= BUCKET_BYTES:
            done.append(filling.pop(parameter.dtype))
    return [*done, *filling.values()]


def local_tensor(tensor: Any) -> torch.Tensor:
    """Part of `tensor` that lies on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


_saves_parts: ContextVar[bool] = ContextVar("saves_parts", default=False)


@contextmanager
def saving_parts() -> Iterator[None]:
    """Context in which clusterd itself saves what a rank has, for the same plan."""
    token = _saves_parts.set(True)
    try:
        yield
    finally:
        _saves_parts.reset(token)


def refuse_parts() -> None:
    """Refuse that the script saves a part of the weights or of the optimizer's state: a file would lack the rest.

    Raises:
        PlanRefused: this is not in `saving_parts`.
    """
    if not _saves_parts.get():
        raise PlanRefused(SAVES_SHARDS)


def adapt_sharded() -> None:
    """Make ``p.data = ...`` of a sharded parameter change the shard, and a pickle of it fail.

    torch drops the one without a word, and writes files with the other that no single process can load.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    plain = torch.Tensor.data

    def assign(parameter: Any, value: Any) -> None:
        if parameter.is_meta or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            plain.__set__(parameter, value)
            return
        if not isinstance(value, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        with torch.no_grad():
            parameter.copy_(value)

    reduce = DTensor.__reduce_ex__

    def pickled(parameter: Any, protocol: Any) -> Any:
        refuse_parts()
        return reduce(parameter, protocol)

    if "data" not in vars(DTensor):
        DTensor.data = property(plain.__get__, assign)
        DTensor.__reduce_ex__ = pickled


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Part of the gradient that lies on this rank, sharded like the parameter."""
    gradient: Any = parameter.grad
    if hasattr(gradient, "placements") and gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)
