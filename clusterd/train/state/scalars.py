"""Training state outside of the tensor collection: step counters, parameter-group values, the scheduler.

It travels as plain values in the message that accompanies a segment, never pickled. Parameters have global names, so
source and target ranks may distribute parameters and groups differently.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from clusterd.train.data import fingerprint
from clusterd.train.data.fingerprint import Fingerprint
from clusterd.train.parallel import build
from clusterd.train.parallel.optimizers import RankOptimizer, attribute_with_tensors
from clusterd.train.process.exits import Refused
from clusterd.train.process.plain_data import NotSerializable, plain_value, restore_like
from clusterd.train.state.first_steps import FirstSteps, check_same
from clusterd.train.state.lazy_optimizer_state import lazy_tensors
from clusterd.train.state.training import Training
from plans.model_shape import ModelShape

Scalars = dict[str, Any]


class ScalarMismatch(Exception):
    """Received state does not fit the optimizer or the scheduler of this rank."""


def collect(training: Training, shape: ModelShape, *, lazy_saved_separately: bool = False) -> Scalars:
    """Collect the scalar state of this rank.

    Args:
        lazy_saved_separately: the caller saves tensors that the optimizer created after its first update.
    Returns:
        first_steps: of the job; data: fingerprint of the data set; stream: position of a stream after this step;
        evaluations, registered: their states; attributes, attribute_tensors: changed attributes of modules, the
        optimizer and the loss, by name;
        counters: [values by slot, names of the parameters that have them]; absent: parameters without state yet;
        groups: names and values of each; common: optimizer state of no parameter; frozen: parameters no longer
        trainable; scheduler: its ``state_dict``, or None.
    Raises:
        NotSerializable: naming the value.
    """
    optimizer, scheduler = training.optimizer, training.scheduler
    _check_buffers(training.parallel.module, shape)
    _check_hidden_state(optimizer.holder)
    tensors = tensor_slots(shape)
    equal_values: dict[str, tuple[dict[str, Any], list[str]]] = {}
    absent: list[str] = []
    names = {id(plain): name for name, _, plain in optimizer.local}
    state = optimizer.holder.state
    updated = optimizer.updated()
    lazy = set(lazy_tensors(optimizer, tensors))
    if lazy and not lazy_saved_separately:
        name, slot = min(lazy)
        raise NotSerializable(
            f"{name}: {slot} was created after the optimizer's first update; only checkpoints can store it"
        )
    counters = [v for slots in state.values() if isinstance(slots, Mapping) for v in slots.values() if _is_counter(v)]
    read = dict(zip(map(id, counters), on_host(counters), strict=True))
    for name, _, plain in optimizer.local:
        if name not in updated:
            continue
        slots = state.get(plain, {})
        if not slots and tensors.get(name):
            absent.append(name)
        values = {
            slot: plain_value(read.get(id(value), value), f"{name}: {slot}")
            for slot, value in slots.items()
            if slot not in tensors.get(name, ()) and value is not None and (name, slot) not in lazy
        }
        equal_values.setdefault(json.dumps(values, sort_keys=True), (values, []))[1].append(name)
    return {
        "first_steps": training.first_steps.to_dict() if training.first_steps is not None else None,
        "attributes": training.attributes.changed(),
        "attribute_tensors": training.attributes.tensors.changed(),
        "data": training.fingerprint,
        "stream": training.stream.position(training.step) if training.stream is not None else None,
        "evaluations": training.evaluations.state(),
        "registered": training.registered.states(),
        "counters": [[values, names_with] for values, names_with in equal_values.values() if values],
        "absent": absent,
        "frozen": training.parallel.newly_frozen(),
        "common": {k: plain_value(v, f"optimizer state: {k}") for k, v in state.items() if isinstance(k, str)},
        "groups": [
            {
                "names": [names[id(p)] for p in group["params"]],
                "values": {k: plain_value(v, f"parameter group: {k}") for k, v in group.items() if k != "params"},
            }
            for group in optimizer.optimizer.param_groups
        ],
        "scheduler": plain_value(_state_dict(scheduler), "scheduler") if scheduler is not None else None,
    }


def _state_dict(scheduler: Any) -> Any:
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise NotSerializable(f"the scheduler, a {type(scheduler).__name__}, has no state_dict or load_state_dict")
    return scheduler.state_dict()


def _check_buffers(module: nn.Module, shape: ModelShape) -> None:
    """Raise NotSerializable if a buffer was added or reshaped after the model was made."""
    sizes = {buffer.name: buffer.shape for buffer in shape.buffers}
    for path, buffer in module.named_buffers(remove_duplicate=False):
        name = build.global_name(path)
        if (made := sizes.get(name)) != tuple(buffer.shape):
            was = f"of shape {made}" if made is not None else "none"
            raise NotSerializable(
                f"the buffer {name} is of shape {tuple(buffer.shape)}, but was {was} when the model was made, which is "
                "not supported: register it with its final shape"
            )


def _check_hidden_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise NotSerializable if the optimizer keeps state outside of `state`: in an attribute or an inner optimizer."""
    if attribute := attribute_with_tensors(optimizer):
        raise NotSerializable(
            f"{type(optimizer).__name__} keeps tensors of its own in its attribute {attribute}, which is not "
            "supported: keep them in `state`"
        )
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        for other in () if name == "state" else held:
            if isinstance(other, torch.optim.Optimizer) and other.state is not optimizer.state:
                raise NotSerializable(
                    f"{type(optimizer).__name__} contains a {type(other).__name__} ({name}) that keeps state of its "
                    "own, which is not supported: let both use one `state`"
                )


