"""The script's own code between steps: callbacks, which rank 0 alone calls, and a loop, which every rank runs.

What callbacks change in the training, the other ranks would not; what a loop changes must be the same on all ranks.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from clusterd.plans.plan import Plan
from clusterd.train.loop.loop_state import RATE, UNKNOWN, LoopVariables, Prelude, numbers
from clusterd.train.loop.replicas import is_sampled
from clusterd.train.parallel.mutation_guard import ShardWrites
from clusterd.train.process import held
from clusterd.train.process.control import Control
from clusterd.train.process.exits import PlanRefused
from clusterd.train.process.seeding import LOOP_STAGES, seed_step
from clusterd.train.state.attribute_tensors import BYTES_MAX, READ_BYTES_MAX, checksum
from clusterd.train.state.attributes import COLLATE, DATA, OPTIMIZER, SAMPLER
from clusterd.train.state.training import Training


class ModelCalls:
    """Calls of the model, or of a part of it, by the script's code between steps, where ranks have shards of it.

    They are collective: where one rank alone makes them, the others never come.

    Attributes:
        on_call: called before each of them; None: the engine makes them.
        depth: of calls within each other that are under way.
    """

    def __init__(self, training: Training) -> None:
        self.on_call: Callable[[], None] | None = None
        self.depth = 0
        plan, model = training.context.plan, training.parallel.module
        if isinstance(model, FSDPModule):
            model._get_fsdp_state()._lazy_init()  # else by the first call, which may be that of a part
        for module in model.modules() if plan.tp > 1 or plan.zero > 1 else ():
            if module is model or isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._begins, prepend=True)  # before that of FSDP2, which gathers
                module.register_forward_hook(self._ends, always_call=True)

    def _begins(self, *_: Any) -> None:
        if self.on_call is not None and not self.depth:
            self.on_call()
        self.depth += 1

    def _ends(self, *_: Any) -> None:
        self.depth -= 1

    @contextmanager
    def each(self, on_call: Callable[[], None] | None) -> Iterator[None]:
        """Context in which this is called before each of them."""
        before, self.on_call = self.on_call, on_call
        yield
        self.on_call = before


class Callbacks:
    """Calls callbacks, and watches some calls for changes of what the next steps compute with.

    A change is told, and where there are other ranks, all refuse the plan between two steps.
    """

    def __init__(self, training: Training, control: Control, model_calls: ModelCalls) -> None:
        self._training, self._control, self._model_calls = training, control, model_calls
        self._calls: dict[str, int] = {}
        self._told = False

    def call(self, name: str, step: int, values: Any) -> None:
        """Call the callback of this name, if the script has it."""
        callback = getattr(self._training.job, name)
        if callback is None:
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        is_watched = not self._told and is_sampled(self._calls[name])
        before = numbers(self._training) if is_watched else {}
        refuse, plan = partial(self._refuse_call, name), self._training.context.plan
        watch = ShardWrites(lambda: None, refuse) if plan.tp > 1 or plan.zero > 1 else nullcontext()
        with self._model_calls.each(refuse), watch:
            callback(step, values)
        now = numbers(self._training) if is_watched else {}
        changed = next((key for key, value in before.items() if now.get(key, value) != value), None)
        if changed is not None:
            self._refuse(f"{name} has changed {changed} from {before[changed]} to {now[changed]}")

    def _refuse_call(self, name: str) -> None:
        plan = self._training.context.plan
        raise PlanRefused(
            f"{name} computes with the model on rank 0 alone, and ranks of {plan} have shards of it: let `evaluate` do "
            "it, or every rank in a loop of the script's own (clusterd.train.session); dp and zero=1 leave it whole"
        )

    def _refuse(self, change: str) -> None:
        self._told = True
        text = (
            f"{change}, but is called on rank 0 alone: what training depends on belongs into a scheduler, into "
            "forward(), or into a loop of the script's own (clusterd.train.session), which every rank runs"
        )
        if self._training.context.plan.ranks > 1:
            self._control.request("refuse", text)
        else:
            print(f"clusterd: {text}; plans of several ranks are refused", flush=True)


class OwnLoop:
    """Watches what a loop of the script's own changes: numbers that the training holds, learning rates, its batches.

    It draws the same random numbers on all ranks and under every plan.

    Attributes:
        changes_steps: how it has changed a step: it gave it another batch, or chose some of its losses.
        chosen: losses of the next step, of several.
        changes_data: it has changed samples or `collate_fn`, since the one that it has was read.
        changed: names of the numbers that it has changed.
        variables: of its function, which no move carries.
    """

    def __init__(self, training: Training, model_calls: ModelCalls, all_call: Callable[[str], None]) -> None:
        self._training, self._model_calls = training, model_calls
        self._agree = all_call
        self._first = training.step  # of this process, from which on it looks now and then
        self.changes_steps, self.chosen, self.changes_data = "", "all", False
        self.changed = training.attributes.of_loop
        self._places: dict[str, tuple[Any, Any]] = {}  # of numbers: what holds it, and its key there
        self._before: list[Any] | None = None
        self._batch: tuple[Any, list[tuple[int, int]]] = None, []  # given to the loop, and what it was then
        self._told: set[str] = set()  # beginnings of lines in the log
        self._watches: list[Any] = []  # of the loop's code: its batch, and weights that are sharded or carried
        self._reads: Any = nullcontext()
        self.variables = LoopVariables(training)
        if training.job.own_loop:
            model_calls.on_call = self._agree_on_call
        self._prelude: Prelude | None = None
        if training.job.own_loop and not training.step:
            self._places = _places(training)
            self._before = self._values()
        elif training.job.own_loop:
            self._prelude = Prelude(training)
            self._watch(self._prelude.writes)

    def begins(self) -> None:
        """End what the script does before its first batch. The samples that it sets where the job begins go with it."""
        self.changed |= {name for name in self._differing() if name.startswith((DATA, COLLATE))}
        if self._prelude is not None:
            self.closes()
            self._prelude.end()
            self._prelude = None

    def opens(self, batch: Any = None) -> None:
        """Watch the loop's code from here on: with its next batch, or after a step, without."""
        training = self._training
        if not training.job.own_loop:
            return
        self._model_calls.on_call = self._agree_on_call
        seed_step(training.job.seed, training.step, 0, LOOP_STAGES[batch is not None])
        if batch is not None:
            self._batch = batch, _versions(batch)
        if not self._places or is_sampled(training.step + 1 - self._first):
            self._places = _places(training)
            if batch is not None:
                self.variables.look(self.changed)
        self._before = self._values()
        plan = training.context.plan
        if plan.dp > 1:
            self._reads = _BatchReads(batch, self._tell_of_batches) if batch is not None else self._reads
            self._watch(self._reads)
        if plan.tp > 1 or plan.zero > 1:
            self._watch(ShardWrites(lambda: self._tell(DRAWS_OF_SHARDS.format(plan=plan)), self._exchange))

    def closes(self) -> set[str]:
        """End what `opens` began: the engine goes on. Returns the names of the numbers that the loop has changed."""
        self._model_calls.on_call = None
        while self._watches:
            self._watches.pop().__exit__(None, None, None)
        if changed := self._differing():
            self.changed |= changed
            of_workers = [name for name in sorted(changed) if name.startswith((DATA, COLLATE))]
            if of_workers and self._training.job.num_workers:
                self._training.workers_are_stale = True
                when = "from the next epoch on, or from where the job goes on"
                if self._training.stream is not None:
                    when = "from where the job goes on, and not before: num_workers=0 reads in this process"
                self._tell(
                    f"the script's loop changes {of_workers[0]}, of which data-loader workers have a copy: samples are "
                    f"read with it {when}"
                )
        return changed

    def _watch(self, mode: Any) -> None:
        mode.__enter__()
        self._watches.append(mode)

    def _tell_of_batches(self) -> None:
        plan = self._training.context.plan
        self._tell(
            f"the script's loop computes with its batches, of which it has one of {plan.dp} parts under {plan}: what "
            "it does to each sample is as in one process, what it draws, counts or computes over the samples (noise, "
            "tokens seen, an accuracy, a mixture) is not: let the loss return numbers as metrics"
        )

    def _differing(self) -> set[str]:
        """Names of what has changed since it was last read."""
        before, self._before = self._before, None
        if before is None or (now := self._values()) == before:
            return set()
        return {n for n, old, new in zip(self._places, before, now, strict=True) if old is not new and old != new}

    def _agree_on_call(self) -> None:
        self._agree("called the model")

    def _exchange(self) -> None:
        if not self._model_calls.depth:
            self._agree("computed with shards of a weight")

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context of what the engine does within the loop's code."""
        for mode in reversed(self._watches):
            mode.__exit__(None, None, None)
        with self._model_calls.each(None):
            yield
        for mode in self._watches:
            mode.__enter__()

    def before_step(self, batch: Any) -> None:
        """Judge what the loop has changed: at some steps, it must be the same on all ranks.

        Raises:
            PlanRefused: on all of them, if it is not.
        """
        training, plan = self._training, self._training.context.plan
        if not training.job.own_loop:
            return
        self.changes_data = any(name.startswith((DATA, COLLATE)) for name in self.closes())
        training.optimizer.share_writes()
        if _versions(batch) != self._batch[1]:
            self.changes_steps = "changes its batches"
            if plan.dp > 1:
                self._tell_of_batches()
        self._batch = None, []
        if plan.pp > 1 and any(name.startswith(RATE) for name in self.changed):
            own, whole = training.optimizer.groups_made, len(training.shape.parameter_groups)
            if own < whole:
                self._tell(
                    f"the script's loop changes learning rates, and this stage of {plan} has {own} of {whole} "
                    "parameter groups: one that it sets by its number is another group here",
                )
        if of_sampler := [name for name in self.changed if name.startswith(SAMPLER)]:
            self._tell(
                f"the script's loop changes {min(of_sampler)}: where the job goes on within an epoch, after a move or "
                "a restart, the order of the rest may be another",
            )
        of_loss = {name for name in self.changed if not name.startswith(_NOT_COMPUTED)}
        if of_loss and (plan.dp * plan.accumulation > 1 or plan.tp * plan.pp > 1):
            self._tell(
                f"the script's loop changes {min(of_loss)}: that {plan} trains as one process was shown for its first "
                "value only",
            )
        if plan.ranks > 1 and is_sampled(training.step + 1 - self._first):
            self._compare(plan)

    def _tell(self, text: str) -> None:
        """Write a line into the log, once, on the first rank of each stage."""
        coordinates, kind = self._training.context.coordinates, text.partition(",")[0].partition(":")[0]
        if kind not in self._told and coordinates.replica == coordinates.shard == 0:
            print(f"clusterd: {text}", flush=True)
        self._told.add(kind)

    def _compare(self, plan: Plan) -> None:
        every: list[Any] = [None] * plan.ranks
        dist.all_gather_object(every, self.changed)
        # Stages have modules of their own; and groups, where one lacks some.
        has_all = self._training.optimizer.groups_made == len(self._training.shape.parameter_groups)
        shared = {name for name in set().union(*every) if name in self._places}
        shared = {name for name in shared if plan.pp == 1 or has_all or not name.startswith(RATE)}
        own = {name: _shown(holder.get(key)) for name in shared for holder, key in [self._places[name]]}
        own["the losses of the step"] = self.chosen
        dist.all_gather_object(every, own)
        first: dict[str, tuple[int, str]] = {}
        for rank, values in enumerate(every):
            for name, value in sorted(values.items()):
                holder_rank, one = first.setdefault(name, (rank, value))
                if one != value:
                    raise PlanRefused(
                        f"before step {self._training.step + 1} the script's loop has made {name} {one} on rank "
                        f"{holder_rank} and {value} on rank {rank}: what training depends on must be the same on all, "
                        "as what follows from the step, out.loss, run.evaluate() or train.gather in the loss is"
                    )

    def _values(self) -> list[Any]:
        of_large = is_sampled(self._training.step + 1 - self._first)
        return [content(holder.get(key), of_large=of_large) for holder, key in self._places.values()]


