"""Exit of a rank that cannot train: one log line, one exit code, one reason for the agent."""

from __future__ import annotations

import sys
from typing import Any

from clusterd.datasets import DataUnreachable
from clusterd.exit_reasons import EXIT_CODE_OF, Reason

_DEVICE_FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "GPU is lost",
)
"""CUDA's texts for failed hardware; errors of the script's kernels have others."""

_DEVICE_BUSY = "busy or unavailable"
"""CUDA's text where it can create no context: another process has an exclusive GPU, or the GPU is in a bad state."""

_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",  # of a context, or of pinned memory
    "CUDA driver error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for its handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL's
    "Cuda failure 'out of memory'",
    "Failed to CUDA calloc",
    "DefaultCPUAllocator: can't allocate",
)


_SHARDED_PARAMETER = "got mixed torch.Tensor and DTensor"
"""torch's text for a sharded parameter used where the script needs the whole one."""

_NOT_SHARDED = (
    "does not have a sharding strategy registered",
    "in-place operations that require placement changes are not supported",
    "Sharding propagation failed",
)
"""torch's texts for operations that it cannot compute with shards."""

_WRITTEN_SHARD = ("is not supported for tensor subclasses", "_fsdp_init.FSDP")
"""torch's texts for a sharded weight turned into numbers, and for a model of such weights that is pickled."""

_COPIED_MODULE = "FSDP does not support deepcopy"
"""torch's text for a copy of a model whose parameters are sharded."""

_FREED_PARAMETER = "are out of bounds for storage of size 0"
"""torch's text for a gathered parameter that is used after it was freed."""


class TrainError(Exception):
    """A rank cannot go on for a reason with an exit code; the message is complete without a traceback."""

    reason = Reason.EXIT  # as the agent records it

    @property
    def exit_code(self) -> int:
        """Exit code by which the agent knows the reason; 1 where it has none."""
        return EXIT_CODE_OF.get(self.reason, 1)


class Refused(TrainError):
    """The script's request is invalid under any plan."""

    reason = Reason.SCRIPT


class PlanRefused(Refused):
    """The job cannot train under this plan; it may under others."""

    reason = Reason.PLAN


class NoTorch(TrainError):
    """The environment cannot import torch, or torch cannot use this host's device; other hosts may work."""

    reason = Reason.NO_TORCH


class PortTaken(TrainError):
    """Another process listens on the rendezvous port."""

    reason = Reason.PORT


class ForeignObject(TrainError):
    """Another process sent an object in the place of a rank."""


class DeviceOutOfMemory(TrainError):
    """The plan does not fit the device's memory."""

    reason = Reason.DEVICE_OOM


class DeviceFault(TrainError):
    """The GPU failed or cannot be used; the job may go on on another."""

    reason = Reason.DEVICE_FAULT


class DatasetUnreachable(TrainError):
    """No host that has the job's data could be reached; one may be later."""

    reason = Reason.DATA


class UnevenParameterUse(PlanRefused):
    """Replicas or steps use different parameters, and the script did not declare it."""


class CheckpointFailed(TrainError):
    """The final checkpoint of a job cannot be written."""


SAVES_SHARDS = (
    "the script saves weights or the state of its optimizer, of which a rank of this plan has a part: `save`, "
    "Evaluation(save_best=...) and [checkpoints] write them whole; dp without ZeRO leaves them whole"
)


def classify_error(error: BaseException, *, where: str) -> TrainError | None:
    """Convert `error` to a `TrainError`; None if it is the script's own.

    Args:
        where: names rank, device and plan in the message.
    """
    cause: BaseException | None = error
    while cause is not None:  # a pipeline stage wraps the error
        text = str(cause)
        if isinstance(cause, TrainError):
            return cause
        if isinstance(cause, DataUnreachable):
            message = text.strip().rpartition("DataUnreachable: ")[2]  # a loader worker prepends its traceback
            return DatasetUnreachable(f"{where}: {message}")
        if _SHARDED_PARAMETER in text:
            return PlanRefused(
                "the plan shards parameters, and the script computes with one outside the forward pass of its module, "
                f"where a rank has a shard of it only{', ' * bool(where)}{where}; dp and zero=1 leave parameters whole"
            )
        if any(sign in text for sign in _NOT_SHARDED):
            return PlanRefused(
                "the plan shards parameters, and torch cannot compute with shards what the script does with one "
                f"({first_line(text)}){', ' * bool(where)}{where}; dp and zero=1 leave parameters whole"
            )
        if any(sign in text for sign in _WRITTEN_SHARD):
            return PlanRefused(f"{SAVES_SHARDS}{', ' * bool(where)}{where}")
        if _COPIED_MODULE in text:
            return PlanRefused(
                "the plan shards parameters, and the script copies the model (an average of its weights?), of which a "
                f"rank has a shard only{', ' * bool(where)}{where}; dp and zero=1 leave parameters whole"
            )
        if _FREED_PARAMETER in text:
            return PlanRefused(
                "the plan frees the parameters that it gathers as soon as a pass is done, and the script computes with "
                f"them once more, as for a second derivative{', ' * bool(where)}{where}; dp and zero=1 leave them whole"
            )
        if any(sign in text for sign in _DEVICE_FAULTS):
            return DeviceFault(f"the GPU failed, {where}: {first_line(text)}")
        if _DEVICE_BUSY in text:
            return DeviceFault(f"the GPU takes no further process, {where}: {first_line(text)}")
        if type(cause).__name__ == "OutOfMemoryError" or any(sign in text for sign in _OUT_OF_MEMORY):
            return DeviceOutOfMemory(f"out of device memory, {where}: {first_line(text)}")
        # torch's store raises a RuntimeError; an OSError comes from a socket of the script.
        if not isinstance(cause, OSError) and ("EADDRINUSE" in text or "address already in use" in text.lower()):
            return PortTaken(f"the rendezvous port is taken, {where}: {first_line(text)}")
        cause = cause.__cause__
    return None


def exit_with(error: TrainError) -> None:
    """Print the error's line and exit with its code.

    Raises:
        SystemExit: always.
    """
    print(f"clusterd: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)


def first_line(text: Any) -> str:
    """First line of a message that may be long."""
    return (str(text).strip().splitlines() or [""])[0]
