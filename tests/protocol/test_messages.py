"""Each message survives its way over the wire, and a malformed one is refused with one clear line."""

from __future__ import annotations

import dataclasses
import enum
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterd import protocol
from clusterd.protocol import ProtocolError, agent, control, forkserver, launch, rank, requests
from clusterd.protocol.messages import from_map, to_map

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.binary(max_size=5)
MODULES = (agent, control, forkserver, launch, launch, rank, requests)
KINDS = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
]


FEW = settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    arguments = typing.get_args(hint)
    if hint is Any:
        return PLAIN
    if typing.get_origin(hint) is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is tuple:
        return st.tuples(*map(values, arguments))
    if typing.get_origin(hint) is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*map(values, arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return built(typing.cast("type[Any]", hint))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=5),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        bytes: st.binary(max_size=5),
        type(None): st.none(),
    }
    return plain[hint]


def built(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)})


def over_the_wire(message: dict[str, Any]) -> dict[str, Any]:
    return protocol.decode(protocol.pack(message))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_a_message_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(built(kind))
    assert from_map(kind, over_the_wire({**to_map(message), "field_of_a_later_version": 1})) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_absent_fields_take_their_defaults(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(built(kind))
    required = {
        field.name.rstrip("_")
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    short = from_map(kind, {name: value for name, value in to_map(message).items() if name in required})
    for field in dataclasses.fields(kind):
        if field.name in required:
            assert getattr(short, field.name) == getattr(message, field.name)
        elif field.default is not dataclasses.MISSING:
            assert getattr(short, field.name) == field.default


@pytest.mark.parametrize("kind", [kind for kind in KINDS if dataclasses.fields(kind)], ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_a_field_of_another_type_is_refused_by_its_name(kind: type[Any], data: st.DataObject) -> None:
    hints = typing.get_type_hints(kind)
    wrong = object()
    fields = [field.name for field in dataclasses.fields(kind) if hints[field.name] is not Any]
    name = data.draw(st.sampled_from(fields))
    sent = {**to_map(data.draw(built(kind))), name.rstrip("_"): wrong}
    with pytest.raises(ProtocolError) as refused:
        from_map(kind, sent, "message")
    assert str(refused.value).startswith(f"message.{name.rstrip('_')} is ")
    assert "\n" not in str(refused.value)


def test_a_launch_of_the_version_before_is_understood() -> None:
    """The map as a daemon of the previous version sent it."""
    device = {"kind": "cuda", "uuid": "GPU-1", "cores": [0, 1], "threads": 2}
    place = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "hosts": 1}
    rank = {**place, "master_addr": "127.0.0.1", "master_port": 7, "interface": "lo", "plan": None, "device": device}
    side = {"generation": 1, "plan": {"dp": 1}, "hosts": ["a"], "devices": [None]}
    move = {"id": "j.1.2", "token": "t", "shape": {"layers": []}, "lost": [], "step": None, "makes_room": False}
    data = {"path": None, "from": [["10.0.0.1", 7]], "token": "t"}
    sent = {
        "restore": None, "snapshot_every": 0, "probe": False, "datasets": {"corpus": data}, "job": "7", "born_s": 1.5,
        "attempt": 1, "generation": 2, "kind": "elastic", "argv": ["python", "train.py"], "env": {"A": "b"},
        "secrets": {"S": "t"}, "snapshot": None, "workdir": "/w", "python": None, "grace_s": 5, "final": None,
        "ranks": [rank], "standby": True,
        "move": {**move, "old": side, "new": {**side, "generation": 2}, "fabric": {"a": ["127.0.0.1", 9]}, "host": "a"},
    }  # fmt: skip
    request = from_map(launch.LaunchRequest, over_the_wire(sent))
    assert request.ranks[0].device == launch.DeviceSpec("cuda", "GPU-1", (0, 1), 2)
    assert request.datasets == {"corpus": launch.DatasetSpec(None, (("10.0.0.1", 7),), "t")}
    assert request.move is not None and request.move.fabric == {"a": ("127.0.0.1", 9)}
    again = to_map(request)  # an agent of the version before finds every key that it reads
    assert {key: again[key] for key in sent} == {**sent, "ranks": again["ranks"], "move": again["move"]}
    assert all(again["ranks"][0][k] == v for k, v in rank.items())
    assert all(again["move"][k] == v for k, v in sent["move"].items())


@pytest.mark.parametrize(
    "value", [{}, {"path": "odd-\udcff", "n": 1}, {"text": "half of a pair \ud800", "rows": [{"a": None}]}]
)
def test_a_frame_around_a_packed_value_is_that_of_the_message(value: dict[str, Any]) -> None:
    """The row of a change is packed once for all watchers."""
    together = protocol.encode_around({"id": 7}, "item", protocol.pack(value))
    assert together == protocol.encode({"id": 7, "item": value})
