"""A plan, applied to a module with torch's own facilities.

===================  =====================================================================================
tensor parallel      `parallelize_module` from the job's tp_plan
pipeline parallel    `torch.distributed.pipelining`: one stage per rank, schedules GPipe and 1F1B
checkpointing        `checkpoint_wrapper` on every block
dp, ZeRO-1           `DistributedDataParallel`; with tensor or pipeline parallelism `GradientSum`
ZeRO-2, ZeRO-3       `fully_shard` (FSDP2), without and with resharding after the forward pass
offload=parameters   `CPUOffloadPolicy` of `fully_shard` (ZeRO-3)
===================  =====================================================================================

The optimizer's part (ZeRO-1, offload=optimizer) is in `clusterd.train.parallel.optimizers`. Ranks form a mesh of
(pp, dp, tp), as `plans.plan` numbers them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clusterd.train.parallel import build
from clusterd.train.parallel.buffers import RecomputeContexts, preserve_shared_buffers
from clusterd.train.parallel.gradient_sync import GradientSum, mean_gradients, sum_gradients
from clusterd.train.parallel.meta_build import allocate
from clusterd.train.parallel.mutation_guard import ParameterMutationGuard
from clusterd.train.parallel.tp_styles import SUMMED, style_of, styles_in
from clusterd.train.process.exits import PlanRefused, Refused, UnevenParameterUse
from clusterd.train.process.job import NAME
from plans.model_shape import ModelShape
from plans.plan import Plan

# Buffers count as replica 0 has them. The option's name has changed, and its old one warns.
_DDP_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_NO_BUFFER_SYNC = {"forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False}


FIND_UNUSED_HINT = (
    "where that differs between steps or replicas, give find_unused_parameters=True to clusterd.train.run (gradients "
    "may have been added up wrongly under the present plan)"
)


class ParallelModel:
    """A module under a plan, on this rank.

    A module on the meta device gets memory here, without values.

    Args:
        find_unused_parameters: which parameters get a gradient may differ between steps and between replicas.

    Attributes:
        module: the rank's own module; parameters bear global names, sharded ones are DTensors.
        parameters: all of them, by global name, as they are between steps; may be asked at any time.
        runner: what is called in its place (the same, or DistributedDataParallel around it).
        averages: whether gradients come out as the mean over replicas (else as their sum).
        marks: what the script wrote onto each parameter (``p.no_decay = True``), and its name, by global name.
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
    ) -> None:
        self.module, self.plan, self.device, self.mesh = module, plan, device, mesh
        self.runner: nn.Module = module
        self.averages = False
        self.parameter_attributes = {name: {**vars(p), NAME: name} for name, p in build.named_parameters(module)}
        self._gradient_sum: GradientSum | None = None
        self._mean_by_ddp = False  # by DistributedDataParallel, from the second step on if not from the first
        self._find_unused = find_unused_parameters
        self._tp_summed: frozenset[str] = frozenset()  # whole on every shard, which has the gradient of its part alone
        self._all_trained: bool | None = None  # every parameter got a gradient in the last step; None: there was none
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
        # While a step runs, FSDP2 puts whole parameters in the place of the shards.
        self.parameters: list[tuple[str, nn.Parameter]] = list(build.named_parameters(module))
        self._trained = [(name, p) for name, p in self.parameters if p.requires_grad]
        self._frozen = [(name, p) for name, p in self.parameters if not p.requires_grad]
        for name, parameter in self.parameters:
            vars(parameter).update(self.parameter_attributes[name])

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard of the same stage."""
        return self.mesh["dp"].get_group() if self.mesh is not None and self.plan.dp > 1 else None

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The stages of this replica."""
        return self.mesh["pp"].get_group() if self.mesh is not None and self.plan.pp > 1 else None

    def watch(self, shape: ModelShape) -> None:
        """From the next pass on, has forward passes raise that write into parameters, where the plan would lose that.

        Args:
            shape: of the whole model, in which what is written is known as far as fake tensors could tell.
        """
        plan = self.plan
        several_passes = plan.pp > 1 or plan.accumulation > 1 or plan.checkpointing
        if plan.dp > 1 or plan.offload != "none" or several_passes:
            units = [m for m in self.module.modules() if hasattr(m, "set_reshard_after_backward")]  # of FSDP2
            ParameterMutationGuard(self.module, units or [self.module], shape.written, values=not shape.written_known)

    def micro_batch_context(self, micro_batch: int) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch without pipeline: replicas talk with the last one only."""
        if isinstance(self.runner, nn.parallel.DistributedDataParallel) and micro_batch < self.plan.accumulation - 1:
            no_sync: AbstractContextManager[Any] = self.runner.no_sync()
            return no_sync
        if self.plan.zero == 2 and self.plan.pp == 1:
            # Parameters stay whole from one micro-batch to the next, as ZeRO-2 has the memory for; gradients do not.
            self.runner.set_reshard_after_backward(micro_batch == self.plan.accumulation - 1)
        return nullcontext()

    def finish_gradients(self) -> None:
        """After the last backward pass of a step: gradients are complete when this returns.

        Raises:
            Refused: a parameter trains that did not when the model was made.
            UsedUnlike: the step left out parameters that steps before it used.
        """
        if name := next((name for name, p in self._frozen if p.requires_grad), ""):
            raise Refused(
                f"{name} trains since this step (requires_grad), and which parameters do is settled when the model is "
                "made: have it train from the first, in a group of the optimizer whose rate a scheduler keeps at zero"
            )
        if self._gradient_sum is not None:
            self._gradient_sum.finish()
        if self._tp_summed:
            sum_gradients([p for name, p in self.parameters if name in self._tp_summed], self.mesh["tp"].get_group())
        if not self._mean_by_ddp:
            return
        is_ddp = isinstance(self.runner, nn.parallel.DistributedDataParallel)
        if not is_ddp:
            assert self.dp_group is not None
            mean_gradients([p for _, p in self.parameters if p.requires_grad], self.dp_group)
        lacking = self.without_gradient()
        if lacking and is_ddp and not self.runner.find_unused_parameters:
            raise UnevenParameterUse(
                f"this step gave {lacking[0]} no gradient, and one before it did: {FIND_UNUSED_HINT}"
            )
        self._all_trained = not lacking

    def refresh_replication(self) -> None:
        """Between two steps, without gradients: where the last one trained every parameter, the next need not look."""
        if not self._mean_by_ddp or self._all_trained is None:
            return
        is_ddp = isinstance(self.runner, nn.parallel.DistributedDataParallel)
        if not is_ddp or (self.runner.find_unused_parameters and self._all_trained and not self._find_unused):
            self.runner = self._replicated(look_for_unused=not self._all_trained)

    def drop_buckets(self) -> None:
        """Frees what gradients are summed in; no step follows."""
        self.runner = self.module
        if self._gradient_sum is not None:
            self._gradient_sum.drop()

    def without_gradient(self) -> list[str]:
        """Global names of the parameters that train and got no gradient in this step."""
        return [name for name, p in self._trained if p.grad is None]

    def newly_frozen(self) -> list[str]:
        """Global names of the parameters that trained when the model was made, and do no more."""
        return [name for name, p in self._trained if not p.requires_grad]

    def freeze(self, names: Set[str]) -> None:
        """Those of them that are here train no more.

        Raises:
            PlanRefused: they would all the same.
        """
        frozen = [(name, parameter) for name, parameter in self._trained if name in names]
        if frozen and self.plan.zero >= 2:
            raise PlanRefused(f"{frozen[0][0]} trains no more (requires_grad), and FSDP2 would train it again")
        for _, parameter in frozen:
            parameter.requires_grad_(False)
        if frozen and self._mean_by_ddp:  # it would wait for their gradients
            self.runner, self._all_trained = self.module, None

    def check_same_gradients(self, lacking: list[str]) -> None:
        """Every rank calls it: ZeRO-2 and ZeRO-3 add up what replicas have, whatever that is the gradient of.

        Args:
            lacking: what `without_gradient` was in a step.
        Raises:
            UsedUnlike: the replicas of some shard differ.
        """
        group = self.dp_group
        if group is None or self.plan.zero < 2:
            return
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, lacking, group=group)
        if unlike := {name for names in reports for name in names if any(name not in other for other in reports)}:
            raise UnevenParameterUse(
                f"some replicas gave {min(unlike)} a gradient, and others did not: {FIND_UNUSED_HINT}"
            )

    def _shard_tensors(self, tp_plan: Mapping[str, str]) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        style_names = styles_in(tp_plan, self.module, stage=isinstance(self.module, build.Stage))
        styles = {
            name: style for name, style_name in style_names.items() if (style := style_of(style_name)) is not None
        }
        trains = {name: p.requires_grad for name, p in self.module.named_parameters(remove_duplicate=False)}
        # Every rank built the same whole tensors under the same seed: each cuts its own, nothing is sent.
        parallelize_module(self.module, self.mesh["tp"], styles, src_data_rank=None)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(trains[name])  # torch before 2.10 has all of them train
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
                    "checkpointing recomputes blocks, and torch.compile of the whole model has none left: compile each "
                    "of them"
                )
            parent, _, name = path.rpartition(".")
            block = self.module.get_submodule(path)
            wrapped = checkpoint_wrapper(block, context_fn=RecomputeContexts(block).contexts)
            setattr_path(self.module.get_submodule(parent), name, wrapped)

    def _shard_fully(self) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        offload = OffloadPolicy()
        if self.plan.offload == "parameters":
            # Pinned memory belongs to an accelerator; asking for it without one raises.
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        options: dict[str, Any] = {"mesh": self.mesh["dp"], "offload_policy": offload}
        # ZeRO-3 has torch's own rule: blocks are given back, what the backward pass begins with is not.
        if self.plan.zero == 2:
            options["reshard_after_forward"] = False
        for path in build.block_paths(self.module):
            block = self.module.get_submodule(path)
            if not shares_parameters(self.module, block) and any(True for _ in block.parameters()):
                fully_shard(block, **options)
        fully_shard(self.module, **options)
        if self.device.type == "cpu":
            self._average_on_cpu()
        if any(p.is_meta for p in self.module.parameters()):
            allocate(self.module, torch.device("cpu") if self.plan.offload == "parameters" else self.device)
            with preserve_shared_buffers(self.module):  # what is offloaded is parameters: buffers are computed with
                for module in self.module.modules():
                    for name, buffer in module._buffers.items():
                        module._buffers[name] = buffer if buffer is None else buffer.to(self.device)
        self.averages = True

    def _average_on_cpu(self) -> None:
        """Has FSDP2 divide gradients itself: gloo gave sums for averages before torch 2.9."""
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
        # Only a step tells whether the model leaves parameters out; without looking for them DDP fails at the second
        # step, and looking costs a walk of the graph. So the first step does without DDP, unless the script says so.
        self._mean_by_ddp = self.averages = True
        if self._find_unused:
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
    """Whether a parameter of `block` is used outside it too (tied weights): such a block is not sharded on its own."""
    inside = {id(p) for p in block.parameters()}
    own = {id(m) for m in block.modules()}
    return any(id(p) in inside for m in root.modules() if id(m) not in own for p in m.parameters(recurse=False))


def setattr_path(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Puts `child` in the place of the submodule `name`, in lists and containers too."""
    parent._modules[name] = child
