"""Tensor-parallel cuts of a model, and a model reduced to the shards of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from clusterd.train.parallel.tp_styles import GATHERING, ROWWISE, SPLITTING, WHOLE, styles_in
from clusterd.train.process.exits import Refused


def tensor_parallel_cuts(model: nn.Module, tp_plan: Mapping[str, str]) -> tuple[dict[str, str], dict[str, int], str]:
    """Styles, cut dimensions, and the reason why tensor parallelism is impossible; it rules out no other plan.

    Models come with tensor-parallel plans that use styles which torch does not support (experts, packed weights).
    """
    try:
        styles = styles_in(tp_plan, model)
        return styles, _tp_dims(model, styles), ""
    except Refused as error:
        return {}, {}, str(error)


def _tp_dims(model: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """Cut dimension of every cut parameter, by torch's rules for Linear and Embedding."""
    dims: dict[str, int] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in WHOLE:
            continue
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise Refused(f"tp_plan cuts {name!r}, a {type(module).__name__}; torch cuts Linear and Embedding")
        rowwise = style in ROWWISE
        dims[f"{name}.weight"] = int(rowwise) if isinstance(module, nn.Linear) else int(not rowwise)
        if getattr(module, "bias", None) is not None and not rowwise:
            dims[f"{name}.bias"] = 0
    return dims


def shard_model(model: nn.Module, styles: dict[str, str], degree: int) -> None:
    """Replace whole tensors by one rank's shards, and emulate the shapes of torch's communication around them."""
    for name, dim in _tp_dims(model, styles).items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = getattr(module, attribute)
        shape = list(parameter.shape)
        shape[dim] //= degree
        setattr(module, attribute, nn.Parameter(torch.empty(shape, dtype=parameter.dtype)))
    for path, style in styles.items():
        module = model.get_submodule(path)
        if style in GATHERING:
            module.register_forward_hook(lambda _m, _i, out: torch.cat([out] * degree, dim=-1))
        if style in SPLITTING and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _m, args: (args[0].chunk(degree, dim=-1)[0], *args[1:]))
