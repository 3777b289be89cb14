"""Complete state of the ranks on both sides of a migration, recorded and reassembled bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clusterd.plans.model_shape import ModelShape
from clusterd.train.migration.source import MigrationSource
from clusterd.train.migration.target import MigrationTarget
from clusterd.train.state.local_shards import local_shards

State = dict[str, Any]
"""By "name|kind|slot": bytes of the whole tensor; and the step."""


def record(directory: Path) -> None:
    """Record the state of this rank at every later hand-over and take-over."""
    depart, arrive = MigrationSource.hand_over, MigrationTarget.take_over

    def recorded_depart(self: Any, at_s: float) -> str:
        if self._migration is not None:
            _write(directory, f"{self._migration.id}-old", self._training, self._migration.shape)
        return depart(self, at_s)

    def recorded_arrive(self: Any, make: Any, device: torch.device) -> Any:
        training = arrive(self, make, device)
        _write(directory, f"{self.migration_id}-new", training, ModelShape.from_dict(training.context.migration.shape))
        return training

    MigrationSource.hand_over = recorded_depart  # type: ignore[method-assign]
    MigrationTarget.take_over = recorded_arrive  # type: ignore[method-assign]


def read(directory: Path, side: str) -> State:
    """State of one side of a migration (``test.1.2-old``), reassembled from all ranks.

    Replicas must agree bit by bit.
    """
    whole: State = {}
    for path in sorted(directory.glob(f"{side}-*.json")):
        told = json.loads(path.read_text())
        arrays = np.load(path.with_suffix(".npz"))
        for key, value in told["scalars"].items():
            assert whole.setdefault(key, value) == value, key
        for key, (shape, box) in told["boxes"].items():
            array = arrays[key]
            at = tuple(slice(low, high) for low, high in box)
            target, seen = whole.setdefault(key, (np.zeros((*shape, array.shape[-1]), np.uint8), np.zeros(shape, bool)))
            mine = seen[at]
            if key.split("|")[1] != "buffer":
                assert (target[at][mine] == array[mine]).all(), f"replicas differ in {key}"
            if key.split("|")[1] != "buffer" or not mine.any():
                target[at], seen[at] = array, True
    for key, value in whole.items():
        if isinstance(value, tuple):
            assert value[1].all(), f"nobody held all of {key}"
            whole[key] = value[0]
    return whole


def assert_equal(one: State, other: State) -> None:
    """Compare every bit and every scalar."""
    assert set(one) == set(other)
    for key, value in one.items():
        assert np.array_equal(value, other[key]), key


def _write(directory: Path, name: str, training: Any, shape: ModelShape) -> None:
    arrays, boxes = {}, {}
    shapes = {p.name: p.shape for p in shape.parameters}
    for (of, kind), holding in local_shards(training, shape).items():
        for slot, tensor in enumerate(holding.tensors):
            if tensor is None:
                continue
            key = f"{of}|{kind}|{slot}"
            whole = shapes[of] if kind in ("parameter", "optimizer") else tuple(high for _, high in holding.box)
            boxes[key] = (whole, holding.box)
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            arrays[key] = flat.reshape(*tensor.shape, tensor.element_size()).numpy().copy()
    scalars: State = {"step": training.step}
    for of, slots in training.optimizer.state_by_name().items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                scalars[f"{of}|{slot}"] = float(value)
    directory.mkdir(exist_ok=True)
    name = f"{name}-{training.context.rank}"
    np.savez(directory / f"{name}.npz", **arrays)
    (directory / f"{name}.json").write_text(json.dumps({"scalars": scalars, "boxes": boxes}))