def _places(training: Training) -> dict[str, tuple[Any, Any]]:
    """Places of the numbers and texts that modules, loss, data and optimizer hold as attributes, and learning rates."""
    of_worker = {DATA: training.job.data} if training.stream is not None and training.job.num_workers else {}
    found = held.places({**training.attributes.roots, **training.attributes.data, **of_worker})
    for name, owner in held.owners(training.attributes.data).items():
        kept = (k for k, v in owner.attributes.items() if isinstance(v, (torch.Tensor, np.ndarray)) or is_table(v))
        found |= {held.path(name, k): (_Kept(owner.value), k) for k in kept}
    if not training.normalises_parts:  # running statistics are each replica's own
        modules = {n: m for n, m in training.attributes.roots.items() if isinstance(m, nn.Module)}
        found |= {held.path(n, k): (m._buffers, k) for n, m in modules.items() for k in m._buffers}
    groups = enumerate(training.optimizer.holder.param_groups)
    return found | {f"{RATE}group {number}": (group, "lr") for number, group in groups if "lr" in group}


def _shown(value: Any) -> str:
    """Value of a place in a few characters, and others for others."""
    if isinstance(value, held.SIMPLE):
        return str(value)
    data = value
    if isinstance(value, torch.Tensor):  # of which some types have no like in NumPy
        data = value.detach().cpu().flatten().view(torch.uint8).numpy()
    return f"a {type(value).__name__} with checksum {content(data, of_large=True)}"


