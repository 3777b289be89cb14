"""Export of the trained model: the whole state dict in one file that plain torch loads without clusterd."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.parallel import build
from clusterd.train.process.exits import Refused, first_line
from clusterd.train.state.copying import narrow_to_box
from clusterd.train.state.local_shards import local_shards
from clusterd.train.state.training import Training
from plans.layout import layout
from plans.model_shape import ModelShape

PATIENCE_S = 3600.0
RETRY_S = 30.0


def check(path: str) -> None:
    """Check before the first step that a file can be written to `path`.

    Raises:
        Refused: the folder cannot be created or written.
    """
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"save is {path!r}, but the folder {folder} cannot be created: {error.strerror}") from None
    if not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise Refused(f"save is {path!r}, which is not writable")


def save(training: Training, path: str) -> None:
    """Write the model's ``state_dict``, whole and on the CPU, to `path` on rank 0; every rank must call it.

    Each part of a tensor comes from one of the ranks that hold it. The file appears when it is complete.

    Raises:
        OSError, RuntimeError: on rank 0, after `PATIENCE_S`: it cannot be written.
    """
    rank, shape = training.context.rank, training.shape
    shared = layout(shape, training.context.plan).deduplicated()
    live = local_shards(training, shape)
    held: dict[tuple[str, str], torch.Tensor] = {
        key: held.tensors[0].detach()
        for key, held in live.items()
        if key[1] in ("parameter", "buffer") and held.tensors[0] is not None
    }
    module = training.parallel.module
    # Of every rank: dtypes of its tensors, names not to be saved, and tensors that no layout contains.
    descriptions: list[Any] = [
        ({key: tensor.dtype for key, tensor in held.items()}, _unsaved(module), _without_holder(module, shape))
    ]
    if dist.is_initialized():  # the default group sends tensors in host memory by gloo
        own, descriptions = descriptions[0], [None] * dist.get_world_size()
        dist.all_gather_object(descriptions, own)
    unsaved = {name for _, names, _ in descriptions for name in names}
    sizes = {(t.name, t.kind): t.shape for t in shared.tensors}
    whole = {name: t for *_, unheld in reversed(descriptions) for name, t in unheld.items() if name not in unsaved}
    without_holder = set(whole)
    for holder in range(shared.ranks):
        for key, box in shared.boxes_of(holder).items():
            name, kind = key
            if kind not in ("parameter", "buffer") or name in unsaved or name in without_holder:
                continue
            part = held[key].to("cpu").contiguous() if holder == rank else None
            if holder and rank == holder:
                dist.send(part, dst=0)
            if rank:
                continue
            if part is None:
                part = torch.empty([high - low for low, high in box], dtype=descriptions[holder][0][key])
                dist.recv(part, src=holder)
            if name not in whole:
                whole[name] = torch.empty(sizes[key], dtype=part.dtype)
            narrow_to_box(whole[name], [low for low, _ in box], [high for _, high in box], [0] * len(box)).copy_(part)
    if rank:
        return
    for names in shape.tied:
        one = next(whole[name] for name in names if name in whole)
        whole.update(dict.fromkeys(names, one))
    file = Path(path).absolute()
    _write(whole, file)
    print(f"clusterd: saved the model after step {training.step} to {file}", flush=True)


def _write(whole: dict[str, torch.Tensor], file: Path) -> None:
    """Write the file completely or not at all; retry on a full disk, since no other copy of the model exists."""
    part_file = file.with_name(f"{file.name}.part")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(whole, part_file)
            part_file.replace(file)
            return
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
            part_file.unlink(missing_ok=True)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise
            message = f"cannot write the model to {file}: {first_line(error)}"
            print(f"clusterd: {message}; retrying for {left_s / 60:.0f} minutes", file=sys.stderr, flush=True)
            time.sleep(min(RETRY_S, left_s))


def _without_holder(module: torch.nn.Module, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Tensors of a state dict that no layout contains.

    Tensors without elements, and buffers that were added or reshaped after the model was made.
    """
    made = {buffer.name: buffer.shape for buffer in shape.buffers}
    found = {build.global_name(name): t for name, t in module.named_parameters() if not t.numel()}
    for path, buffer in module.named_buffers(remove_duplicate=False):
        name = build.global_name(path)
        if not buffer.numel() or made.get(name) != tuple(buffer.shape):
            found[name] = buffer
    return {name: tensor.detach().to("cpu") for name, tensor in found.items()}


def _unsaved(module: torch.nn.Module) -> list[str]:
    """Names of the buffers that a state dict leaves out."""
    return [
        build.global_name(f"{path}.{name}" if path else name)
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    ]
