"""Evaluation under every plan: each sample once, the model in evaluation mode, without gradients.

Batches are the same under every plan, because a metric need not be a mean over samples; a replica computes each of them
whole. All ranks go through the same rounds of batches, because shards (ZeRO-2, ZeRO-3) are gathered by all replicas
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from clusterd.train.data import loader
from clusterd.train.loop.callbacks import content, is_table
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.buffers import ForwardState, with_copied_buffers
from clusterd.train.parallel.mesh import same_on_all_ranks
from clusterd.train.parallel.precision import with_precision
from clusterd.train.process import held
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.seeding import seed_step
from clusterd.train.process.weighted_means import Weighted, WeightedMeans, means, weighted

_STREAM = 0xFFFE
"""Stage number of evaluation data in `seed_step`."""

BATCH = 16
"""Samples of a batch, or those of a global batch, if fewer: no plan may change it, and it must fit under each."""

TOLERANCE = 1e-4
"""Relative difference between the metric of a batch and that of its halves that is rounding."""

# Between pipeline stages, each message begins with a header of dtypes and shapes: torch's pipeline schedules need
# micro-batches of one shape, which a last batch with fewer samples has not.
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_HEADER_NUMBERS = 64


class Interrupted(Exception):
    """All ranks agreed, between two batches, to end an evaluation before its end.

    Attributes:
        flags: those that are raised.
    """

    def __init__(self, flags: set[str]) -> None:
        super().__init__()
        self.flags = flags


class Evaluator:
    """Forward passes of one rank over a data set.

    Args:
        training: the job under its plan on this rank.
        flags: states of `SIGNALS` on this rank.
        on_round: called before each round.
    """

    def __init__(
        self, training: Any, flags: Callable[[], list[float]], on_round: Callable[[], None] = lambda: None
    ) -> None:
        self._training, self._flags, self._on_round = training, flags, on_round
        plan, coordinates = training.context.plan, training.context.coordinates
        self._replicas, self._replica = plan.dp, coordinates.replica
        self._stage, self._is_last = coordinates.stage, coordinates.stage == plan.pp - 1
        self._reports = self._is_last and coordinates.shard == 0  # shards of one replica have the same outputs
        self._gathers = plan.zero >= 2

    def means(
        self,
        data: Any,
        metric: Callable[[Any, Any], Any] | None = None,
        *,
        batch: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        whole: bool = False,
        interrupted_by: frozenset[str] = frozenset(),
    ) -> dict[str, float]:
        """Mean of each metric over all samples, the same on every rank; every rank must call it.

        Args:
            whole: rank 0 gives the metric the outputs and targets of all samples at once.
            interrupted_by: flags that end the evaluation.
        Raises:
            Interrupted: one of them is raised on some rank.
        """
        job, device = self._training.job, self._training.device
        try:
            samples = len(data)
        except TypeError:
            raise Refused("the evaluation data have no length; they must be a map-style data set") from None
        if not samples or not same_on_all_ranks(samples, device):
            raise Refused(f"the evaluation data have {samples} samples here: they need some, as many on every rank")
        name = "loss" if metric is None else getattr(metric, "__name__", "metric").replace("<lambda>", "metric")
        judge = with_precision(job.precision, device.type, metric or job.loss)
        rounds = list(self._rounds(samples, batch or min(job.global_batch, BATCH)))
        kept: list[tuple[int, Any, Any]] = []
        batches = self._batches(data, rounds, collate_fn or job.collate_fn)
        totals, agreed = WeightedMeans(), None
        with self._evaluation_mode():
            for start, stop, _ in rounds:
                self._on_round()
                # Read one round later, so that no rank waits for it.
                if agreed is not None and (flags := agreed.result()[1]) & interrupted_by:
                    raise Interrupted(flags)
                agreed = StepConsensus(torch.zeros((), device=device), self._flags()) if interrupted_by else None
                if stop == start and not self._gathers:
                    continue
                inputs, targets = next(batches)
                training = self._training
                outputs = outputs_of(training.parallel, training.stepper.stage_forward, self._stage, inputs)
                if not self._reports or stop == start:
                    continue
                if whole:
                    kept.append((start, *(loader.to_device(part, torch.device("cpu")) for part in (outputs, targets))))
                    continue
                is_judged = start == 0 and metric is not None and name not in self._training.compared_metrics
                kept_before = _kept_by(metric) if is_judged else {}
                found = weighted(judge(outputs, targets), stop - start, name)
                if is_judged:
                    self._training.compared_metrics.add(name)
                    changed = [key for key, value in _kept_by(metric).items() if kept_before.get(key) != value]
                    if changed:
                        self._tell_of_part(name, min(changed))
                    else:  # it may be called again
                        self._compare_with_halves(judge, outputs, targets, stop, found, name)
                totals.add(found)
            if whole and (every := self._gathered_on_first(kept)):
                totals.add(weighted(judge(*_joined(every)), samples, name))
        return means(self._gathered(totals.sums()))

    def _tell_of_part(self, name: str, kept: str) -> None:
        plan = self._training.context.plan
        if plan.dp * plan.pp > 1:
            print(
                f"clusterd: {name} keeps {kept} of its calls, but under {plan} a rank makes some of them: return "
                "sums (a dict of pairs), or give it all samples at once by whole=True, and read it on rank 0",
                flush=True,
            )

    def _compare_with_halves(
        self, judge: Callable[[Any, Any], Any], outputs: Any, targets: Any, samples: int, found: Weighted, name: str
    ) -> None:
        """Say once that a metric is no mean over samples."""
        if samples < 2:
            return
        halves, middle = WeightedMeans(), samples // 2
        try:
            for start, stop in ((0, middle), (middle, samples)):
                loader.check_sliceable(outputs, samples)
                loader.check_sliceable(targets, samples)
                parts = (loader.slice_batch(part, start, stop) for part in (outputs, targets))
                halves.add(weighted(judge(*parts), stop - start, name))
        except Exception:  # a batch that cannot be cut, or a metric that needs more samples
            return
        whole = WeightedMeans()
        whole.add(found)
        there, here = means([halves.sums()]), means([whole.sums()])
        for key, value in here.items():
            other = there.get(key, value)
            if abs(value - other) > TOLERANCE * max(abs(value), abs(other)):
                print(
                    f"clusterd: {key} is {value:.6g} of {samples} samples as a whole and {other:.6g} as the mean of "
                    "their halves: it is no mean over samples, and the mean of its values of batches is shown; a pair "
                    "(sum, weight) is exact, and whole=True gives it all samples at once",
                    flush=True,
                )

    def _gathered_on_first(self, kept: list[tuple[int, Any, Any]]) -> list[tuple[int, Any, Any]]:
        """Outputs and targets of all replicas on rank 0, in the order of samples."""
        every: list[Any] = [kept]
        if dist.is_initialized():
            is_first = dist.get_rank() == 0
            every = [None] * dist.get_world_size()
            dist.gather_object(kept, every if is_first else None, dst=0)
            every = every if is_first else []
        return sorted((entry for some in every for entry in some), key=lambda entry: entry[0])

    def _rounds(self, samples: int, each: int) -> Iterator[tuple[int, int, int]]:
        """First and end of this replica's batch of each round, and the first sample of all replicas."""
        for first in range(0, samples, each * self._replicas):
            start = min(first + each * self._replica, samples)
            yield start, min(start + each, samples), first

    def _batches(
        self, data: Any, rounds: list[tuple[int, int, int]], collate_fn: Callable[[Any], Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Batches of this replica; with sharded parameters, a round without samples gets one that does not count."""
        read = [each for each in rounds if each[1] > each[0] or self._gathers]
        indices = [list(range(start, stop)) or [first] for start, stop, first in read]
        if self._stage and not self._is_last:
            yield from ((None, None) for _ in indices)
            return
        job, device = self._training.job, self._training.device
        fetched = iter(
            DataLoader(
                data,
                batch_sampler=indices,
                num_workers=job.num_workers,
                collate_fn=collate_fn,
                pin_memory=device.type == "cuda",
                worker_init_fn=loader.ignore_sigterm,
                generator=torch.Generator().manual_seed(job.seed),
            )
        )
        try:
            for start, _, _ in read:
                seed_step(job.seed, start, 0, _STREAM)
                yield loader.pair_on_device(next(fetched), device)
        finally:
            loader.stop_workers(fetched)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Evaluate with the buffers of replica 0, and leave modules, buffers and counters as they are."""
        module, loss = self._training.parallel.module, self._training.job.loss
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for part in (module, loss):
                if isinstance(part, nn.Module):
                    # Restores the training flags too, which are plain attributes.
                    stack.enter_context(ForwardState(part).restored())
                    stack.enter_context(with_copied_buffers(part))
                    part.eval()
            self._share_buffers(module)
            try:
                yield
            finally:
                for part in module.modules():
                    if hasattr(part, "reshard"):  # a unit of FSDP2, which keeps gathered parameters for a backward pass
                        part.reshard()

    def _share_buffers(self, module: nn.Module) -> None:
        group = self._training.parallel.dp_group
        for buffer in module.buffers() if group is not None else ():
            whole = buffer.contiguous()
            dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
            buffer.copy_(whole)

    def _gathered(self, own: dict[str, tuple[float, float]]) -> list[dict[str, tuple[float, float]]]:
        if not dist.is_initialized():
            return [own]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return gathered


def outputs_of(parallel: ParallelModel, stage_forward: Callable[..., Any], stage: int, inputs: Any) -> Any:
    """Outputs of a pipeline stage, which the next one gets; those of the last one are the model's."""
    if (group := parallel.pp_group) is None:
        return loader.call(parallel.module, inputs)
    outputs = stage_forward(*(_receive(group, stage - 1, parallel.device) if stage else (inputs,)))
    if stage < parallel.plan.pp - 1:
        _send(outputs if isinstance(outputs, tuple) else (outputs,), group, stage + 1)
    return outputs


def _joined(every: list[tuple[int, Any, Any]]) -> tuple[Any, Any]:
    """Outputs and targets of all batches as one of each.

    Raises:
        Refused: they are of different shapes.
    """

    def joined(parts: list[Any]) -> Any:
        leaves, structures = zip(*map(tree_flatten, parts), strict=True)
        columns = [list(column) for column in zip(*leaves, strict=True)]
        wholes = [torch.cat(c) if isinstance(c[0], torch.Tensor) and c[0].dim() else c for c in columns]
        return tree_unflatten(wholes, structures[0])

    try:
        return joined([outputs for _, outputs, _ in every]), joined([targets for *_, targets in every])
    except (RuntimeError, ValueError) as error:
        raise Refused(
            f"whole=True joins outputs and targets of all batches along their first dimension: {error}"
        ) from error


def _kept_by(metric: Any) -> dict[str, Any]:
    """Marks of what a metric keeps in itself, and in the variables that its code reads."""
    roots = {"(metric)": getattr(metric, "__self__", metric), **held.script_globals([metric])}
    values = {held.path(n, k): v for n, owner in held.owners(roots).items() for k, v in owner.attributes.items()}
    kinds = (*held.SIMPLE, torch.Tensor, np.ndarray)
    return {key: content(v, of_large=True) for key, v in values.items() if isinstance(v, kinds) or is_table(v)}


def _send(tensors: tuple[Any, ...], group: dist.ProcessGroup, stage: int) -> None:
    """Send tensors to a stage.

    Raises:
        PlanRefused: something between the stages is no tensor.
    """
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise PlanRefused("a pipeline needs tensors between its layers")
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header = torch.tensor(numbers + [0] * (_HEADER_NUMBERS - len(numbers)), device=tensors[0].device)
    _exchange(dist.isend, header, group, stage)
    for tensor in tensors:
        _exchange(dist.isend, tensor.contiguous(), group, stage)


def _receive(group: dist.ProcessGroup, stage: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Receive tensors from a stage."""
    header = torch.empty(_HEADER_NUMBERS, dtype=torch.int64, device=device)
    _exchange(dist.irecv, header, group, stage)
    count, *numbers = header.tolist()
    received = []
    for _ in range(count):
        dtype, dims = _DTYPES[numbers[0]], numbers[1]
        received.append(torch.empty(numbers[2 : 2 + dims], dtype=dtype, device=device))
        numbers = numbers[2 + dims :]
    for tensor in received:
        _exchange(dist.irecv, tensor, group, stage)
    return tuple(received)


def _exchange(operation: Any, tensor: torch.Tensor, group: dist.ProcessGroup, stage: int) -> None:
    # Batched even if alone: with NCCL, such transfers use the group's own communicator, as the pipeline's do.
    peer = dist.get_global_rank(group, stage)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()