def _is_counter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def on_host(scalars: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same values in host memory, one transfer per dtype: each transfer waits for the whole GPU queue."""
    read: dict[int, torch.Tensor] = {}
    equal_values: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for scalar in scalars:
        equal_values[scalar.dtype, scalar.device].append(scalar)
    for same in equal_values.values():
        together = torch.stack([scalar.detach().reshape(()) for scalar in same]).cpu()
        read.update(zip(map(id, same), together.unbind(), strict=True))
    return [read[id(scalar)].reshape(scalar.shape) for scalar in scalars]


def restore(training: Training, shape: ModelShape, received: Iterable[Scalars]) -> None:
    """Restore the scalar state that several ranks sent.

    Raises:
        ScalarMismatch: a counter or a group that is needed was not received.
        Refused: the data set is another one.
        PlanRefused: the first steps of the job differ under this plan.
    """
    sources = list(received)
    _compare_first_steps(training, shape, sources[0])
    same_data = _check_data(training.fingerprint, sources[0].get("data"))
    if training.stream is not None:
        training.stream.restore(sources[0].get("stream") if same_data else None)
    training.evaluations.restore(sources[0].get("evaluations"))
    training.registered.restore(sources[0].get("registered"))
    optimizer, scheduler = training.optimizer, training.scheduler
    attributes: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for source in reversed(sources):  # replica 0 wins, as for buffers; old checkpoints have none
        attributes |= source.get("attributes", {})
        tensors |= source.get("attribute_tensors", {})
    training.attributes.restore(attributes)
    training.attributes.tensors.restore(tensors)
    _restore_counters(optimizer, tensor_slots(shape), sources)
    state = optimizer.holder.state
    for key, value in sources[0].get("common", {}).items():  # old state snapshots and checkpoints have none
        state[key] = restore_like(state.get(key), value)
    training.parallel.freeze({name for source in sources for name in source.get("frozen", ())})
    origins = _restore_groups(optimizer, sources)
    if scheduler is not None:
        states = [source["scheduler"] for source in sources]
        if any(state is None for state in states):
            raise ScalarMismatch("this rank has a scheduler, but the source had none")
        fresh = scheduler.state_dict()
        scheduler.load_state_dict(restore_like(fresh, _by_groups(states, sources, origins)))


def _compare_first_steps(training: Training, shape: ModelShape, source: Scalars) -> None:
    """Take over the first steps of the job, and compare them with the same steps under this plan.

    Raises:
        PlanRefused: they differ.
    """
    training.first_steps = None
    here, before = training.fingerprint, source.get("data")
    is_same_job = bool(here and before and here["job"] == before["job"])
    if not is_same_job or not source.get("first_steps"):  # another job's, or ranks of an earlier version
        return
    training.first_steps = FirstSteps.from_dict(source["first_steps"])
    if training.repeated_steps is not None:
        names = [parameter.name for parameter in shape.parameters]
        check_same(training.first_steps, training.repeated_steps, training.job.precision, names)


def _check_data(here: Fingerprint | None, before: Fingerprint | None) -> bool:
    """Compare the data set with that of the ranks before; False: a new job has others.

    Raises:
        Refused: this job's data are others now.
    """
    if why := fingerprint.difference(before, here):
        if before and here and before["job"] != here["job"]:  # a new job from the state of another
            print(f"clusterd: the data are not those that the state was trained on: {why}", flush=True)
            return False
        raise Refused(f"the data are not those that this job has trained on so far: {why}. {fingerprint.ADVICE}")
    return True


def _restore_counters(optimizer: RankOptimizer, tensors: dict[str, set[str]], sources: list[Scalars]) -> None:
    counters = {
        name: values for source in reversed(sources) for values, names_with in source["counters"] for name in names_with
    }
    absent = {name for source in sources for name in source["absent"]}
    updated = optimizer.updated()
    for name, _, plain in optimizer.local:
        if name not in updated:
            continue
        if name in absent:
            optimizer.holder.state.pop(plain, None)
            continue
        slots = optimizer.holder.state.get(plain, {})
        mine = {slot for slot, value in slots.items() if slot not in tensors.get(name, ()) and value is not None}
        if missing := mine - set(counters.get(name, {})):
            raise ScalarMismatch(f"no {min(missing)} of {name} was received")
        for slot, value in counters.get(name, {}).items():
            optimizer.holder.state[plain][slot] = restore_like(slots.get(slot), value)


def _restore_groups(optimizer: RankOptimizer, sources: list[Scalars]) -> list[tuple[int, int]]:
    """Set the values of the groups; return for each group here its (source, group) of origin."""
    names = {id(plain): name for name, _, plain in optimizer.local}
    where = {
        name: (s, g)
        for s, source in reversed(list(enumerate(sources)))
        for g, group in enumerate(source["groups"])
        for name in group["names"]
    }
    origins: list[tuple[int, int]] = []
    for number, group in enumerate(optimizer.optimizer.param_groups):
        first = next((names[id(p)] for p in group["params"] if names[id(p)] in where), None)
        if first is None and (group["params"] or number >= len(sources[0]["groups"])):
            raise ScalarMismatch(f"parameter group {number} of this rank is in none of the received groups")
        source, origin = where[first] if first is not None else (0, number)
        origins.append((source, origin))
        values = sources[source]["groups"][origin]["values"]
        group.update({k: restore_like(group.get(k), v) for k, v in values.items()})
    holder = optimizer.holder
    if holder is not optimizer.optimizer:
        for outer, inner in zip(optimizer.optimizer.param_groups, holder.param_groups, strict=True):
            inner.update({k: v for k, v in outer.items() if k != "params"})
    return origins


def _by_groups(states: list[Any], sources: list[Scalars], origins: list[tuple[int, int]]) -> Any:
    """A scheduler's state, with its per-group lists rearranged for the groups that are here."""
    here = len(origins)
    if all(len(s["groups"]) == here for s in sources) and [g for _, g in origins] == list(range(here)):
        return states[0]
    first = states[0]
    if isinstance(first, dict):
        return {k: _by_groups([s[k] for s in states], sources, origins) for k in first}
    if isinstance(first, list) and len(first) == len(sources[0]["groups"]):
        return [states[s][g] for s, g in origins]
    if isinstance(first, list):
        return [_by_groups([s[i] for s in states], sources, origins) for i in range(len(first))]
    return first


def tensor_slots(shape: ModelShape) -> dict[str, set[str]]:
    """Names of the slots that migrate as tensors, by parameter."""
    found = {p.name: {name for name, _ in shape.slots_of(i)} for i, p in enumerate(shape.parameters)}
    for odd in shape.odd_slots:
        found[shape.parameters[odd.parameter].name].add(odd.name)
    return found
