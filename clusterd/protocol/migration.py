"""Request of a migration: every rank computes the same copy plan from it. Sent to source ranks and with a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]

PROOF = ".proof"
"""Suffix of a migration's id in the names of segments of its proof."""


@dataclass(frozen=True)
class SideRequest:
    """Source ranks, or target ranks, in the order of their numbers."""

    generation: int
    plan: dict[str, Any]
    hosts: tuple[str, ...]
    devices: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class SnapshotSegments:
    """Segments that ranks published at one step, by rank: their names, and the hosts that have them."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class MigrationRequest:
    """One migration from a plan to another."""

    id: str
    shape: dict[str, Any]  # of the model
    old: SideRequest
    new: SideRequest
    token: str = ""  # by which agents let each other read its segments
    lost: tuple[int, ...] = ()  # source ranks that are gone
    step: int | None = None  # with lost ranks: step that survivors must complete, if they can
    proof_s: float = 0.0  # time for source ranks to publish a state and the steps after it; 0: there is no proof
    makes_room: bool = False  # source ranks free their memory before target ranks start
    fabric: dict[str, Address] = field(default_factory=dict)  # where agents serve segments, by host
    host: str | None = None  # of the receiving ranks
    snapshot: SnapshotSegments | None = None  # source of the state, instead of ranks
    sets: dict[str, str] = field(default_factory=dict)  # tokens of the state snapshots that are read, by set
