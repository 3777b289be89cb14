"""Checkpoints of state that no rule cuts for another plan: what each rank has, for the same plan again.

The format is that of other checkpoints, with the parameters as in those; the rest lies in a value of each rank, as its
objects save it. Numbers, text and tensors are stored, and loaded without running code; what holds other objects begins
anew, which the log says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from clusterd.plans.layout import Layout
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.train.checkpoint import dcp_files as files
from clusterd.train.checkpoint.dcp_files import Staged, StagedTensor
from clusterd.train.parallel import build
from clusterd.train.parallel.gradient_sync import local_tensor, saving_parts
from clusterd.train.process.exits import PlanRefused
from clusterd.train.state import scalars
from clusterd.train.state.local_shards import local_shards
from clusterd.train.state.training import Training

PLAN = "clusterd.plan"
"""Key of the plan, and of the reason why there is no other."""

_LEFT_OUT = object()


def stage(training: Training, shape: ModelShape, layout: Layout, why: str) -> Staged:
    """Copy this rank's part of the checkpoint, between two steps."""
    rank, optimizer = training.context.rank, training.optimizer.holder
    live, mine = local_shards(training, shape), layout.deduplicated().boxes_of(rank)
    sizes = {(t.name, t.kind): t.shape for t in layout.tensors}
    tensors = [
        StagedTensor(("model", key[0]), sizes[key], live[key].box, tensor.detach().to("cpu", copy=True).contiguous())
        for key in mine
        if key[1] == "parameter" and (tensor := live[key].tensors[0]) is not None
    ]
    left_out: list[str] = []
    with saving_parts():
        own = {
            "buffers": dict(training.parallel.module.named_buffers(remove_duplicate=False)),
            "optimizer": optimizer.state_dict(),
            "held": _held(optimizer),
            "scheduler": _state_of(training.scheduler),
            "registered": training.registered.raw_states(),
        }
    own = {name: None if (v := _stored(value, name, left_out)) is _LEFT_OUT else v for name, value in own.items()}
    for name in left_out:
        print(f"clusterd: {name} is not in the checkpoint of step {training.step}, and will begin anew", flush=True)
    key = str(rank)
    values: dict[files.Key, Any] = {
        ("clusterd", "scalars", key): scalars.carried(training),
        ("clusterd", "own", key): own,
    }
    if rank == 0:
        values["step",] = training.step
        values["clusterd", "plan"] = {"plan": training.context.plan.to_dict(), "why": why}
        print(
            f"clusterd: the checkpoint of step {training.step} is for {training.context.plan} only: {why}", flush=True
        )
    return Staged(training.step, tensors, values)


def is_for(directory: str, plan: Plan) -> bool:
    """True for a checkpoint of one plan only.

    Raises:
        PlanRefused: it is for another than `plan`.
    """
    if PLAN not in files.metadata(directory).state_dict_metadata:
        return False
    values: dict[str, Any] = {PLAN: None}
    files.read(directory, {}, values)
    if (saved := Plan.from_dict(values[PLAN]["plan"])) != plan:
        raise PlanRefused(f"the checkpoint in {directory} is for {saved} only: {values[PLAN]['why']}")
    return True


def restore(training: Training, shape: ModelShape, directory: str) -> None:
    """Restore a rank under the plan of the checkpoint."""
    rank = training.context.rank
    names = [f"clusterd.{kind}.{rank}" for kind in ("own", "scalars")]
    values: dict[str, Any] = dict.fromkeys([*names, "step"])
    wanted: dict[str, files.Wanted] = {}
    live = local_shards(training, shape)
    sizes = {p.name: p.shape for p in shape.parameters}
    for (name, kind), shard in live.items():
        if kind == "parameter" and (tensor := shard.tensors[0]) is not None:
            wanted[f"model.{name}"] = sizes[name], shard.box, tensor
    files.read(directory, wanted, values)
    for shard in live.values():
        if shard.mirror is not None and (local := shard.tensors[0]) is not None:
            shard.mirror.copy_(local)
    own = values[names[0]]
    for path, buffer in own["buffers"].items():
        parent, _, name = path.rpartition(".")
        held = training.parallel.module.get_submodule(parent)._buffers
        if (there := held.get(name)) is not None and there.shape == buffer.shape:
            there.copy_(buffer)  # modules may share it
        else:
            held[name] = buffer.to(training.device)
    training.optimizer.load(own["optimizer"])
    for name, saved in own["held"].items():
        _hold(training.optimizer.holder, name, saved)
    if own["scheduler"] is not None:
        training.scheduler.load_state_dict(own["scheduler"])
    scalars.restore_carried(training, [values[names[1]]])
    training.registered.restore(own["registered"])
    training.step = int(values["step"])


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _held(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Tensors and inner optimizers that an optimizer holds outside of its ``state``."""
    names = vars(optimizer).keys() - {"state", "param_groups", "defaults"}
    found = {name: [_state_of(part) for part in _parts(optimizer, name)] for name in sorted(names)}
    return {name: parts for name, parts in found.items() if parts}


def _parts(optimizer: torch.optim.Optimizer, name: str) -> list[Any]:
    """Tensors in an attribute, and optimizers with a state of their own."""
    leaves, _ = tree_flatten(getattr(optimizer, name, None))
    optimizers = (leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer))
    shared = {id(one) for one in optimizers if one.state is optimizer.state}
    return [v for v in leaves if isinstance(v, (torch.Tensor, torch.optim.Optimizer)) and id(v) not in shared]


def _hold(optimizer: torch.optim.Optimizer, name: str, saved: list[Any]) -> None:
    with torch.no_grad():
        for leaf, value in zip(_parts(optimizer, name), saved, strict=False):  # old checkpoints have shared ones, too
            if isinstance(leaf, torch.Tensor):
                leaf.copy_(value)
            else:
                leaf.load_state_dict(value)


def _stored(value: Any, where: str, left_out: list[str]) -> Any:
    """A copy of numbers, text and tensors in nested containers; names of other objects are noted."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, torch.Tensor):
        return local_tensor(value.detach()).to("cpu", copy=True)
    if isinstance(value, Mapping):
        parts = {k: _stored(v, f"{where}.{build.global_name(str(k))}", left_out) for k, v in value.items()}
        return {k: v for k, v in parts.items() if v is not _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        items = [_stored(v, f"{where}[{i}]", left_out) for i, v in enumerate(value)]
        return type(value)(v if v is not _LEFT_OUT else None for v in items) if type(value) in (list, tuple) else items
    left_out.append(f"{where}, a {type(value).__name__},")
    return _LEFT_OUT
