"""Environment of a rank: variables, rank file and working directory."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import processes, programs
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import attempt_name, is_disk_full, write_json
from clusterd.agent.host.login_environment import expanded
from clusterd.process_attributes import HASH_SEED, SEED_VARIABLE
from clusterd.protocol.launch import ForRanks, LaunchRequest, RankFile, RankSpec
from clusterd.protocol.messages import to_map

_PYTHONS = ("python", "python3")

_OF_RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CLUSTERD_RANK_FILE",
)  # fmt: skip

SURVIVES_PEERS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else the watchdog ends the process before the script reports its error
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else the watchdog blocks the process for a minute to write its dump
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Settings that stop torch from ending a process whose NCCL peer is gone: the rank must hand over its state first."""

MIG_PREFIX = "MIG-"
"""Start of the uuid of a MIG slice; CUDA gives a process one slice at most."""

LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Makes torch use pages of 2 MiB for large tensors in host memory, which speeds up steps on CPUs."""


def variables(attempt: Attempt, rank: RankSpec, tag: str, secrets: Mapping[str, str]) -> dict[str, str]:
    """Complete environment of one rank, on top of the login's.

    The job's variables override clusterd's defaults (threads, network interface). Clusterd's override the job's where
    the rendezvous of the ranks depends on them.
    """
    launch = attempt.launch
    env = dict(attempt.login)
    env["PWD"] = str(work_of(attempt))
    # torch compiles to /tmp/torchinductor_NAME, which another account may have made, and runs what it finds there.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(attempt.directory.parents[1] / "torchinductor"))
    env["OMP_NUM_THREADS"] = str((rank.device.threads or 1) * rank.hosts // max(launch.all_tasks, rank.hosts) or 1)
    if rank.interface:
        env["GLOO_SOCKET_IFNAME"] = rank.interface
        env["NCCL_SOCKET_IFNAME"] = f"={rank.interface}"  # without "=" NCCL matches prefixes
    if launch.kind == "elastic":
        env.update(SURVIVES_PEERS | LARGE_PAGES)
        env["PYTHONHASHSEED"] = HASH_SEED
        env[SEED_VARIABLE] = attempt.job
    else:
        env["PYTHONUNBUFFERED"] = "1"  # so that `logs -f` shows lines immediately
    if launch.python:
        _activate(env, programs.interpreter(launch.python))
    on_slice = rank.device.uuid.startswith(MIG_PREFIX)
    if on_slice:
        # NCCL refuses two ranks on one GPU of one host, and slices have no direct link: each is a host to it.
        env["NCCL_HOSTID"] = f"rank{rank.rank}"
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on
    for name, value in launch.env.items():
        env[name] = value if launch.container else expanded(value, env)
    env.update(secrets)
    if launch.kind == "checkpointable" or (launch.kind == "elastic" and not runs_in_fork(launch)):
        ours = [str(CODE_ROOT), str(CODE_ROOT / "vendor"), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, ours))
    env.update(
        {
            processes.TAG: tag,
            "CLUSTERD_JOB": attempt.job,
            "CLUSTERD_ATTEMPT": str(attempt.attempt),
            "CLUSTERD_RANK_FILE": str(attempt.rank_file(rank.rank)),
            "CLUSTERD_STEP": shlex.join(programs.command("step", heeds_environment=False)),
            "RANK": str(rank.rank),
            "WORLD_SIZE": str(rank.world_size),
            # A script selects the GPU of its local rank among those that it sees.
            "LOCAL_RANK": "0" if on_slice else str(rank.local_rank),
            "LOCAL_WORLD_SIZE": "1" if on_slice else str(rank.local_world_size),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": _visible(launch, rank),
        }
    )
    if rank.master_addr:
        env["MASTER_ADDR"] = rank.master_addr
        env["MASTER_PORT"] = str(rank.master_port)
    if launch.all_tasks > 1:
        return env  # its processes are its ranks
    if launch.kind == "command" and rank.world_size == 1:
        # Without these variables, torchrun or accelerate inside a single-process command set up their own world.
        forget_rank(env)
    elif launch.kind == "command" and rank.node is not None:
        env.update(_launcher_variables(rank))
    return env


def _launcher_variables(rank: RankSpec) -> dict[str, str]:
    """Variables of a launcher that starts the processes of one node itself, as torchrun and accelerate do.

    torchrun takes its options from PET_*, so that a plain `torchrun train.py` finds the other nodes.
    """
    nodes, node, here = str(rank.hosts), str(rank.node), str(rank.local_world_size)
    return {
        "NNODES": nodes,
        "NODE_RANK": node,
        "GROUP_RANK": node,
        "NPROC_PER_NODE": here,
        "PET_NNODES": nodes,
        "PET_NODE_RANK": node,
        "PET_NPROC_PER_NODE": here,
        "PET_MASTER_ADDR": rank.master_addr,
        "PET_MASTER_PORT": str(rank.master_port),
    }


def _visible(launch: LaunchRequest, rank: RankSpec) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a rank.

    A rank sees its own GPU. A rank of a checkpointable job sees the GPUs of all its ranks on this host and picks one by
    LOCAL_RANK, as under torchrun, except on MIG slices, of which CUDA uses the first visible one only. Other programs
    than elastic ones get indices instead of uuids, because some accept nothing else (vLLM, DeepSpeed).
    """
    ranks = [rank]
    if launch.kind == "checkpointable" and not rank.device.uuid.startswith(MIG_PREFIX):
        ranks = sorted(launch.ranks, key=lambda other: other.local_rank)
    uuids = ",".join(known.device.uuid for known in ranks if known.device.kind == "cuda").split(",")
    indices = launch.gpu_indices
    if launch.kind != "elastic" and all(uuid in indices for uuid in uuids):
        return ",".join(str(indices[uuid]) for uuid in uuids)
    return ",".join(uuids)


