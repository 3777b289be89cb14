"""Calls over one connection: envelopes of requests and replies, and the call that a reply belongs to. Does no I/O.

A request has ``id`` and ``verb`` beside its arguments. A reply has the same ``id`` and one of ``ok`` (the result),
``item`` (one of a stream; more follow) and ``error``. Quick to import, for the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from clusterd.protocol.frames import Message, ProtocolError


class Ok(NamedTuple):
    """Result of a call; the last reply of a stream has None."""

    value: Any


class Item(NamedTuple):
    """One item of a stream."""

    value: Any


class Failure(NamedTuple):
    """Error of a call: `kind` is the agent's, for programs; `exit_code` the daemon's, for the command line."""

    message: str
    kind: str = ""
    exit_code: int | None = None

    @classmethod
    def of(cls, error: object) -> Failure:
        """Check the map of an error.

        Raises:
            ProtocolError: it is none.
        """
        message, code = (error.get("message"), error.get("exit_code")) if isinstance(error, Mapping) else (None, None)
        if not isinstance(error, Mapping) or not isinstance(message, str) or not isinstance(code, (int, type(None))):
            raise ProtocolError(f"an invalid error: {error!r:.200}")
        return cls(message, str(error.get("kind", "")), code)

    def to_map(self) -> Message:
        """The error as it is sent."""
        given = {"kind": self.kind or None, "message": self.message, "exit_code": self.exit_code}
        return {name: value for name, value in given.items() if value is not None}


class Ended(NamedTuple):
    """The connection ended before the reply."""

    why: Exception


Reply = Ok | Item | Failure | Ended
Deliver = Callable[[Reply], object]


def result(outcome: Reply, refusal: Callable[[Failure], Exception]) -> Any:
    """Result of a call, or the item of a stream.

    Raises:
        Exception: `refusal` of the failure, or why the connection ended.
    """
    if isinstance(outcome, Ended):
        raise outcome.why
    if isinstance(outcome, Failure):
        raise refusal(outcome)
    return outcome.value


def request(number: int, verb: str, arguments: Mapping[str, Any]) -> Message:
    """A request as it is sent."""
    return {**arguments, "id": number, "verb": verb}


def reply(number: object, outcome: Ok | Item | Failure) -> Message:
    """A reply as it is sent."""
    if isinstance(outcome, Failure):
        return {"id": number, "error": outcome.to_map()}
    return {"id": number, "item" if isinstance(outcome, Item) else "ok": outcome.value}


class Calls:
    """Open calls of one side of a connection, by number."""

    def __init__(self) -> None:
        self._open: dict[int, Deliver] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, deliver: Deliver) -> int:
        """Begin a call; returns the number for its request.

        Args:
            deliver: called with each reply, the last of which is no `Item`; must not raise.
        """
        self._number += 1
        self._open[self._number] = deliver
        return self._number

    def close(self, number: int) -> None:
        """Give a call up: later replies to it are ignored."""
        self._open.pop(number, None)

    def take(self, message: Message) -> bool:
        """Deliver a received message; false if it is no reply to an open call.

        Raises:
            ProtocolError: it is one, and malformed.
        """
        number = message.get("id")
        if not isinstance(number, int) or (deliver := self._open.get(number)) is None:
            return False
        outcome: Reply
        if "item" in message:
            outcome = Item(message["item"])
        else:
            error = message.get("error")
            outcome = Ok(message.get("ok")) if error is None else Failure.of(error)
            del self._open[number]
        deliver(outcome)
        return True

    def end(self, why: Exception) -> None:
        """End all open calls, as when the connection ended."""
        calls, self._open = self._open, {}
        for deliver in calls.values():
            deliver(Ended(why))
