"""Reading and writing of `torch.distributed.checkpoint` directories: staged state in, boxes of tensors out."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
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

from clusterd.train.parallel.gradient_sync import saving_parts
from clusterd.train.process.exits import Refused
from clusterd.train.state.copying import narrow_to_box
from clusterd.train.state.local_shards import Box

NEXT_STEP = "next_step.json"
"""In the directory of a checkpoint: the loss of the next step, and under which plan."""

Key = tuple[str, ...]
"""Components of a key, joined by dots in the file."""

Wanted = tuple[tuple[int, ...], Box, torch.Tensor]
"""Size of a whole tensor, the box of a part, and the tensor to read that part into."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """One tensor, or a part of one."""

    key: Key
    size: tuple[int, ...]  # of the whole
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True)
class Staged:
    """Copy of this rank's part of a checkpoint."""

    step: int
    tensors: list[StagedTensor]
    values: dict[Key, Any]

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(saved.tensor.nbytes for saved in self.tensors)


SENT_BYTES = 16 << 20
"""Size of a message with a part of a file."""


def check(directory: str) -> None:
    """Check before the first step that this rank can write a checkpoint there; the disk may still fill up.

    Raises:
        Refused: it cannot.
    """
    folder = os.path.dirname(directory.rstrip("/"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Refused(f"cannot create {folder} for checkpoints: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refused(f"cannot write checkpoints to {folder}: it is not writable")


def write(staged: Staged, directory: str, group: dist.ProcessGroup | None, *, collects: bool = False) -> None:
    """Write the staged state of all ranks to a directory, which appears when it is complete.

    Every rank of `group` must call it.

    Args:
        directory: on a file system that all ranks see; an existing checkpoint there is replaced.
        group: not used by anything else meanwhile; None for a single process.
        collects: each rank names a directory of its own host instead, and all files are sent to that of the first.
    Raises:
        FileExistsError: the directory holds something else.
        Exception: that of the first rank that failed, on all of them.
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
        if collects and group is not None:
            _broadcast_error([_collect(part, group)], group)
    except Exception:  # all ranks have finished writing, and all raise
        if first or collects:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if first:
        try:
            _replace(part, directory)
        except OSError as error:
            failed = [error]
            shutil.rmtree(part, ignore_errors=True)
    _broadcast_error(failed, group)


def _collect(part: str, group: dist.ProcessGroup) -> OSError | None:
    """Send the files that other hosts have written to the first rank's host, whose error is returned there."""
    rank, failure = dist.get_rank(group), None
    mark = [uuid.uuid4().hex]  # who sees it writes where the first rank does: on its host, or in a folder they share
    if rank == 0:
        try:
            open(f"{part}/{mark[0]}", "xb").close()
        except OSError as error:
            failure = error
    dist.broadcast_object_list(mark, src=0, group=group)
    own: list[str] = []
    if rank and os.path.isdir(part) and not os.path.exists(f"{part}/{mark[0]}"):
        own = [name for name in os.listdir(part) if name.startswith(f"__{rank}_")]
    written: list[dict[str, int]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(written, {name: os.path.getsize(f"{part}/{name}") for name in own}, group=group)
    if rank == 0 and failure is None:
        os.unlink(f"{part}/{mark[0]}")
    for source, files in enumerate(written):
        for name, size in files.items():
            if rank == source:
                _send(f"{part}/{name}", group)
            elif rank == 0:
                failure = _receive(f"{part}/{name}", source, size, group) or failure
    if rank:
        with contextlib.suppress(OSError):  # others have files there
            os.rmdir(part)
    return failure


def _send(path: str, group: dist.ProcessGroup) -> None:
    """Send a file to the first rank, and remove it."""
    with open(path, "rb") as file:
        while data := bytearray(file.read(SENT_BYTES)):
            dist.send(torch.frombuffer(data, dtype=torch.uint8), 0, group)
    os.unlink(path)


def _receive(path: str, source: int, size: int, group: dist.ProcessGroup) -> OSError | None:
    """Write what a rank sends to a file; after an error the rest is received and left."""
    arriving = _arriving(source, size, group)
    try:
        with open(path, "wb") as file:
            for data in arriving:
                file.write(data.numpy())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        for _ in arriving:
            pass
        return error
    return None


def _arriving(source: int, size: int, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    for left in range(size, 0, -SENT_BYTES):
        data = torch.empty(min(left, SENT_BYTES), dtype=torch.uint8)
        dist.recv(data, source, group)
        yield data


def _broadcast_error(failed: list[OSError | None], group: dist.ProcessGroup | None) -> None:
    """Broadcast the result of the first rank, for which all others wait, and raise its error."""
    if group is not None:
        dist.broadcast_object_list(failed, src=0, group=group)
    if failed[0] is not None:
        raise failed[0]


def _foreign_content(*directories: str) -> OSError | None:
    """Error if a directory holds anything but a checkpoint; such files are not ours to delete."""
    for directory in directories:
        try:
            present = sorted(os.listdir(directory))
        except FileNotFoundError:
            continue
        except OSError as error:
            return error
        # NFS keeps deleted files that are still open under names of its own.
        ours = [name for name in present if name.startswith((".metadata", ".nfs")) or name.endswith(".distcp")]
        foreign = [name for name in present if name not in (*ours, NEXT_STEP)]
        if foreign:
            return FileExistsError(f"{directory} holds {foreign[0]}, which is not a checkpoint: name another directory")
    return None


def _replaced_path(part: str) -> str:
    return f"{part}.before"


@contextlib.contextmanager
def _as_exceptions() -> Iterator[None]:
    """Convert a CheckpointException, which is not an `Exception`, to the error of the rank that failed."""
    try:
        yield
    except CheckpointException as error:
        first, _ = error.failures[min(error.failures)]
        raise first if isinstance(first, Exception) else RuntimeError(repr(first)) from error


def _replace(part: str, directory: str) -> None:
    """Replace `directory` by `part`; the old checkpoint is deleted last, so that one is complete at any time."""
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


def find(place: str) -> str:
    """Directory of the checkpoint at a place: the place itself, or the newest of the folders in it.

    Args:
        place: a folder; with ``@STEP``, the checkpoint of that step.
    Raises:
        Refused: there is none.
    """
    folder, at, step = place.rpartition("@")
    place, wanted = (folder, step) if at and step.isdigit() else (place, "")
    files = _file_system(place)
    folders = [place] if files.isfile(f"{place}/.metadata") else []
    if not folders and files.isdir(place):
        inside = sorted(f"{place}/{name.rstrip('/').rpartition('/')[2]}" for name in files.ls(place, detail=False))
        folders = [folder for folder in inside if files.isfile(f"{folder}/.metadata")]
    steps = {folder: _step(folder) for folder in folders}
    fitting = [folder for folder in folders if not wanted or str(steps[folder]) == wanted]
    if not fitting:
        others = f"; there are steps {', '.join(map(str, sorted(steps.values())))}" if steps else ""
        raise Refused(f"no checkpoint{f' of step {wanted}' if wanted else ''} in {place}: it has no .metadata{others}")
    return max(fitting, key=lambda folder: steps[folder])


def _step(directory: str) -> int:
    values: dict[str, Any] = {"step": 0}
    read(directory, {}, values)
    return int(values["step"])


def _file_system(path: str) -> Any:
    found, _ = fsspec.url_to_fs(path)
    return found


def metadata(directory: str) -> Metadata:
    """Metadata of a checkpoint.

    Raises:
        Refused: there is none.
    """
    if not _file_system(directory).isfile(f"{directory}/.metadata"):
        raise Refused(f"no checkpoint in {directory}: it has no .metadata")
    return _reader(directory).read_metadata()


def _reader(directory: str) -> Any:
    """Reader of a folder, or of one that another host serves (``clusterd://``)."""
    return FsspecReader(directory) if "://" in directory else dcp.FileSystemReader(directory)


def read(directory: str, wanted: dict[str, Wanted], values: dict[str, Any]) -> None:
    """Fill the wanted tensors, by key, and those of the values that are there."""
    with _as_exceptions():
        dcp.load({}, storage_reader=_reader(directory), planner=_BoxLoadPlanner(wanted, values), no_dist=True)


class _StagedSavePlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch is not followed
    """Save planner that writes staged state instead of a state dict."""

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
        # Key components, for readers that want nested dicts back.
        mappings = {index.fqn: saved.key for index, saved in self._tensors.items()}
        mappings |= {index.fqn: path for index, (path, _) in self._values.items()}
        self.plan = SavePlan(items, planner_data=mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._tensors[MetadataIndex(write_item.index.fqn, write_item.index.offset)].tensor
        data = io.BytesIO()
        with saving_parts():
            torch.save(self._values[MetadataIndex(write_item.index.fqn)][1], data)
        return data


class _BoxLoadPlanner(LoadPlanner):  # type: ignore[misc]
    """Load planner that reads boxes of tensors, and values, by key."""

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
        """Do nothing: `resolve_tensor` returned the live tensor."""


def _reads(key: str, box: Box, chunks: list[ChunkStorageMetadata]) -> Iterator[ReadItem]:
    """Overlap of `box` with every stored chunk."""
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
