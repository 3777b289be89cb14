"""What a forward pass writes into the parameters themselves, which plans must not repeat, spread or forget.

A norm that an embedding keeps (``max_norm``), weights that are clipped, targets that follow by a moving average: one
process has them in its parameters at once. Replicas write what their own samples make of it, micro-batches and
recomputation write more than once, and what FSDP2 gathers is thrown away with all that was written into it.
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
"""What done twice, at different times of a step too, is as done once."""

_LOOK_UP = frozenset({"embedding_renorm_", "embedding", "_embedding_bag", "_embedding_bag_forward_only", "detach"})
"""Of a renormed table: they see no row that was not asked for, and so not yet renormed."""


class ParameterMutationTracer(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Follows parameters, and what depends on samples or on random numbers, through forward passes within it.

    Attributes:
        by_samples: global name of a parameter into which something was written that depends on them; empty: none.
        anew: name of one in which a second pass would not find what it would write.
        sparse: name of one that is looked up so that its gradient has only the rows that were.
        by_frequency: name of one whose gradient is divided by how often each row was.
        why_no_pipeline: one may not change before the backward pass; a reason.
        complete: whether all passes came to their end.
    """

    def __init__(self, model: nn.Module, *given: torch.Tensor) -> None:
        """`given`: the samples."""
        super().__init__()
        self.sample_dependent = self.not_idempotent = self.sparse = self.by_frequency = self.pipeline_refusal = ""
        self.complete = False
        self._model = model
        self._parameters = dict(build.named_parameters(model))
        self._before = {name: (p, storage_of(p), p._version) for name, p in self._parameters.items()}
        self._names = {storage_of(p): name for name, p in self._parameters.items()}
        self._done: dict[str, set[str]] = {}  # by parameter, names of the operations that wrote into it
        self._read: dict[str, set[str]] = {}  # and that it was given to
        self._saved: set[str] = set()
        self._depending = {storage_of(tensor) for tensor in given}
        self._alive: list[torch.Tensor] = list(given)  # freed storage would be another's
        self._hooks: Any = None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if function.namespace == "prim":
            return result
        given, into = _tensors((arguments, options)), list(written_tensors(function, arguments, options))
        name = function.__name__.partition(".")[0]
        depends = torch.Tag.nondeterministic_seeded in function.tags or (
            any(storage_of(t) in self._depending for t in given) and "_like" not in name and not name.startswith("new_")
        )
        for tensor in given:
            if parameter := self._names.get(storage_of(tensor), ""):
                self._read.setdefault(parameter, set()).add(name)
                if self._parameters[parameter].requires_grad:
                    if _given(function, arguments, options, "sparse"):
                        self.sparse = self.sparse or parameter
                    if _given(function, arguments, options, "scale_grad_by_freq"):
                        self.by_frequency = self.by_frequency or parameter
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
            if now.get(name) is not parameter or storage_of(parameter) != storage:  # put in its place
                self._done.setdefault(name, set()).add("set_")
                if now.get(name) is not parameter or storage_of(parameter) in self._depending:
                    self.sample_dependent = self.sample_dependent or name
                self._names[storage_of(parameter)] = name
            if name in self._saved and parameter._version != version and name in self._done:
                self.pipeline_refusal = (
                    f"the forward pass writes into {name}, which the backward pass of another micro-batch still needs"
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
    """The argument that the operation calls so; None: it has none."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == name:
            return arguments[place] if place < len(arguments) else options.get(name, argument.default_value)
    return None


def written_tensors(function: Any, arguments: Any, options: Any) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = arguments[place] if place < len(arguments) else options.get(argument.name)
            yield from _tensors(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