def forget_rank(env: dict[str, str]) -> None:
    """Remove the variables by which a program would recognise itself as a rank."""
    for name in _OF_RANKS:
        env.pop(name, None)


def _activate(env: dict[str, str], python: str) -> None:
    """Put the job's virtual environment first on the PATH, as its `activate` script would."""
    binaries = Path(python).parent
    env["PATH"] = os.pathsep.join([str(binaries), env.get("PATH", os.defpath)])
    if (binaries.parent / "pyvenv.cfg").exists():
        env["VIRTUAL_ENV"] = str(binaries.parent)
    env.pop("PYTHONHOME", None)


def runs_in_fork(launch: LaunchRequest) -> bool:
    """True if the job's command is a Python program that can run in a fork with torch imported.

    Interpreter options other than -u cannot be applied in a fork, so such a command gets its own interpreter.
    """
    argv = forked_argv(launch)
    return (
        launch.kind == "elastic"
        and len(argv) > 1
        and ((argv[1] == "-m" and len(argv) > 2) or not argv[1].startswith("-"))
    )


def forked_argv(launch: LaunchRequest) -> list[str]:
    """The argv without the interpreter's -u, which a fork has anyway; empty if the command is not Python."""
    argv = list(launch.argv)
    named = launch.python
    if argv[0] not in _PYTHONS and not (named and argv[0] in (named, programs.interpreter(named))):
        return []
    while len(argv) > 1 and argv[1] == "-u":
        del argv[1]
    return argv


def exec_argv(launch: LaunchRequest, env: Mapping[str, str]) -> list[str]:
    """The argv of a rank that runs in a new process; ``python`` is replaced by the job's interpreter.

    Without one it is python3 where the PATH has no python, as on Debian.
    """
    argv = list(launch.argv)
    if argv[0] in _PYTHONS and (launch.kind == "elastic" or launch.python):
        argv[0] = programs.interpreter(launch.python)
    elif argv[0] == "python" and not launch.container and not shutil.which("python", path=env.get("PATH")):
        argv[0] = "python3"
    return argv


