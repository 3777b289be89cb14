"""Gradients of replicated tensors under tensor parallelism: each shard must get the whole gradient.

torch sums gradients where a module's input is whole and its weights are cut. Between such a module and the one that
gathers features again, each shard computes with its own features. A replicated tensor used there (the weight of a norm
per head, a gate, a temperature) gets a partial gradient on each shard: shards would silently diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clusterd.train.inspect.operations import storage_of
from clusterd.train.inspect.parameter_mutation import written_tensors
from clusterd.train.parallel import build
from clusterd.train.parallel.tp_styles import COLWISE, GATHERING, SUMMED


class TpGradientTracer(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Tracks partial features through the operations of a forward pass.

    Attributes:
        problem: description of a gradient that would differ between shards; empty: none found.
    """

    def __init__(self, model: nn.Module, styles: Mapping[str, str]) -> None:
        """Register hooks on `model`, which is already sharded and gathers around the modules of `styles`."""
        super().__init__()
        self.problem = ""
        self._names = {storage_of(p): build.global_name(name) for name, p in model.named_parameters()}
        self._alive: list[torch.Tensor] = []  # the address of a freed storage would be reused
        self._parts: set[int] = set()
        self._inside = 0
        for path, style in styles.items():
            if style != "replicate":
                model.get_submodule(path).register_forward_pre_hook(self._enter)
                # Before the script's own hooks, which compute with partial features too.
                model.get_submodule(path).register_forward_hook(self._leave(path, style), prepend=True)

    def end(self, loss: Any) -> None:
        """Check the loss after the pass; other outputs (attention maps) may be partial."""
        if any(storage_of(t) in self._parts for t in _tensors(loss)):
            self.problem = self.problem or "each computes the loss from a part of the features"

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if self._inside:
            return result
        given, name = _tensors((arguments, options)), function.__name__
        whole = [t for t in given if storage_of(t) not in self._parts]
        if len(whole) == len(given):
            if len(given) == 1 and storage_of(given[0]) in self._names:  # a view, or another dtype
                self._keep(result, lambda made: self._names.setdefault(made, self._names[storage_of(given[0])]))
        elif "_like" not in name and not name.startswith("new_"):  # these use the shape alone
            if torch.is_grad_enabled() and (trainable := [t for t in whole if t.requires_grad]):
                tensor_name = self._names.get(
                    storage_of(trainable[0]), f"a tensor that needs a gradient ({name.partition('.')[0]})"
                )
                self.problem = self.problem or f"{tensor_name} is replicated but computed with partial features"
            for storage in map(storage_of, written_tensors(function, arguments, options)):
                if storage in self._names and storage not in self._parts:
                    problem = f"{self._names[storage]} is replicated, but partial features are written into it"
                    self.problem = self.problem or problem
            self._keep(result, self._parts.add)
        return result

    def _keep(self, result: Any, note: Callable[[int], object]) -> None:
        for tensor in _tensors(result):
            self._alive.append(tensor)
            note(storage_of(tensor))

    def _enter(self, *_: Any) -> None:
        self._inside += 1

    def _leave(self, path: str, style: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._inside -= 1
            if style == SUMMED and not any(storage_of(t) in self._parts for t in _tensors(inputs)):
                self.problem = self.problem or f"{path} gets whole features, whose gradients {style} would sum"
            elif style == SUMMED or style in COLWISE - GATHERING:
                self._keep(outputs, self._parts.add)

        return hook


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
