"""The optimizer under a plan: over this rank's tensors, sharded (ZeRO-1), or in host memory.

The optimizer is always built over plain local tensors that share memory with this rank's shards: torch's fused and
foreach kernels then run at full speed under any mix of shards and whole tensors. For elementwise optimizers this
changes nothing; others are refused under plans that cut tensors (`clusterd.train.inspect.optimizer_traits` detects
them).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from clusterd.train.parallel.alternating import AlternatingOptimizer
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.build import Elsewhere
from clusterd.train.parallel.gradient_sync import local_gradient, local_tensor, refuse_parts
from clusterd.train.parallel.optimizer_slots import NEEDS_CLOSURE, make_optimizer, set_gradient
from clusterd.train.process import accelerator
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.job import OptimizerFactory

MAKE_STATE_BYTES = 64 << 20
"""Gradient bytes per trial update: a waiting rank needs no second copy of its parameters."""


class RankOptimizer:
    """The job's optimizer on this rank.

    Attributes:
        optimizer: the factory's optimizer (under ZeRO-1: torch's ZeroRedundancyOptimizer around it); the scheduler
            acts on it.
        in_host_memory: True if it updates copies of the parameters in host memory (offload=optimizer).
        groups_made: parameter groups that the factory formed; later ones the script has added.
        local: (global name, parameter, plain tensor that the optimizer updates) of every trainable parameter.
    """

    def __init__(self, parallel: ParallelModel, factory: OptimizerFactory, *, own_loop: bool = False) -> None:
        self._parallel, self._own_loop = parallel, own_loop
        self.in_host_memory = parallel.plan.offload == "optimizer"
        self.local: list[tuple[str, nn.Parameter, nn.Parameter]] = [
            (name, parameter, self._local_parameter(name, parameter))
            for name, parameter in parallel.parameters
            if parameter.requires_grad
        ]
        plain = [p for _, _, p in self.local]
        if parallel.plan.zero == 1:
            are_whole = all(plain is parameter for _, parameter, plain in self.local)
            self.optimizer = _sharded(factory, plain, parallel.dp_group, are_whole)
        else:
            self.optimizer = make_optimizer(factory, plain)
        self._guard_state()
        self._memory = [(p, p.data) for p in plain] if parallel.plan.zero == 1 else []
        self._options = self._inner_options()
        self.groups_made = len(self.optimizer.param_groups)
        self._versions, self._trains = [p._version for p in plain], [True] * len(plain)
        self._count = sum(len(group["params"]) for group in self.holder.param_groups)
        if parallel.plan.zero or parallel.plan.tp * parallel.plan.pp > 1:
            self.holder.register_state_dict_pre_hook(lambda _: refuse_parts())

    def step(self, part: str = "") -> None:
        """Update the parameters from their gradients: all, or those of a part of an `AlternatingOptimizer`."""
        self._check_parameters()
        _put_back(self._memory)
        if self._parallel.plan.zero == 1:  # torch's would make other buckets where a parameter is frozen meanwhile
            self.optimizer._is_trainable_mask = self.optimizer._get_is_trainable_mask()
        for outer, inner, before in zip(
            self.optimizer.param_groups, self._inner_options(), self._options, strict=False
        ):
            outer.update({k: v for k, v in inner.items() if k in before and before[k] is not v})  # by the script
        for _, parameter, plain in self.local:
            if plain is parameter:
                continue
            if self.in_host_memory and self._own_loop:
                plain.detach().copy_(local_tensor(parameter.detach()))  # which the loop may have changed
            if parameter.grad is None:
                plain.grad = None
                continue
            gradient = local_gradient(parameter)
            if self.in_host_memory and gradient.is_sparse:
                plain.grad = gradient.to("cpu")
            elif self.in_host_memory:
                if plain.grad is None:
                    plain.grad = _host_like(gradient)
                plain.grad.copy_(gradient, non_blocking=True)
            else:
                # FSDP2 may reallocate a shard at its first forward pass.
                plain.data = local_tensor(parameter.detach())
                plain.grad = gradient
        if self.in_host_memory and (gpu := accelerator.of(self._parallel.device)) is not None:
            gpu.current_stream().synchronize()
        with kept_in_place(plain for _, _, plain in self.local):
            try:
                self.optimizer.step(**({"part": part} if part else {}))
            except Exception as error:
                if "closure" in str(error):  # which its signature does not say
                    raise Refused(NEEDS_CLOSURE.format(type(self.holder).__name__)) from error
                raise
        self._options = self._inner_options()
        if self.in_host_memory:
            with torch.no_grad():
                for _, parameter, plain in self.local:
                    local_tensor(parameter.detach()).copy_(plain, non_blocking=True)
        self._versions = [plain._version for _, _, plain in self.local]

    def _check_parameters(self) -> None:
        """Check, where the script has added some, that all parameters are of the model that its factory made.

        Raises:
            Refused: one is not.
        """
        count = sum(len(group["params"]) for group in self.holder.param_groups)
        known = {id(plain) for *_, plain in self.local} if count != self._count else set()
        self._count = count
        if known and any(id(p) not in known for group in self.holder.param_groups for p in group["params"]):
            raise Refused(
                "the script gave the optimizer a parameter that model() did not make (a layer added while it trains): "
                "replicas do not share its gradient, and no move or checkpoint has it. Make all layers in model(), and "
                "let a number of the model say which are applied"
            )

    def share_writes(self) -> None:
        """Give the model what the script changes in the parameters of its optimizer: values, and whether they train.

        Under some plans these are copies or shards; under ZeRO-1 each rank's optimizer has some of them, the others'
        are sent. Every rank must call it.
        """
        if not self._own_loop:
            return
        before, self._versions = self._versions, [plain._version for _, _, plain in self.local]
        pairs = zip(self._trains, self.local, strict=True)
        flipped = [t in (not p.requires_grad, not plain.requires_grad) for t, (_, p, plain) in pairs]
        if is_sharded := self._parallel.plan.zero == 1:
            changed = torch.tensor(float(before != self._versions or any(flipped)))  # on the host: no GPU is waited for
            dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._parallel.dp_group)
            if not changed:
                return
            by_any = torch.tensor(flipped, dtype=torch.float)
            dist.all_reduce(by_any, op=dist.ReduceOp.MAX, group=self._parallel.dp_group)
            flipped = by_any.bool().tolist()
        for number in (number for number, is_flipped in enumerate(flipped) if is_flipped):
            self._trains[number] = not self._trains[number]
            for parameter in self.local[number][1:]:
                parameter.requires_grad_(self._trains[number])
        if is_sharded:
            _put_back(self._memory)
            self.optimizer._sync_params()
            self._versions = [plain._version for _, _, plain in self.local]
        elif self.in_host_memory:
            with torch.no_grad():
                for version, now, (_, parameter, plain) in zip(before, self._versions, self.local, strict=True):
                    if version != now:
                        local_tensor(parameter.detach()).copy_(plain)

    def follow_frozen(self) -> None:
        """Freeze what the model has frozen, and nothing else."""
        self._trains = [parameter.requires_grad for _, parameter, _ in self.local]
        for trains, (*_, plain) in zip(self._trains, self.local, strict=True):
            plain.requires_grad_(trains)

    def _inner_options(self) -> list[dict[str, Any]]:
        """Values of the groups of ZeRO-1's inner optimizer, which the script knows: torch's overwrites them."""
        groups = self.holder.param_groups if self._parallel.plan.zero == 1 else []
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def make_state(self) -> None:
        """Make the optimizer create its state for every parameter, by updates on zero gradients.

        A few parameters at a time, to save memory. State and parameters must be overwritten afterwards.
        """
        self.zero_grad()
        holder = self.holder
        without_state = [p for g in holder.param_groups for p in g["params"] if not holder.state.get(p)]
        while without_state:
            batch, size = [], 0
            while without_state and size < MAKE_STATE_BYTES:
                batch.append(without_state.pop())
                size += batch[-1].nbytes
            for plain in batch:
                set_gradient(holder, plain, torch.zeros_like(plain))
            holder.step()
            for plain in batch:
                plain.grad = None

    def zero_grad(self) -> None:
        """Free all gradients."""
        for _, parameter, plain in self.local:
            parameter.grad = None
            if not self.in_host_memory:
                plain.grad = None

    def state_by_name(self) -> dict[str, dict[str, Any]]:
        """Optimizer state on this rank, by global parameter name and slot; boxes are the parameters'.

        Under ZeRO-1 it contains only the parameters that this rank updates.
        """
        state = self.holder.state
        return {name: dict(state[plain]) for name, _, plain in self.local if plain in state}

    @property
    def holder(self) -> torch.optim.Optimizer:
        """Optimizer that holds this rank's state: under ZeRO-1 the inner one."""
        if self._parallel.plan.zero != 1:
            return self.optimizer
        inner: torch.optim.Optimizer = self.optimizer.optim
        return inner

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the first parameter group; None where reading it would wait for the device."""
        rate = self.optimizer.param_groups[0].get("lr")
        if isinstance(rate, torch.Tensor):
            return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
        return float(rate) if isinstance(rate, (int, float)) else None

    def updated(self) -> set[str]:
        """Global names of the parameters that this rank updates and whose state it holds."""
        here = {id(p) for group in self.holder.param_groups for p in group["params"]}
        return {name for name, _, plain in self.local if id(plain) in here}

    def load(self, saved: dict[str, Any]) -> None:
        """Load what `state_dict` of the holder gave on this rank of the same plan."""
        self.holder.load_state_dict(saved)
        self._guard_state()
        if self.holder is not self.optimizer:
            for outer, inner in zip(self.optimizer.param_groups, self.holder.param_groups, strict=True):
                outer.update({k: v for k, v in inner.items() if k != "params"})

    def _guard_state(self) -> None:
        """Refuse that the script looks up state by a parameter of the model that this rank's optimizer has not."""
        holder = self.holder
        state = _State(holder.state.default_factory, holder.state)
        state.groups = holder.param_groups
        if self._parallel.plan.zero == 1:
            updated = {id(p) for group in holder.param_groups for p in group["params"]}
            state.others = {id(plain) for *_, plain in self.local if id(plain) not in updated}
        state.cut = {id(parameter) for _, parameter, plain in self.local if plain is not parameter}
        for optimizer in (holder, *(holder.parts.values() if isinstance(holder, AlternatingOptimizer) else ())):
            optimizer.state = state

    def _local_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        local = local_tensor(parameter.detach())
        if self.in_host_memory:
            plain = nn.Parameter(_host_like(local).copy_(local))
        elif hasattr(parameter, "placements"):
            plain = nn.Parameter(local)
        else:
            return parameter
        vars(plain).update(self._parallel.parameter_attributes[name])  # the factory may form groups by them
        return plain


