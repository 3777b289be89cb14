"""State in modules, helpers, classes, closures and generators goes on in other processes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clusterd.train.state.attributes import Attributes


class Helper:
    """A helper that is no module: a number, an array, a table of other helpers, and a way back to its owner."""

    def __init__(self, owner: Any, depth: int = 1) -> None:
        self.owner, self.seen = owner, 0
        self.squares = np.zeros(3)
        self.table = torch.zeros(2)
        self.others = [Helper(owner, depth - 1)] if depth else []

    def use(self) -> float:
        self.seen += 1
        self.squares += self.seen
        self.table = self.table + self.seen
        return self.seen + float(self.squares.sum() + self.table.sum()) + sum(other.use() for other in self.others)


class Slotted:
    """The same with slots, and a state of its own."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Stateful:
    """An object that saves its own state, beside a cache that it does not save."""

    def __init__(self) -> None:
        self.total, self.cache = 0.0, object()

    def state_dict(self) -> dict[str, Any]:
        return {"total": torch.tensor(self.total), "array": np.arange(3)}

    def average(self, *_: Any) -> None:
        """Keep an average."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["array"].tolist() == [0, 1, 2]
        self.total = float(state["total"])


def _counting() -> Callable[[Any], float]:
    calls, kept = 0, {"last": 0.0}

    def count(_: Any) -> float:
        nonlocal calls
        calls += 1
        kept["last"] += calls
        return calls + kept["last"]

    return count


class Net(nn.Module):
    """A model that keeps state of every kind."""

    steps = 0
    shared: dict[str, int] = {"steps": 0}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.helper, self.slotted, self.stateful = Helper(self), Slotted(), Stateful()
        self.n, self.aux_loss, self.late = 0, None, None
        self.generators = {"torch": torch.Generator(), "numpy": np.random.default_rng(1)}
        self.python, self.legacy = random.Random(1), np.random.RandomState(1)
        self.extra = 0
        self.hooked = Helper(self, 0)
        self.register_forward_hook(lambda *_, helper=self.hooked: None)
        self.register_forward_pre_hook(self.hooked_too)
        self.counting = _counting()

    def hooked_too(self, *_: Any) -> None:
        self.hooked.use()

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state["extra"]

    def forward(self, x: torch.Tensor) -> list[float]:
        type(self).steps += 1
        self.shared["steps"] += 1
        self.n += 1
        self.extra += 1
        self.aux_loss = self.linear(x).sum()  # an object beside the numbers, replaced in each pass
        self.late = torch.full((self.n,), 0.5) if self.n > 1 else None  # of another shape each time
        self.slotted.count += 1
        self.stateful.total += 0.5
        drawn = [float(torch.rand((), generator=self.generators["torch"])), self.generators["numpy"].random()]
        drawn += [self.python.random(), self.legacy.rand()]
        kept = [self.helper.use(), self.counting(x), len(self.late) if self.late is not None else 0]
        return [
            *drawn,
            *kept,
            self.n,
            self.steps,
            self.shared["steps"],
            self.slotted.count,
            self.stateful.total,
            self.extra,
        ]


def _made() -> tuple[Net, Attributes]:
    Net.steps, Net.shared["steps"] = 0, 0  # a new process
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, Attributes(dict(net.named_modules()), optimizer)


def _sent(attributes: Attributes) -> Any:
    return json.loads(json.dumps(attributes.changed()))


@pytest.mark.parametrize("rehearsals", [0, 3])
def test_everything_that_a_model_keeps_goes_on_in_another_process(rehearsals: int) -> None:
    """A module that had replaced any object among its attributes lost all its numbers."""
    net, attributes = _made()
    x = torch.ones(1, 2)
    for _ in range(3):
        net(x)
    sent = _sent(attributes)
    expected = [net(x) for _ in range(2)]
    there, attributes = _made()
    for _ in range(rehearsals):
        there(x)
    attributes.restore([sent])
    assert [there(x) for _ in range(2)] == expected


def test_what_was_not_changed_is_reset_to_what_it_was() -> None:
    _, attributes = _made()
    sent = _sent(attributes)
    there, attributes = _made()
    x = torch.ones(1, 2)
    there(x)
    attributes.restore([sent])
    found = there(x)
    assert found == _made()[0](x)


class Unsendable(Stateful):
    """Saves what no message can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"object": object()}


def test_what_cannot_be_carried_is_told_once_by_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    net = nn.Module()
    net.bad, net.large = Unsendable(), np.zeros(1 << 18)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.register_step_post_hook(Stateful().average)
    attributes = Attributes({"part": net}, optimizer)
    net.large = net.large + 1
    for _ in range(2):
        _sent(attributes)
    told = capfd.readouterr().out
    names = ("the state of part.bad", "part.large, which has changed", "step hook Stateful.average")
    assert [told.count(name) for name in names] == [1] * 3
