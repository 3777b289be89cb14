"""Objects of the script that travel with the training state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clusterd.train.process.exits import Refused
from clusterd.train.state.registered import Registered


class Kept:
    def __init__(self, numbers: int) -> None:
        self.table = torch.zeros(numbers, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table = state["table"]


def test_a_state_above_its_limit_is_refused_when_it_is_registered() -> None:
    registered = Registered()
    with pytest.raises(Refused, match=r"register\('cache'\): the state of cache has .* of at most 1\.0 MiB"):
        registered.add("cache", Kept(1 << 20))
    registered.add("cache", Kept(10))  # the name was not taken


def test_a_state_that_grows_is_warned_of_once_at_half_of_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    registered, kept = Registered(), Kept(10)
    registered.add("cache", kept)
    assert capsys.readouterr().out == ""
    kept.table = torch.zeros(600_000, dtype=torch.uint8)
    for _ in range(2):
        assert set(registered.states()) == {"cache"}
    assert capsys.readouterr().out.count("the state of cache has ") == 1
