"""State of the script's own objects, which travels with the training state by the names they are registered under."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clusterd.train.process.exits import Refused
from clusterd.train.process.plain_data import NotSerializable, from_plain, plain_with_tensors
from clusterd.units import size

STATE_BYTES_MAX = 1 << 20
"""Limit for one object's state: it is part of a message, unlike parameters and buffers."""


class _TooLarge(NotSerializable):
    """A state above the limit."""


class Registered:
    """Objects with ``state_dict`` and ``load_state_dict``, by name, and received states that wait for their object.

    Attributes:
        objects: by name.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}
        self._loaded: dict[str, tuple[Any, Any]] = {}  # received states, and what the objects gave once they had them
        self._warned: set[str] = set()

    def add(self, name: str, value: Any) -> None:
        """Register an object; if a state for it was received, load it.

        Raises:
            Refused: the object has no state, its state is too large, or the name is taken.
        """
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise Refused(f"register({name!r}): a {type(value).__name__} has no state_dict and load_state_dict")
        if name in self.objects:
            raise Refused(f"register({name!r}): the name is taken by a {type(self.objects[name]).__name__}")
        try:
            self._state(name, value)
        except _TooLarge as error:
            raise Refused(f"register({name!r}): {error}") from None
        except NotSerializable:
            pass  # it may be another by the time that it has to travel, and a checkpoint of this plan holds what it can
        self.objects[name] = value
        if name in self._waiting:
            self._load(name, self._waiting.pop(name))

    def _load(self, name: str, state: Any) -> None:
        self.objects[name].load_state_dict(from_plain(state))
        self._loaded[name] = state, self._given(name)

    def _given(self, name: str) -> Any:
        try:
            return self._state(name, self.objects[name])
        except NotSerializable:
            return None

    def reload(self) -> list[str]:
        """Load received states again into objects that have changed since; return their names."""
        changed = [name for name, (_, given) in self._loaded.items() if self._given(name) != given]
        for name in changed:
            self._load(name, self._loaded[name][0])
        return changed

    def states(self) -> dict[str, Any]:
        """Plain values of all states.

        Raises:
            NotSerializable: naming the value.
        """
        return dict(self._waiting) | {name: self._state(name, value) for name, value in self.objects.items()}

    def _state(self, name: str, value: Any) -> Any:
        state = plain_with_tensors(value.state_dict(), name)
        bytes_now = len(json.dumps(state))
        large = f"the state of {name} has {size(bytes_now)} of at most {size(STATE_BYTES_MAX)}"
        if bytes_now > STATE_BYTES_MAX:
            raise _TooLarge(f"{large}: keep large tensors as buffers of the model")
        if bytes_now > STATE_BYTES_MAX / 2 and name not in self._warned:
            self._warned.add(name)
            print(f"clusterd: {large}; above that it can be neither moved nor saved for another plan", flush=True)
        return state

    def raw_states(self) -> dict[str, Any]:
        """All states as the objects give them."""
        waiting = {name: from_plain(state) for name, state in self._waiting.items()}
        return waiting | {name: value.state_dict() for name, value in self.objects.items()}

    def restore(self, states: Mapping[str, Any] | None) -> None:
        """Load received states into the objects that are here, and keep the others for later ones."""
        for name, state in (states or {}).items():
            if name in self.objects:
                self._load(name, state)
            else:
                self._waiting[name] = state
