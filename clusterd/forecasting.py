"""Messages between the daemon and the process beside it that plays roll-outs."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

from clusterd.rows import Effect, Forecast
from clusterd.types import DeviceClaim, HostId, JobSpec

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Shares of roll-outs by which a start or an end has come, in the order of `rows.Quantiles`."""

HEADER_BYTES = 4
"""Length of a message, before it, most significant byte first."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A job that would be submitted now, alone."""

    spec: JobSpec
    shape: dict[str, Any] | None = None  # of its model, as inspected for another job; None: it has no model
    model: str = ""  # signature


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator would do now: drain hosts, or claim devices."""

    drained: tuple[HostId, ...] = ()
    jobs_stay: bool = False  # on the drained hosts, to their end
    claim: DeviceClaim | None = None


class PastJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is over, as one like it may be submitted again."""

    at_s: float  # of its submission
    spec: JobSpec
    ran_s: float


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """State to play forward, and how often."""

    now_s: float
    state: bytes  # core.state.State without its performance tables, encoded
    tables: dict[str, bytes]  # performance tables by model, each encoded
    past: bytes  # list of past jobs, encoded
    policy: str
    rollouts: int  # at most
    cpu_s: float  # processor time after which no further roll-out begins
    what_ifs: tuple[WhatIf, ...] = ()  # the time is shared among these
    change: Change | None = None  # asked about instead


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a job that would be submitted, and how it would start most often."""

    forecast: Forecast | None = None
    plan: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Forecasts by job, or one for each what-if, or the effect of a change."""

    jobs: dict[str, Forecast] = {}
    what_ifs: tuple[WhatIfAnswer, ...] = ()
    effect: Effect | None = None


def message(value: Request | Answer) -> bytes:
    """Bytes of a message, with its length."""
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(HEADER_BYTES) + body


def read_message(stream: BinaryIO) -> bytes | None:
    """Read the body of the next message from a blocking stream; None: the other side is gone."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    body = stream.read(length := int.from_bytes(header))
    return body if len(body) == length else None
