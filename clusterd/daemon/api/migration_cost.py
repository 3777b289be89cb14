"""Predicted cost of a migration: exact bytes, and downtime from earlier migrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move
from clusterd.types import RankPlace
from plans.layout import layout
from plans.model_shape import ModelShape
from plans.reshard import plan_transfers

COPY_BYTES_PER_S = 2e9
"""Copy rate of one rank, where no migration of this job was measured yet."""

NETWORK_BYTES_PER_S = 1e9
"""Network rate of one host, likewise."""

FIXED_S = 0.1
"""Fixed part of the downtime: agreement on the last step, messages, and the commit of the switch."""

RESTART_S = 10.0
"""Downtime through host memory, where it was not measured yet: ranks exit, new ones start and build the model."""


def predict_cost(job: Job, move: Move, crowded: str | None = None, restart_s: float | None = None) -> dict[str, Any]:
    """Predict the bytes within and between hosts, and the downtime.

    Args:
        crowded: why the job has to stop for it and start again; None: it need not.
        restart_s: what that took before.
    """
    attempt = job.attempt
    assert attempt is not None and attempt.plan is not None and job.shape is not None
    shape = ModelShape.from_dict(job.shape)
    if crowded is not None:
        local, network, seconds = shape.state_bytes, 0, restart_s or RESTART_S
    else:
        local, network = _bytes(shape, attempt, move)
        seconds = _downtime_s(job, local, network, move.ranks)
    return {
        "plan": str(move.plan),
        "from": str(attempt.plan),
        "devices": [place.device for place in move.ranks],
        "reason": move.reason,
        "local_bytes": local,
        "network_bytes": network,
        "crowded": crowded,
        "predicted_downtime_s": seconds,
    }


def _bytes(shape: ModelShape, attempt: Attempt, move: Move) -> tuple[int, int]:
    """Bytes within hosts, and between them."""
    assert attempt.plan is not None, "only what runs under a plan is moved"
    old = [rank.place for _, rank in sorted(attempt.ranks.items())]
    moves = plan_transfers(
        layout(shape, attempt.plan),
        layout(shape, move.plan),
        [place.host for place in old],
        [place.host for place in move.ranks],
        [str(place.device) for place in old],
        [str(place.device) for place in move.ranks],
    )
    return moves.local_bytes, moves.network_bytes


def _downtime_s(job: Job, local: int, network: int, places: Sequence[RankPlace]) -> float:
    """Downtime scaled from the job's own migrations where there are any."""
    seconds = _expected_s(local, network, places)
    done = [
        m for m in job.migrations if m.downtime_s is not None and not m.restarts and m.local_bytes + m.network_bytes
    ]
    if not done:
        return seconds
    last = done[-1]
    expected = _expected_s(last.local_bytes, last.network_bytes, last.places)
    return seconds * (last.downtime_s or expected) / expected


def _expected_s(local: int, network: int, places: Sequence[RankPlace]) -> float:
    """Downtime by assumed rates: ranks copy in parallel, twice each byte; hosts fetch in parallel."""
    copied = 2.0 * (local + network) / len(places)
    return FIXED_S + copied / COPY_BYTES_PER_S + network / len({p.host for p in places}) / NETWORK_BYTES_PER_S
