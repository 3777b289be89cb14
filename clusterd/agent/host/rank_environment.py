"""Environment of a rank: variables, rank file and working directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import processes, programs
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import attempt_name, write_json

_PYTHONS = ("python", "python3")

_OF_RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CLUSTERD_RANK_FILE",
)  # fmt: skip

SURVIVES_PEERS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # of the watchdog, which ends the process before its script has said why
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # for which the watchdog keeps the process from anything else, for a minute
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""torch would end a process whose NCCL peer is gone; a rank of ours is told, and hands over what it holds."""

LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch asks for pages of 2 MiB for large tensors in host memory: steps on CPUs are faster."""


def variables(attempt: Attempt, rank: Mapping[str, Any], tag: str, secrets: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one rank.

    The job's own variables win over our defaults (threads, network interface), ours win over the job's where the ranks
    would not find each other otherwise.
    """
    launch = attempt.launch
    device = rank.get("device") or {}
    env = programs.own_environment(os.environ)
    env["OMP_NUM_THREADS"] = str(device.get("threads") or 1)
    if interface := rank.get("interface"):
        env["GLOO_SOCKET_IFNAME"] = str(interface)
        env["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without it, NCCL takes whatever begins so
    if launch["kind"] == "elastic":
        env.update(SURVIVES_PEERS | LARGE_PAGES)
    else:
        env["PYTHONUNBUFFERED"] = "1"  # a log that is followed shows lines as they come
    if launch.get("python"):
        _activate(env, programs.interpreter(launch["python"]))
    env.update(launch.get("env") or {})
    env.update(secrets)
    if launch["kind"] == "checkpointable" or (launch["kind"] == "elastic" and not runs_in_fork(launch)):
        ours = [str(CODE_ROOT), str(CODE_ROOT / "vendor"), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, ours))
    env.update(
        {
            processes.TAG: tag,
            "CLUSTERD_JOB": attempt.job,
            "CLUSTERD_ATTEMPT": str(attempt.attempt),
            "CLUSTERD_RANK_FILE": str(attempt.rank_file(int(rank["rank"]))),
            "RANK": str(rank["rank"]),
            "WORLD_SIZE": str(rank["world_size"]),
            "LOCAL_RANK": str(rank["local_rank"]),
            "LOCAL_WORLD_SIZE": str(rank["local_world_size"]),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": _visible(launch, rank),
        }
    )
    if rank.get("master_addr"):
        env["MASTER_ADDR"] = str(rank["master_addr"])
        env["MASTER_PORT"] = str(rank["master_port"])
    if launch["kind"] == "command" and rank["world_size"] == 1:
        # A lone command is no rank of anything: torchrun or accelerate inside it make their own world.
        forget_rank(env)
    return env


def _visible(launch: Mapping[str, Any], rank: Mapping[str, Any]) -> str:
    """The GPUs that a rank may see.

    Its own, and where a script is started as by torchrun those of all its ranks on this host: LOCAL_RANK is the place
    of its own among them. By index for programs that are not ours, as some know no other names (vLLM, DeepSpeed).
    """
    ranks = [rank]
    if launch["kind"] == "checkpointable":
        ranks = sorted(launch["ranks"], key=lambda r: int(r["local_rank"]))
    devices = [r.get("device") or {} for r in ranks]
    uuids = ",".join(device["uuid"] for device in devices if device.get("kind") == "cuda").split(",")
    indices = launch.get("gpu_indices") or {}
    if launch["kind"] != "elastic" and all(uuid in indices for uuid in uuids):
        return ",".join(str(indices[uuid]) for uuid in uuids)
    return ",".join(uuids)


def forget_rank(env: dict[str, str]) -> None:
    """Takes out what would make a program take itself for a rank."""
    for name in _OF_RANKS:
        env.pop(name, None)


def _activate(env: dict[str, str], python: str) -> None:
    """Put the job's environment first on the PATH, as its `activate` would."""
    binaries = Path(python).parent
    env["PATH"] = os.pathsep.join([str(binaries), env.get("PATH", os.defpath)])
    if (binaries.parent / "pyvenv.cfg").exists():
        env["VIRTUAL_ENV"] = str(binaries.parent)
    env.pop("PYTHONHOME", None)


def runs_in_fork(launch: Mapping[str, Any]) -> bool:
    """True if the job's command is a Python program that can run in a fork with torch imported.

    Interpreter options other than -u cannot be applied in a fork, so such a command gets its own interpreter.
    """
    argv = forked_argv(launch)
    return (
        launch["kind"] == "elastic"
        and len(argv) > 1
        and ((argv[1] == "-m" and len(argv) > 2) or not argv[1].startswith("-"))
    )


