"""Export of the trained model: the whole state dict, in files that other tools load without clusterd."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from clusterd.plans.layout import layout
from clusterd.plans.model_shape import ModelShape
from clusterd.train.checkpoint import whole_model
from clusterd.train.checkpoint.weight_files import write_safetensors
from clusterd.train.parallel import build
from clusterd.train.process.exits import Refused, first_line
from clusterd.train.state.copying import narrow_to_box
from clusterd.train.state.local_shards import local_shards
from clusterd.train.state.training import Training

PATIENCE_S = 3600.0
RETRY_S = 30.0

FILE_BYTES_MAX = 5_000_000_000
"""Size of one file of a folder of weights, from which on there are several, as of Hugging Face's tools."""


FORMATS = ("torch", "safetensors", "hf")

_FOLDER_FILES = (".safetensors", ".json")


def check(path: str, save_format: str) -> None:
    """Check before the first step that the model can be written to `path`.

    Raises:
        Refused: the folder cannot be created or written, or holds something else.
    """
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"save is {path!r}, but the folder {folder} cannot be created: {error.strerror}") from None
    if not os.access(folder, os.W_OK) or (Path(path).is_dir() and save_format != "hf"):
        raise Refused(f"save is {path!r}, which is not writable")
    if Path(path).is_dir() and (foreign := [f for f in sorted(os.listdir(path)) if not f.endswith(_FOLDER_FILES)]):
        raise Refused(f"save is {path!r}, which holds {foreign[0]}: name a folder of its own for the model")


def save(training: Training, path: str) -> None:
    """Write the model's ``state_dict``, whole and on the CPU, to `path` on rank 0; every rank must call it.

    Each part of a tensor comes from one of the ranks that hold it, and the model itself makes the state dict of them.
    The file appears when it is complete.

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
    # Of every rank: dtypes of its tensors, what its modules have changed in themselves, names not to be saved, and
    # tensors that no layout contains.
    descriptions: list[Any] = [
        (
            {key: tensor.dtype for key, tensor in held.items()},
            training.attributes.changed(),
            unsaved_names(module),
            _without_holder(module, shape),
        )
    ]
    if dist.is_initialized():  # the default group sends tensors in host memory by gloo
        own, descriptions = descriptions[0], [None] * dist.get_world_size()
        dist.all_gather_object(descriptions, own)
    unsaved = {name for *_, names, _ in descriptions for name in names}
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
    file, save_format = Path(path).absolute(), training.job.save_format
    for names in shape.tied:
        one = next(whole[name] for name in names if name in whole)
        whole.update(dict.fromkeys(names, one))
    state = whole_model.state_dict(training.job, module, whole, [changed for _, changed, *_ in descriptions])
    if save_format == "torch":
        _write(lambda part: torch.save(state, part), file)
    else:
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        if left_out := sorted(map(str, state.keys() - tensors.keys())):
            print(f"clusterd: a {save_format} file has tensors only, and lacks {', '.join(left_out)}", flush=True)
        if save_format == "hf":  # whose loaders share tied weights by themselves
            for _, *others in shape.tied:
                tensors = {name: tensor for name, tensor in tensors.items() if name not in others}
            _write(lambda part: _write_folder(tensors, module, part), file)
        else:
            _write(lambda part: write_safetensors(part, tensors), file)
    print(f"clusterd: saved the model after step {training.step} to {file}", flush=True)


def _write_folder(whole: Mapping[str, torch.Tensor], module: torch.nn.Module, folder: Path) -> None:
    """Write a folder as of Hugging Face's ``save_pretrained``: weights, their index, and the model's configuration."""
    folder.mkdir()
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in whole.items():
        if files[-1] and sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > FILE_BYTES_MAX:
            files.append({})
        files[-1][name] = tensor
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        write_safetensors(folder / name, tensors)
        index.update(dict.fromkeys(tensors, name))
    if len(files) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in whole.values())}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": total, "weight_map": index}))
    for name in ("config", "generation_config"):
        if callable(save := getattr(getattr(module, name, None), "save_pretrained", None)):
            save(str(folder))


def _write(write: Callable[[Path], None], file: Path) -> None:
    """Write a file or a folder completely or not at all; retry on a full disk: no other copy of the model exists."""
    part_file = file.with_name(f"{file.name}.part")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _remove(part_file)
            write(part_file)
            if part_file.is_dir():
                _remove(file)
            part_file.replace(file)
            return
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
            _remove(part_file)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise
            message = f"cannot write the model to {file}: {first_line(error)}"
            print(f"clusterd: {message}; retrying for {left_s / 60:.0f} minutes", file=sys.stderr, flush=True)
            time.sleep(min(RETRY_S, left_s))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


def unsaved_names(module: torch.nn.Module) -> list[str]:
    """Names of the buffers that a state dict leaves out."""
    return [
        build.global_name(f"{path}.{name}" if path else name)
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    ]
