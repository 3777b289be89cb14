"""Context of a rank: from the agent's rank file, from torchrun's environment, or a single process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterd.plans.plan import Coordinates, Plan, PlanError
from clusterd.protocol.launch import SAME_VARIABLE, MigrationRequest, RankFile
from clusterd.protocol.messages import from_map
from clusterd.train.process.exits import PlanRefused

_ONE_PROCESS = Plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything that a rank receives from outside; it derives the rest."""

    launcher: str = "alone"  # "clusterd", "torchrun" or "alone"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    plan: Plan = _ONE_PROCESS
    device_kind: str = ""  # "cuda", "cpu", or "": cuda if available
    threads: int = 0  # of intra-op parallelism; 0: torch's default
    master_addr: str = ""
    master_port: int = 0
    job: str = ""
    attempt: int = 0
    generation: int = 0
    directory: Path | None = None  # of the attempt on this host
    steps_file: Path | None = None
    control_socket: str = ""
    token: str = ""
    standby: bool = False  # started for a migration, to take over from the ranks that train now
    migration: MigrationRequest | None = None
    snapshot_every: int = 0  # steps between state snapshots; 0: none
    probe: bool = False  # measure device and links first
    proven: tuple[str, ...] = ()  # families of plans that are known to train as one process
    group_token: str = field(default="", repr=False)  # signs objects that ranks send each other
    note: str = ""  # first line of the log of rank 0
    hosts: int = 1  # number of hosts of the ranks
    restore: str = ""  # directory of the checkpoint to restore
    refuses_difference: bool = False  # ends if its first step is another one than where that was written
    final: str = ""  # directory of the final checkpoint

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank in its plan."""
        return self.plan.coordinates(self.rank)

    def __str__(self) -> str:
        """Rank and plan, for messages."""
        return f"rank {self.rank} of {self.world_size} ({self.plan})"


def read(environ: Mapping[str, str] | None = None) -> Context:
    """Read this process's context.

    Raises:
        PlanRefused: the plan is malformed, or has another number of ranks.
    """
    environ = os.environ if environ is None else environ
    if path := environ.get("CLUSTERD_RANK_FILE"):
        return _checked(_of_rank_file(rank_file(path)))
    rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    return _checked(
        Context(
            launcher="torchrun" if "WORLD_SIZE" in environ else "alone",
            rank=rank,
            world_size=world_size,
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            plan=_plan(environ.get("CLUSTERD_PLAN", ""), world_size),
            device_kind=environ.get("CLUSTERD_DEVICE", ""),
            steps_file=Path(environ["CLUSTERD_STEPS_FILE"]) if environ.get("CLUSTERD_STEPS_FILE") else None,
        )
    )


def rank_file(path: str) -> RankFile:
    """Read the file in which the agent describes a rank."""
    return from_map(RankFile, json.loads(Path(path).read_text(encoding="utf-8")), "rank file")


def _of_rank_file(file: RankFile) -> Context:
    return Context(
        launcher="clusterd",
        rank=file.rank,
        world_size=file.world_size,
        local_rank=file.local_rank,
        plan=_plan(file.plan, file.world_size),
        device_kind=file.device.kind,
        threads=file.device.threads,
        master_addr=file.master_addr or "127.0.0.1",
        master_port=file.master_port,
        job=file.job,
        attempt=file.attempt,
        generation=file.generation,
        directory=Path(file.directory) if file.directory else None,
        steps_file=Path(file.steps_file) if file.steps_file else None,
        control_socket=file.control_socket,
        token=file.token,
        standby=file.standby,
        migration=file.move,
        snapshot_every=file.snapshot_every,
        probe=file.probe,
        proven=file.proven,
        group_token=file.group_token,
        note=file.note,
        hosts=file.hosts,
        restore=file.restore or "",
        # A job that failed goes on by itself, and the log tells of a difference; a person is asked.
        refuses_difference=file.attempt == 1 and bool(os.environ.get(SAME_VARIABLE)),
        final=file.final or "",
    )


def _plan(given: str | dict[str, Any] | None, world_size: int) -> Plan:
    try:
        if not given:
            return Plan(dp=world_size)
        return Plan.parse(given) if isinstance(given, str) else Plan.from_dict(given)
    except (PlanError, TypeError) as error:
        raise PlanRefused(f"invalid plan {given!r}: {error}") from error


def _checked(context: Context) -> Context:
    if context.plan.ranks != context.world_size:
        raise PlanRefused(
            f"the plan {context.plan} has {context.plan.ranks} ranks, but {context.world_size} were started"
        )
    return context
