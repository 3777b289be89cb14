"""Command lines that run a rank, or a shell beside it, in a container, as the user and in the working directory.

Values of variables, secrets among them, are in the environment of the runtime's program and never in its arguments,
which every user of the host can read.
"""

from __future__ import annotations

import grp
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import processes, programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.ranks.containers import LABEL, program, runtime_of
from clusterd.protocol.launch import LaunchRequest, RankSpec
from clusterd.trusted_paths import account_name

_OF_HOST = ("PATH", "PYTHONPATH", "HOME", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")
"""Variables with a value for the host, which does not apply inside."""

CPU_SHARES_PER_CORE = 1024

_STEP = "CLUSTERD_STEP"
"""Variable with the command that runs a step of a batch script; of the host's Python, outside of containers."""

_STEP_INSIDE = (
    'command -v python3 > /dev/null && exec "$@"\n'
    'echo "clusterd: srun needs python3 (3.10 or newer) in the image" >&2; exit 127'
)


@dataclass(frozen=True)
class Inside:
    """A rank's place in a container.

    Attributes:
        name: of the container.
        tag: of the attempt's processes.
        env: environment of the rank, as it would be on the host.
        named: variables that the job sets itself.
        work: working directory.
        directories: others that it needs under the same path, writable.
    """

    launch: LaunchRequest
    rank: RankSpec
    name: str
    tag: str
    env: Mapping[str, str] = field(repr=False)
    named: frozenset[str]
    work: Path
    directories: tuple[Path, ...] = ()


def command(inside: Inside, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that run `argv` in a new container.

    Raises:
        Refused: ``environment``: the runtime is not on this host.
    """
    runtime, image = runtime_of(inside.launch.container), inside.launch.container.partition(":")[2]
    variables = _variables(inside, runtime)
    host = {**programs.own_environment(os.environ), processes.TAG: inside.tag}
    if runtime == "apptainer":
        passed = {f"APPTAINERENV_{name}": value for name, value in variables.items()}
        binds = [part for mount in _mounts(inside) for part in ("--bind", ":".join(mount))]
        image = (
            image if "://" in image or image.endswith(".sif") or image.startswith(("/", "./")) else f"docker://{image}"
        )
        gpus = ["--nv"] if _uuids(inside) else []
        options = ["exec", "--cleanenv", *gpus, "--home", str(inside.work), "--pwd", str(inside.work), *binds]
        return [_program(runtime), *options, image, *argv], {**host, **passed}
    options = ["run", "--rm", "--init", "--name", inside.name, "--label", f"{LABEL}={inside.tag}"]
    options += ["--network", "host", "--ipc", "host", "--workdir", str(inside.work), *_user(runtime)]
    options += [part for mount in _mounts(inside) for part in ("--mount", _bind(*mount))]
    options += [*_devices(inside, runtime), *_limits(inside, runtime)]
    options += ["--interactive"] if inside.launch.reads_input else []
    options += [part for name in sorted(variables) for part in ("--env", name)]
    return [_program(runtime), *options, image, *argv], {**host, **variables}


def beside(inside: Inside, argv: Sequence[str], *, on_screen: bool) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that run `argv`, or a shell, in the container of a running rank.

    Apptainer cannot enter a container that was not started for it: there it is another one of the same image.
    """
    argv = argv or ["/bin/sh"]
    runtime = runtime_of(inside.launch.container)
    if runtime == "apptainer":
        return command(inside, argv)
    variables = _variables(inside, runtime)
    options = ["exec", "--interactive", *(["--tty"] if on_screen else []), "--workdir", str(inside.work)]
    options += [part for name in sorted(variables) for part in ("--env", name)]
    return [_program(runtime), *options, inside.name, *argv], {**programs.own_environment(os.environ), **variables}


def _program(runtime: str) -> str:
    found = program(runtime)
    if found is None:
        raise Refused("environment", f"{runtime} is not on this host, or not on the PATH of a login there")
    return found


def _variables(inside: Inside, runtime: str) -> dict[str, str]:
    """Variables of the job and of clusterd, without those of the host's login."""
    host = programs.own_environment(os.environ)
    names = {name for name, value in inside.env.items() if host.get(name) != value and name not in _OF_HOST}
    found = {name: inside.env[name] for name in sorted(names | (inside.named & set(inside.env)))}
    user = account_name(os.getuid())
    # The image knows no user of this id: what asks for a name or a home looks at these.
    defaults = {"HOME": str(inside.work), "USER": user, "LOGNAME": user}
    uuids = _uuids(inside)
    visible = inside.env.get("CUDA_VISIBLE_DEVICES", "")
    if uuids and runtime != "apptainer":  # only its own are there, counted from 0
        visible = ",".join(str(index) for index in range(len(uuids)))
    found = {**defaults, **found, "CUDA_VISIBLE_DEVICES": visible}
    step = programs.command("step", python="python3", heeds_environment=False)
    found[_STEP] = shlex.join(["sh", "-c", _STEP_INSIDE, "srun", *step])
    if inside.launch.kind != "command":
        ours = [str(CODE_ROOT), str(CODE_ROOT / "vendor")]
        found["PYTHONPATH"] = os.pathsep.join([*ours, *([found["PYTHONPATH"]] if "PYTHONPATH" in inside.named else [])])
    return found


def _uuids(inside: Inside) -> list[str]:
    """GPUs of the rank; of a checkpointable job, of all its ranks on this host, as each picks one by LOCAL_RANK."""
    ranks: Iterable[RankSpec] = (inside.rank,)
    if inside.launch.kind == "checkpointable" and not inside.rank.device.uuid.startswith("MIG-"):
        ranks = sorted(inside.launch.ranks, key=lambda rank: rank.local_rank)
    return [uuid for rank in ranks if rank.device.kind == "cuda" for uuid in rank.device.uuid.split(",")]


def _devices(inside: Inside, runtime: str) -> list[str]:
    uuids = _uuids(inside)
    if not uuids:
        return []
    if runtime == "docker":
        return ["--gpus", f'"device={",".join(uuids)}"']  # its own quotes: the value has commas
    return [part for uuid in uuids for part in ("--device", f"nvidia.com/gpu={uuid}")]


def _user(runtime: str) -> list[str]:
    user = ["--user", f"{os.getuid()}:{os.getgid()}"]
    if runtime == "podman":
        return [*(["--userns", "keep-id"] if os.getuid() else []), *user]
    groups = [group for group in os.getgroups() if group != os.getgid() and _is_shared(group)]
    return [*user, *(part for group in groups for part in ("--group-add", str(group)))]


def _is_shared(group: int) -> bool:
    """False for the group that may command Docker: with it, a job inside could leave its container."""
    try:
        return grp.getgrgid(group).gr_name not in ("docker", "root")
    except KeyError:
        return True


def _limits(inside: Inside, runtime: str) -> list[str]:
    """Limits that the control group of the attempt sets for jobs without a container."""
    launch, device = inside.launch, inside.rank.device
    ranks = max(len(launch.ranks), 1)
    options = ["--memory", str(launch.memory_bytes // ranks)] if launch.memory_bytes else []
    if runtime == "docker" or os.getuid() == 0:  # a user's own podman often may not share out CPUs
        options += ["--cpu-shares", str(max(launch.cores // ranks, 1) * CPU_SHARES_PER_CORE)] if launch.cores else []
        options += ["--cpuset-cpus", ",".join(map(str, device.cores))] if device.cores else []
    return options


def _mounts(inside: Inside) -> Iterator[tuple[str, ...]]:
    """Source, target and, where it is read-only, ``ro`` of each mount."""
    launch = inside.launch
    same = [inside.work, *inside.directories]
    for directory in dict.fromkeys(same):
        yield str(directory), str(directory)
    if launch.kind != "command" or any(_STEP in word for word in launch.argv):  # as in the prelude of batch scripts
        yield str(CODE_ROOT), str(CODE_ROOT), "ro"
    for path in dict.fromkeys(known.path for known in launch.datasets.values() if known.path):
        yield path, path, "ro"
    for mount in launch.mounts:
        source, _, rest = mount.partition(":")
        target, _, mode = rest.partition(":")
        source = os.path.expanduser(source)
        if not os.path.exists(source):
            raise Refused("environment", f"{source} is not on this host, and the job mounts it")
        yield (source, target or source, *(["ro"] if mode == "ro" else []))


def _bind(source: str, target: str, mode: str = "") -> str:
    for path in (source, target):
        if "," in path or '"' in path:
            raise Refused("environment", f"{path!r} cannot be mounted: its name has a comma or a quote")
    return f"type=bind,source={source},target={target}{',readonly' if mode else ''}"
