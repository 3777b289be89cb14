"""Operations of a forward pass in order, to compare two computations."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Operation = tuple[str, str]
"""Name, and arguments with tensors as their dtypes and shapes."""

_REENTRANT = "CheckpointFunctionBackward"
_NOTHING = ("aten.detach.default", "aten.alias.default")


class OperationRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Records every operation.

    Attributes:
        recomputes: True if outputs are recomputed in the backward pass by torch's reentrant checkpoints.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recomputes = False
        self._done: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "prim" and str(func) not in _NOTHING:
            self._done.append((str(func), str(tree_map(_outline, (args, kwargs)))))
        return func(*args, **kwargs)

    def end(self, outputs: Any) -> None:
        """Inspect the outputs after the pass."""
        nodes = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        seen: set[Any] = {None}
        while nodes:
            if (node := nodes.pop()) not in seen:
                seen.add(node)
                self.recomputes = self.recomputes or node.name() == _REENTRANT
                nodes += [before for before, _ in node.next_functions]

    def first_difference(self, other: OperationRecorder) -> str | None:
        """Name of the first operation that `other` lacks at its position; None: no difference."""
        for mine, its in zip_longest(self._done, other._done):
            if mine != its:
                return (mine or its)[0].removeprefix("aten.").partition(".")[0]
        return None


def _outline(value: Any) -> Any:
    return (str(value.dtype), tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a storage, equal for a tensor and its views; reused once all of them are freed."""
    return int(tensor.untyped_storage()._cdata)
