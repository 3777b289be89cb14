"""Encoding of events, decisions, proposals and the state for the journal."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import msgpack
import msgspec

from clusterd.core import decisions, events
from clusterd.core.state import Job, State
from clusterd.core.view import Proposal

_EVENT_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in events.EVENTS.items()}
_DECISION_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in decisions.DECISIONS.items()}
_STATE = msgspec.msgpack.Decoder(State)
_JOB = msgspec.msgpack.Decoder(Job)
_PROPOSAL = msgspec.msgpack.Decoder(Proposal)
_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    """Encode an event, a decision, a proposal, a job or a state."""
    return _encoder.encode(value)


def event(kind: str, body: bytes) -> events.Event:
    """Decode an event of this kind.

    Raises:
        KeyError: the kind is unknown.
        msgspec.ValidationError: another version wrote the event, with other fields.
    """
    decoded: events.Event = _EVENT_DECODERS[kind].decode(_with_restarts(body))
    return decoded


def decision(kind: str, body: bytes) -> decisions.Decision:
    """Decode a decision of this kind.

    Raises:
        KeyError: the kind is unknown.
        msgspec.ValidationError: another version wrote the decision, with other fields.
    """
    decoded: decisions.Decision = _DECISION_DECODERS[kind].decode(body)
    return decoded


def state(body: bytes) -> State:
    """Decode a state."""
    decoded: State = _STATE.decode(body)
    return decoded


def snapshot(state: State) -> bytes:
    """Encode a state for a journal snapshot."""
    return _shape() + encode(state)


def of_snapshot(body: bytes) -> State:
    """Decode the state of a journal snapshot.

    Raises:
        ValueError: a version wrote it whose state has fields that are unknown here, or lacks some whose default would
            not tell the truth, as that of the devices in use.
        msgspec.ValidationError: a value is not of its field's type.
    """
    found = state(body[_SHAPE_BYTES:])
    if not body.startswith(_shape()):
        absent, unknown = _differences(_pairs(body[_SHAPE_BYTES:]), found)
        if other := sorted(unknown | (absent - ADDED)):
            raise ValueError(f"its state differs in {', '.join(other)}")
    return found


_SHAPE_BYTES = 8

ADDED = frozenset(
    {
        "Attempt.over_share", "Attempt.paused_by", "Attempt.reclaim", "DeviceClaim.owner", "DeviceClaim.unused",
        "Host.jobs_stay",
        "JobSpec.begin_s", "JobSpec.booking", "JobSpec.clean_env", "JobSpec.hold", "JobSpec.is_attached",
        "JobSpec.limit_signal", "JobSpec.output", "JobSpec.reads_input", "Resources.exclude", "Resources.tasks",
        "State.booked_s", "State.budgets", "State.device_weights", "State.half_life_s", "State.notice", "State.used",
        "Progress.input_share", "Stop.keep", "Tenant.device_hours", "Used.month_s",
    }
)  # fmt: skip
"""Fields of the state that later versions added, as TYPE.FIELD: their default says what was so before."""


def _pairs(body: bytes) -> Any:
    """Decode without types: maps as tuples of pairs, since some of their keys are maps."""
    return msgpack.unpackb(body, strict_map_key=False, use_list=False, object_pairs_hook=tuple)


def _differences(raw: Any, value: Any) -> tuple[set[str], set[str]]:
    """Fields of a decoded value, and of all that it holds, which its encoding lacks; and those that only that has."""
    absent: set[str] = set()
    unknown: set[str] = set()
    parts: list[tuple[Any, Any]] = []
    if is_dataclass(value):
        known, encoded = {field.name for field in fields(value)}, dict(raw)
        absent |= {f"{type(value).__name__}.{name}" for name in known - encoded.keys()}
        unknown |= {f"{type(value).__name__}.{name}" for name in encoded.keys() - known}
        parts = [(encoded[name], getattr(value, name)) for name in known & encoded.keys()]
    elif isinstance(value, dict):
        parts = [(part, own) for (_, part), own in zip(raw, value.values(), strict=True)]
    elif isinstance(value, list | tuple):
        parts = list(zip(raw, value, strict=True))
    for part, own in parts:
        more_absent, more_unknown = _differences(part, own)
        absent |= more_absent
        unknown |= more_unknown
    return absent, unknown


@cache
def _shape() -> bytes:
    """Digest of the fields of the state, and of all that they hold."""
    return blake2b(repr(msgspec.inspect.type_info(State)).encode(), digest_size=_SHAPE_BYTES).digest()


def job(body: bytes) -> Job:
    """Decode a job."""
    decoded: Job = _JOB.decode(_with_restarts(body))
    return decoded


_RESTARTS = msgspec.msgpack.encode({"restarts": True})[1:]


def _with_restarts(body: bytes) -> bytes:
    """A job, or an event with jobs, whose restarts are in a list of their own; once they were among its migrations."""
    return _encoder.encode(_divided(msgspec.msgpack.decode(body))) if _RESTARTS in body else body


def _divided(value: Any) -> Any:
    if isinstance(value, list):
        return [_divided(each) for each in value]
    if not isinstance(value, dict):
        return value
    divided = {key: _divided(each) for key, each in value.items()}
    if "spec" in value and isinstance(changes := value.get("migrations"), list):
        divided["migrations"] = [change for change in changes if not change.get("restarts")]
        divided["restarts"] = [change for change in changes if change.get("restarts")]
    return divided


def proposal(body: bytes) -> Proposal:
    """Decode a proposal of a policy."""
    decoded: Proposal = _PROPOSAL.decode(body)
    return decoded


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists, strings and numbers for the client socket."""
    return msgspec.to_builtins(value)
