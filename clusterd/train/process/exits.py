"""How a rank ends when it cannot train: one log line, one exit code, one reason for the agent."""

from __future__ import annotations

import sys
from typing import Any

from clusterd.datasets import DataUnreachable

SCRIPT = 92
DEVICE_FAULT = 93
DATA = 94
DEVICE_OOM = 95
PLAN = 96
NO_TORCH = 97
PORT = 98

REASONS = {
    SCRIPT: "script",
    DEVICE_FAULT: "device-fault",
    DATA: "data",
    DEVICE_OOM: "device-oom",
    PLAN: "plan",
    NO_TORCH: "no-torch",
    PORT: "port",
}

_DEVICE_FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "GPU is lost",
)
"""CUDA's words for hardware that failed; what a kernel of the script's did wrong has others."""

_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",  # of a context, or of pinned memory
    "CUDA driver error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # its handle found no memory
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL's
    "Cuda failure 'out of memory'",
    "Failed to CUDA calloc",
    "DefaultCPUAllocator: can't allocate",
)


_SHARDED_PARAMETER = "got mixed torch.Tensor and DTensor"
"""torch's words for a parameter of which a plan has a part where the script wants it whole."""


class TrainError(Exception):
    """A rank cannot go on for a reason that has an exit code; the message is complete and needs no traceback."""

    exit_code = 1

    @property
    def reason(self) -> str:
        """The word that the agent records."""
        return REASONS.get(self.exit_code, "exit")


class Refused(TrainError):
    """What the script asks for cannot be, whatever the plan."""

    exit_code = SCRIPT


class PlanRefused(Refused):
    """The job cannot train under this plan; under others it may."""

    exit_code = PLAN


class NoTorch(TrainError):
    """This environment cannot import torch, or its torch cannot use this host's device: other hosts' may."""

    exit_code = NO_TORCH


class PortTaken(TrainError):
    """Another process listens on the rendezvous port."""

    exit_code = PORT


class DeviceOutOfMemory(TrainError):
    """The plan does not fit the device's memory."""

    exit_code = DEVICE_OOM


class DeviceFault(TrainError):
    """The GPU itself failed; on another the job may go on."""

    exit_code = DEVICE_FAULT


class DatasetUnreachable(TrainError):
    """No host that has the job's data could be reached; later one may be."""

    exit_code = DATA


class UnevenParameterUse(PlanRefused):
    """Replicas, or steps, use different parameters, and the script did not say so."""


class CheckpointFailed(TrainError):
    """The checkpoint that a job is to leave cannot be had."""


def classify_error(error: BaseException, *, where: str) -> TrainError | None:
    """`error` as one of ours, or None if it is the script's own.

    Args:
        where: names rank, device and plan in the message.
    """
    cause: BaseException | None = error
    while cause is not None:  # a pipeline stage wraps what happened in it
        text = str(cause)
        if isinstance(cause, TrainError):
            return cause
        if isinstance(cause, DataUnreachable):
            message = text.strip().rpartition("DataUnreachable: ")[2]  # a loader's worker puts its traceback before it
            return DatasetUnreachable(f"{where}: {message}")
        if _SHARDED_PARAMETER in text:
            return PlanRefused(
                "the plan cuts parameters, and the script computes with one outside the forward pass of its module, "
                f"where it is in parts{', ' * bool(where)}{where}: {first_line(text)}"
            )
        if any(sign in text for sign in _DEVICE_FAULTS):
            return DeviceFault(f"the GPU failed, {where}: {first_line(text)}")
        if type(cause).__name__ == "OutOfMemoryError" or any(sign in text for sign in _OUT_OF_MEMORY):
            return DeviceOutOfMemory(f"out of device memory, {where}: {first_line(text)}")
        # torch's store tells it as a RuntimeError; an OSError is of a socket of the script's own.
        if not isinstance(cause, OSError) and ("EADDRINUSE" in text or "address already in use" in text.lower()):
            return PortTaken(f"the rendezvous port is taken, {where}: {first_line(text)}")
        cause = cause.__cause__
    return None


def exit_with(error: TrainError) -> None:
    """Ends the process with the error's code after its one line.

    Raises:
        SystemExit: always.
    """
    print(f"clusterd: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)


def first_line(text: Any) -> str:
    """Of a message that may go on for pages."""
    return (str(text).strip().splitlines() or [""])[0]