def forked_argv(launch: Mapping[str, Any]) -> list[str]:
    """The argv without what the fork has anyway: the interpreter's -u. Empty where it is no Python's."""
    argv = [str(argument) for argument in launch["argv"]]
    named = launch.get("python")
    if argv[0] not in _PYTHONS and not (named and argv[0] in (named, programs.interpreter(named))):
        return []
    while len(argv) > 1 and argv[1] == "-u":
        del argv[1]
    return argv


def exec_argv(launch: Mapping[str, Any]) -> list[str]:
    """The argv of a process of its own, where ``python`` is the job's interpreter."""
    argv = [str(argument) for argument in launch["argv"]]
    if argv[0] in _PYTHONS and (launch["kind"] == "elastic" or launch.get("python")):
        argv[0] = programs.interpreter(launch.get("python"))
    return argv


def check(launch: Mapping[str, Any]) -> None:
    """Refuse what cannot start here, before anything is written.

    Raises:
        Refused: no command, no ranks, or an interpreter that is not on this host.
    """
    if not launch["argv"] or not launch["ranks"] or launch["kind"] not in ("command", "checkpointable", "elastic"):
        raise Refused(
            "launch", f"a launch needs argv, ranks and a kind; got {launch['argv']!r} of kind {launch['kind']!r}"
        )
    try:
        programs.interpreter(launch.get("python"))
    except FileNotFoundError as error:
        raise Refused("environment", str(error)) from error


def write_rank_file(attempt: Attempt, rank: Mapping[str, Any], control_socket: Path) -> None:
    """The rank file of the protocol, for this user's eyes: it holds the rank's token."""
    place = {
        "job": attempt.job,
        "attempt": attempt.attempt,
        "generation": attempt.generation,
        "rank": rank["rank"],
        "world_size": rank["world_size"],
        "local_rank": rank["local_rank"],
        "local_world_size": rank["local_world_size"],
        "hosts": rank.get("hosts", 1),
        "master_addr": rank.get("master_addr"),
        "master_port": rank.get("master_port"),
        "interface": rank.get("interface"),
        "plan": rank.get("plan"),
        "device": rank.get("device"),
        "steps_file": str(attempt.steps),
        "directory": str(attempt.directory),
        "control_socket": str(control_socket),
        "token": attempt.ranks[int(rank["rank"])].token,
        "restore": attempt.launch.get("restore"),
        "final": attempt.launch.get("final"),
        "standby": bool(attempt.launch.get("standby")),
        "move": attempt.launch.get("move"),
        "datasets": {name: known.get("path") for name, known in (attempt.launch.get("datasets") or {}).items()},
        "data_cache": attempt.launch.get("data_cache"),
        "snapshot_every": attempt.launch.get("snapshot_every"),
        "probe": attempt.launch.get("probe"),
    }
    write_json(attempt.rank_file(int(rank["rank"])), place)


def work_of(attempt: Attempt) -> Path:
    """Path of the ranks' working directory: that of the attempt's first generation on this host."""
    given = attempt.launch.get("workdir")
    if given and not attempt.launch.get("snapshot"):
        return Path(given).expanduser().absolute()
    own = attempt.directory / "work"
    if own.is_dir():
        return own
    names = (attempt_name(attempt.job, attempt.attempt, number) for number in range(1, attempt.generation))
    works = (attempt.directory.with_name(name) / "work" for name in names)
    return next((work for work in works if work.is_dir()), own)


def working_directory(attempt: Attempt, snapshot: Path | None) -> Path:
    """Make the ranks' working directory: a copy of the submitted one, the given directory, or an empty one.

    A later generation of the attempt on this host finds what an earlier one wrote.

    Raises:
        Refused: the given directory is not there, or the copy does not fit on the disk.
    """
    work = work_of(attempt)
    if work.is_dir():
        return work
    if snapshot is None and attempt.launch.get("workdir"):
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
        raise Refused("disk-full", f"cannot copy the snapshot to {work}: {error}") from error
    return work


def _copy_writable(source: str, target: str) -> None:
    shutil.copy2(source, target, follow_symlinks=False)
    if not os.path.islink(target):
        os.chmod(target, os.stat(target).st_mode | 0o200)


def make_writable(tree: Path) -> None:
    """Give this user back the right to write into a tree that was kept read-only."""
    for directory, _names, _files in os.walk(tree):
        os.chmod(directory, 0o700)