class _BatchReads(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
    """Tells of code that computes with tensors of a batch, or asks for their sizes."""

    def __init__(self, batch: Any, tell: Callable[[], None]) -> None:
        super().__init__()
        parts = [p if isinstance(p, torch.Tensor) else getattr(p, "__dict__", None) for p in tree_leaves(batch)]
        self._tensors = {id(leaf): leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)}
        self._tell = tell

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if self._tensors and not self._tensors.keys().isdisjoint(map(id, tree_leaves(arguments))):
            name = getattr(function, "__self__", function).__name__  # of an attribute, or a method
            if name in ("to", "cuda"):
                self._tensors[id(result)] = result
            elif name not in _OF_NO_SAMPLE:
                self._tensors = {}
                self._tell()
        return result


_OF_NO_SAMPLE = "device", "dtype", "dim", "ndim", "layout", "requires_grad", "is_cuda", "is_floating_point"
"""Attributes and methods of tensors that are the same for any number of samples."""


class _Kept:
    """Tensors, arrays, lists and maps of an object or a container, as they are now and will be later."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def get(self, attribute: str) -> Any:
        """The one of this name, if it is still there."""
        return held.attributes(self._owner).get(attribute)


def _versions(batch: Any) -> list[tuple[int, int]]:
    """Identities of a batch's tensors, and their versions."""
    return [(id(leaf), leaf._version) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


DRAWS_OF_SHARDS = (
    "the script's loop draws random numbers for a weight, of which ranks of {plan} have shards: others than in "
    "one process, and losses differ as between two seeds"
)


def is_table(value: Any) -> bool:
    return held.is_container(value) and held.is_plain(value)


def content(value: Any, *, of_large: bool) -> Any:
    """Mark that almost surely differs for another content of an array, or of a list or map of numbers and text."""
    if isinstance(value, np.ndarray):
        is_read = value.nbytes <= BYTES_MAX or (of_large and value.nbytes <= READ_BYTES_MAX)
        return checksum(value) if is_read and not value.dtype.hasobject else UNKNOWN
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if held.is_container(value):
        return zlib.crc32(pickle.dumps(value))
    return value if isinstance(value, held.SIMPLE) else UNKNOWN


_NOT_COMPUTED = OPTIMIZER, DATA, SAMPLER, COLLATE, RATE
"""Beginnings of the names of what forward pass and loss do not read."""
