"""Tensor-parallel styles: from Hugging Face's words to torch's."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from clusterd.train.exits import PlanRefused

GATHERING = frozenset({"colwise_rep", "colwise_gather_output"})
"""Cut by output features; every shard gets the whole result."""
SPLITTING = frozenset({"rowwise_rep", "rowwise_split_input"})
"""Cut by input features; every shard takes its part of a whole input."""
ROWWISE = frozenset({"rowwise", "embedding_rowwise"}) | SPLITTING
"""Cut by input features (an embedding: by its rows); shards' results are added up."""
COLWISE = frozenset({"colwise"}) | GATHERING
STYLES = (*sorted(COLWISE), *sorted(ROWWISE), "replicate")


def style_of(word: str) -> Any:
    """torch's style for `word`, one of `STYLES`; None where the module stays whole."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if word == "colwise":
        return ColwiseParallel()
    if word == "rowwise":
        return RowwiseParallel()
    if word in GATHERING:
        return ColwiseParallel(output_layouts=Replicate())
    if word in ROWWISE:
        return RowwiseParallel(input_layouts=Replicate())
    return None


def matches(tp_plan: Mapping[str, str], module_names: Iterable[str]) -> dict[str, str]:
    """Style word by module name, patterns resolved (``*`` stands for one part of a name); the first match counts.

    Raises:
        PlanRefused: a pattern matches no module, or a style is none of `STYLES`.
    """
    names = [name for name in module_names if name]
    found: dict[str, str] = {}
    for pattern, word in tp_plan.items():
        hits = [n for n in names if n.count(".") == pattern.count(".") and fnmatch.fnmatchcase(n, pattern)]
        if not hits:
            raise PlanRefused(f"tp_plan names {pattern!r}, which is no module of the model")
        if word not in STYLES:
            raise PlanRefused(f"tp_plan has style {word!r}; it can have {', '.join(STYLES)}")
        for name in hits:
            found.setdefault(name, word)
    return found
