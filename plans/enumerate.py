"""Enumeration of all legal plans of a model on given numbers of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clusterd.plans.legality import check, check_model
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import OFFLOADS, SCHEDULES, Plan, PlanError


def legal_plans(
    shape: ModelShape | None,
    devices: int | Iterable[int],
    *,
    global_batch: int | None = None,
    kind: str = "cuda",
    offloads: Iterable[str] = OFFLOADS,
    accumulations: Iterable[int] | None = None,
) -> list[Plan]:
    """Legal plans on exactly this many devices (or on each of several numbers), in a fixed order, each once.

    Equivalent plans are listed once: schedules only under pipeline parallelism, accumulation only if it divides the
    share. Shares are equal; unequal ones come from placement on mixed devices.

    Args:
        shape: of the model; without it only plans that do not depend on it (no tp, no pp).
        global_batch: default: the shape's.
        offloads: allowed values; host memory is a resource too.
        accumulations: allowed numbers of micro-batches; default: all that divide the share.
    Raises:
        PlanError: neither shape nor global batch is given.
    """
    batch = shape.global_batch if global_batch is None and shape is not None else global_batch
    if batch is None:
        raise PlanError("a global batch is needed to list plans")
    counts = [devices] if isinstance(devices, int) else sorted(set(devices))
    accumulation_filter = None if accumulations is None else set(accumulations)
    return [
        plan
        for count in counts
        for plan in _candidates(count, batch, tuple(offloads), accumulation_filter, shape)
        if not check(plan, shape, global_batch=batch, kinds=[kind])
    ]


def _candidates(
    count: int, batch: int, offloads: tuple[str, ...], accumulation_filter: set[int] | None, shape: ModelShape | None
) -> Iterator[Plan]:
    """Candidate plans, without numbers of shards or stages that the model refuses under any plan.

    On many devices that excludes most of them.
    """
    for pp in _divisors(count) if shape else [1]:
        if shape and check_model(Plan(pp=pp), shape):
            continue
        for tp in _divisors(count // pp) if shape else [1]:
            dp = count // pp // tp
            if batch % dp or (shape and check_model(Plan(tp=tp, pp=pp), shape)):
                continue
            for zero in range(4):
                for offload in OFFLOADS:
                    if offload not in offloads:
                        continue
                    for accumulation in _divisors(batch // dp):
                        if accumulation_filter is not None and accumulation not in accumulation_filter:
                            continue
                        for checkpointing in (False, True):
                            for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                                yield Plan(
                                    dp=dp,
                                    tp=tp,
                                    pp=pp,
                                    zero=zero,
                                    offload=offload,
                                    accumulation=accumulation,
                                    checkpointing=checkpointing,
                                    schedule=schedule,
                                )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
