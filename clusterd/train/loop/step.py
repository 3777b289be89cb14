"""One training step under a plan: forward, backward, gradient reduction, clipping, update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clusterd.plans.plan import Coordinates, Plan
from clusterd.train.data.loader import call, check_sliceable, micro_batch_sizes, slice_batch
from clusterd.train.loop.phases import PhaseClock
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.buffers import isolate_first_pass
from clusterd.train.parallel.gather import Gathering, gathering
from clusterd.train.parallel.gradient_sync import local_gradient
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.parallel.schedule import Schedule
from clusterd.train.process import accelerator
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.job import LossFunction
from clusterd.train.process.weighted_means import Weighted, WeightedMeans, is_pair, means, split_loss, weighted


class Stepper:
    """Executes the steps of one rank.

    Loss and gradient of a step are those of the mean over the global batch, whatever the shares: the mean over a
    micro-batch of m samples is weighted by m / global_batch.

    A loss given as (sum, weight) is divided by the weight of the whole global batch instead: gradients are scaled once
    the weight of all micro-batches and replicas is known.

    Args:
        shares: samples of the global batch that each replica takes.
        each_whole: the replicas compute the same samples, which are the whole batch to each of them. Where gradients of
            replicas are summed, the sum is then that of as many whole batches.

    Attributes:
        metric_names: further values that the loss returns.
        gradient_norm: of the last step, before clipping; None without a limit.
        measured_parameters: names of parameters, in the order of `gradient_norms`; the next step measures them.
        gradient_norms: norm of each parameter's gradient, as measured.
        complete: True from the end of gradient reduction to the end of the update; the rest of the step needs no peer.
        before_update: called before each update of the optimizer.
        updating: True from the first to the last change of a parameter; a step that fails in between leaves neither the
            old state nor the new one.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: RankOptimizer,
        scheduler: Schedule | None,
        loss: LossFunction,
        *,
        coordinates: Coordinates,
        shares: tuple[int, ...],
        clip_norm: float | None,
        each_whole: bool = False,
    ) -> None:
        plan = parallel.plan
        self._parallel, self._optimizer, self._scheduler = parallel, optimizer, scheduler
        self._loss = loss
        self._parts: list[tuple[Any, Weighted]] = []  # weight and further values of the loss of each micro-batch
        self._weight: Any = 0.0  # of this step's losses, where the loss is a pair (sum, weight)
        self._weighs: bool | None = None  # the loss is such a pair; None: no step yet
        self.metric_names: list[str] = []
        self._metrics = WeightedMeans()
        self.gradient_norm: torch.Tensor | None = None
        self.measured_parameters: Sequence[str] = ()
        self.gradient_norms: list[float] = []
        self._stage = coordinates.stage
        self.complete = self.updating = False
        self.before_update: Callable[[], None] = lambda: None
        self.phases = PhaseClock(parallel.device)
        self._shares, self._global_batch, self._clip_norm = shares, sum(shares), clip_norm
        self._sizes = micro_batch_sizes(shares[coordinates.replica], plan.accumulation)
        self._gathering = Gathering()
        if not each_whole:
            self._gathering = Gathering(shares, coordinates.replica, parallel.dp_group, plan.accumulation)
        self._gradient_factor = len(shares) if parallel.averages or each_whole else 1
        self._trainable: list[nn.Parameter] = [p for p in parallel.module.parameters() if p.requires_grad]
        self._pipeline_stage: Any = None
        self._schedule_options: dict[str, bool] = {}
        self._forward = parallel.module.forward  # without what torch's pipeline schedules need around it
        self._schedule = self._build_schedule() if plan.pp > 1 else None
        # Shards of one replica have the same loss; one of them reports it.
        self._is_first = coordinates.stage == coordinates.replica == coordinates.shard == 0
        self._reports_loss = coordinates.shard == 0 and coordinates.stage == plan.pp - 1

    @property
    def wants_inputs(self) -> bool:
        """True if this stage reads samples; stages in the middle of a pipeline do not."""
        return self._stage in (0, self._parallel.plan.pp - 1)

    def step(
        self,
        inputs: Any,
        targets: Any,
        on_gradients: Callable[[torch.Tensor], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Run one step on this replica's share of a global batch.

        Args:
            on_gradients: called when all gradients are complete, with this rank's contribution to the mean loss over
                the global batch: a scalar on the device, not yet summed over ranks.
            on_change: called before the first change of a parameter, if that is earlier.
        Raises:
            PlanRefused: micro-batches cannot be cut from such batches.
        """
        self.complete = False
        loss = self.compute_gradients(inputs, targets)
        self.complete = True
        on_gradients(loss)
        self.phases.lap("agree")
        self.update()
        self.phases.lap("optimizer")

    def gradients(self, inputs: Any, targets: Any) -> Iterator[tuple[str, Stepper, torch.Tensor]]:
        """Compute the gradients of each loss of a step in turn.

        Yields the part of the model, what computed its gradients, and this rank's contribution to its loss.
        """
        yield "", self, self.compute_gradients(inputs, targets)

    def own_metrics(self) -> dict[str, tuple[float, float]]:
        """Sums and weights of the further values of the loss that this rank adds."""
        return self._metrics.sums() if self._reports_loss else {}

    def compute_gradients(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Gradients of one step, clipped; return this rank's contribution to the loss.

        Raises:
            PlanRefused: micro-batches cannot be cut from such batches.
        """
        if len(self._sizes) > 1 and self.wants_inputs:
            for part in (inputs, targets):
                check_sliceable(part, sum(self._sizes))
        self._parts = []
        self._optimizer.zero_grad()
        self._parallel.refresh_replication()
        with gathering(self._gathering):
            loss = self._through_pipeline(inputs, targets) if self._schedule else self._accumulate(inputs, targets)
        self._parallel.finish_gradients()
        self._add_parts()
        if self._weighs is None:
            self._agree_on_loss()
        if self._weighs:
            loss = loss * self._divide_by_weight()
        self.phases.lap("sync")
        plan, device = self._parallel.plan, self._parallel.device
        if names := self.measured_parameters:
            self.gradient_norms = gradient_norms(self._parallel.parameters, names, plan, device).tolist()
            self.measured_parameters = ()
        if self._clip_norm is not None:
            self.gradient_norm = clip_gradients(self._trainable, plan, device, self._clip_norm)
        return loss if self._reports_loss else torch.zeros_like(loss)

    def update(self) -> None:
        """Finish a step: update the parameters from their gradients."""
        self.updating = True
        self.before_update()
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        torch.clear_autocast_cache()  # a script's autocast context may last longer than its weights
        self.complete = self.updating = False

    def stage_forward(self, *inputs: Any) -> Any:
        """Outputs of a pipeline stage, outside of the schedule."""
        module = self._parallel.module
        scheduled, module.forward = module.forward, self._forward
        try:
            return module(*inputs)  # by whose hooks FSDP2 gathers parameters
        finally:
            module.forward = scheduled

    def clear(self, *, gradients: bool) -> None:
        """Free activations, and device memory that torch caches.

        Args:
            gradients: free them too; their step can then be repeated, but not finished.
        """
        if gradients:
            self._optimizer.zero_grad()
        if self._pipeline_stage is not None:
            self._pipeline_stage.clear_runtime_states()
        if (gpu := accelerator.of(self._parallel.device)) is not None:
            gpu.empty_cache()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Context of steps whose updates are discarded; torch creates connections, buckets and kernels in them.

        Every rank of the plan must take part. Parameters and optimizer state are garbage afterwards.
        """
        scheduler, self._scheduler = self._scheduler, None
        yield
        self._scheduler = scheduler
        self._optimizer.make_state()
        self._parallel.refresh_replication()

    def _contribution(self, outputs: Any, targets: Any, samples: int) -> torch.Tensor:
        """Part of the global batch's loss that a micro-batch adds; further values are recorded.

        Raises:
            Refused: the loss returned neither one number nor a pair (sum, weight).
        """
        value, others = split_loss(self._loss(outputs, targets))
        weight: Any = 0.0
        weighs = is_pair(value)
        if weighs:
            value, weight = value
        if weighs or others:
            self._parts.append((weight, weighted(others, samples, "")))
        if weighs:
            return _checked(value) / self._global_batch  # close to its final size; see `_divide_by_weight`
        return _checked(value) * (samples / self._global_batch)

    def _add_parts(self) -> None:
        """Add up weights and further values of this step's micro-batches."""
        self._weight, self._metrics = 0.0, WeightedMeans()
        # Before its first step, torch's pipeline schedule computes a loss of no micro-batch.
        for weight, others in self._parts[-self._parallel.plan.accumulation :]:
            self._weight = self._weight + (weight.detach().double() if isinstance(weight, torch.Tensor) else weight)
            self._metrics.add(others)

    def _agree_on_loss(self) -> None:
        """Learn on all ranks, in the first step, what the last stage's loss returns."""
        own = isinstance(self._weight, torch.Tensor) or self._weight != 0.0, self._metrics.names
        found: list[Any] = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        self._weighs = any(weighs for weighs, _ in found)
        self.metric_names = sorted({name for _, names in found for name in names})

    def _divide_by_weight(self) -> torch.Tensor:
        """Scale gradients to those of the weighted mean over the global batch; return the factor."""
        weight = torch.as_tensor(self._weight, dtype=torch.float64, device=self._parallel.device)
        if not self._reports_loss:
            weight = torch.zeros_like(weight)
        if dist.is_initialized():
            dist.all_reduce(weight)
        # A batch in which nothing counts changes nothing.
        factor = torch.where(weight > 0, self._global_batch / weight, 0.0)
        gradients: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in self._trainable:
            if parameter.grad is not None and (gradient := _gradient_values(parameter)).numel():
                gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), some in gradients.items():
            torch._foreach_mul_(some, factor.to(device))
        return factor.float()

    def reported_values(self) -> list[torch.Tensor]:
        """Values of this step to sum over ranks: of written parameters, gradient norm, sums and weights of metrics."""
        device = self._parallel.device
        values = self._parallel.written_values()
        if self.gradient_norm is not None:
            values.append(self.gradient_norm if self._is_first else torch.zeros_like(self.gradient_norm))
        if self.metric_names:
            metrics = self._metrics if self._reports_loss else WeightedMeans()
            if unknown := set(metrics.names) - set(self.metric_names):
                raise Refused(f"loss returned {min(unknown)}, which the first step had not: return it in every step")
            values += metrics.tensors(self.metric_names, device)
        return values

    def read_values(self, values: Sequence[float]) -> dict[str, Any]:
        """Entries of the step log from the sums of `reported_values` over all ranks.

        Raises:
            PlanRefused: replicas wrote different values into parameters.
        """
        found: dict[str, Any] = {}
        if self._parallel.compares_writes:
            total, squares, *values = values
            self._parallel.check_same_writes(total, squares)
        if self._clip_norm is not None:
            found["grad_norm"], *values = values
        if count := len(self.metric_names):
            sums = {n: (values[i], values[count + i]) for i, n in enumerate(self.metric_names)}
            found["metrics"] = means([sums])
        return found

    def _accumulate(self, inputs: Any, targets: Any) -> torch.Tensor:
        total = torch.zeros((), device=self._parallel.device)
        start = 0
        for index, size in enumerate(self._sizes):
            torch.clear_autocast_cache()  # FSDP2 loses gradients of weights cast in an earlier forward pass
            stop = start + size
            # A single micro-batch is passed on unsliced: it may be of a type that cannot be sliced.
            part_inputs, part_targets = inputs, targets
            if len(self._sizes) > 1:
                part_inputs, part_targets = (slice_batch(part, start, stop) for part in (inputs, targets))
            with self._parallel.micro_batch_context(index):
                loss = self._loss_of(part_inputs, part_targets, size)
                self.phases.lap("forward")
                (loss * self._gradient_factor if self._gradient_factor != 1 else loss).backward()
            self.phases.lap("backward")
            total += loss.detach()
            start = stop
        return total

    def _loss_of(self, inputs: Any, targets: Any, samples: int) -> torch.Tensor:
        """Contribution of a micro-batch to the loss of the global batch."""
        return self._contribution(call(self._parallel.runner, inputs), targets, samples)

    def _through_pipeline(self, inputs: Any, targets: Any) -> torch.Tensor:
        loss = self._run_schedule(inputs, targets)
        self.phases.lap("pipeline")
        return loss

    def _run_schedule(self, inputs: Any, targets: Any) -> torch.Tensor:
        assert self._schedule is not None
        device = self._parallel.device
        if self._stage == 0:
            self._schedule.step(inputs, **self._schedule_options)
        elif self._stage == self._parallel.plan.pp - 1:
            losses: list[torch.Tensor] = []
            self._schedule.step(target=targets, losses=losses, **self._schedule_options)
            return torch.stack([loss.detach() for loss in losses]).sum().float() / self._gradient_factor
        else:
            self._schedule.step(**self._schedule_options)
        return torch.zeros((), device=device)

    def _build_schedule(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        parallel, plan = self._parallel, self._parallel.plan
        send_contiguous(parallel.runner)
        isolate_first_pass(parallel.runner, parallel.device)
        stage = PipelineStage(parallel.runner, self._stage, plan.pp, parallel.device, group=parallel.pp_group)
        if parallel.device.type == "cpu":
            # The initial exchange creates NCCL communicators. torch before 2.10 sends 8 bytes for 4 in it, and gloo
            # then aborts the process.
            stage._get_init_p2p_neighbors_ops = list
        in_flight = plan.pp - self._stage if plan.schedule == "1f1b" else plan.accumulation
        share_receive_buffers(stage, in_flight)
        self._pipeline_stage = stage
        schedule_class = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
        # Outputs are not needed; torch before 2.10 has no such option and would pass it on to the model.
        knows = "return_outputs" in inspect.signature(schedule_class.step).parameters
        self._schedule_options = {"return_outputs": False} if knows else {}
        # All micro-batches of a replica have one size here (`plans.legality`), so one factor suffices. The schedule's
        # own scaling divides by their count, which is wrong when replicas have unequal shares.
        size, factor = self._sizes[0], self._gradient_factor
        try:
            return schedule_class(
                stage,
                n_microbatches=plan.accumulation,
                loss_fn=lambda outputs, targets: self._contribution(outputs, targets, size) * factor,
                scale_grads=False,
            )
        except ValueError as error:  # such as fewer micro-batches than stages, in some versions
            raise PlanRefused(f"torch {torch.__version__} cannot run {plan}: {error}") from error


def _checked(value: Any) -> torch.Tensor:
    """Loss without dimensions.

    Raises:
        Refused: it is not one number.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        is_what = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise Refused(
            f"loss returned {is_what}; it must return the mean over the samples it is given, a scalar, or (sum, weight)"
        )
    return value.reshape(())


def gradient_norms(
    parameters: Iterable[tuple[str, nn.Parameter]], names: Sequence[str], plan: Plan, device: torch.device
) -> torch.Tensor:
    """2-norm of the gradient of each parameter of `names` over all ranks; 0 without a gradient."""
    places = {name: index for index, name in enumerate(names)}
    squares = torch.zeros(len(names), dtype=torch.float64)
    for name, parameter in parameters:
        if name in places and parameter.grad is not None and (gradient := _gradient_values(parameter)).numel():
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.promote_types(gradient.dtype, torch.float32))
            squares[places[name]] = norm.double().square() / holders(parameter, plan)
    squares = squares.to(device)
    if dist.is_initialized():
        dist.all_reduce(squares)
    return squares.sqrt().cpu()


def clip_gradients(parameters: Iterable[nn.Parameter], plan: Plan, device: torch.device, limit: float) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most `limit`.

    Every element counts once: the squares of a rank's gradients are divided by the number of ranks that hold the same
    elements, and summed over all ranks.

    Returns:
        The norm before clipping, on `device`.
    """
    groups: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and (gradient := _gradient_values(parameter)).numel():
            # A norm in bfloat16 has three digits, and would differ between a shard and the whole.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            groups.setdefault((holders(parameter, plan), gradient.device, wide), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, _, wide), gradients in groups.items():
        norms = torch.stack(torch._foreach_norm(gradients, dtype=wide))
        total += (norms.double().square().sum() / copies).to(device)
    if dist.is_initialized():
        dist.all_reduce(total)
    norm = total.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for (_, target, _), gradients in groups.items():
        torch._foreach_mul_(gradients, scale.to(target))
    return norm


def _gradient_values(parameter: nn.Parameter) -> torch.Tensor:
    """Stored values of the local gradient; a sparse gradient is coalesced first."""
    gradient = local_gradient(parameter)
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    values: torch.Tensor = parameter.grad.values()
    return values


def holders(parameter: nn.Parameter, plan: Plan) -> int:
    """Number of ranks of the stage that hold the same part of this parameter."""
    shards = 1
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate():
            shards *= parameter.device_mesh.size(dim)
    return plan.dp * plan.tp // shards


def share_receive_buffers(stage: Any, in_flight: int) -> None:
    """Let micro-batches that are never in flight at once receive into the same memory.

    torch makes a buffer for each micro-batch of a step, for activations and for gradients. A stage has the activations
    of at most `in_flight` micro-batches, and of the gradients those of one.
    """
    prepare_forward, prepare_backward = stage._prepare_forward_infra, stage._prepare_backward_infra
    receive_forward = stage.get_fwd_recv_ops

    def forward_prepared(*arguments: Any, **options: Any) -> Any:
        found = prepare_forward(*arguments, **options)
        stage.args_recv_info = {chunk: stage.args_recv_info[chunk % in_flight] for chunk in stage.args_recv_info}
        return found

    def backward_prepared(*arguments: Any, **options: Any) -> Any:
        found = prepare_backward(*arguments, **options)
        stage.grad_recv_info = dict.fromkeys(stage.grad_recv_info, stage.grad_recv_info.get(0))
        return found

    def received(chunk: int) -> Any:
        for info in stage.args_recv_info[chunk]:
            if (buffer := getattr(info, "buffer", None)) is not None:
                buffer.grad = None  # of the micro-batch before: being sent, and the next one's would be added to it
        return receive_forward(chunk)

    stage._prepare_forward_infra, stage._prepare_backward_infra = forward_prepared, backward_prepared
    stage.get_fwd_recv_ops = received


def send_contiguous(module: nn.Module) -> None:
    """Make a stage send contiguous activations and gradients.

    Process groups neither send nor receive a transposed tensor ("input tensor has to be contiguous").
    """
    forward = module.forward

    def computed(*inputs: Any, **options: Any) -> Any:
        outputs = forward(*(_contiguous(value) for value in inputs), **options)
        return tuple(map(_contiguous, outputs)) if isinstance(outputs, tuple) else _contiguous(outputs)

    module.forward = computed


def _contiguous(value: Any) -> Any:
    return _Contiguous.apply(value) if isinstance(value, torch.Tensor) else value


class _Contiguous(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor) if tensor.is_contiguous() else tensor.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()
