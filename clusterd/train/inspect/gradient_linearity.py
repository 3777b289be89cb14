"""Linearity of the backward pass: gradients must be proportional to the loss, as plans weight it by shares.

Autograd is linear: twice the loss has twice the gradients. Custom backward code need not be. An auxiliary loss of
experts that adds its own gradient (as in Megatron and DeepSeek) has the same weight whatever the loss was multiplied
by; a gradient that is clipped in the backward pass depends on the number of samples in its mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clusterd.train.inspect.operations import storage_of
from clusterd.train.inspect.parameter_mutation import written_tensors
from clusterd.train.parallel import build

_SUMS = frozenset({"add", "add_", "sub", "sub_"})
_BENT = frozenset(
    f"{name}{place}"
    for name in (
        "abs", "clamp", "clamp_max", "clamp_min", "exp", "hardtanh", "linalg_vector_norm", "log", "nan_to_num", "norm",
        "pow", "relu", "round", "rsqrt", "sigmoid", "sign", "sqrt", "tanh",
    )
    for place in ("", "_")
)  # fmt: skip
_BLANK = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "zero_",
    "new_zeros", "_efficientzerotensor",
})  # fmt: skip
_OF_NO_GRADIENT = frozenset({
    "ones_like", "full_like", "new_ones", "new_full", "rand_like", "randn_like", "bernoulli", "eq", "ne", "lt", "le",
    "gt", "ge", "isnan", "isinf",
})  # fmt: skip
"""Operations whose result is not a gradient: it depends on the shape alone, or is a mask."""


class GradientLinearityTracer(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Tracks tensors that depend on the gradient of the loss through a backward pass.

    Attributes:
        added: True if something independent of that gradient is added to a gradient.
        nonlinear: True if a gradient is not proportional to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.added = self.nonlinear = False
        self._follow: set[int] = set()
        self._nothing: set[int] = set()  # zeros and uninitialised tensors
        self._alive: list[torch.Tensor] = []  # the address of a freed storage would be reused

    def run(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Run the backward pass of `loss`; gradients stay on the parameters."""
        seed = torch.ones_like(loss)
        self._note(seed, self._follow)
        with self:
            loss.backward(seed)
        gradients = _tensors([p.grad for _, p in build.named_parameters(model)])
        self.added |= any(storage_of(g) not in self._follow and not self._is_nothing(g) for g in gradients)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if function.namespace == "prim":
            return result
        name = function.__name__.partition(".")[0]
        given, into = _tensors((arguments, options)), list(written_tensors(function, arguments, options))
        following = [t for t in given if storage_of(t) in self._follow]
        if name in _BLANK:
            self._note((result, into), self._nothing)
        elif name in _OF_NO_GRADIENT:
            pass
        elif following:
            self._look(name, arguments, given, len(following))
            self._note((result, into), self._follow)
        elif given and (all(map(self._is_nothing, given)) or (_is_product(name) and any(map(self._is_nothing, given)))):
            self._note(result, self._nothing)
        return result

    def _look(self, name: str, arguments: Any, given: list[torch.Tensor], following: int) -> None:
        if name in _SUMS:
            others = [v for v in arguments[:2] if not isinstance(v, torch.Tensor)]
            nothing = sum(map(self._is_nothing, given))
            self.added = self.added or following + nothing < len(given) or any(others)
        product, ratio = name in ("mul", "mul_"), name in ("div", "div_")
        divided_by = ratio and isinstance(arguments[1], torch.Tensor) and storage_of(arguments[1]) in self._follow
        self.nonlinear = self.nonlinear or name in _BENT or (product and following > 1) or divided_by

    def _is_nothing(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._nothing

    def _note(self, made: Any, where: set[int]) -> None:
        for tensor in _tensors(made):
            self._alive.append(tensor)
            self._nothing.discard(storage_of(tensor))
            where.add(storage_of(tensor))


def _is_product(name: str) -> bool:
    return name in ("mul", "div", "mm", "bmm") or "backward" in name


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]
