"""Copy plan of one migration: live tensors of a rank and the segment parts they are copied to or from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterd.plans.layout import Tensor
from clusterd.plans.packing import Part, Read
from clusterd.train.state.copying import CopyBatch, SegmentPart, narrow_to_box
from clusterd.train.state.local_shards import LocalShard

COPY_THREADS_MAX = 8

LocalShards = dict[tuple[str, str], LocalShard]
"""Shards that a rank holds, by global name and kind."""

MemoryAddresses = dict[tuple[str, str], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class PreparedCopy:
    """Copies that are valid while the tensors stay at the same memory addresses."""

    copies: tuple[CopyBatch, ...]
    memory_addresses: MemoryAddresses


def memory_addresses(live: LocalShards) -> MemoryAddresses:
    """Addresses of all local tensors; equal while the same boxes lie in the same memory."""
    return {
        key: (
            shard.box,
            *(None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in shard.tensors),
        )
        for key, shard in live.items()
    }


def segment_part(part: Part | Read, tensor: Tensor, live: LocalShards, offset: int) -> SegmentPart:
    """Live tensors of a part of an outbox, or of a read, narrowed to its box."""
    shard = live[tensor.name, tensor.kind]
    within = getattr(part, "within", None)
    origin = [low for low, _ in shard.box]
    return SegmentPart(
        offset,
        tuple(None if t is None else narrow_to_box(t, part.low, part.high, origin) for t in shard.tensors),
        part.bytes,
        None if within is None else (_extent(within), tuple(a - b for a, b in zip(part.low, within[0], strict=True))),
    )


def _extent(box: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(high - low for low, high in zip(*box, strict=True))


def copy_threads(hosts: Sequence[str], rank: int) -> int:
    """Number of copy threads of a rank: its own cores, or its share of the host's."""
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():
        cores //= hosts.count(hosts[rank])
    return max(1, min(COPY_THREADS_MAX, cores))
