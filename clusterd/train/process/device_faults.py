"""Question to the agent about this rank's GPU after an error that does not say whether the GPU or the job is at fault.

A GPU that fell off the bus raises the errors of a faulty kernel, and memory that a process outside the queue holds
raises those of a plan that does not fit.
"""

from __future__ import annotations

from clusterd.protocol.control import InspectGpu
from clusterd.train.process import exits
from clusterd.train.process.context import Context
from clusterd.train.process.control import AgentAbsent, AgentRefused, Control
from clusterd.train.process.exits import DeviceFault, DeviceOutOfMemory, NoTorch, TrainError

ANSWER_S = 30.0
"""The agent gives a driver that hangs 20 s."""

FOREIGN_BYTES_MIN = 256 << 20
"""Less than this is a display or a monitoring tool, and does not explain why a plan does not fit."""

_UNKNOWN = (
    "unspecified launch failure",
    "CUDA error: unknown error",
    "CUDA unknown error",
    "CUDA_ERROR_UNKNOWN",
    "CUDA_ERROR_LAUNCH_FAILED",
    "the launch timed out",
    "unhandled cuda error",  # NCCL's
)
"""CUDA's texts where the GPU or a kernel of the script may be at fault."""


def judge(error: BaseException, refusal: TrainError | None, context: Context, control: Control) -> TrainError | None:
    """Return the refusal, or `DeviceFault` if the driver or a process outside the queue explains the error.

    Args:
        refusal: what the error alone says; None: it is the script's own.
    """
    is_ambiguous = _is_unknown(error) or isinstance(refusal, DeviceOutOfMemory | NoTorch)
    if context.device_kind != "cuda" or not context.control_socket or not is_ambiguous:
        return refusal
    try:
        gpu = control.ask(InspectGpu(), ANSWER_S)
    except (AgentAbsent, AgentRefused):  # an agent of an earlier version refuses
        return refusal
    if gpu.fault:
        return DeviceFault(f"the GPU failed ({gpu.fault}), {context}: {exits.first_line(error)}")
    if gpu.foreign_bytes >= FOREIGN_BYTES_MIN and isinstance(refusal, DeviceOutOfMemory):
        others = f"processes outside the queue hold {gpu.foreign_bytes / (1 << 30):.1f} GiB of the GPU's memory"
        return DeviceFault(f"{others}, {context}: {exits.first_line(error)}")
    return refusal


def _is_unknown(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:  # a pipeline stage wraps the error
        if any(text in str(cause) for text in _UNKNOWN):
            return True
        cause = cause.__cause__
    return False
