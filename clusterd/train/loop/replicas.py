"""Comparison of replicas: what they hold alike must stay alike, or they train models of their own.

After some of the first steps of a process and every so many later ones, each replica adds up norms of its parameters
and of its optimizer's state, on the device, and the sums are compared within the next step. Nothing waits for that.
Buffers are not compared here: running statistics are each replica's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.parallel.gradient_sync import local_tensor
from clusterd.train.process import accelerator
from clusterd.train.process.exits import Refused
from clusterd.train.state.training import Training

EVERY = 100

SAME_DEVICES, OTHER_DEVICES = 1e-9, 1e-5
"""Relative differences that count: replicas on equal devices compute the same, others round otherwise."""


def is_sampled(number: int) -> bool:
    """True for 1, 2, 4, ..., and every hundredth: for what is looked at now and then, more often at first."""
    return number % EVERY == 0 or (number < EVERY and number & (number - 1) == 0)


class ReplicaComparison:
    """Comparisons of one rank with those that hold the same under its plan."""

    def __init__(self, training: Training) -> None:
        self._training, self._first = training, training.step
        plan = training.context.plan
        self._group = training.parallel.dp_group if plan.zero <= 1 else None
        self._sums: torch.Tensor | None = None  # highest and negated lowest of all replicas, in flight
        self._work: Any = None
        self._step = 0
        self._tolerance: float | None = None  # not asked here, where the loss of a peer would be the end of this rank

    def begin(self) -> None:
        """Begin a comparison after a step, if one is due."""
        step = self._training.step
        if self._group is None or not is_sampled(step - self._first):
            return
        if self._tolerance is None:
            names: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(names, accelerator.name_of(self._training.device), group=self._group)
            self._tolerance = SAME_DEVICES if len(set(names)) == 1 else OTHER_DEVICES
        norms = [norm for _, norm in self._norms()]
        weights = torch.cos(torch.arange(len(norms), dtype=torch.float64, device=self._training.device)) + 2
        total = torch.stack(norms).dot(weights)
        self._sums, self._step = torch.stack([total, -total]), step
        self._work = dist.all_reduce(self._sums, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def end(self) -> None:
        """Read the comparison in flight, if any.

        Raises:
            Refused: on every replica, naming what differs.
        """
        if self._sums is None or self._tolerance is None:
            return
        self._work.wait()
        (highest, lowest), self._sums = self._sums.tolist(), None
        if highest + lowest <= self._tolerance * abs(highest) or not math.isfinite(highest):
            return
        own = [(name, float(norm)) for name, norm in self._norms()]
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, own, group=self._group)
        low, high = self._extremes(every)
        pairs = [(abs(a - b) / (abs(a) or 1.0), name, a, b) for (name, a), (_, b) in zip(low, high, strict=True)]
        _, name, one, other = max(pairs)
        raise Refused(
            f"replicas have diverged by step {self._step}: the norm of {name} is {one:.6g} on one and {other:.6g} on "
            "another. Does the optimizer draw from a generator of its own, or does something change parameters by the "
            "samples that a replica sees?"
        )

    def _extremes(self, every: list[Any]) -> tuple[Any, Any]:
        totals = [sum(norm for _, norm in one) for one in every]
        return every[totals.index(min(totals))], every[totals.index(max(totals))]

    def _norms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Norm of everything that replicas hold alike, by name."""
        training = self._training
        named = [(name, local_tensor(parameter.detach())) for name, parameter in training.parallel.parameters]
        if training.context.plan.zero == 0:
            for name, slots in training.optimizer.state_by_name().items():
                named += [(f"{name}: {slot}", v.detach()) for slot, v in slots.items() if isinstance(v, torch.Tensor)]
        device = training.device.type
        named = [(name, t) for name, t in named if t.is_floating_point() and t.numel() and t.device.type == device]
        # In float64: ranks of other numbers of threads sum in other orders.
        norms = torch._foreach_norm([tensor for _, tensor in named], dtype=torch.float64)
        return zip((name for name, _ in named), norms, strict=True)
