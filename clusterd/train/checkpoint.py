"""Checkpoints in the format of `torch.distributed.checkpoint`, under global names, for any plan and for plain torch.

Keys are those of torch's own ``get_state_dict``: ``model.NAME``, ``optim.state.NAME.SLOT``, ``optim.param_groups``;
beside them ``step`` and ``clusterd.scalars.RANK``. The state is copied between two steps, each byte by one of the
ranks that hold it, and written by a thread while training goes on, over a process group of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from clusterd.train import late, scalars
from clusterd.train.boxes import Box, Trained, holdings
from clusterd.train.context import Context
from clusterd.train.copying import narrowed
from clusterd.train.exits import PlanRefused
from plans.layout import Layout
from plans.model_shape import ModelShape

Key = tuple[str, ...]
"""Parts of a key, joined by points in the file."""


class Checkpointed(Trained, Protocol):
    """The part of `clusterd.train.entry.Training` that is written and read."""

    context: Context
    scheduler: Any
    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor, or a part of one."""

    key: Key
    size: tuple[int, ...]  # of the whole
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True)
class Staged:
    """What this rank writes, apart from what trains on."""

    step: int
    tensors: list[Saved]
    values: dict[Key, Any]

    @property
    def bytes(self) -> int:
        """Of the tensors."""
        return sum(saved.tensor.nbytes for saved in self.tensors)


def stage(training: Checkpointed, shape: ModelShape, layout: Layout) -> Staged:
    """A copy of what this rank is to write; between two steps.

    Args:
        layout: of the present plan.
    Raises:
        CannotTravel: optimizer or scheduler hold what only a pickle could, or what nobody knows how to cut.
    """
    rank = training.context.rank
    slots_of, tensor_slots = _slots(shape), scalars.tensor_slots(shape)
    live = holdings(training, shape)
    mine = layout.shared_out().boxes_of(rank)
    sizes = {(t.name, t.kind): t.shape for t in layout.tensors}
    tensors = [
        Saved(at, sizes[key], live[key].box, tensor.detach().to("cpu", copy=True).contiguous())
        for key in mine
        for at, tensor in zip(_keys(*key, slots_of), live[key].tensors, strict=True)
        if tensor is not None
    ]
    parameters = dict(training.parallel.parameters)
    late_ones = late.kept(training.optimizer, tensor_slots)
    for (name, slot), tensor in late_ones.items():
        if (place := late.place(parameters[name], tensor.shape)) is None:
            raise scalars.CannotTravel(f"{name}: {slot} is of shape {tuple(tensor.shape)} for a part of the parameter")
        if tensor.numel():  # holders of one part all have it; torch writes it once
            at = ("optim", "state", name, slot)
            tensors.append(Saved(at, *place, tensor.detach().to("cpu", copy=True).contiguous()))
    told = scalars.collect(training, shape, late_apart=True)
    values: dict[Key, Any] = {("clusterd", "scalars", str(rank)): told}
    for name, slots in training.optimizer.state_by_name().items():
        for slot, value in slots.items():
            at = ("optim", "state", name, slot)
            if slot in tensor_slots[name] or value is None or (name, slot) in late_ones:
                continue
            if isinstance(value, torch.Tensor):  # holders of one parameter all have it; torch writes it once
                whole = tuple((0, n) for n in value.shape)
                tensors.append(Saved(at, tuple(value.shape), whole, value.detach().to("cpu", copy=True)))
            else:
                values[at] = scalars.plain_value(value, f"{name}: {slot}")
    if rank == 0:
        values["step",] = training.step
        values["optim", "param_groups"] = _groups(told, shape)
        if told["scheduler"] is not None:
            values["scheduler",] = told["scheduler"]
    return Staged(training.step, tensors, values)


