"""Tensor-parallel styles: from Hugging Face's words to torch's."""

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
"""Cut by input features (an embedding: by its rows); shards' results are added up."""
COLWISE = frozenset({"colwise"}) | GATHERING
WHOLE_AROUND = GATHERING | SPLITTING | {"embedding_rowwise"}
"""What comes in and what goes out is whole on every shard."""
SUMMED = "replicated_with_grad_allreduce"
"""Whole, but given each shard's own part of the features (a norm that all heads share): gradients are added up."""
WHOLE = frozenset({"replicate", SUMMED})
STYLES = (*sorted(COLWISE), *sorted(ROWWISE), *sorted(WHOLE))


def style_of(style: str) -> Any:
    """torch's style for `style`, one of `STYLES`; None where the module stays whole."""
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
    """Style word by the name of each module that has one.

    A parameter that two modules share (an embedding that is the output layer too) stays whole where that changes
    nothing for the modules around it: torch would cut it for one of the two, and train them apart.

    Args:
        stage: whether `module` may lack some of what `tp_plan` names.
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
            raise Refused(f"tp_plan has style {style!r}; it can have {', '.join(STYLES)}")
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
    """``*`` stands for one part of a name."""
    return [n for n in names if n.count(".") == pattern.count(".") and fnmatch.fnmatchcase(n, pattern)]