class _State(defaultdict[Any, Any]):
    """State of this rank's optimizer.

    Attributes:
        others: parameters that it did not update at first, by identity; groups may get them.
        cut: those of the model in whose place it updates other tensors.
    """

    others: Set[int] = frozenset()
    cut: Set[int] = frozenset()
    groups: Sequence[Mapping[str, Any]] = ()

    def __missing__(self, key: Any) -> Any:
        is_other = id(key) in self.others and all(key is not p for group in self.groups for p in group["params"])
        self._refuse(key, is_other or id(key) in self.cut or isinstance(key, Elsewhere))
        return super().__missing__(key)

    def __contains__(self, key: Any) -> bool:
        self._refuse(key, id(key) in self.cut)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Value of a key, or the default."""
        self._refuse(key, id(key) in self.cut)
        return super().get(key, default)

    def _refuse(self, key: Any, is_other: bool) -> None:
        if is_other:
            raise PlanRefused(
                "the script looks up the optimizer's state of a parameter that this rank's optimizer does not update, "
                "or of which it has a shard: go through the parameters in optimizer.param_groups, or take a plan of dp"
            )


@contextmanager
def kept_in_place(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context of an update whose new values end in the parameters' own memory, of which shards and buckets are views.

    Optimizers that assign ``p.data = ...`` put them elsewhere.
    """
    before = [(parameter, parameter.data) for parameter in parameters]
    yield
    _put_back(before)


