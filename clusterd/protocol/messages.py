"""Base classes of requests and events: their names on the wire, the type of a request's reply, and tables by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from clusterd.protocol.codec import from_map, to_map
from clusterd.protocol.frames import Message, ProtocolError

R = TypeVar("R")
E = TypeVar("E", bound="Event")


class Request(Generic[R]):
    """A request that is answered by a message of type `R`: ``class Stop(Request[Stopped], verb="stop")``."""

    verb: ClassVar[str]
    reply: ClassVar[Any]

    def __init_subclass__(cls, verb: str) -> None:
        cls.verb = verb
        bases: tuple[Any, ...] = cls.__orig_bases__  # type: ignore[attr-defined]
        ((cls.reply,),) = (get_args(base) for base in bases if get_origin(base) is Request)

    def to_message(self) -> Message:
        """The request as it is sent, but for its number."""
        return {"verb": self.verb, **to_map(self)}


class Event:
    """A message that is not answered: ``class Progress(Event, event="progress")``."""

    event: ClassVar[str]

    def __init_subclass__(cls, event: str) -> None:
        cls.event = event

    def to_message(self) -> Message:
        """The event as it is sent."""
        return {"event": self.event, **to_map(self)}


@dataclass(frozen=True)
class Done:
    """Reply of a request that asks for nothing but its effect."""


def by_verb(*kinds: type[Request[Any]]) -> dict[str, type[Request[Any]]]:
    """Table of requests."""
    return {kind.verb: kind for kind in kinds}


def by_event(*kinds: type[E]) -> dict[str, type[E]]:
    """Table of events."""
    return {kind.event: kind for kind in kinds}


def read_event(kinds: Mapping[str, type[E]], message: Message) -> E:
    """Check a received event.

    Raises:
        ProtocolError: it is none of these kinds, or malformed.
    """
    name = message.get("event")
    if not isinstance(name, str) or name not in kinds:
        raise ProtocolError("an event of an unknown kind")
    return from_map(kinds[name], message, name)
