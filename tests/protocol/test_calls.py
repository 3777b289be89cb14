"""Calls over one connection: each reply reaches its call, and none waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.protocol import ProtocolError, calls
from clusterd.protocol.calls import Calls, Ended, Failure, Item, Ok


@given(st.data())
def test_replies_reach_their_calls_in_any_order(data: st.DataObject) -> None:
    open_calls = Calls()
    count = data.draw(st.integers(1, 8))
    received: list[list[Any]] = [[] for _ in range(count)]
    numbers = [open_calls.open(replies.append) for replies in received]
    assert len(set(numbers)) == count
    items = [data.draw(st.integers(0, 3)) for _ in range(count)]
    ends = [
        data.draw(st.sampled_from([Ok(1), Failure("no", "busy"), Failure("no", exit_code=75)])) for _ in range(count)
    ]
    sequences = [[*(Item(n) for n in range(some)), end] for some, end in zip(items, ends, strict=True)]
    left = [n for n, sequence in enumerate(sequences) for _ in sequence]
    sent = [0] * count
    for n in data.draw(st.permutations(left)):
        assert open_calls.take(calls.reply(numbers[n], sequences[n][sent[n]]))
        sent[n] += 1
    assert repr(received) == repr(sequences)  # equal tuples may be of different types
    assert len(open_calls) == 0


def test_a_late_reply_and_other_messages_are_nobodys() -> None:
    open_calls = Calls()
    received: list[Any] = []
    number = open_calls.open(received.append)
    open_calls.close(number)
    for message in (calls.reply(number, Ok(1)), {"event": "progress"}, {"id": [], "ok": 1}, {}):
        assert not open_calls.take(message)
    assert received == []


def test_every_open_call_ends_with_the_connection() -> None:
    open_calls = Calls()
    received: list[list[Any]] = [[], [], []]
    numbers = [open_calls.open(replies.append) for replies in received]
    open_calls.take(calls.reply(numbers[0], Ok(None)))
    open_calls.take(calls.reply(numbers[1], Item(1)))
    lost = ConnectionError("gone")
    open_calls.end(lost)
    open_calls.end(ConnectionError("again"))
    assert repr(received) == repr([[Ok(None)], [Item(1), Ended(lost)], [Ended(lost)]])


@pytest.mark.parametrize("error", ["no", [], {}, {"message": 1}, {"message": "no", "exit_code": "75"}])
def test_a_malformed_error_is_a_protocol_error(error: Any) -> None:
    open_calls = Calls()
    number = open_calls.open(lambda _: None)
    with pytest.raises(ProtocolError, match="invalid error"):
        open_calls.take({"id": number, "error": error})


def test_errors_keep_their_form_on_the_wire() -> None:
    """Agents name a kind, the daemon an exit code."""
    assert calls.reply(3, Failure("no", "busy")) == {"id": 3, "error": {"kind": "busy", "message": "no"}}
    assert calls.reply(3, Failure("no", exit_code=2)) == {"id": 3, "error": {"message": "no", "exit_code": 2}}
    assert calls.reply(3, Ok(None)) == {"id": 3, "ok": None}
    assert calls.request(3, "stop", {"job": "1"}) == {"id": 3, "verb": "stop", "job": "1"}
