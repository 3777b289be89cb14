"""Keys of a job file with their types and meanings: the source of the known keys and of the JSON Schema for editors.

`clusterd.submission.job_file` parses the values, and refuses what no schema can express.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Size = Annotated[int | float | str, Meta(examples=["64GiB"])]
"""``64GB``, ``64GiB`` or a number of bytes."""

Duration = Annotated[int | float | str, Meta(examples=["90s", "12h", "1h30m"])]
"""``90s``, ``12h``, ``1h30m`` or a number of seconds."""

Count = Annotated[int, Meta(ge=0)]

Name = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]


class PlanTable(Struct, forbid_unknown_fields=True):
    """Plan of an elastic job as a table."""

    dp: Annotated[int, Meta(ge=1, description="Data-parallel replicas.")] = 1
    tp: Annotated[int, Meta(ge=1, description="Tensor-parallel shards of each layer.")] = 1
    pp: Annotated[int, Meta(ge=1, description="Pipeline stages.")] = 1
    zero: Annotated[int, Meta(ge=0, le=3, description="ZeRO stage.")] = 0
    offload: Annotated[
        Literal["none", "optimizer", "parameters"], Meta(description="State that is held in host memory.")
    ] = "none"
    accumulation: Annotated[int, Meta(ge=1, description="Micro-batches per step and replica.")] = 1
    checkpointing: Annotated[bool, Meta(description="Recompute activations in the backward pass.")] = False
    schedule: Annotated[Literal["1f1b", "gpipe"], Meta(description="Schedule of the pipeline.")] = "1f1b"
    shares: Annotated[
        list[Annotated[int, Meta(ge=1)]] | UnsetType,
        Meta(description="Samples of the global batch per replica; default: equal shares."),
    ] = UNSET


class ResourceKeys(Struct, forbid_unknown_fields=True):
    """Devices, cores and memory that the job requests."""

    gpus: Annotated[int | str | UnsetType, Meta(description='Number of GPUs, or "a100:2".')] = UNSET
    devices: Annotated[
        Count | UnsetType, Meta(description="Number of devices of any kind, CPU devices too, in the place of gpus.")
    ] = UNSET
    gpu_type: Annotated[str | UnsetType, Meta(description='Part of the GPU\'s name, as in "a100"; default: any.')] = (
        UNSET
    )
    gpu_memory: Annotated[Size | UnsetType, Meta(description="Least memory of each GPU.")] = UNSET
    compute_capability: Annotated[
        str | UnsetType, Meta(description='Conditions on the capability of each GPU, as in ">=8.0".')
    ] = UNSET
    cpus: Annotated[Count | UnsetType, Meta(description="Cores in all; default: one for each device.")] = UNSET
    memory: Annotated[Size | UnsetType, Meta(description="Host memory in all.")] = UNSET
    nodes: Annotated[int, Meta(ge=1, description="Hosts, with the command started on each.")] = 1
    gpus_per_node: Annotated[
        Count | UnsetType, Meta(description="GPUs on each of the nodes, in the place of gpus.")
    ] = UNSET
    devices_per_node: Annotated[
        Count | UnsetType, Meta(description="Devices on each of the nodes, in the place of devices.")
    ] = UNSET
    hosts: Annotated[list[str] | UnsetType, Meta(description="Run on these hosts only; default: any.")] = UNSET
    constraint: Annotated[list[str] | UnsetType, Meta(description="Labels that each host has.")] = UNSET
    min_devices: Annotated[Count | UnsetType, Meta(description="Least size of an elastic job.")] = UNSET
    max_devices: Annotated[Count | UnsetType, Meta(description="Largest size of an elastic job.")] = UNSET
    min_gpus: Annotated[Count | UnsetType, Meta(description="The same as min_devices.")] = UNSET
    max_gpus: Annotated[Count | UnsetType, Meta(description="The same as max_devices.")] = UNSET
    grow: Annotated[bool, Meta(description="false: never beyond the request.")] = True
    share: Annotated[
        int, Meta(ge=1, description="Jobs that may be on the device of a command at a time, itself included.")
    ] = 1
    plan: Annotated[
        str | PlanTable | UnsetType,
        Meta(description='Requested plan of an elastic job: { dp = 2, tp = 2 } or "dp=2,tp=2".'),
    ] = UNSET
    plans: Annotated[
        list[str | PlanTable] | UnsetType,
        Meta(description="Plans under which a checkpointable job may run, the first preferred."),
    ] = UNSET


class LimitKeys(Struct, forbid_unknown_fields=True):
    """Times and counts after which the job ends or is started again."""

    time: Annotated[Duration | UnsetType, Meta(description="Longest run; jobs that can save do so before it.")] = UNSET
    stall: Annotated[
        Duration | UnsetType,
        Meta(description="An elastic job without a step for so long is restarted from its newest state."),
    ] = UNSET
    grace: Annotated[Duration, Meta(description="Between the request to stop and SIGKILL.")] = "30s"
    retries: Annotated[int, Meta(ge=0, description="Times that the job is queued again after failures of its own.")] = 0
    retry_on: Annotated[
        list[Annotated[int, Meta(ge=1, le=255)]] | UnsetType,
        Meta(description="Exit codes after which the job is queued again however often."),
    ] = UNSET
    on_nan: Annotated[Literal["report", "stop"], Meta(description="What to do once the loss is not a number.")] = (
        "report"
    )


class CheckpointKeys(Struct, forbid_unknown_fields=True):
    """Checkpoints that clusterd writes for an elastic job."""

    directory: Annotated[str | UnsetType, Meta(description="Folder that all its hosts share.")] = UNSET
    every: Annotated[
        Duration | UnsetType, Meta(description="Time between two checkpoints; default: only at the end.")
    ] = UNSET


class JobKeys(Struct, forbid_unknown_fields=True):
    """A job file of `clusterd submit`."""

    command: Annotated[
        list[str],
        Meta(min_length=1, description='Words, the program first, as in ["python", "train.py"]; {job} is filled in.'),
    ]
    name: Annotated[
        Name | UnsetType, Meta(description="Up to 63 letters, digits, '.', '_' and '-'; default: the file's name.")
    ] = UNSET
    kind: Annotated[
        Literal["command", "checkpointable", "elastic"],
        Meta(
            description="checkpointable: saves on request and resumes. "
            "elastic: written with clusterd.train; any plan, live migration."
        ),
    ] = "command"
    workdir: Annotated[str, Meta(description="Directory that is sent with the job, relative to this file.")] = "."
    python: Annotated[str | UnsetType, Meta(description="Interpreter or virtual environment on the hosts.")] = UNSET
    uv: Annotated[
        str | UnsetType, Meta(description="uv.lock in the workdir from which each host builds an environment.")
    ] = UNSET
    requirements: Annotated[
        str | UnsetType, Meta(description="File in the workdir from which each host builds an environment.")
    ] = UNSET
    container: Annotated[
        str | UnsetType, Meta(description='Image that the command runs in, as in "docker:IMAGE", or a .sif file.')
    ] = UNSET
    mounts: Annotated[
        list[str] | UnsetType, Meta(description="Directories of the host in the container: SOURCE[:TARGET[:ro]].")
    ] = UNSET
    env: Annotated[dict[str, str] | UnsetType, Meta(description="Environment variables.")] = UNSET
    secrets: Annotated[
        dict[str, Annotated[str, Meta(pattern="^(env|file):")]] | UnsetType,
        Meta(description='Variables that no log shows: "env:NAME" from the submitting shell, "file:PATH" from a file.'),
    ] = UNSET
    ports: Annotated[
        list[Annotated[int, Meta(ge=1, le=65535)]] | UnsetType,
        Meta(description="Ports that the job serves, for clusterd forward."),
    ] = UNSET
    datasets: Annotated[
        dict[str, str] | UnsetType,
        Meta(description='Folders that clusterd.train reads: "HOST:/folder", or "/folder" on every host.'),
    ] = UNSET
    priority: Annotated[int, Meta(description="Higher goes first, and preempts.")] = 0
    guaranteed: Annotated[bool, Meta(description="Never slower than what it asks for, while it runs.")] = False
    preemptible: Annotated[bool, Meta(description="A command that may be stopped for other jobs and begins anew.")] = (
        False
    )
    tenant: Annotated[str, Meta(description="Tenant whose quota and share count.")] = "default"
    after: Annotated[
        list[str] | UnsetType,
        Meta(description='Jobs, by id or name, that must have finished; "JOB:any": be over; "JOB:failed".'),
    ] = UNSET
    array: Annotated[str | UnsetType, Meta(description='"0-99%8": a job for each index, 8 at a time.')] = UNSET
    stages: Annotated[
        list[str] | UnsetType, Meta(description="Stages of a training script, each of which is a job.")
    ] = UNSET
    wait_for_hosts: Annotated[
        bool, Meta(description="Accept the job though no host of the cluster can serve it yet.")
    ] = False
    trials: Annotated[bool, Meta(description="false: no steps under other plans to measure them.")] = True
    snapshots: Annotated[
        Count | UnsetType,
        Meta(description="Steps between copies of the state on a second host; 0: none; default: automatic."),
    ] = UNSET
    target_loss: Annotated[float | UnsetType, Meta(description="Ends the job when its loss reaches this.")] = UNSET
    resources: Annotated[ResourceKeys | UnsetType, Meta(description="What the job requests.")] = UNSET
    limits: Annotated[LimitKeys | UnsetType, Meta(description="When the job ends or is started again.")] = UNSET
    checkpoints: Annotated[CheckpointKeys | UnsetType, Meta(description="Checkpoints of an elastic job.")] = UNSET
