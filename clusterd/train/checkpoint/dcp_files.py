"""Reading and writing directories of `torch.distributed.checkpoint`: what is staged goes in, boxes come out."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

from clusterd.train.process.exits import Refused
from clusterd.train.state.copying import narrow_to_box
from clusterd.train.state.local_shards import Box

Key = tuple[str, ...]
"""Parts of a key, joined by points in the file."""

Wanted = tuple[tuple[int, ...], Box, torch.Tensor]
"""Of one tensor: the size of the whole, the box of a part, and the part."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """One tensor, or a part of one."""

    key: Key
    size: tuple[int, ...]  # of the whole
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True)
class Staged:
    """What this rank writes, apart from what trains on."""

    step: int
    tensors: list[StagedTensor]
    values: dict[Key, Any]

    @property
    def bytes(self) -> int:
        """Of the tensors."""
        return sum(saved.tensor.nbytes for saved in self.tensors)


def check(directory: str) -> None:
    """Finds out before the first step whether this rank can write a checkpoint there; the disk may still fill up.

    Raises:
        Refused: it cannot.
    """
    folder = os.path.dirname(directory.rstrip("/"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Refused(f"checkpoints are to go to {folder}, which cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refused(f"checkpoints are to go to {folder}, which cannot be written")


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
    failed: list[OSError | None] = [_foreign_content(directory, part, _replaced_path(part)) if first else None]
    _broadcast_error(failed, group)
    try:
        with _as_exceptions():
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(part),
                planner=_StagedSavePlanner(staged),
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
    _broadcast_error(failed, group)


def _broadcast_error(failed: list[OSError | None], group: dist.ProcessGroup | None) -> None:
    """All wait for the first rank, so it tells them how it went whatever happens."""
    if group is not None:
        dist.broadcast_object_list(failed, src=0, group=group)
    if failed[0] is not None:
        raise failed[0]


def _foreign_content(*directories: str) -> OSError | None:
    """What is no checkpoint of ours, whole or begun, is not ours to remove."""
    for directory in directories:
        try:
            present = sorted(os.listdir(directory))
        except FileNotFoundError:
            continue
        except OSError as error:
            return error
        # NFS keeps what somebody still reads under names of its own.
        foreign = [
            name for name in present if not name.startswith((".metadata", ".nfs")) and not name.endswith(".distcp")
        ]
        if foreign:
            return FileExistsError(f"{directory} holds {foreign[0]}, which is no checkpoint: name another directory")
    return None


def _replaced_path(part: str) -> str:
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
    before = _replaced_path(part)
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


def metadata(directory: str) -> Metadata:
    """What a checkpoint has.

    Raises:
        Refused: there is none.
    """
    if not os.path.isfile(os.path.join(directory, ".metadata")):
        raise Refused(f"no checkpoint in {directory}: it has no .metadata")
    return dcp.FileSystemReader(directory).read_metadata()


def read(directory: str, wanted: dict[str, Wanted], values: dict[str, Any]) -> None:
    """Fills tensors, by key, and those of the values that are there."""
    with _as_exceptions():
        reader = dcp.FileSystemReader(directory)
        dcp.load({}, storage_reader=reader, planner=_BoxLoadPlanner(wanted, values), no_dist=True)


class _StagedSavePlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch is not followed
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


class _BoxLoadPlanner(LoadPlanner):  # type: ignore[misc]
    """Reads boxes of tensors, and values, by key."""

    def __init__(self, wanted: dict[str, Wanted], values: dict[str, Any]) -> None:
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
        return narrow_to_box(tensor, low, [a + n for a, n in zip(low, read_item.lengths, strict=True)], [0] * len(low))

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
