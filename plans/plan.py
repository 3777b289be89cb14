"""Parallel plan of one training job over its ranks.

Ranks are numbered with tensor parallelism innermost and pipeline stages outermost:
``rank = (stage * dp + replica) * tp + shard``. Tensor-parallel neighbours communicate most, so they get neighbouring
ranks, which placement keeps on one host.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

OFFLOADS = ("none", "optimizer", "parameters")
SCHEDULES = ("1f1b", "gpipe")


class PlanError(ValueError):
    """An invalid plan; the message names the field and the legal values."""


class Coordinates(NamedTuple):
    """Position of a rank in its plan."""

    stage: int  # of the pipeline, 0 <= stage < pp
    replica: int  # of the data, 0 <= replica < dp
    shard: int  # of the tensors, 0 <= shard < tp


@dataclass(frozen=True, slots=True)
class Plan:
    """Degrees of parallelism and memory-saving techniques of one job.

    The global batch is the job's, not the plan's: each replica takes its share of it in `accumulation` micro-batches
    per step. Under pipeline parallelism these are the micro-batches in the pipe.
    """

    dp: int = 1  # data-parallel replicas
    tp: int = 1  # tensor-parallel shards of each layer
    pp: int = 1  # pipeline stages
    zero: int = 0  # ZeRO stage over the replicas: 0 none, 1 optimizer, 2 + gradients, 3 + parameters
    offload: str = "none"  # to host memory: "none", "optimizer", "parameters" (both)
    accumulation: int = 1  # micro-batches per step and replica
    checkpointing: bool = False  # recompute activations in the backward pass
    schedule: str = "1f1b"  # of the pipeline
    shares: tuple[int, ...] = ()  # samples of the global batch per replica; empty: equal shares

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "accumulation"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if type(self.zero) is not int or self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero is {self.zero!r}; ZeRO stages are 0, 1, 2 and 3")
        if not isinstance(self.checkpointing, bool):
            raise PlanError(f"checkpointing is {self.checkpointing!r}; it must be true or false")
        if self.offload not in OFFLOADS:
            raise PlanError(f"offload is {self.offload!r}; it must be one of {', '.join(OFFLOADS)}")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule is {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        if any(type(share) is not int for share in self.shares):
            raise PlanError(f"shares is {list(self.shares)!r}; it must be a list of whole numbers, one per replica")
        if self.shares and (len(self.shares) != self.dp or min(self.shares) < 1):
            raise PlanError(
                f"shares has {len(self.shares)} entries; it must have one of at least 1 per replica ({self.dp})"
            )

    @property
    def ranks(self) -> int:
        """Number of processes, and of devices."""
        return self.dp * self.tp * self.pp

    @property
    def techniques(self) -> frozenset[str]:
        """Techniques beyond one process with one pass per step: names of non-default fields."""
        return frozenset(n for n in _DEFAULTS if getattr(self, n) != _DEFAULTS[n]) - {"schedule", "shares"}

    @property
    def family(self) -> str:
        """Techniques by which a step is computed, without their degrees, and whether replicas take unequal shares."""
        names = {f"zero{self.zero}" if name == "zero" else name for name in self.techniques}
        return "+".join(sorted(names | ({"shares"} if len(set(self.shares)) > 1 else set())))

    def coordinates(self, rank: int) -> Coordinates:
        """Stage, replica and shard of `rank`."""
        if not 0 <= rank < self.ranks:
            raise PlanError(f"rank {rank} is outside a plan of {self.ranks}")
        replica, shard = divmod(rank, self.tp)
        stage, replica = divmod(replica, self.dp)
        return Coordinates(stage, replica, shard)

    def rank_of(self, stage: int, replica: int, shard: int) -> int:
        """Rank at these coordinates."""
        return (stage * self.dp + replica) * self.tp + shard

    def batch_shares(self, global_batch: int) -> tuple[int, ...]:
        """Samples of each global batch that each replica takes.

        Raises:
            PlanError: the batch cannot be cut this way.
        """
        if self.shares:
            if sum(self.shares) != global_batch:
                raise PlanError(f"shares sum to {sum(self.shares)}, the global batch is {global_batch}")
            return self.shares
        share, rest = divmod(global_batch, self.dp)
        if rest or share == 0:
            raise PlanError(f"a global batch of {global_batch} cannot be cut into {self.dp} equal shares")
        return (share,) * self.dp

    def __str__(self) -> str:
        """Short form that `parse` reads: ``dp=2,tp=2,zero=3,checkpointing``."""
        parts = [f"{n}={getattr(self, n)}" for n in ("dp", "tp", "pp", "zero") if getattr(self, n) != _DEFAULTS[n]]
        if self.offload != "none":
            parts.append(f"offload={self.offload}")
        if self.accumulation != 1:
            parts.append(f"accumulation={self.accumulation}")
        if self.checkpointing:
            parts.append("checkpointing")
        if self.pp > 1 and self.schedule != "1f1b":
            parts.append(f"schedule={self.schedule}")
        if self.shares:
            parts.append("shares=" + ":".join(map(str, self.shares)))
        return ",".join(parts) or "dp=1"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the wire: non-default fields only."""
        return {
            f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v
            for f in fields(self)
            if getattr(self, f.name) != _DEFAULTS[f.name]
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Parse the result of `to_dict`, or a ``plan = { ... }`` table of a job file.

        Raises:
            PlanError: an unknown field or a value out of range.
        """
        known = dict(values)
        for name in known:
            if name not in _DEFAULTS:
                raise PlanError(f"a plan has no field {name!r}; it has {', '.join(_DEFAULTS)}")
        if "shares" in known:
            if not isinstance(known["shares"], (list, tuple)):
                raise PlanError(f"shares is {known['shares']!r}; it must be a list of whole numbers, one per replica")
            known["shares"] = tuple(known["shares"])
        return cls(**known)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parse the result of `str`.

        Raises:
            PlanError: the text is not a plan.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, given, value = part.partition("=")
            if not given:
                if name != "checkpointing":
                    raise PlanError(f"{part!r} is not a field of a plan; write it as in dp=2,tp=2,zero=3,checkpointing")
                values[name] = True
            elif name in ("offload", "schedule"):
                values[name] = value
            elif name == "shares":
                values[name] = tuple(_whole(name, v) for v in value.split(":"))
            elif name == "checkpointing":
                flags = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
                values[name] = flags.get(value.lower(), value)
            else:
                values[name] = _whole(name, value)
        return cls.from_dict(values)


def even_shares(samples: int, parts: int) -> tuple[int, ...]:
    """Shares of a batch that differ by at most one, larger ones first."""
    least, more = divmod(samples, parts)
    return (least + 1,) * more + (least,) * (parts - more)


def replicas(devices: int, batch: int) -> Plan:
    """Plain data parallelism with the batch cut as evenly as possible."""
    uneven = batch > devices and batch % devices
    return Plan(dp=devices, shares=even_shares(batch, devices) if uneven else ())


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise PlanError(f"{name} is {text!r}; it must be a whole number") from None


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Plan)}