def check(launch: LaunchRequest) -> None:
    """Check that a launch can start on this host, before anything is written.

    Raises:
        Refused: the launch has no command, no ranks or an unknown kind, its interpreter is not on this host, or one
            process is to use several MIG slices.
    """
    if not launch.argv or not launch.ranks or launch.kind not in ("command", "checkpointable", "elastic"):
        given = f"{list(launch.argv)!r} of kind {launch.kind!r}"
        raise Refused("launch", f"a launch needs argv, ranks and a kind; got {given}")
    for rank in launch.ranks:
        if rank.device.uuid.count(MIG_PREFIX) > 1:
            raise Refused(
                "environment",
                f"one process cannot use {rank.device.uuid.count(',') + 1} MIG slices, which is how CUDA works: "
                "ask for one, or for whole GPUs by --gpus TYPE:COUNT",
            )
    try:
        programs.interpreter(launch.python)
    except FileNotFoundError as error:
        raise Refused("environment", str(error)) from error


def write_rank_file(attempt: Attempt, rank: RankSpec, control_socket: Path) -> None:
    """Write the rank file of the protocol, readable by this user alone because it contains the rank's token."""
    launch = attempt.launch
    place = RankFile(
        **{field.name: getattr(rank, field.name) for field in dataclasses.fields(RankSpec)},
        **{field.name: getattr(launch, field.name) for field in dataclasses.fields(ForRanks)},
        job=launch.job,
        attempt=launch.attempt,
        generation=launch.generation,
        token=attempt.ranks[rank.rank].token,
        control_socket=str(control_socket),
        directory=str(attempt.directory),
        steps_file=str(attempt.steps),
        datasets={name: known.path for name, known in launch.datasets.items()},
    )
    write_json(attempt.rank_file(rank.rank), to_map(place))


def work_of(attempt: Attempt) -> Path:
    """Path of the ranks' working directory, which all generations of the attempt on this host share."""
    given = attempt.launch.workdir
    if given and not attempt.launch.snapshot:
        return Path(given).expanduser().absolute()
    own = attempt.directory / "work"
    if own.is_dir():
        return own
    names = (attempt_name(attempt.job, attempt.attempt, number) for number in range(1, attempt.generation))
    works = (attempt.directory.with_name(name) / "work" for name in names)
    return next((work for work in works if work.is_dir()), own)


def working_directory(attempt: Attempt, snapshot: Path | None) -> Path:
    """Make the ranks' working directory: a copy of the submitted workdir, the directory the job names, or an empty one.

    A later generation of the attempt on this host finds the files that an earlier one wrote.

    Args:
        snapshot: directory of the unpacked workdir; None: the job submitted none.
    Raises:
        Refused: the named directory does not exist or is closed to this account; the copy cannot be made.
    """
    work = work_of(attempt)
    try:
        if work.is_dir():
            return work
    except PermissionError as error:
        raise Refused("workdir", f"the account of the job here may not enter its working directory: {error}") from None
    if snapshot is None and attempt.launch.workdir:
        raise Refused("workdir", f"the working directory {work} does not exist on this host")
    if snapshot is None:
        work.mkdir()
        return work
    copy = attempt.directory / ".work"
    try:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(snapshot, copy, symlinks=True, copy_function=_copy_writable)
        make_writable(copy)
        copy.rename(work)
    except OSError as error:
        make_writable(copy)
        shutil.rmtree(copy, ignore_errors=True)
        kind = "disk-full" if is_disk_full(error) else "host"
        raise Refused(kind, f"cannot copy the workdir to {work}: {error}") from error
    return work


def _copy_writable(source: str, target: str) -> None:
    shutil.copy2(source, target, follow_symlinks=False)
    if not os.path.islink(target):
        os.chmod(target, os.stat(target).st_mode | 0o200)


def make_writable(tree: Path) -> None:
    """Restore this user's permission to write to the directories of a read-only tree."""
    for directory, _names, _files in os.walk(tree):
        os.chmod(directory, 0o700)
