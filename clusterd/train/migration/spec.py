"""One migration from a plan to another: its message, and layouts and transfers that every rank derives from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from clusterd.plans.layout import Layout, layout
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.packing import Packing
from clusterd.plans.plan import Plan
from clusterd.plans.reshard import Transfers, plan_transfers
from clusterd.plans.snapshots import StateSnapshotPacking
from clusterd.protocol.launch import PROOF, Address, MigrationRequest, SideRequest, SnapshotSegments


@dataclass(frozen=True)
class MigrationSide:
    """Source ranks, or target ranks."""

    generation: int
    plan: Plan
    hosts: tuple[str, ...]
    devices: tuple[str, ...]

    @classmethod
    def of(cls, side: SideRequest) -> MigrationSide:
        """Parse the side's plan."""
        return cls(
            side.generation, Plan.from_dict(side.plan), side.hosts, tuple(device or "" for device in side.devices)
        )


@dataclass(frozen=True)
class MigrationSpec:
    """Message of a migration, with derived layouts and transfers."""

    id: str
    shape: ModelShape
    old: MigrationSide
    new: MigrationSide
    lost: tuple[int, ...]
    fabric: Mapping[str, Address]
    snapshot: SnapshotSegments | None  # source of the state, instead of ranks
    step: int | None  # with lost ranks: step that survivors must complete, if they can
    frees_source_memory: bool  # source ranks free their memory before target ranks start
    proof_s: float = 0.0  # time for the proof that the state is carried; 0: there is none

    @classmethod
    def of(cls, request: MigrationRequest) -> MigrationSpec:
        """Parse the model and the plans of a request.

        Raises:
            ValueError, KeyError: they are malformed.
        """
        return cls(
            request.id,
            ModelShape.from_dict(request.shape),
            MigrationSide.of(request.old),
            MigrationSide.of(request.new),
            request.lost,
            request.fabric,
            request.snapshot,
            request.step,
            request.makes_room,
            request.proof_s,
        )

    @cached_property
    def of_proof(self) -> MigrationSpec:
        """The same, with segments of its own for the proof."""
        other = replace(self, id=f"{self.id}{PROOF}")
        vars(other).update(transfers=self.transfers, packing=self.packing)
        return other

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
        if self.snapshot is not None:
            return StateSnapshotPacking(self.transfers)
        offloads = {self.old.plan.offload, self.new.plan.offload}
        in_host_memory = (
            {"parameter", "optimizer"} if "parameters" in offloads else {"optimizer"} if "optimizer" in offloads else ()
        )
        return Packing(self.transfers, self._on_one_device, frozenset(in_host_memory))

    @property
    def _on_one_device(self) -> frozenset[tuple[int, int]]:
        """Pairs of source and target rank on one device, both of which live while the state moves."""
        if self.frees_source_memory:
            return frozenset()
        return frozenset(
            (source, target)
            for source, device in enumerate(self.old.devices)
            for target, other in enumerate(self.new.devices)
            if device and (device, self.old.hosts[source]) == (other, self.new.hosts[target])
        )

    def outbox_name(self, old_rank: int) -> str:
        """Name of the segment that a source rank fills."""
        return f"{self.id}.out{old_rank}" if self.snapshot is None else self.snapshot.names[old_rank]

    def description_name(self, old_rank: int) -> str:
        """Name of the segment in which a source rank describes its device memory."""
        return f"{self.id}.device{old_rank}"

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
