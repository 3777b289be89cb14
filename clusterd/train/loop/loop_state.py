"""State of a loop of the script's own: its variables, which begin anew where a job goes on, and what it sets first."""

from __future__ import annotations

import gc
import io
import pickle
import sys
import types
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from clusterd.train.parallel.build import Elsewhere
from clusterd.train.parallel.mutation_guard import IgnoredWrites
from clusterd.train.process import held
from clusterd.train.state.attribute_tensors import READ_BYTES_MAX, checksum
from clusterd.train.state.attributes import DATA
from clusterd.train.state.training import Training

NAMED_MAX = 6
"""Variables that a line of the log names: a progress bar must not hide a scheduler."""

PROBED, COUNTED = 16, 3
"""Values of a tensor, and items of a large container, that are looked at."""

UNKNOWN = "(unknown)"
"""In place of what is not read: the same on all ranks."""


class LoopVariables:
    """Variables of the functions that train, and what they hold beside what the training carries.

    These are the function that takes the next batch, and those that called it, up to the one that opened the session.
    No move and no restart carries them: rank 0's log names those that change, or that are others where the job goes on.

    Attributes:
        opened_in: frame in which the session was opened.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.opened_in: types.FrameType | None = None
        self._first: dict[str, Any] | None = None  # before the first step
        self._looks = training.context.rank == 0 and training.context.launcher == "clusterd"
        self._told: set[str] = set()  # variables

    def look(self, changed: set[str]) -> None:
        """Compare the variables with those before the first step of this process.

        Args:
            changed: names of the numbers in the training that the loop has changed, which are carried.
        """
        if not self._looks:
            return
        now = self._marks()
        if self._first is None:
            self._first = now
            self._compare_start()
            return
        known = {name.rpartition(".")[2] for name in changed}
        names = (n for n, v in self._first.items() if n.rpartition(".")[2] not in known and now.get(n, v) != v)
        one_each = {_variable(name): name for name in sorted(names, reverse=True) if _variable(name) not in self._told}
        if one_each:
            self._told |= one_each.keys()
            self._tell(f"variables of the script's loop change ({_named(one_each.values())}), and begin anew")

    def _compare_start(self) -> None:
        """Compare the variables before the first step with those where the job first started."""
        assert self._first is not None
        groups: dict[str, list[Any]] = {}
        for name, mark in sorted(self._first.items()):
            groups.setdefault(_variable(name), []).append(mark)
        now = {name: zlib.crc32(repr(marks).encode()) for name, marks in groups.items()}
        attributes = self._training.attributes
        if not self._training.step:
            attributes.loop_variables = now
        there = attributes.loop_variables
        if names := [name for name, mark in now.items() if there.get(name, mark) != mark]:
            self._tell(
                f"variables of the script's loop ({_named(names)}) have other values before its first step than where "
                "the job began, as a copy of the weights has those of now: variables begin anew"
            )

    def _tell(self, what: str) -> None:
        print(
            f"clusterd: {what} after a move or a restart: what training depends on belongs into an object for "
            "run.register(), or, where it is as large as weights, into the model",
            flush=True,
        )

    def _marks(self) -> dict[str, Any]:
        """Marks of contents by name: another content almost surely has another."""
        training = self._training
        carried = {**training.attributes.roots, **training.attributes.data, **training.registered.objects}
        owners = held.owners(carried).values()
        parts = (part for owner in owners for part in (owner.value, *owner.attributes.values()))
        known = {id(part) for part in parts if not isinstance(part, held.SIMPLE)}
        variables: dict[str, Any] = {}
        for frame in script_frames():
            read = held.Globals(frame.f_globals)
            read.names = set(frame.f_code.co_names) & frame.f_globals.keys()
            named = {name: value for name, value in frame.f_locals.items() if name != "_"}
            for name, value in {**held.attributes(read), **named}.items():
                is_other = variables.setdefault(name, value) is not value
                variables |= {f"{name} of {frame.f_code.co_name}": value} if is_other else {}
            if frame is self.opened_in:
                break
        found = {name: mark for name, value in variables.items() if (mark := self._mark(value, known)) != UNKNOWN}
        roots = {name: value for name, value in variables.items() if held.is_looked_into(value)}
        for name, owner in held.owners(roots).items():
            if id(owner.value) not in known and not isinstance(owner.value, nn.Module):
                marks = ((held.path(name, k), self._mark(v, known)) for k, v in owner.attributes.items())
                found |= {path: mark for path, mark in marks if mark != UNKNOWN}
        return found

    def _mark(self, value: Any, known: set[int]) -> Any:
        if isinstance(value, held.SIMPLE):
            return repr(value)
        if id(value) in known:
            return UNKNOWN
        if isinstance(value, torch.Tensor):
            return _mark_of_tensor(value)
        if isinstance(value, np.ndarray):
            return checksum(value) if value.nbytes <= READ_BYTES_MAX and not value.dtype.hasobject else UNKNOWN
        if isinstance(value, held.GENERATORS):
            return zlib.crc32((held.generator_state(value) or "").encode())
        if isinstance(value, nn.Module):  # the model itself is carried, and may be wrapped
            is_carried = any(id(module) in known for module in value.modules())
            return UNKNOWN if is_carried else tuple(map(_mark_of_tensor, value.state_dict().values()))
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return zlib.crc32(repr({k: v for k, v in vars(value).items() if held.is_plain(v)}).encode())
        if held.is_container(value):
            if held.is_plain(value):
                return zlib.crc32(pickle.dumps(value))
            parts = value.values() if isinstance(value, dict) else value
            marks = [self._mark(part, known) for part in islice(parts, COUNTED)]
            return len(value), *(mark for mark in marks if mark != UNKNOWN)
        if _is_apart(value):  # it is further with each step
            return self._training.step
        return UNKNOWN


def script_frames() -> Iterator[types.FrameType]:
    """Frames of the script's functions that run, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if held.is_of_script(name, sys.modules.get(name)):
            yield frame
        frame = frame.f_back


