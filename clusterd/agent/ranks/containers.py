"""Container runtimes of this host, and the containers of attempts: listed and removed by their label.

A container of Docker is no child of the process that started it: neither a signal to that process nor a control group
ends it for certain. Each has the tag of its attempt as its label, by which an agent finds it, also after a restart.
Those of Apptainer are ordinary children, and found as such. A rank, or a shell beside it, runs in one as the user and
in the working directory. Values of variables, secrets among them, are in the environment of the runtime's program and
never in its arguments, which every user of the host can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import processes, programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.log import log_line
from clusterd.protocol.launch import LaunchRequest, RankSpec
from clusterd.trusted_paths import account_name

LABEL = "clusterd.tag"

PROGRAMS = {"docker": ("docker",), "podman": ("podman",), "apptainer": ("apptainer", "singularity")}
"""Programs of each runtime, the first that is there is used."""

OUTLIVE_CLIENTS = ("docker", "podman")
"""Runtimes whose containers are no children of the program that started them."""

_VERSION = {
    "docker": ("version", "--format", "{{.Server.Version}}"),
    "podman": ("--version",),
    "apptainer": ("--version",),
}
VERSION_TIMEOUT_S = 10.0

COMMAND_TIMEOUT_S = 60.0
TRIES, PAUSE_TRIES = 10, 3
RETRY_S = 0.2


def program(runtime: str) -> str | None:
    """Path of a runtime's program; None: it is not on this host."""
    return next((found for name in PROGRAMS.get(runtime, ()) if (found := shutil.which(name))), None)


def runtimes() -> dict[str, str]:
    """Container runtimes of this host, each with why this account cannot use it; empty: it can.

    Blocks until each has answered.
    """
    found: dict[str, str] = {}
    for runtime, arguments in _VERSION.items():
        if (path := program(runtime)) is None:
            continue
        try:
            done = subprocess.run(
                [path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_TIMEOUT_S, text=True
            )
            lines = (done.stderr or done.stdout).strip().splitlines()
            found[runtime] = "" if done.returncode == 0 else lines[-1] if lines else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            found[runtime] = f"{path} has not answered for {VERSION_TIMEOUT_S:.0f} s"
        except OSError as error:
            found[runtime] = f"{path}: {error.strerror}"
    return found


def runtime_of(container: str) -> str:
    """Runtime of a job's ``container``: ``docker`` of ``docker:IMAGE``; empty: it has none."""
    return container.partition(":")[0]


async def tags(prefix: str, runtime: str) -> set[str]:
    """Tags of the containers of a runtime that begin with `prefix`, whether they run or have exited."""
    listed = await _call(runtime, "ps", "--all", "--format", f'{{{{.Label "{LABEL}"}}}}', "--filter", f"label={LABEL}")
    return {line for line in (listed or "").splitlines() if line.startswith(prefix)}


async def remove(tag: str, runtime: str) -> None:
    """Kill and remove the containers of an attempt; returns once none is left, or the runtime fails for long.

    A container that is being created while its client is killed appears late, so that two looks must find nothing.
    """
    if runtime not in OUTLIVE_CLIENTS:
        return
    empty, failed = 0, 0
    while empty < 2 and failed < TRIES:
        listed = await _call(runtime, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={tag}")
        names = listed.split() if listed is not None else []
        if listed is None or (names and await _call(runtime, "rm", "--force", "--volumes", *names) is None):
            failed += 1
        empty = 0 if names or listed is None else empty + 1
        await asyncio.sleep(RETRY_S * (1 + failed) if failed or names else 0.0)
    if failed >= TRIES:
        log_line(f"agent: {runtime} does not answer: a container of {tag} may still run")


async def set_paused(tag: str, runtime: str, paused: bool) -> None:
    """Freeze the containers of an attempt, or let them go on; those of Apptainer get signals like any process.

    Returns once none is left that is not so: one that is being created appears late, and Docker lists one for a moment
    as it was.

    Raises:
        Refused: ``container``: the runtime cannot do it, with its message.
    """
    verb, status = ("pause", "running") if paused else ("unpause", "paused")
    empty, failed = 0 if runtime in OUTLIVE_CLIENTS else 2, 0
    while empty < 2:
        names = await _names(runtime, f"label={LABEL}={tag}", status)
        try:
            if names:
                await _output(runtime, verb, *names)
        except Refused:
            failed += 1
            if failed == PAUSE_TRIES:
                raise
            await asyncio.sleep(RETRY_S)
        empty = 0 if names else empty + 1


async def is_running(inside: Inside) -> bool:
    """True once the container of a rank runs, and others may enter it; its image may have to be pulled first."""
    runtime = runtime_of(inside.launch.container)
    return runtime not in OUTLIVE_CLIENTS or bool(await _names(runtime, f"name=^/?{inside.name}$", "running"))


async def _names(runtime: str, which: str, status: str) -> list[str]:
    listed = await _output(runtime, "ps", "--quiet", "--no-trunc", "--filter", which, "--filter", f"status={status}")
    return listed.split()


async def _call(runtime: str, *arguments: str) -> str | None:
    """Output of a command of the runtime; None: it failed, which is logged."""
    try:
        return await _output(runtime, *arguments)
    except Refused as refused:
        log_line(f"agent: {refused}")
        return None


async def _output(runtime: str, *arguments: str) -> str:
    """Output of a command of the runtime.

    Raises:
        Refused: ``container``: it failed.
    """
    path = program(runtime)
    if path is None:
        raise Refused("container", f"{runtime} is not on this host")
    process = await asyncio.create_subprocess_exec(
        path, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    except (asyncio.TimeoutError, TimeoutError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise Refused("container", f"{runtime} {arguments[0]} has not answered for {COMMAND_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise Refused("container", f"{runtime} {arguments[0]}: {errors.decode(errors='replace').strip()}")
    return out.decode(errors="replace")


def start_failure(container: str, exit_code: int | None, log_lines: Sequence[str]) -> str:
    """Message of a runtime that could not start the container, by its own exit code; empty: the command ran."""
    if runtime_of(container) not in OUTLIVE_CLIENTS or exit_code != 125:
        return ""
    said = next((line for line in reversed(log_lines) if line.strip() and not line.startswith("See '")), "no output")
    return f"{runtime_of(container)} could not start {container.partition(':')[2]}: {said.strip()}"


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
