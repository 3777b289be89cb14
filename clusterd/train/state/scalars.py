"""Training state outside of the tensor collection: step counters, parameter-group values, the scheduler.

It travels as plain values in the message that accompanies a segment, never pickled. Parameters have global names, so
source and target ranks may distribute parameters and groups differently.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from clusterd.plans.model_shape import ModelShape
from clusterd.protocol.launch import SCHEDULE_VARIABLE
from clusterd.train.data import fingerprint
from clusterd.train.data.fingerprint import Fingerprint
from clusterd.train.parallel.optimizers import RankOptimizer, attribute_with_tensors
from clusterd.train.process.exits import Refused
from clusterd.train.process.plain_data import NotSerializable, plain_value, restore_like
from clusterd.train.state import parameter_groups
from clusterd.train.state.lazy_optimizer_state import lazy_tensors
from clusterd.train.state.training import Training

Scalars = dict[str, Any]


class ScalarMismatch(Exception):
    """Received state does not fit the optimizer of this rank."""


def collect(training: Training, shape: ModelShape, *, lazy_saved_separately: bool = False) -> Scalars:
    """Collect the scalar state of this rank.

    Args:
        lazy_saved_separately: the caller saves tensors that the optimizer created after its first update.
    Returns:
        data: fingerprint of the data set; stream: position of a stream after this step;
        evaluations, registered: their states; attributes, attribute_tensors, attribute_states: what modules,
        the optimizer and the loss have changed in themselves, by name;
        counters: [values by slot, names of the parameters that have them]; absent: parameters without state yet;
        groups: names and values of each; common: optimizer state of no parameter; frozen: parameters no longer
        trainable; scheduler: its ``state_dict``, or None.
    Raises:
        NotSerializable: naming the value.
    """
    optimizer = training.optimizer
    _check_hidden_state(optimizer.holder)
    tensors = tensor_slots(shape)
    equal_values: dict[str, tuple[dict[str, Any], list[str]]] = {}
    absent: list[str] = []
    state = optimizer.holder.state
    updated = optimizer.updated()
    lazy = set(lazy_tensors(optimizer, tensors))
    if lazy and not lazy_saved_separately:
        name, slot = min(lazy)
        raise NotSerializable(
            f"{name}: {slot} is no state that a trial update of the optimizer creates; only checkpoints can store it"
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
        **carried(training),
        "registered": training.registered.states(),
        "counters": [[values, names_with] for values, names_with in equal_values.values() if values],
        "absent": absent,
        "common": {k: plain_value(v, f"optimizer state: {k}") for k, v in state.items() if isinstance(k, str)},
        **parameter_groups.collect(optimizer, training.scheduler),
    }


def carried(training: Training) -> Scalars:
    """The part of `collect` that every rank can give, whatever its optimizer and buffers are like."""
    return {
        **training.attributes.changed(),
        "data": training.fingerprint,
        "stream": training.stream.position(training.step) if training.stream is not None else None,
        "evaluations": training.evaluations.state(),
        "frozen": training.parallel.newly_frozen(),
    }


def restore_carried(training: Training, sources: Sequence[Scalars]) -> None:
    """Restore what `carried` collects.

    Raises:
        Refused: the data set is another one.
    """
    same_data = _check_data(training.fingerprint, sources[0].get("data"))
    if training.stream is not None:
        training.stream.restore(sources[0].get("stream") if same_data else None)
    training.evaluations.restore(sources[0].get("evaluations"))
    training.attributes.restore(sources)  # replica 0 wins, as for buffers
    training.parallel.freeze({name for source in sources for name in source.get("frozen", ())})
    training.optimizer.follow_frozen()


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


def restore(
    training: Training, shape: ModelShape, received: Iterable[Scalars], lazy: Iterable[tuple[str, str]] = ()
) -> bool:
    """Restore the scalar state that several ranks sent.

    Args:
        lazy: parameters and slots whose tensors the caller restores.
    Returns:
        True if groups and schedule are the script's, at its first step, as this job asked for.
    Raises:
        ScalarMismatch, GroupMismatch: a counter or a group that is needed was not received.
        Refused: the data set is another one.
        PlanRefused: the first steps of the job differ under this plan, or groups or scheduler cannot be placed.
    """
    sources = list(received)
    optimizer = training.optimizer
    placement = _placement(training, sources)
    restore_carried(training, sources)
    training.registered.restore(sources[0].get("registered"))
    tensors = tensor_slots(shape)
    for name, slot in lazy:
        tensors[name].add(slot)
    _restore_counters(optimizer, tensors, sources)
    state = optimizer.holder.state
    for key, value in sources[0].get("common", {}).items():  # old state snapshots and checkpoints have none
        state[key] = restore_like(state.get(key), value)
    if placement is not None:
        placement.apply()
    return placement is None


def _placement(training: Training, sources: list[Scalars]) -> parameter_groups.Placement | None:
    """Values of groups and schedule; None: those of the script stay, as a job that goes on from another's asked for.

    Raises:
        Refused: the schedule of the other job is of another kind.
    """
    optimizer, factory = training.optimizer, training.job.scheduler
    here, before = training.fingerprint, sources[0].get("data")
    other_job = bool(here and before and here["job"] != before["job"])
    if other_job and os.environ.get(SCHEDULE_VARIABLE) == "script":
        return None
    parameter_groups.add_groups(optimizer, sources)
    placement = parameter_groups.Placement(optimizer, training.scheduler, factory, sources)
    if other_job and (differing := placement.differences()) and training.context.rank == 0:
        print(
            f"clusterd: values of the checkpoint are kept where the script has others: {', '.join(differing)}; "
            "clusterd submit --from ... --schedule script takes the script's",
            flush=True,
        )
    return placement


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


def tensor_slots(shape: ModelShape) -> dict[str, set[str]]:
    """Names of the slots that migrate as tensors, by parameter."""
    found = {p.name: {name for name, _ in shape.slots_of(i)} for i, p in enumerate(shape.parameters)}
    for odd in shape.odd_slots:
        found[shape.parameters[odd.parameter].name].add(odd.name)
    return found
