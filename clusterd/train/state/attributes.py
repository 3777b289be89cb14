"""Attributes that modules, the optimizer and the loss change: a step counter, a temperature, a generator's state."""

from __future__ import annotations

import copy
import functools
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from clusterd.train.parallel.alternating import AlternatingOptimizer
from clusterd.train.process import held
from clusterd.train.process.plain_data import NotSerializable, from_plain, plain_value, plain_with_tensors, restore_like
from clusterd.train.state.attribute_tensors import BYTES_MAX, AttributeTensors

OPTIMIZER = "(optimizer)"
"""Key in the place of a module name."""

LOSS = "(loss)"
"""Prefix of the names of modules that belong to the loss."""

DATA = "(data)"
"""Key of a data set, of which only generators are carried, and what the script's own loop changes."""

SAMPLER, COLLATE = "(sampler)", "(collate_fn)"
"""Keys of what else makes batches, of which only the latter is carried."""

EXTRA = "(extra state)"
"""Attribute in the place of what a module's ``get_extra_state`` gives."""

STATE_BYTES_MAX = 1 << 20
"""Limit for the state of one object: it is part of a message."""


class Attributes:
    """Changed attributes of the modules, the optimizer and the loss of a rank, and of the objects that they hold.

    Carried are numbers and text, lists and maps of these, small tensors and arrays, the states of generators, and those
    of objects that save their own. Other objects are left as they are. What has changed and is not carried is reported
    in the log, once.

    Attributes:
        roots: the modules, the optimizer and the loss, by name.
        data: what makes batches, by name.
        of_loop: names of what the script's own loop has changed.
        loop_variables: checksums of the variables with which that loop began, where the job first started.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        loss: object = None,
        data: Mapping[str, object] | None = None,
    ) -> None:
        """Record the initial values; call before the first step.

        Args:
            modules: by the names that they have in the model.
            loss: included if it is an object, or a function that keeps something.
            data: what makes batches in this process: set of samples, sampler, `collate_fn`.
        """
        optimizers = optimizer.parts if isinstance(optimizer, AlternatingOptimizer) else {}
        self.roots: dict[str, object] = {**modules, OPTIMIZER: optimizer}
        self.roots |= {f"{OPTIMIZER}.{name}": part for name, part in optimizers.items()}
        losses = {f"{LOSS}.{name}": module for name, module in parts_of_loss(loss).items()}
        self.roots |= losses
        self.roots |= held.script_globals([*modules.values(), loss, *losses.values()])
        self.data = {name: getattr(value, "__self__", value) for name, value in (data or {}).items()}
        self.data |= {f"{DATA}.{n}": v for n, v in held.script_globals([*self.data.values()]).items()}
        owners = held.owners(self.roots)
        self._tensors = AttributeTensors(owners, frozenset(losses))
        self._initial = {
            name: {k: copy.deepcopy(v) for k, v in owner.attributes.items() if held.is_plain(v)}
            for name, owner in owners.items()
        }
        self._sizes = {
            (name, k): len(v) if held.is_container(v) else -1
            for name, o in owners.items()
            for k, v in o.attributes.items()
        }
        self.of_loop: set[str] = set()
        self.loop_variables: dict[str, int] = {}
        self._told: set[tuple[str, str]] = set()
        self._initial_states = self._states(self._stateful(owners))
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            for hook in filter(held.keeps_something, getattr(optimizer, kind, {}).values()):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                self._tell(OPTIMIZER, name, f"what the optimizer's step hook {name} keeps")

    def changed(self) -> dict[str, Any]:
        """Attributes that differ from their initial values, by owner.

        Returns:
            attributes: plain values; attribute_tensors: tensors and arrays; attribute_states: states of generators and
            of objects that save their own, by name; of_loop: what the script's own loop has changed.
        """
        owners = held.owners(self.roots)
        plain: dict[str, dict[str, Any]] = {}
        for name, owner in owners.items():
            if differing := self._differing(name, owner):
                plain[name] = {k: plain_value(v, held.path(name, k)) for k, v in differing.items()}
            for k, v in owner.attributes.items():
                if held.is_container(v) and not held.is_plain(v) and len(v) != self._sizes.get((name, k), len(v)):
                    self._tell(name, k, f"{held.path(name, k)}, which has changed and holds no numbers, or too many,")
        tensors, left_out = self._tensors.changed(owners)
        for name, owner in held.owners(self.data).items():
            for k, v in owner.attributes.items():
                if (at := held.path(name, k)) not in self.of_loop:
                    continue
                if held.is_plain(v):
                    plain.setdefault(name, {})[k] = plain_value(v, at)
                elif isinstance(v, (torch.Tensor, np.ndarray)) and v.nbytes <= BYTES_MAX:
                    tensors.setdefault(name, {})[k] = plain_with_tensors(v, at)
                else:
                    left_out.append((name, k))
        for owned_by, attribute in left_out:
            self._tell(owned_by, attribute, f"{held.path(owned_by, attribute)}, which has changed and is large,")
        states = self._states(self._stateful(owners))
        differing_states = {name: state for name, state in states.items() if state != self._initial_states.get(name)}
        more = {"of_loop": sorted(self.of_loop), "loop_variables": self.loop_variables}
        found = {"attributes": plain, "attribute_tensors": tensors, "attribute_states": differing_states}
        return found | {name: value for name, value in more.items() if value}

    def restore(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Set what several ranks have changed, and reset the rest to its initial value.

        Args:
            sources: results of `changed`; of two that have changed the same, the first counts. Old ones have less.
        """
        plain, tensors, states = (
            {name: value for source in reversed(sources) for name, value in source.get(kind, {}).items()}
            for kind in ("attributes", "attribute_tensors", "attribute_states")
        )
        owners = held.owners(self.roots)
        for name, owner in owners.items():
            for attribute, value in self._differing(name, owner).items():
                initial = self._initial_value(name, owner, attribute, value)
                held.assign(owner.value, attribute, copy.deepcopy(initial))
            for attribute, value in plain.get(name, {}).items():
                initial = self._initial_value(name, owner, attribute, None)
                held.assign(owner.value, attribute, restore_like(initial, value))
        for name, owner in held.owners(self.data).items():
            for attribute, value in plain.get(name, {}).items():
                held.assign(owner.value, attribute, restore_like(owner.attributes.get(attribute), value))
            for attribute, value in tensors.get(name, {}).items():
                held.assign(owner.value, attribute, from_plain(value))
        self.of_loop.update(*(source.get("of_loop", ()) for source in sources))
        for source in reversed(sources):
            self.loop_variables |= source.get("loop_variables", {})
        self._tensors.restore(owners, tensors)
        stateful = self._stateful(owners)
        now = self._states(stateful)
        for name, state in {**self._initial_states, **states}.items():
            if name in stateful and now.get(name) != state:
                _load(stateful[name], state)

    def _differing(self, name: str, owner: held.Owner) -> dict[str, Any]:
        # What begins with an underscore and was made later may be torch's own, for this plan.
        return {
            k: v
            for k, v in owner.attributes.items()
            if held.is_plain(v) and v != self._initial_value(name, owner, k, v if k.startswith("_") else _NONE)
        }

    def _initial_value(self, name: str, owner: held.Owner, attribute: str, default: Any) -> Any:
        """Initial value of an attribute; that of the class if the instance had none."""
        initial = self._initial.get(name, {})
        return initial[attribute] if attribute in initial else getattr(type(owner.value), attribute, default)

    def _stateful(self, owners: Mapping[str, held.Owner]) -> dict[str, Any]:
        """Generators, objects that save their own state, and modules with an extra state, by name."""
        found = held.generators({k: v for k, v in self.data.items() if k == DATA})
        for name, owner in owners.items():
            if (
                isinstance(owner.value, nn.Module)
                and type(owner.value).get_extra_state is not nn.Module.get_extra_state
            ):
                found[held.path(name, EXTRA)] = owner.value
            for attribute, part in owner.parts():
                if not isinstance(part, held.SIMPLE) and (isinstance(part, held.GENERATORS) or held.has_state(part)):
                    found[held.path(name, attribute)] = part
        return found

    def _states(self, stateful: Mapping[str, Any]) -> dict[str, str]:
        found = {}
        for name, value in stateful.items():
            try:
                state = _saved(value, name)
            except NotSerializable as error:
                self._tell(name, "", f"the state of {name} ({error})")
                continue
            if len(state) <= STATE_BYTES_MAX:
                found[name] = state
            else:
                self._tell(name, "", f"the state of {name}, which has {len(state)} bytes,")
        return found

    def _tell(self, name: str, attribute: str, what: str) -> None:
        if (name, attribute) not in self._told:
            self._told.add((name, attribute))
            print(
                f"clusterd: {what} is neither migrated nor saved in checkpoints: register it as a buffer of the model, "
                "unless it can be recomputed",
                flush=True,
            )


_NONE = object()


def _saved(value: Any, name: str) -> str:
    if (state := held.generator_state(value)) is not None:
        return state
    return json.dumps(
        plain_with_tensors(value.get_extra_state() if isinstance(value, nn.Module) else value.state_dict(), name)
    )


def _load(value: Any, state: str) -> None:
    if held.generator_state(value) is not None:
        held.set_generator_state(value, state)
    elif isinstance(value, nn.Module):
        value.set_extra_state(from_plain(json.loads(state)))
    else:
        value.load_state_dict(from_plain(json.loads(state)))


def parts_of_loss(loss: object) -> dict[str, object]:
    """Modules of a loss by name, or the object that it is or is a method of."""
    if isinstance(loss, Mapping):  # several losses
        parts = ((f"{name}.{path}", part) for name, one in loss.items() for path, part in parts_of_loss(one).items())
        return dict(parts)
    if isinstance(loss, functools.partial):
        loss = loss.func
    loss = getattr(loss, "__self__", loss)
    if isinstance(loss, nn.Module):
        return dict(loss.named_modules())
    return {"": loss} if hasattr(loss, "__dict__") and not isinstance(loss, (type, types.ModuleType)) else {}
