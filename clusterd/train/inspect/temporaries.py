"""Temporary memory of an optimizer update on CUDA, measured on small stand-ins.

On CUDA torch's optimizers update all tensors at once ("foreach"), and so do their temporaries: AdamW's denominators
are one more copy of all parameters, beside parameters, gradients and state. On CPUs updates go tensor by tensor, and
Adafactor, used where memory is short, does so on CUDA too by default.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clusterd.train.parallel.optimizer_slots import ParameterSpec, trial_update
from clusterd.train.process.exits import Refused
from clusterd.train.process.job import OptimizerFactory, SchedulerFactory

UNKNOWN_RATIO = 1.0


def temporaries_ratio(
    factory: OptimizerFactory, parameters: Sequence[ParameterSpec], scheduler: SchedulerFactory | None = None
) -> float:
    """Peak bytes of temporaries of an update, per byte of the trainable ones of `parameters`.

    Too low for an optimizer that goes tensor by tensor on CUDA too, if one tensor is most of the model.
    """
    try:
        trained = [p for p in parameters if p.trainable]
        optimizer, plain = trial_update(factory, trained, scheduler)
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = not isinstance(optimizer, torch.optim.Adafactor)
        existing = [t for p in plain for t in (p, p.grad, *optimizer.state.get(p, {}).values())]
        with (
            torch.random.fork_rng(devices=[]),
            _AllocationTracker(t for t in existing if isinstance(t, torch.Tensor)) as tracker,
        ):
            optimizer.step()
    except Refused:
        raise
    except Exception:  # any error of the trial: assume the ratio of most optimizers
        return UNKNOWN_RATIO
    # Groups are updated in turn; the largest real group may be another share of the whole than the stand-ins'.
    sizes = {
        id(p): math.prod(outline.shape) * outline.dtype.itemsize for p, outline in zip(plain, trained, strict=True)
    }
    largest_bytes = max((sum(sizes[id(p)] for p in group["params"]) for group in optimizer.param_groups), default=0)
    tried_bytes = max((sum(p.nbytes for p in group["params"]) for group in optimizer.param_groups), default=0)
    return tracker.peak_bytes / tried_bytes * largest_bytes / sum(sizes.values()) if largest_bytes else 0.0


class _AllocationTracker(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Counts the memory of live new tensors; single elements are ignored.

    Attributes:
        peak_bytes: the maximum.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak_bytes = self._bytes = 0
        self._storages = {t.untyped_storage()._cdata for t in existing}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and math.prod(tensor.shape) > 1:
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self._bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

        def gone() -> None:
            self._storages.discard(key)
            self._bytes -= size_bytes

        weakref.finalize(tensor, gone)
