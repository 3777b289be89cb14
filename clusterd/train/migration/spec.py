"""One migration from a plan to another: its message, and layouts and transfers that every rank derives from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plans.layout import Layout, layout
from plans.model_shape import ModelShape
from plans.packing import Packing
from plans.plan import Plan
from plans.reshard import Transfers, plan_transfers
from plans.snapshots import StateSnapshotPacking


@dataclass(frozen=True)
class MigrationSide:
    """Source ranks, or target ranks."""

    generation: int
    plan: Plan
    hosts: tuple[str, ...]
    devices: tuple[str, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MigrationSide:
        """Parse the message."""
        return cls(
            int(values["generation"]),
            Plan.from_dict(values["plan"]),
            tuple(values["hosts"]),
            tuple(values.get("devices") or ()),
        )


@dataclass(frozen=True)
class StateSnapshot:
    """Segments that ranks published at one step, by rank: their names, and the hosts that have them."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StateSnapshot:
        """Parse the message."""
        return cls(tuple(values["names"]), tuple(values["hosts"]))


@dataclass(frozen=True)
class MigrationSpec:
    """Message of a migration, with derived layouts and transfers."""

    id: str
    shape: ModelShape
    old: MigrationSide
    new: MigrationSide
    lost: tuple[int, ...]
    fabric: Mapping[str, tuple[str, int]]
    snapshot: StateSnapshot | None  # source of the state, instead of ranks
    step: int | None  # with lost ranks: step that survivors must complete, if they can
    frees_source_memory: bool  # source ranks free their memory before target ranks start

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MigrationSpec:
        """Parse the message.

        Raises:
            ValueError, KeyError: it is malformed.
        """
        return cls(
            str(values["id"]),
            ModelShape.from_dict(values["shape"]),
            MigrationSide.from_dict(values["old"]),
            MigrationSide.from_dict(values["new"]),
            tuple(values.get("lost") or ()),
            {host: (str(a), int(p)) for host, (a, p) in (values.get("fabric") or {}).items()},
            StateSnapshot.from_dict(values["snapshot"]) if values.get("snapshot") else None,
            None if values.get("step") is None else int(values["step"]),
            bool(values.get("makes_room")),
        )

    @cached_property
    def old_layout(self) -> Layout:
        """Layout of the source ranks, lost ones included."""
        return layout(self.shape, self.old.plan)

    @cached_property
    def new_layout(self) -> Layout:
        """Layout of the target ranks."""
        return layout(self.shape, self.new.plan)

    @cached_property
    def transfers(self) -> Transfers:
        """Transfers from the source to the target layout.

        Raises:
            IncompleteLayout: parts of the state are lost with their ranks.
        """
        return plan_transfers(
            self.old_layout.deduplicated() if self.snapshot is not None else self.old_layout.without(self.lost),
            self.new_layout,
            self.snapshot.hosts if self.snapshot is not None else self.old.hosts,
            self.new.hosts,
            () if self.snapshot is not None else self.old.devices,
            self.new.devices,
        )

    @cached_property
    def packing(self) -> Packing:
        """Positions of the transferred boxes in the segments."""
        return Packing(self.transfers) if self.snapshot is None else StateSnapshotPacking(self.transfers)

    def outbox_name(self, old_rank: int) -> str:
        """Name of the segment that a source rank fills."""
        return f"{self.id}.out{old_rank}" if self.snapshot is None else self.snapshot.names[old_rank]

    @property
    def inbox_name(self) -> str:
        """Name of the segment into which a host fetches."""
        return f"{self.id}.in"


def sums_to_bytes(sums: list[int]) -> bytes:
    """Encode checksums for the message: eight bytes each, little-endian."""
    return b"".join(s.to_bytes(8, "little") for s in sums)


def sums_from_bytes(data: bytes) -> list[int]:
    """Decode the result of `sums_to_bytes`."""
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