def check(directory: str) -> None:
    """Finds out before the first step whether this rank can write a checkpoint there; the disk may still fill up.

    Raises:
        PlanRefused: it cannot.
    """
    folder = os.path.dirname(directory.rstrip("/"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise PlanRefused(f"checkpoints are to go to {folder}, which cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanRefused(f"checkpoints are to go to {folder}, which cannot be written")


def write(staged: Staged, directory: str, group: dist.ProcessGroup | None) -> None:
    """Writes what all ranks staged; every rank of `group` must call it. The directory appears when it is complete.

    Args:
        directory: on a file system that all ranks see; a checkpoint that is there already is replaced.
        group: that nobody else talks over meanwhile; None for a lone process.
    Raises:
        FileExistsError: something else is there.
        Exception: the first rank's that failed, on all of them.
    """
    part = f"{directory.rstrip('/')}.part"
    first = group is None or dist.get_rank(group) == 0
    failed: list[OSError | None] = [_in_the_way(directory, part, _before(part)) if first else None]
    _all_hear(failed, group)
    try:
        with _as_exceptions():
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(part),
                planner=_Saver(staged),
                process_group=group,
                no_dist=group is None,
            )
    except Exception:  # all ranks have ended writing, and all of them raise
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if first:
        try:
            _replace(part, directory)
        except OSError as error:
            failed = [error]
            shutil.rmtree(part, ignore_errors=True)
    _all_hear(failed, group)


def _all_hear(failed: list[OSError | None], group: dist.ProcessGroup | None) -> None:
    """All wait for the first rank, so it tells them how it went whatever happens."""
    if group is not None:
        dist.broadcast_object_list(failed, src=0, group=group)
    if failed[0] is not None:
        raise failed[0]


def _in_the_way(*directories: str) -> OSError | None:
    """What is no checkpoint of ours, whole or begun, is not ours to remove."""
    for directory in directories:
        try:
            there = sorted(os.listdir(directory))
        except FileNotFoundError:
            continue
        except OSError as error:
            return error
        # NFS keeps what somebody still reads under names of its own.
        strange = [
            name for name in there if not name.startswith((".metadata", ".nfs")) and not name.endswith(".distcp")
        ]
        if strange:
            return FileExistsError(f"{directory} holds {strange[0]}, which is no checkpoint: name another directory")
    return None


def _before(part: str) -> str:
    return f"{part}.before"


@contextlib.contextmanager
def _as_exceptions() -> Iterator[None]:
    """What torch raises of a rank that failed is no `Exception`, and would pass by all who look for one."""
    try:
        yield
    except CheckpointException as error:
        first, _ = error.failures[min(error.failures)]
        raise first if isinstance(first, Exception) else RuntimeError(repr(first)) from error


def _replace(part: str, directory: str) -> None:
    """Puts `part` in the place of `directory`; one that is there goes last, so that one of both is whole throughout."""
    before = _before(part)
    shutil.rmtree(before, ignore_errors=True)
    if replaces := os.path.isdir(directory):
        os.rename(directory, before)
    try:
        os.rename(part, directory)
    except OSError:
        if replaces:
            os.rename(before, directory)
        raise
    shutil.rmtree(before, ignore_errors=True)


def restore(training: Checkpointed, shape: ModelShape, directory: str) -> None:
    """Fills a rank whose optimizer has its state, with whatever values, from a checkpoint of any plan.

    Raises:
        PlanRefused: there is none, or it is of another model.
    """
    if not os.path.isfile(os.path.join(directory, ".metadata")):
        raise PlanRefused(f"no checkpoint in {directory}: it has no .metadata")
    reader = dcp.FileSystemReader(directory)
    metadata = reader.read_metadata()
    known = metadata.state_dict_metadata
    ranks = sorted(key for key in known if key.startswith("clusterd.scalars."))
    if not ranks:
        raise PlanRefused(f"the checkpoint in {directory} was not written by clusterd: it has no clusterd.scalars")
    values: dict[str, Any] = dict.fromkeys([*ranks, "step"])
    with _as_exceptions():
        dcp.load({}, storage_reader=reader, planner=_Loader({}, values), no_dist=True)
    told = [values[key] for key in ranks]
    absent = {name for source in told for name in source["absent"]}
    sizes = {p.name: p.shape for p in shape.parameters}
    slots_of = _slots(shape)
    wanted: dict[str, tuple[tuple[int, ...], Box, torch.Tensor]] = {}
    live = holdings(training, shape)
    for (name, kind), holding in live.items():
        if kind.startswith("optimizer") and name in absent:
            continue
        whole = sizes[name] if kind in ("parameter", "optimizer") else tuple(high for _, high in holding.box)
        for at, tensor in zip(_keys(name, kind, slots_of), holding.tensors, strict=True):
            assert tensor is not None
            wanted[".".join(at)] = whole, holding.box, tensor
    for key, (whole, _, _) in wanted.items():
        there = known.get(key)
        if not isinstance(there, TensorStorageMetadata) or tuple(there.size) != whole:
            has = tuple(there.size) if isinstance(there, TensorStorageMetadata) else "nothing"
            raise PlanRefused(f"the checkpoint in {directory} has {has} for {key}, the model needs {whole}")
    parameters = dict(training.parallel.parameters)
    late_ones = late.room(training.optimizer, scalars.tensor_slots(shape), metadata)
    for (name, slot), tensor in late_ones.items():
        if (place := late.place(parameters[name], tensor.shape)) is None:
            raise PlanRefused(f"the checkpoint in {directory} has a {slot} for {name} that the plan does not cut")
        if tensor.numel():
            wanted[f"optim.state.{name}.{slot}"] = *place, tensor
    with _as_exceptions():
        dcp.load({}, storage_reader=dcp.FileSystemReader(directory), planner=_Loader(wanted, {}), no_dist=True)
    for holding in live.values():
        if holding.mirror is not None and (local := holding.tensors[0]) is not None:
            holding.mirror.copy_(local)
    scalars.restore(training, shape, told)
    plain = {name: p for name, _, p in training.optimizer.local}
    for (name, slot), tensor in late_ones.items():
        training.optimizer.holder.state[plain[name]][slot] = tensor
    training.step = int(values["step"])


class _Saver(DefaultSavePlanner):  # type: ignore[misc]  # torch is not followed
    """Writes what was staged; nothing is taken from a state dict."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._tensors = {
            MetadataIndex(".".join(s.key), torch.Size([low for low, _ in s.box])): s for s in staged.tensors
        }
        self._values = {MetadataIndex(".".join(path)): (path, value) for path, value in staged.values.items()}

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(index.offset, torch.Size([high - low for low, high in saved.box])),
                    properties=TensorProperties(dtype=saved.tensor.dtype),
                    size=torch.Size(saved.size),
                ),
            )
            for index, saved in self._tensors.items()
        ]
        items += [
            WriteItem(index=index, type=WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0))
            for index in self._values
        ]
        # What keys are made of, for those who want nested dictionaries back.
        mappings = {index.fqn: saved.key for index, saved in self._tensors.items()}
        mappings |= {index.fqn: path for index, (path, _) in self._values.items()}
        self.plan = SavePlan(items, planner_data=mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._tensors[MetadataIndex(write_item.index.fqn, write_item.index.offset)].tensor
        data = io.BytesIO()
        torch.save(self._values[MetadataIndex(write_item.index.fqn)][1], data)
        return data


class _Loader(LoadPlanner):  # type: ignore[misc]
    """Reads boxes of tensors, and values, by key."""

    def __init__(self, wanted: dict[str, tuple[tuple[int, ...], Box, torch.Tensor]], values: dict[str, Any]) -> None:
        self._wanted, self._values = wanted, values

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        nowhere = torch.Size([])
        items = [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(k), nowhere, MetadataIndex(k), nowhere, nowhere)
            for k in self._values
            if isinstance(self._metadata.state_dict_metadata.get(k), BytesStorageMetadata)
        ]
        for key, (_, box, _) in self._wanted.items():
            items += _reads(key, box, self._metadata.state_dict_metadata[key].chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._wanted[read_item.dest_index.fqn][2]
        low = list(read_item.dest_offsets)
        return narrowed(tensor, low, [a + n for a, n in zip(low, read_item.lengths, strict=True)], [0] * len(low))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: what was resolved is the live tensor."""


def _reads(key: str, box: Box, chunks: list[ChunkStorageMetadata]) -> Iterator[ReadItem]:
    """Of every stored chunk, what overlaps `box`."""
    for number, chunk in enumerate(chunks):
        low = [max(a, o) for (a, _), o in zip(box, chunk.offsets, strict=True)]
        high = [min(b, o + n) for (_, b), o, n in zip(box, chunk.offsets, chunk.sizes, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(key),
                dest_offsets=torch.Size([x - a for x, (a, _) in zip(low, box, strict=True)]),
                storage_index=MetadataIndex(key, chunk.offsets, number),
                storage_offsets=torch.Size([x - o for x, o in zip(low, chunk.offsets, strict=True)]),
                lengths=torch.Size([b - a for a, b in zip(low, high, strict=True)]),
            )


def _keys(name: str, kind: str, slots: dict[str, list[str]]) -> list[Key]:
    if kind in ("parameter", "buffer"):
        return [("model", name)]
    of = slots[name] if kind == "optimizer" else [kind.partition(".")[2]]
    return [("optim", "state", name, slot) for slot in of]


def _slots(shape: ModelShape) -> dict[str, list[str]]:
    """Names of each parameter's slots of its own shape, in order."""
    return {p.name: [name for name, _ in shape.slots_of(i)] for i, p in enumerate(shape.parameters)}


def _groups(told: scalars.Scalars, shape: ModelShape) -> list[dict[str, Any]]:
    """Parameter groups of the whole model, with the values that they have on this rank."""
    names = [[shape.parameters[i].name for i in group] for group in shape.parameter_groups]
    if len(names) != len(told["groups"]):
        names = [group["names"] for group in told["groups"]]
    return [{"params": n, **g["values"]} for n, g in zip(names, told["groups"], strict=True)]