def _is_apart(value: Any, depth: int = 4) -> bool:
    """True for an iterator of other things than the run's batches, whose generators run while they are looked at."""
    if not isinstance(value, (Iterator, tuple)) or isinstance(value, io.IOBase) or getattr(value, "gi_running", False):
        return False
    inner = [part for part in gc.get_referents(value) if isinstance(part, (Iterator, tuple))] if depth else []
    return any(_is_apart(part, depth - 1) for part in inner) if inner else isinstance(value, Iterator)


def _mark_of_tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, Elsewhere) or value.is_meta:
        return UNKNOWN
    if hasattr(value, "placements") or not value.numel() or value.layout != torch.strided:
        return value._version
    probe = value.detach().flatten()[:: max(1, value.numel() // PROBED)][:PROBED]
    return value._version, *map(repr, probe.tolist())


def _variable(name: str) -> str:
    """Name of the variable that holds what has this name."""
    return name.partition(".")[0].partition("[")[0]


def _named(names: Any) -> str:
    first = list(islice(sorted(names), NAMED_MAX + 1))
    return ", ".join(first[:NAMED_MAX]) + " and more" * (len(first) > NAMED_MAX)


class Prelude:
    """Script's code before its first batch, where the job goes on after some step.

    It sets anew what it set where the job began: weights, rates, numbers. What the job carries stays as it was.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._attributes = training.attributes.changed()
        self._numbers = numbers(training)
        optimizer, module = training.optimizer, training.parallel.module
        optimizers = {id(one): one for one in (optimizer.optimizer, optimizer.holder)}.values()
        self._optimizers = [(one, one.state, one.param_groups, _options(one)) for one in optimizers]
        tensors = [*module.parameters(), *module.buffers(), *(plain for *_, plain in optimizer.local)]
        self._memory = [(tensor, tensor.data) for tensor in tensors if not hasattr(tensor, "placements")]
        self.writes = IgnoredWrites(tensors)

    def end(self) -> None:
        """Put back what the script has set, and say so."""
        training = self._training
        for optimizer, state, groups, options in self._optimizers:
            optimizer.state, optimizer.param_groups = state, groups
            for group, values in zip(groups, options, strict=False):
                group.update(values)
        replaced = [tensor for tensor, memory in self._memory if tensor.data_ptr() != memory.data_ptr()]
        for tensor, memory in self._memory:
            tensor.data = memory
        now = numbers(training)
        set_anew = sorted(name for name, value in self._numbers.items() if now.get(name, value) != value)
        training.attributes.restore([self._attributes])
        set_anew += training.registered.reload()
        set_anew += ["weights"] * bool(replaced or self.writes.ignored)
        if set_anew and training.context.rank == 0:
            print(
                f"clusterd: the script sets {_named(set_anew)} before its first batch: the job goes on after step "
                f"{training.step} with what it had there",
                flush=True,
            )


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


RATE = "the learning rate of "


def numbers(training: Training) -> dict[str, str]:
    """Numbers, and texts, that modules, loss, data and optimizer hold, by name; and learning rates.

    As text, in which a value that is not a number equals itself.
    """
    roots = {**training.attributes.roots, DATA: training.job.data}
    found = {
        held.path(name, attribute): str(value)
        for name, owner in held.owners(roots).items()
        for attribute, value in owner.attributes.items()
        if isinstance(value, held.SIMPLE)
    }
    return found | {f"{RATE}{name}": str(rate) for name, rate in training.rates().items()}
