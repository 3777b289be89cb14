"""Encoding of events, decisions, proposals and the state for the journal."""

from __future__ import annotations

from typing import Any

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
    decoded: events.Event = _EVENT_DECODERS[kind].decode(body)
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


def job(body: bytes) -> Job:
    """Decode a job."""
    decoded: Job = _JOB.decode(body)
    return decoded


def proposal(body: bytes) -> Proposal:
    """Decode a proposal of a policy."""
    decoded: Proposal = _PROPOSAL.decode(body)
    return decoded


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists, strings and numbers for the client socket."""
    return msgspec.to_builtins(value)
