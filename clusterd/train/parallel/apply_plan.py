"""Application of a plan to a module with torch's own facilities.

===================  =====================================================================================
tensor parallel      `parallelize_module` from the job's tp_plan
pipeline parallel    `torch.distributed.pipelining`: one stage per rank, schedules GPipe and 1F1B
checkpointing        `checkpoint_wrapper` on every block
dp, ZeRO-1           `DistributedDataParallel`; with tensor or pipeline parallelism `GradientSum`
ZeRO-2, ZeRO-3       `fully_shard` (FSDP2), without and with resharding after the forward pass
offload=parameters   `CPUOffloadPolicy` of `fully_shard` (ZeRO-3)
===================  =====================================================================================

`clusterd.train.parallel.optimizers` implements the optimizer's part (ZeRO-1, offload=optimizer). Ranks form a mesh of
(pp, dp, tp), numbered as in `plans.plan`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.train.parallel import build
from clusterd.train.parallel.buffers import RecomputeContexts, preserve_shared_buffers
from clusterd.train.parallel.gradient_sync import (
    GradientSum,
    adapt_sharded,
    mean_gradients,
    sum_gradients,
)
from clusterd.train.parallel.meta_build import allocate
from clusterd.train.parallel.mutation_guard import ParameterMutationGuard
from clusterd.train.parallel.tp_styles import SUMMED, style_of, styles_in
from clusterd.train.process.exits import PlanRefused, Refused, UnevenParameterUse
from clusterd.train.process.job import NAME

# Buffers are taken from replica 0, not synchronised. The option was renamed, and its old name warns.
_DDP_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_NO_BUFFER_SYNC = {"forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False}

WRITES_TOLERANCE = 1e-6
"""Relative difference of norms from which written values count as different; devices differ in the last digits."""

FIND_UNUSED_HINT = (
    "if that differs between steps or replicas, pass find_unused_parameters=True to clusterd.train.run (gradients "
    "may have been summed wrongly under the current plan)"
)


class ParallelModel:
    """A module under a plan, on this rank.

    A module on the meta device gets memory here, without values.

    Args:
        find_unused_parameters: the set of parameters that get a gradient may differ between steps and replicas.
        alternates: a step trains one part of the module after another, by passes that the script's losses run.

    Attributes:
        module: the rank's own module; parameters have global names, sharded ones are DTensors.
        parameters: all parameters by global name, as they are between steps; may be read at any time.
        runner: the module to call (the same, or DistributedDataParallel around it).
        averages: True if gradients come out as the mean over replicas (else as their sum).
        compares_writes: True if replicas compare what their forward passes write into parameters.
        parameter_attributes: attributes that the script set on each parameter (``p.no_decay = True``), and its name, by
            global name.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        device: torch.device,
        *,
        mesh: Any = None,
        tp_plan: Mapping[str, str] | None = None,
        find_unused_parameters: bool = False,
        alternates: bool = False,
    ) -> None:
        self.module, self.plan, self.device, self.mesh = module, plan, device, mesh
        self.runner: nn.Module = module
        self.averages = self.compares_writes = False
        self.parameter_attributes = {name: {**vars(p), NAME: name} for name, p in build.named_parameters(module)}
        self._gradient_sum: GradientSum | None = None
        self._whole: list[nn.Parameter] = []  # trainable ones that FSDP2 cannot cut: they have no dimension
        self._mean_by_ddp = False  # by DistributedDataParallel, from the first or second step on
        self._find_unused, self._alternates = find_unused_parameters, alternates
        self._tp_summed: frozenset[str] = frozenset()  # replicated over shards that each have a partial gradient
        self._guard: ParameterMutationGuard | None = None
        self._known_frozen: list[str] = []  # before this step
        self._all_trained: bool | None = None  # all parameters got a gradient in the last step; None: no step yet
        if plan.tp > 1:
            self._shard_tensors(tp_plan or {})
        if plan.checkpointing:
            self._recompute_blocks()
        if plan.zero >= 2:
            self._shard_fully()
        else:
            allocate(module, device)
            if plan.dp > 1:
                self._replicate()
        # During a step, FSDP2 replaces the shards by whole parameters.
        self.parameters: list[tuple[str, nn.Parameter]] = list(build.named_parameters(module))
        if any(hasattr(parameter, "placements") for _, parameter in self.parameters):
            adapt_sharded()
        self._trained = [(name, p) for name, p in self.parameters if p.requires_grad]
        self._frozen = [(name, p) for name, p in self.parameters if not p.requires_grad]
        for name, parameter in self.parameters:
            vars(parameter).update(self.parameter_attributes[name])

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same shard of the same stage."""
        return self.mesh["dp"].get_group() if self.mesh is not None and self.plan.dp > 1 else None

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Ranks of the stages of this replica."""
        return self.mesh["pp"].get_group() if self.mesh is not None and self.plan.pp > 1 else None

    def guard_parameters(self, shape: ModelShape) -> None:
        """Make forward passes raise if they write into parameters and the plan would lose the write.

        Args:
            shape: of the whole model; it lists the writes that fake tensors could detect.
        """
        plan = self.plan
        several_passes = plan.pp > 1 or plan.accumulation > 1 or plan.checkpointing
        keeps = not (several_passes or plan.tp > 1 or plan.zero > 1 or plan.offload != "none")
        if plan.dp > 1 or plan.offload != "none" or several_passes or not shape.written_known:
            units = [m for m in self.module.modules() if hasattr(m, "set_reshard_after_backward")]  # FSDP2 units
            self._guard = ParameterMutationGuard(
                self.module,
                units or [self.module],
                shape.written,
                values=not shape.written_known,
                # ZeRO-1 updates copies of trainable parameters.
                accepts=lambda parameter: keeps and not (plan.zero and parameter.requires_grad),
            )
            self.compares_writes = keeps and plan.dp > 1

    @property
    def written(self) -> Set[str]:
        """Global names of parameters that forward passes were found to write into."""
        return self._guard.written if self._guard is not None else frozenset()

    def written_values(self) -> list[torch.Tensor]:
        """Two numbers of this step, to sum over all replicas for `check_same_writes`; none if nothing is compared."""
        if not self.compares_writes or self._guard is None:
            return []
        checksum = torch.as_tensor(self._guard.checksum(), dtype=torch.float64, device=self.device)
        return [checksum, checksum.square()]

    def check_same_writes(self, total: float, squares: float) -> None:
        """Check the sums of `written_values`: the replicas' checksums must be equal.

        Raises:
            PlanRefused: on all ranks, if forward passes wrote different values.
        """
        if self.plan.dp * squares - total**2 > WRITES_TOLERANCE**2 * total**2:
            raise PlanRefused(
                f"dp={self.plan.dp} lets replicas diverge: the forward pass writes values into parameters (one is "
                f"{min(self.written, default='unknown')}) that depend on its own samples"
            )

    def micro_batch_context(self, micro_batch: int) -> AbstractContextManager[Any]:
        """Context around a micro-batch outside of pipelines: replicas communicate in the last one only."""
        if isinstance(self.runner, nn.parallel.DistributedDataParallel) and micro_batch < self.plan.accumulation - 1:
            no_sync: AbstractContextManager[Any] = self.runner.no_sync()
            return no_sync
        if self.plan.zero == 2 and self.plan.pp == 1:
            # Under ZeRO-2 parameters stay gathered between micro-batches; gradients do not.
            self.runner.set_reshard_after_backward(micro_batch == self.plan.accumulation - 1)
        return nullcontext()

    def finish_gradients(self) -> None:
        """Complete the gradients after the last backward pass of a step.

        Raises:
            Refused: a parameter is trainable now that was not when the model was made.
            UnevenParameterUse: the step left out parameters that earlier steps used.
        """
        if name := next((name for name, p in self._frozen if p.requires_grad), ""):
            raise Refused(
                f"{name} became trainable in this step (requires_grad), but the set of trainable parameters is fixed "
                "when the model is made: make it trainable from the start, in an optimizer group whose learning rate "
                "a scheduler keeps at zero"
            )
        if self._gradient_sum is not None:
            self._gradient_sum.finish()
        if self._tp_summed:
            sum_gradients([p for name, p in self.parameters if name in self._tp_summed], self.mesh["tp"].get_group())
        if self._whole:
            assert self.dp_group is not None
            mean_gradients(self._whole, self.dp_group)
        if not self._mean_by_ddp:
            return
        is_ddp = isinstance(self.runner, nn.parallel.DistributedDataParallel)
        if not is_ddp:
            assert self.dp_group is not None
            mean_gradients([p for _, p in self._trained], self.dp_group)
        lacking = self.without_gradient()
        if lacking and is_ddp and not self.runner.find_unused_parameters:
            raise UnevenParameterUse(
                f"this step gave {lacking[0]} no gradient, but an earlier one did: {FIND_UNUSED_HINT}"
            )
        self._all_trained = not lacking

    def refresh_replication(self) -> None:
        """Begin a step, without gradients: rebuild the DistributedDataParallel wrapper if it can or must change.

        After a step that trained every parameter, the next need not search for unused ones. It knows those that were
        trainable when it was made.
        """
        if self._gradient_sum is not None:
            self._gradient_sum.begin()
        before, self._known_frozen = self._known_frozen, self.newly_frozen()
        if not self._mean_by_ddp or self._alternates:
            return
        if self._known_frozen != before:
            self._all_trained = None
            self.runner = self._replicated(look_for_unused=True) if self._find_unused else self.module
        if self._all_trained is None:
            return
        is_ddp = isinstance(self.runner, nn.parallel.DistributedDataParallel)
        if not is_ddp or (self.runner.find_unused_parameters and self._all_trained and not self._find_unused):
            self.runner = self._replicated(look_for_unused=not self._all_trained)

    @contextmanager
    def training_only(self, part: str) -> Iterator[None]:
        """Context in which only the parameters of a submodule get gradients."""
        others = [p for name, p in self._trained if p.requires_grad and not name.startswith(f"{part}.")]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def drop_buckets(self) -> None:
        """Free the buckets in which gradients are summed; no step follows."""
        self.runner = self.module
        if self._gradient_sum is not None:
            self._gradient_sum.drop()

    def without_gradient(self) -> list[str]:
        """Global names of the trainable parameters that got no gradient in this step."""
        return [name for name, p in self._trained if p.grad is None and name not in self._known_frozen]

    def newly_frozen(self) -> list[str]:
        """Global names of the parameters that were trainable when the model was made, and are not now."""
        return [name for name, p in self._trained if not p.requires_grad]

    def freeze(self, names: Set[str]) -> None:
        """Make these parameters, as far as this rank has them, no longer trainable, and all others trainable."""
        for name, parameter in self._trained:
            parameter.requires_grad_(name not in names)

    def check_same_gradients(self, lacking: list[str]) -> None:
        """Check on every rank that replicas have gradients for the same parameters; ZeRO-2 and ZeRO-3 sum them blindly.

        Args:
            lacking: result of `without_gradient` in a step.
        Raises:
            UnevenParameterUse: the replicas of some shard differ.
        """
        group = self.dp_group
        if group is None or self.plan.zero < 2:
            return
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, lacking, group=group)
        if unlike := {name for names in reports for name in names if any(name not in other for other in reports)}:
            raise UnevenParameterUse(
                f"some replicas gave {min(unlike)} a gradient and others did not: {FIND_UNUSED_HINT}"
            )

    def _shard_tensors(self, tp_plan: Mapping[str, str]) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        style_names = styles_in(tp_plan, self.module, stage=isinstance(self.module, build.Stage))
        styles = {
            name: style for name, style_name in style_names.items() if (style := style_of(style_name)) is not None
        }
        trains = {name: p.requires_grad for name, p in self.module.named_parameters(remove_duplicate=False)}
        # Every rank built the same whole tensors under the same seed and keeps its own shard; nothing is sent.
        parallelize_module(self.module, self.mesh["tp"], styles, src_data_rank=None)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(trains[name])  # torch before 2.10 makes all of them trainable
        summed_ids = {
            id(p) for n, w in style_names.items() if w == SUMMED for p in self.module.get_submodule(n).parameters(False)
        }
        trained = [(name, p) for name, p in build.named_parameters(self.module) if p.requires_grad]
        self._tp_summed = frozenset(name for name, p in trained if id(p) in summed_ids)

    def _recompute_blocks(self) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for path in build.block_paths(self.module):
            if "_orig_mod." in path:
                raise PlanRefused(
                    "checkpointing recomputes blocks, and torch.compile of the whole model leaves none: compile each "
                    "block instead"
                )
            parent, _, name = path.rpartition(".")
            block = self.module.get_submodule(path)
            wrapped = checkpoint_wrapper(block, context_fn=RecomputeContexts(block).contexts)
            setattr_path(self.module.get_submodule(parent), name, wrapped)

    def _shard_fully(self) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        offload = OffloadPolicy()
        if self.plan.offload == "parameters":
            # Pinning memory without an accelerator raises.
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        options: dict[str, Any] = {"mesh": self.mesh["dp"], "offload_policy": offload}
        # ZeRO-3 uses torch's default: blocks are resharded after the forward pass, the root module is not.
        if self.plan.zero == 2:
            options["reshard_after_forward"] = False
        scalars = {p for p in self.module.parameters() if p.dim() == 0}
        if scalars:
            options["ignored_params"] = scalars
        for path in build.block_paths(self.module):
            block = self.module.get_submodule(path)
            if not shares_parameters(self.module, block) and any(True for _ in block.parameters()):
                fully_shard(block, **options)
        fully_shard(self.module, **options)
        if self.device.type == "cpu":
            self._average_on_cpu()
        if any(p.is_meta for p in self.module.parameters()):
            allocate(self.module, torch.device("cpu") if self.plan.offload == "parameters" else self.device)
            with preserve_shared_buffers(self.module):  # only parameters are offloaded; buffers stay on the device
                for module in self.module.modules():
                    for name, buffer in module._buffers.items():
                        module._buffers[name] = buffer if buffer is None else buffer.to(self.device)
        for parameter in scalars:
            parameter.data = parameter.data.to(self.device)
        self._whole = [p for p in self.module.parameters() if p.dim() == 0 and p.requires_grad]
        self.averages = True

    def _average_on_cpu(self) -> None:
        """Make FSDP2 divide gradients itself: gloo returned sums for averages before torch 2.9."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def _replicate(self) -> None:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if self.plan.tp > 1 or self.plan.pp > 1:
            group = self.dp_group
            assert group is not None
            self._gradient_sum = GradientSum(parameters, group, micro_batches=self.plan.accumulation)
            return
        # Only a step shows if the model leaves parameters unused. Without searching for them DDP fails at the second
        # step, and searching costs a walk of the graph. So the first step runs without DDP, unless the script asks.
        self._mean_by_ddp = self.averages = True
        if self._find_unused and not self._alternates:
            self.runner = self._replicated(look_for_unused=True)

    def _replicated(self, *, look_for_unused: bool) -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            self.module,
            process_group=self.dp_group,
            init_sync=False,  # all replicas are built under the same seed
            **_NO_BUFFER_SYNC,
            gradient_as_bucket_view=True,
            find_unused_parameters=look_for_unused,
        )


def shares_parameters(root: nn.Module, block: nn.Module) -> bool:
    """True if a parameter of `block` is used outside it too (tied weights); such a block is not sharded on its own."""
    inside = {id(p) for p in block.parameters()}
    own = {id(m) for m in block.modules()}
    return any(id(p) in inside for m in root.modules() if id(m) not in own for p in m.parameters(recurse=False))


def setattr_path(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Replace the submodule `name` by `child`, in lists and containers too."""
    parent._modules[name] = child
