"""Requests and events: their base classes, tables by name, and conversion between maps and frozen dataclasses.

The conversion checks every field's type, in place of msgspec, as only the standard library may be used. Fields that a
class does not know are ignored and absent ones take their default, so that peers of other versions are understood; a
field of the wrong type is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin

from clusterd.protocol.frames import Message, ProtocolError

T = TypeVar("T")

_UNIONS = (Union, types.UnionType)


def from_map(kind: type[T], data: object, where: str = "") -> T:
    """Check a received map against a dataclass.

    Args:
        where: path to the map, for the error message.
    Raises:
        ProtocolError: a field is absent or of another type; names the field, not its value, which may be a secret.
    """
    where = where or kind.__name__
    if not isinstance(data, Mapping):
        raise ProtocolError(f"{where} is {type(data).__name__}, not a map")
    values: dict[str, Any] = {}
    for name, hint, required in _fields(kind):  # type: ignore[arg-type]
        key = name.rstrip("_")
        if key in data:
            value = data[key]
            # Most fields are plain, and agents send thousands of messages.
            values[name] = value if type(value) is hint else _checked(hint, value, f"{where}.{key}")
        elif required:
            raise ProtocolError(f"{where}.{key} is absent")
    return kind(**values)


def to_map(message: Any) -> Message:
    """The map of a dataclass, nested ones included. A field whose name is a keyword of Python ends with ``_`` there."""
    return {field.name.rstrip("_"): _plain(getattr(message, field.name)) for field in dataclasses.fields(message)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_map(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether it is required, of each field."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    )


def _checked(hint: Any, value: Any, where: str) -> Any:
    """The value as its field's type wants it."""
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if origin in _UNIONS:
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        (one,) = (option for option in options if option is not type(None))
        return _checked(one, value, where)
    if origin is tuple:
        return _checked_tuple(typing.get_args(hint), value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} is {type(value).__name__}, not a map")
        key_hint, value_hint = typing.get_args(hint)
        return {_checked(key_hint, k, where): _checked(value_hint, v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_map(typing.cast("type[Any]", hint), value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise ProtocolError(f"{where} is no {hint.__name__}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ProtocolError(f"{where} is {type(value).__name__}, not {hint.__name__}")
    return value


def _checked_tuple(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(f"{where} is {type(value).__name__}, not a list")
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(_checked(hints[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(hints):
        raise ProtocolError(f"{where} has {len(value)} items, not {len(hints)}")
    return tuple(_checked(h, item, f"{where}[{i}]") for i, (h, item) in enumerate(zip(hints, value, strict=True)))


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
class OfAttempt:
    """Base of messages about all generations of an attempt."""

    job: str
    attempt: int


@dataclass(frozen=True)
class OfGeneration(OfAttempt):
    """Base of messages about one generation of an attempt."""

    generation: int


@dataclass(frozen=True)
class OfRank(OfGeneration):
    """Base of messages about one rank."""

    rank: int


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
