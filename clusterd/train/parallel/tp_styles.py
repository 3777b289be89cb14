"""Tensor-parallel styles: translation of Hugging Face's names to torch's."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from clusterd.train.process.exits import Refused

GATHERING = frozenset({"colwise_rep", "colwise_gather_output"})
"""Cut by output features; every shard gets the whole result."""
SPLITTING = frozenset({"rowwise_rep", "rowwise_split_input"})
"""Cut by input features; every shard takes its part of a whole input."""
ROWWISE = frozenset({"rowwise", "embedding_rowwise"}) | SPLITTING
"""Cut by input features (an embedding: by its rows); the shards' results are summed."""
COLWISE = frozenset({"colwise"}) | GATHERING
WHOLE_AROUND = GATHERING | SPLITTING | {"embedding_rowwise"}
"""Styles whose input and output are whole on every shard."""
SUMMED = "replicated_with_grad_allreduce"
"""Replicated, but applied to each shard's own features (a norm that all heads share): gradients are summed."""
WHOLE = frozenset({"replicate", SUMMED})
STYLES = (*sorted(COLWISE), *sorted(ROWWISE), *sorted(WHOLE))


def style_of(style: str) -> Any:
    """torch's style for `style`, one of `STYLES`; None if the module stays whole."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if style == "colwise":
        return ColwiseParallel()
    if style == "rowwise":
        return RowwiseParallel()
    if style in GATHERING:
        return ColwiseParallel(output_layouts=Replicate())
    if style in ROWWISE:
        return RowwiseParallel(input_layouts=Replicate())
    return None


def styles_in(tp_plan: Mapping[str, str], module: nn.Module, *, stage: bool = False) -> dict[str, str]:
    """Style name of each module that has one.

    A parameter that two modules share (an embedding that is also the output layer) stays whole if that changes nothing
    for
    the modules around it: torch would cut it for one of the two and train them separately.

    Args:
        stage: `module` may lack some modules that `tp_plan` names.
    Raises:
        Refused: a pattern matches no module, or a style is none of `STYLES`.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, str] = {}
    for pattern, style in tp_plan.items():
        matching = _matching(pattern, names)
        if not matching and _matching(pattern, [name for name, _ in module.named_parameters()]):
            raise Refused(f"tp_plan cuts {pattern!r}, a parameter by itself; torch cuts Linear and Embedding")
        if not matching and not stage:
            raise Refused(f"tp_plan names {pattern!r}, which is no module of the model")
        if style not in STYLES:
            raise Refused(f"tp_plan has style {style!r}; it must be one of {', '.join(STYLES)}")
        for name in matching:
            found.setdefault(name, style)
    users = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    for name, style in found.items():
        if style in WHOLE_AROUND and any(
            users[id(p)] > 1 for p in module.get_submodule(name).parameters(recurse=False)
        ):
            found[name] = "replicate"
    return found


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that match; ``*`` stands for one component of a name."""
    return [n for n in names if n.count(".") == pattern.count(".") and fnmatch.fnmatchcase(n, pattern)]
