"""Writes of a forward pass into parameters, which plans must not repeat, distribute or lose.

A norm that an embedding keeps (``max_norm``), clipped weights, targets that follow by a moving average: with one
process they are in its parameters at once. Replicas write values that depend on their own samples, micro-batches and
recomputation write more than once, and FSDP2 discards writes into gathered parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clusterd.train.inspect.operations import storage_of
from clusterd.train.parallel import build

_SAME_AGAIN = frozenset({"clamp_", "clamp_min_", "clamp_max_", "embedding_renorm_", "fill_", "zero_"})
"""Idempotent operations, also at different times of a step."""

_LOOK_UP = frozenset({"embedding_renorm_", "embedding", "_embedding_bag", "_embedding_bag_forward_only", "detach"})
"""Reads of a renormed table that see only rows already renormed."""


class ParameterMutationTracer(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Tracks parameters, and values that depend on samples or random numbers, through forward passes.

    Attributes:
        sample_dependent: global name of a parameter that gets values depending on samples or random numbers; empty:
            none.
        not_idempotent: name of one into which a second pass would write other values.
        sparse: name of one with sparse gradients (embedding lookups).
        pipeline_refusal: reason if one changes before another micro-batch's backward pass needs it.
        complete: True if all passes ran to their end.
    """

    def __init__(self, model: nn.Module, *given: torch.Tensor) -> None:
        """Track the parameters of `model`; `given`: the samples."""
        super().__init__()
        self.sample_dependent = self.not_idempotent = self.sparse = self.pipeline_refusal = ""
        self.complete = False
        self._model = model
        self._parameters = dict(build.named_parameters(model))
        self._before = {name: (p, storage_of(p), p._version) for name, p in self._parameters.items()}
        self._names = {storage_of(p): name for name, p in self._parameters.items()}
        self._done: dict[str, set[str]] = {}  # by parameter: operations that wrote into it
        self._read: dict[str, set[str]] = {}  # by parameter: operations that read it
        self._saved: set[str] = set()
        self._depending = {storage_of(tensor) for tensor in given}
        self._alive: list[torch.Tensor] = list(given)  # the address of a freed storage would be reused
        self._hooks: Any = None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if function.namespace == "prim":
            return result
        given, into = _tensors((arguments, options)), list(written_tensors(function, arguments, options))
        name = function.__name__.partition(".")[0]
        is_seeded = torch.Tag.nondeterministic_seeded in function.tags
        depends = is_seeded or (
            any(storage_of(t) in self._depending for t in given) and "_like" not in name and not name.startswith("new_")
        )
        for tensor in given:
            if parameter := self._names.get(storage_of(tensor), ""):
                self._read.setdefault(parameter, set()).add(name)
                if self._parameters[parameter].requires_grad and _given(function, arguments, options, "sparse"):
                    self.sparse = self.sparse or parameter
        for tensor in into:
            if parameter := self._names.get(storage_of(tensor), ""):
                self._done.setdefault(parameter, set()).add(name)
                if depends:
                    self.sample_dependent = self.sample_dependent or parameter
        if depends:
            for tensor in (*_tensors(result), *into):
                self._alive.append(tensor)
                self._depending.add(storage_of(tensor))
        return result

    def __enter__(self) -> ParameterMutationTracer:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._hooks.__enter__()
        entered: ParameterMutationTracer = super().__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)
        now = dict(build.named_parameters(self._model))
        for name, (parameter, storage, version) in self._before.items():
            if now.get(name) is not parameter or storage_of(parameter) != storage:  # replaced
                self._done.setdefault(name, set()).add("set_")
                if now.get(name) is not parameter or storage_of(parameter) in self._depending:
                    self.sample_dependent = self.sample_dependent or name
                self._names[storage_of(parameter)] = name
            if name in self._saved and parameter._version != version and name in self._done:
                self.pipeline_refusal = (
                    f"the forward pass writes into {name}, which another micro-batch's backward pass still needs"
                )
        self.not_idempotent = self.not_idempotent or next(
            (name for name, done in self._done.items() if self._is_anew(name, done)), ""
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Global names of the parameters that were written into."""
        return tuple(name for name in self._parameters if name in self._done)

    def _is_anew(self, name: str, done: set[str]) -> bool:
        renormed = "embedding_renorm_" in done
        return not done <= _SAME_AGAIN or (renormed and not self._read[name] <= _LOOK_UP)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if name := self._names.get(storage_of(tensor), ""):
            self._saved.add(name)
        return tensor


def _given(function: Any, arguments: Any, options: Any, name: str) -> Any:
    """Value of the named argument of an operation; None: it has none."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == name:
            return arguments[place] if place < len(arguments) else options.get(name, argument.default_value)
    return None


def written_tensors(function: Any, arguments: Any, options: Any) -> Iterator[torch.Tensor]:
    """Tensors that an operation writes into."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = arguments[place] if place < len(arguments) else options.get(argument.name)
            yield from _tensors(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