def _put_back(memory: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Put the values of parameters back into the memory that they had."""
    for parameter, data in memory:
        if parameter.data_ptr() != data.data_ptr():
            data.copy_(parameter.data)
            parameter.data = data


def attribute_with_tensors(optimizer: torch.optim.Optimizer) -> str:
    """Name of an attribute that holds tensors which are neither parameters nor in `state`; empty: none."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        tensors = (t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.numel() > 1)
        if name not in ("state", "param_groups", "defaults") and any(id(t) not in known for t in tensors):
            return str(name)
    return ""


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for `tensor`; pinned if a GPU copies from it."""
    gpu = accelerator.of(tensor.device)
    return torch.empty(tensor.shape, dtype=tensor.dtype) if gpu is None else gpu.pinned(tensor.shape, tensor.dtype)


def _sharded(
    factory: OptimizerFactory, parameters: list[nn.Parameter], group: Any, are_whole: bool
) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    whole = make_optimizer(factory, parameters)
    if attribute := attribute_with_tensors(whole):
        raise PlanRefused(
            f"zero=1 gives each replica some of the parameters, but {type(whole).__name__} keeps tensors for all of "
            f"them in its attribute {attribute}: keep them in `state` instead"
        )

    def from_groups(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        # ZeroRedundancyOptimizer takes a class and its arguments; the job has a factory. The groups already hold all
        # arguments, so an optimizer from the factory with these groups is equivalent.
        inner = factory(parameters)
        for group, given in zip(inner.param_groups, groups, strict=True):
            group.update(given)  # in place: an inner optimizer may hold the same dict
        step = inner.step

        def in_place(*arguments: Any, **options: Any) -> Any:
            with kept_in_place(parameters):
                return step(*arguments, **options)

        inner.step = in_place
        return inner

    sharded: torch.optim.Optimizer = ZeroRedundancyOptimizer(
        whole.param_groups,
        optimizer_class=from_groups,
        process_group=group,
        # One message per rank instead of one per parameter. It reallocates parameters, so plain tensors would no longer
        # share memory with their DTensor shards; and torch supports it for parameters of one dtype only.
        parameters_as_bucket_view=are_whole and len({p.dtype for p in parameters}) == 1,
    )
    sharded.defaults.update(whole.defaults)  # schedulers read momentum and betas there
    return sharded
