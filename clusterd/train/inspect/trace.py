"""Costs of a forward pass of one sample by layer: saved bytes, outputs, tensor-parallel traffic, FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from clusterd.plans.model_shape import LayerShape
from clusterd.train.inspect.operations import storage_of


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


# Attention kernel of CPUs; torch counts only those of accelerators.
_FLOPS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
_OUTSIDE, LOSS = -1, -2
"""Places in a forward pass, beside the index of a layer."""


class Trace:
    """Counts costs by place in the model over one forward pass of one sample.

    Attributes:
        place: current place: index of a layer, LOSS, or outside.
        counter: FLOP counter; enter it around the pass, and `casts`, with `save` as an autograd hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self.saved_bytes: dict[int, int] = {}
        self.cast_bytes: dict[int, int] = {}
        self.output_bytes: dict[int, int] = {}
        self.reduced_bytes: dict[int, int] = {}
        self.flops: dict[int, int] = {}
        self.place = _OUTSIDE
        self.casts = _Casts(model)
        self.counter = FlopCounterMode(display=False, custom_mapping=_FLOPS)
        self._seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self._entered_at = 0

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd hook: count a saved tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            counts = self.cast_bytes if self.casts.made(tensor) else self.saved_bytes
            counts[self.place] = counts.get(self.place, 0) + storage.nbytes()
        return tensor

    def enter(self, place: int) -> Callable[..., None]:
        """Hook for before the layer with this index."""

        def hook(*_: Any) -> None:
            self.place, self._entered_at = place, self.counter.get_total_flops()

        return hook

    def leave(self, place: int) -> Callable[..., None]:
        """Hook for after the layer with this index."""

        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self.flops[place] = self.flops.get(place, 0) + self.counter.get_total_flops() - self._entered_at
            self.output_bytes[place] = _tensor_bytes(outputs)
            self.place = _OUTSIDE

        return hook

    def reduced(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Hook for after a module whose results the shards sum or gather."""
        self.reduced_bytes[self.place] = self.reduced_bytes.get(self.place, 0) + _tensor_bytes(outputs)


class _Casts(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Tracks copies of parameters in another dtype, as autocast makes them; their size is independent of the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._made: dict[int, torch.Tensor] = {}  # by storage; kept alive: a freed address would be reused

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten._to_copy.default and storage_of(arguments[0]) in self._parameters:
            self._made[storage_of(result)] = result
        return result

    def made(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is such a copy, or a view of one."""
        return storage_of(tensor) in self._made


def layer_shapes(
    paths: list[str], blocks: set[str], whole: Trace, part: Trace | None, degree: int
) -> tuple[list[LayerShape], int]:
    """Layers with their counts; operations outside all layers are one more, without a name."""
    layers = []
    for place in [*range(len(paths)), _OUTSIDE]:
        saved = whole.saved_bytes.get(place, 0)
        cast = whole.cast_bytes.get(place, 0)
        if place == _OUTSIDE and not saved + cast:
            continue
        cut = 0
        if part is not None:
            # saved = whole + cut, and with shards: whole + cut / degree.
            cut = max(0, (saved - part.saved_bytes.get(place, 0)) * degree // (degree - 1))
        layers.append(
            LayerShape(
                name="" if place == _OUTSIDE else paths[place],
                block=place != _OUTSIDE and paths[place] in blocks,
                activation_bytes=max(0, saved - cut),
                activation_tp_bytes=min(cut, saved),
                output_bytes=whole.output_bytes.get(place, 0),
                tp_reduced_bytes=part.reduced_bytes.get(place, 0) if part is not None else 0,
                flops=whole.flops.get(place, 0),
                cast_bytes=cast,
            )
        )
    return layers, whole.saved_bytes.get(LOSS, 0)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0


# Functions and methods that "CUDA Ops that can autocast to float32" of torch's documentation names.
_IN_FLOAT32 = {
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cosh",
    "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv",
    "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log_softmax", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss",
    "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss",
    "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
}  # fmt: skip


class CudaAutocast(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
    """Context, inside autocast for CPUs, in which the operations of CUDA's list compute in float32.

    A machine that inspects a model may have no GPU, and torch's autocast for CPUs computes in bfloat16 what CUDA's does
    not: a trace would count half of the bytes that CUDA saves there.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is F.cross_entropy:
            with torch.autocast("cpu", enabled=False):
                return _cross_entropy(*arguments, **options)
        if getattr(function, "__name__", "") in _IN_FLOAT32:
            # Autocast is off inside: it would cast the inputs of parts of the function back.
            with torch.autocast("cpu", enabled=False):
                return function(*map(_widened, arguments), **{k: _widened(v) for k, v in options.items()})
        return function(*arguments, **options)


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: Any = None, *positional: Any, **options: Any
) -> torch.Tensor:
    """Cross entropy under CUDA's autocast: it takes the logarithm in the dtype of the logits, and then casts.

    Both are saved, which for half precision is more than float32 alone.
    """
    if positional or target.is_floating_point() or options.get("label_smoothing"):
        return F.cross_entropy(_widened(logits), _widened(target), _widened(weight), *positional, **options)
    logarithms = F.log_softmax(logits, min(1, logits.dim() - 1))
    options.pop("label_smoothing", None)
    return F.nll_loss(logarithms.float(), target, _widened(weight), **options)


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
