"""Parameter groups and the learning-rate scheduler over them, carried between ranks that have other groups.

A stage of a pipeline has the groups of its own parameters, which parameter names identify. Which lists in a scheduler's
state have one value per group is found by evidence: over twice the groups, the script's factory makes them twice as
long. Schedulers within schedulers are parts of the same state.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections import defaultdict
from contextlib import suppress
from typing import Any

import torch

from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.parallel.schedule import step_once
from clusterd.train.process.exits import PlanRefused, Refused, first_line
from clusterd.train.process.job import SchedulerFactory
from clusterd.train.process.plain_data import NotSerializable, plain_value, restore_like

Origin = tuple[int, int] | None
"""Source and group there of a group that is here; None: it is empty, and in no source."""

_SCHEDULED = ("lr", "momentum", "betas")
"""Values of a group that a scheduler changes."""

_UNKNOWN = object()
"""What an example of the scheduler has not."""


class GroupMismatch(Exception):
    """Parameter groups or a scheduler of this rank were not received."""


def collect(optimizer: RankOptimizer, scheduler: Any) -> dict[str, Any]:
    """Names and values of each group, and the state of the scheduler or None, as plain values.

    Raises:
        NotSerializable: naming the value.
    """
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise NotSerializable(f"the scheduler, a {type(scheduler).__name__}, has no state_dict or load_state_dict")
    groups = [
        {
            "names": names,
            "values": {k: plain_value(v, f"parameter group: {k}") for k, v in group.items() if k != "params"},
            **({"added": True} if number >= optimizer.groups_made else {}),
        }
        for number, (names, group) in enumerate(zip(_names(optimizer), optimizer.optimizer.param_groups, strict=True))
    ]
    return {
        "groups": groups,
        "scheduler": plain_value(scheduler.state_dict(), "scheduler") if scheduler is not None else None,
    }


def add_groups(optimizer: RankOptimizer, sources: list[dict[str, Any]]) -> None:
    """Add the parameter groups that the script's optimizer got while it trained."""
    plain = {name: p for name, _, p in optimizer.local}
    for group in (group for source in sources for group in source["groups"] if group.get("added")):
        grouped = {name for names in _names(optimizer) for name in names}
        if names := [name for name in group["names"] if name in plain and name not in grouped]:
            values = {k: restore_like(None, v) for k, v in group["values"].items()}
            optimizer.optimizer.add_param_group({**values, "params": [plain[name] for name in names]})


