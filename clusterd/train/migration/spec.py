"""One move from a plan to another, as every rank of both sides computes it from the same message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plans.layout import Layout, layout
from plans.model_shape import ModelShape
from plans.packing import Packing
from plans.plan import Plan
from plans.reshard import Moves, plan_moves
from plans.snapshots import SnapshotPacking


@dataclass(frozen=True)
class MigrationSide:
    """The old ranks, or the new ones."""

    generation: int
    plan: Plan
    hosts: tuple[str, ...]
    devices: tuple[str, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MigrationSide:
        """Of the message."""
        return cls(
            int(values["generation"]),
            Plan.from_dict(values["plan"]),
            tuple(values["hosts"]),
            tuple(values.get("devices") or ()),
        )


@dataclass(frozen=True)
class StateSnapshot:
    """Segments that old ranks published at one step, by rank: their names, and the hosts that have them."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StateSnapshot:
        """Of the message."""
        return cls(tuple(values["names"]), tuple(values["hosts"]))


@dataclass(frozen=True)
class MigrationSpec:
    """A move's message, and what follows from it."""

    id: str
    shape: ModelShape
    old: MigrationSide
    new: MigrationSide
    lost: tuple[int, ...]
    fabric: Mapping[str, tuple[str, int]]
    snapshot: StateSnapshot | None  # that the old side is, instead of ranks
    step: int | None  # with lost ranks: that survivors are to end, if they can and have not
    frees_source_memory: (
        bool  # the old ranks let go of their memory once they have handed over, for the new ones to be made
    )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MigrationSpec:
        """Of the message.

        Raises:
            ValueError, KeyError: it is none.
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
        """Who held what, lost ranks included."""
        return layout(self.shape, self.old.plan)

    @cached_property
    def new_layout(self) -> Layout:
        """Who is to hold what."""
        return layout(self.shape, self.new.plan)

    @cached_property
    def moves(self) -> Moves:
        """What goes where.

        Raises:
            IncompleteLayout: with the lost ranks, parts of the state are gone.
        """
        return plan_moves(
            self.old_layout.shared_out() if self.snapshot is not None else self.old_layout.without(self.lost),
            self.new_layout,
            self.snapshot.hosts if self.snapshot is not None else self.old.hosts,
            self.new.hosts,
            () if self.snapshot is not None else self.old.devices,
            self.new.devices,
        )

    @cached_property
    def packing(self) -> Packing:
        """Where it lies on its way."""
        return Packing(self.moves) if self.snapshot is None else SnapshotPacking(self.moves)

    def outbox_name(self, old_rank: int) -> str:
        """Name of the segment that an old rank fills."""
        return f"{self.id}.out{old_rank}" if self.snapshot is None else self.snapshot.names[old_rank]

    @property
    def inbox_name(self) -> str:
        """Name of the segment of what a host fetches."""
        return f"{self.id}.in"


def sums_to_bytes(sums: list[int]) -> bytes:
    """For the message: eight bytes each, little-endian."""
    return b"".join(s.to_bytes(8, "little") for s in sums)


def sums_from_bytes(data: bytes) -> list[int]:
    """What `sums_to_bytes` made."""
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
