"""Guard against forward passes that write into parameters under a plan that would lose or repeat the write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clusterd.train.parallel import build
from clusterd.train.parallel.gradient_sync import local_tensor
from clusterd.train.process.exits import PlanRefused


class ParameterMutationGuard:
    """Refuses real forward passes that write into parameters; fake ones may not have shown the write.

    Args:
        units: modules whose own parameters (not those of other units) stay as they are from before their forward pass
            until after it, whole or sharded.
        allowed: names of parameters whose mutation is known and legal under the plan.
        values: compare values in the first pass too, not only torch's version counters, which miss writes to ``.data``.
        accepts: decides whether the plan keeps a write into a parameter, if it is the same on all replicas.

    Attributes:
        written: global names of the accepted parameters that were written into.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        allowed: Iterable[str],
        *,
        values: bool,
        accepts: Callable[[nn.Parameter], bool],
    ) -> None:
        self._root, self._allowed, self._accepts = root, frozenset(allowed), accepts
        self.written: set[str] = set()
        self._changed: dict[str, nn.Parameter] = {}  # accepted ones, since the last checksum
        separate = set(units)
        for unit in separate:
            record = _ParameterRecord(list(_own_modules(unit, separate)), values=values)
            unit.register_forward_pre_hook(lambda *_, record=record: record.start())
            # Before FSDP2's own hook, which replaces whole parameters by shards.
            unit.register_forward_hook(lambda *_, record=record: self._check(record.changed()), prepend=True)

    def _check(self, changed: list[nn.Parameter]) -> None:
        for parameter in changed:
            names = (name for name, p in build.named_parameters(self._root) if p is parameter)
            if not (name := next(names, "")):
                raise PlanRefused(
                    "parameters were resharded before the forward pass ended: if it computes gradients itself "
                    "(torch.autograd.grad), FSDP2 leaves only shards of them; zero=1 leaves them whole"
                )
            if name in self._allowed:
                continue
            if not self._accepts(parameter):
                raise PlanRefused(
                    f"the forward pass writes into {name}, which this plan would lose or repeat; one process keeps it, "
                    "and so does dp without sharding, accumulation and checkpointing"
                )
            self.written.add(name)
            self._changed[name] = parameter

    def checksum(self) -> float | torch.Tensor:
        """Number that differs between replicas if values do that forward passes wrote since the last call."""
        changed, self._changed = self._changed, {}
        norms = [_norm(parameter.detach()) for _, parameter in sorted(changed.items())]
        return torch.stack(norms).sum() if norms else 0.0


class _ParameterRecord:
    """Parameters of some modules, and their versions and norms before a forward pass."""

    def __init__(self, modules: list[nn.Module], *, values: bool) -> None:
        self._held, self._values = [module._parameters for module in modules if module._parameters], values
        self._parameters: list[nn.Parameter] = []

    def start(self) -> None:
        # Runs in every pass: torch's own iteration over parameters takes as long as a small layer.
        self._parameters = [p for held in self._held for p in held.values() if p is not None]
        self._versions = [_version_of(p) for p in self._parameters]
        self._norms = _norms(self._parameters) if self._values else []

    def changed(self) -> list[nn.Parameter]:
        found = [p for p, note in zip(self._parameters, self._versions, strict=True) if _version_of(p) != note]
        if self._values:
            now = _norms(self._parameters)
            found += [p for p, a, b in zip(self._parameters, self._norms, now, strict=True) if a != b and a == a]
        self._values = False
        self._parameters = []
        return found


def _own_modules(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _own_modules(child, units)


def _version_of(parameter: nn.Parameter) -> tuple[int, int]:
    # Runs twice per parameter and pass, so the type check is the cheapest one.
    return parameter._version, parameter.data_ptr() if type(parameter) is nn.Parameter else 0


def _norms(parameters: list[nn.Parameter]) -> list[float]:
    """Norm of each parameter; it almost surely changes when a value does."""
    with torch.no_grad():
        sizes = [_norm(local_tensor(p.detach())) for p in parameters]
    return torch.stack(sizes).tolist() if sizes else []


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor.double().norm()
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


class ShardWrites(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Context of the script's code between steps, in which it may change sharded parameters.

    A part of a tensor along which it is sharded is a copy to torch, and what is written into it is lost.

    Args:
        on_draw: called if it draws random numbers for a shard.
        on_exchange: called before each operation in which all ranks that have shards must take part.
    Raises:
        PlanRefused: it writes into such a copy.
    """

    def __init__(self, on_draw: Callable[[], None], on_exchange: Callable[[], None]) -> None:
        super().__init__()
        self._on_draw, self._on_exchange = on_draw, on_exchange
        self._copies: dict[int, Any] = {}  # by identity, which a freed one would share with others

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        given = arguments[0] if arguments else None
        if function._schema.is_mutable and id(given) in self._copies:
            raise PlanRefused(
                f"the script's loop changes a part of a weight ({function.__name__}), of which ranks have shards, and "
                "torch would lose the change: change the whole of it (multiply by a mask); dp and zero=1 leave "
                "weights whole"
            )
        if _exchanges(function, arguments):
            self._on_exchange()
        result = function(*arguments, **(options or {}))
        placements = getattr(given, "placements", ())
        if any(not placement.is_replicate() for placement in placements):
            if torch.Tag.nondeterministic_seeded in function.tags:
                self._on_draw()
            if function.is_view and _storage(result) != _storage(given):
                self._copies[id(result)] = result
        return result


def _exchanges(function: Any, arguments: Any) -> bool:
    """True for a collective operation, and for one with shards that may need one."""
    name: str = function.__name__.partition(".")[0]
    if function.namespace == "_c10d_functional":
        return name != "wait_tensor"
    placements = [p for leaf in tree_leaves(arguments) for p in getattr(leaf, "placements", ())]
    alone = torch.Tag.pointwise in function.tags or name == "t" or name.startswith(_ON_EACH_RANK)
    return any(p.is_partial() or (p.is_shard() and not alone) for p in placements)


_ON_EACH_RANK = (
    "alias", "all", "amax", "amin", "any", "bernoulli", "clone", "copy_", "detach", "empty", "exponential", "fill",
    "_foreach", "linalg_vector_norm", "max", "mean", "min", "new_", "norm", "normal_", "ones", "permute", "prod",
    "rand", "sum", "_to_copy", "transpose", "uniform_", "zero",
)  # fmt: skip
"""Beginnings of the names of operations of which each rank computes the part of its shard."""


def _storage(tensor: Any) -> int:
    address: int = local_tensor(tensor).untyped_storage().data_ptr()
    return address


class IgnoredWrites(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Context in which writes into some tensors have no effect.

    Attributes:
        ignored: True if there was one.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._storages = {_storage(tensor) for tensor in tensors if tensor.numel() and not tensor.is_meta}
        self.ignored = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function._schema.is_mutable and any(_storage(t) in self._storages for t in _written(function, arguments)):
            self.ignored = True
            return arguments[0] if function._schema.returns else None
        return function(*arguments, **(options or {}))


def _written(function: Any, arguments: Any) -> list[torch.Tensor]:
    pairs = zip(function._schema.arguments, arguments, strict=False)
    written = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