class Placement:
    """Values of the groups and of the scheduler for this rank, found before anything is changed.

    Raises:
        GroupMismatch: a group or the scheduler that is needed was not received.
        PlanRefused: the parameters of a group here have other values each, or the scheduler's state does not tell what
            belongs to which group.
    """

    def __init__(
        self, optimizer: RankOptimizer, scheduler: Any, factory: SchedulerFactory | None, sources: list[dict[str, Any]]
    ) -> None:
        self._optimizer, self._scheduler, self._factory = optimizer, scheduler, factory
        names = _names(optimizer)
        self._origins = _origins(names, sources)
        self._values = [sources[o[0]]["groups"][o[1]]["values"] if o is not None else {} for o in self._origins]
        self._state: Any = None
        if scheduler is None:
            return
        states = [source["scheduler"] for source in sources]
        if any(state is None for state in states):
            raise GroupMismatch("this rank has a scheduler, but the source had none")
        for state, source in zip(states, sources, strict=True):
            if [group["names"] for group in source["groups"]] == names:
                self._state = state
                return
        self._counts = [len(source["groups"]) for source in sources]
        same_numbers = [o and o[1] for o in self._origins] == list(range(len(names))) and {*self._counts} == {
            len(names)
        }
        if same_numbers and all(json.dumps(state) == json.dumps(states[0]) for state in states):
            self._state = states[0]
            return
        assert factory is not None
        try:
            once, twice = (_example(factory, optimizer.optimizer, times) for times in (1, 2))
        except Exception as error:  # a factory for a fixed number of groups
            why = f"its factory fails with another number of parameter groups ({first_line(error)})"
            raise _refusal(scheduler, why) from error
        fresh = plain_value(scheduler.state_dict(), "scheduler")
        self._state = self._placed(type(scheduler).__name__, once, twice, fresh, states)

    def apply(self) -> None:
        """Set the values of the groups, and load the scheduler's state."""
        optimizer = self._optimizer.optimizer
        for group, values in zip(optimizer.param_groups, self._values, strict=True):
            group.update({k: restore_like(group.get(k), v) for k, v in values.items()})
        if (holder := self._optimizer.holder) is not optimizer:
            for outer, inner in zip(optimizer.param_groups, holder.param_groups, strict=True):
                inner.update({k: v for k, v in outer.items() if k != "params"})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(restore_like(self._scheduler.state_dict(), self._state))

    def differences(self) -> list[str]:
        """Values of groups and scheduler that the script has otherwise, in words.

        Raises:
            Refused: the scheduler is of another kind.
        """
        has_schedule = self._scheduler is not None
        found = []
        for number, (group, values) in enumerate(
            zip(self._optimizer.optimizer.param_groups, self._values, strict=True)
        ):
            for name, value in values.items():
                own = plain_value(group[name], name) if name in group else None
                if own != value and not (has_schedule and name in _SCHEDULED):
                    found.append(f"{name} of parameter group {number} {value} (script: {own})")
        if has_schedule and self._factory is not None and isinstance(self._state, dict):
            fresh = plain_value(self._scheduler.state_dict(), "scheduler")
            if self._state.keys().isdisjoint(fresh) or not fresh.keys() <= self._state.keys():
                kind = type(self._scheduler).__name__
                raise Refused(
                    f"the schedule of the checkpoint is no {kind}, as the script's is: submit the job with --schedule "
                    "script, which takes the script's, at the step of the checkpoint"
                )
            with suppress(Exception):
                stepped = _example(self._factory, self._optimizer.optimizer, 1)
                constant = (k for k in self._state if k in fresh and fresh[k] == stepped.get(k) and k != "base_lrs")
                found += [f"{k} {self._state[k]} (script: {fresh[k]})" for k in constant if fresh[k] != self._state[k]]
        return found

    def _placed(self, where: str, once: Any, twice: Any, fresh: Any, states: list[Any]) -> Any:
        """A part of the state for the groups that are here.

        Args:
            once, twice: the same part of the examples.
            fresh: the same part of this rank's scheduler, as it was made.
            states: the same part of each source.
        """
        first, here = states[0], len(self._origins)
        if not all(type(state) is type(first) for state in states):
            raise _refusal(self._scheduler, f"{where} is of another type on each rank")
        if isinstance(first, dict):
            known = isinstance(once, dict) and isinstance(twice, dict)
            if (known and once.keys() != twice.keys()) or any(state.keys() != first.keys() for state in states):
                raise _refusal(self._scheduler, f"{where} has other keys with other groups")
            return {k: self._part(f"{where}.{k}", k, once, twice, fresh, states) for k in first}
        if isinstance(first, list):
            lengths = [len(part) if isinstance(part, list) else -1 for part in (once, twice)]
            if here and lengths == [here, 2 * here] and [*map(len, states)] == self._counts:
                origins = enumerate(self._origins)
                return [states[o[0]][o[1]] if o is not None else fresh[g] for g, o in origins]
            if (lengths[0] != lengths[1] or lengths[0] < 1) and any(states):
                raise _refusal(self._scheduler, f"{where} does not tell which of its values belongs to which group")
            if any(len(state) != len(first) for state in states):
                raise _refusal(self._scheduler, f"{where} is of another length on each rank")
            return [self._part(f"{where}[{i}]", i, once, twice, fresh, states) for i in range(len(first))]
        if any(json.dumps(state) != json.dumps(first) for state in states):
            raise _refusal(self._scheduler, f"{where} is another value on each rank")
        return first

    def _part(self, where: str, key: Any, once: Any, twice: Any, fresh: Any, states: list[Any]) -> Any:
        examples = _entry(once, key), _entry(twice, key), _entry(fresh, key)
        return self._placed(where, *examples, [state[key] for state in states])


def _entry(part: Any, key: Any) -> Any:
    try:
        return part[key]
    except (KeyError, IndexError, TypeError):
        return _UNKNOWN


def _refusal(scheduler: Any, why: str) -> PlanRefused:
    return PlanRefused(
        f"the state of {type(scheduler).__name__} cannot be carried to the parameter groups of this plan: {why}; plans "
        "without pipeline stages have the same groups on all ranks"
    )


def _names(optimizer: RankOptimizer) -> list[list[str]]:
    """Global names of the parameters of each group."""
    names = {id(plain): name for name, _, plain in optimizer.local}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.optimizer.param_groups]


def _origins(names: list[list[str]], sources: list[dict[str, Any]]) -> list[Origin]:
    where = {
        name: (s, g)
        for s, source in reversed(list(enumerate(sources)))  # the first source that has it
        for g, group in enumerate(source["groups"])
        for name in group["names"]
    }
    found: list[Origin] = []
    for number, own in enumerate(names):
        there = list(dict.fromkeys(where[name] for name in own if name in where))
        if own and not there:
            raise GroupMismatch(f"parameter group {number} of this rank is in none of the received groups")
        if len({json.dumps(sources[s]["groups"][g]["values"], sort_keys=True) for s, g in there}) > 1:
            raise PlanRefused(
                f"parameter group {number} under this plan has parameters of several groups with other values so far "
                f"(one is {own[0]}): let the optimizer's factory form groups by the names of parameters"
            )
        same_layout = len(sources[0]["groups"]) == len(names)
        found.append(there[0] if there else (0, number) if same_layout else None)
    return found


def _example(factory: SchedulerFactory, optimizer: torch.optim.Optimizer, times: int) -> Any:
    """State after one step of a scheduler over copies of the groups, each so many times."""
    stand_in = object.__new__(type(optimizer))
    vars(stand_in).update({k: v for k, v in vars(optimizer).items() if k != "step"})  # not wrapped by a scheduler yet
    stand_in.defaults, stand_in.state = dict(optimizer.defaults), defaultdict(dict)
    stand_in.param_groups = [
        {k: v if k == "params" else copy.deepcopy(v) for k, v in group.items()}
        for _ in range(times)
        for group in optimizer.param_groups
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps without an update
        scheduler = factory(stand_in)
        step_once(scheduler)
    return plain_value(scheduler.state_dict(), "scheduler")
