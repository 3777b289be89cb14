"""Parser of job files and command lines into `JobSpec`; an error is one line that names file and key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterd.errors import ConfigError, UsageError
from clusterd.plans.plan import Plan, PlanError
from clusterd.submission.job_keys import CheckpointKeys, JobKeys, LimitKeys, ResourceKeys
from clusterd.toml import check_keys, data_folders, read_toml, text_table
from clusterd.types import CONTAINER_RUNTIMES, HostId, JobId, JobKind, JobSpec, Resources
from clusterd.units import counted, parse_capability, parse_duration_s, parse_gpus, parse_size

NAME_LENGTH_MAX = 63

UV_FILES = ("pyproject.toml", "uv.lock")
"""Files of a project that uv needs; a job names one of them."""

_TYPES = {str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "a table", float: "a number"}


@dataclass(frozen=True, slots=True)
class Request:
    """Job to submit: its specification, and its secrets, which never enter the journal."""

    spec: JobSpec
    secrets: dict[str, str]
    array: str = ""  # indices of its tasks, "0-99%8"; empty: one job
    stages: str = ""  # of its script, "pretrain,finetune", each of which is a job; empty: one job


def read_job_file(file: Path) -> Request:
    """Read the job that a TOML file describes; its workdir is relative to the file.

    Raises:
        ConfigError: names file and key.
    """
    return parse_job(read_toml(file), file, str(file))


def parse_job(values: dict[str, Any], file: Path, where: str) -> Request:
    """Job of the keys of a job file; its workdir is relative to `file`.

    Raises:
        ConfigError: names file and key.
    """
    check_keys(values, JobKeys.__struct_fields__, where)
    get = _Getter(values, where)
    resources = _resources(get.table("resources"), f"{where}: [resources]")
    limits = get.table("limits")
    check_keys(limits, LimitKeys.__struct_fields__, f"{where}: [limits]")
    limit = _Getter(limits, f"{where}: [limits]")
    checkpoints = get.table("checkpoints")
    check_keys(checkpoints, CheckpointKeys.__struct_fields__, f"{where}: [checkpoints]")
    if "every" in checkpoints and "directory" not in checkpoints:
        raise ConfigError(f'{where}: [checkpoints] needs a place: directory = "/shared/folder", seen by all its hosts')
    saved = _Getter(checkpoints, f"{where}: [checkpoints]")
    command = get("command", list, None)
    if command is None:
        raise ConfigError(f'{where}: command is missing: the argv to run, as in command = ["python", "train.py"]')
    kind = get("kind", str, "command")
    if kind not in list(JobKind):
        raise ConfigError(f"{where}: kind is {kind!r}; it must be one of {', '.join(k.value for k in JobKind)}")
    datasets = data_folders(get.table("datasets"), f"{where}: [datasets]")
    if datasets and kind == "command":
        raise ConfigError(
            f"{where}: [datasets] is read through clusterd.train, which a command has not: "
            'kind = "elastic" or "checkpointable", or give it the paths'
        )
    secrets = _secrets(get.table("secrets"), f"{where}: [secrets]")
    spec = JobSpec(
        name=checked_name(get("name", str, file.stem), where),
        kind=JobKind(kind),
        command=tuple(_texts(command, f"{where}: command")),
        workdir=_workdir(file, get("workdir", str, "."), where),
        python=get("python", str, None),
        uv=get("uv", str, ""),
        requirements=get("requirements", str, ""),
        container=parse_container(get("container", str, ""), where),
        mounts=tuple(_texts(get("mounts", list, []), f"{where}: mounts")),
        env=dict(text_table(get.table("env"), f"{where}: [env]")),
        datasets=datasets,
        secrets=tuple(sorted(secrets)),
        resources=resources,
        priority=get("priority", int, 0),
        guaranteed=get("guaranteed", bool, False),
        preemptible=get("preemptible", bool, False),
        tenant=get("tenant", str, "default"),
        after=tuple(JobId(job) for job in _texts(get("after", list, []), f"{where}: after")),
        time_limit_s=limit.duration_s("time", None),
        stall_s=limit.duration_s("stall", None),
        stops_on_nan=_on_nan(limit("on_nan", str, "report"), f"{where}: [limits]"),
        grace_s=limit.duration_s("grace", 30.0) or 0.0,
        retries=limit("retries", int, 0),
        retry_on=_exit_codes(limit("retry_on", list, []), f"{where}: retry_on"),
        ports=_ports(get("ports", list, []), f"{where}: ports"),
        waits_for_hosts=get("wait_for_hosts", bool, False),
        trials=get("trials", bool, True),
        target_loss=_number(values, "target_loss", where),
        snapshot_every=get("snapshots", int, None),
        checkpoint_directory=saved("directory", str, None),
        checkpoint_every_s=saved.duration_s("every", None),
    )
    check_environment(spec, where)
    stages = ",".join(_texts(get("stages", list, []), f"{where}: stages"))
    return Request(spec, secrets, get("array", str, ""), stages)


def parse_container(given: str, where: str) -> str:
    """Runtime and image of ``docker:IMAGE``; a path to a ``.sif`` file is one of Apptainer.

    Raises:
        ConfigError: no such runtime, or no image.
    """
    runtime, _, image = given.partition(":")
    if given.endswith(".sif") and runtime not in CONTAINER_RUNTIMES:
        return f"apptainer:{given}"
    if given and (runtime not in CONTAINER_RUNTIMES or not image):
        known = ", ".join(f"{name}:IMAGE" for name in CONTAINER_RUNTIMES)
        raise ConfigError(f"{where}: container is {given!r}; it must be {known}, or a path to a .sif file")
    return given


def check_environment(spec: JobSpec, where: str) -> None:
    """Check that the files of which the hosts build the job's environment are in its workdir.

    Raises:
        ConfigError: names the key and the file.
    """
    if spec.uv and spec.requirements:
        raise ConfigError(f"{where}: uv and requirements are both given: give one of them")
    workdir = Path(spec.workdir or ".")
    for key, given in (("uv", spec.uv), ("requirements", spec.requirements)):
        needed = [given] if given else []
        if key == "uv" and given:
            if Path(given).name not in UV_FILES:
                raise ConfigError(f"{where}: uv is {given!r}; it must be {' or '.join(UV_FILES)}, in the workdir")
            needed = [str(Path(given).parent / name) for name in UV_FILES]
        for name in needed:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ConfigError(f"{where}: {key} is {name!r}; it must be a path inside the workdir")
            if not (workdir / name).is_file():
                how = ": `uv lock` writes it" if name.endswith("uv.lock") else ""
                raise ConfigError(f"{where}: {key}: there is no {name} in the workdir {workdir}{how}")


def _on_nan(given: str, where: str) -> bool:
    if given not in ("report", "stop"):
        raise ConfigError(f'{where}: on_nan is {given!r}; it must be "report" or "stop"')
    return given == "stop"


def _exit_codes(given: list[Any], where: str) -> tuple[int, ...]:
    for code in given:
        if isinstance(code, bool) or not isinstance(code, int) or not 1 <= code <= 255:
            raise ConfigError(f"{where}: {code!r} is no exit code of a failed job; write it as in [75, 85]")
    return tuple(given)


def _ports(given: list[Any], where: str) -> tuple[int, ...]:
    for port in given:
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise ConfigError(f"{where}: {port!r} is no port; write them as in [6006, 8888]")
    return tuple(given)


def _workdir(file: Path, given: str, where: str) -> str:
    try:
        return str((file.parent / os.path.expanduser(given)).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a null byte
        raise ConfigError(f"{where}: workdir is {given!r}, which is not a path to a directory: {error}") from None


def command_line_job(
    argv: Sequence[str],
    *,
    name: str | None = None,
    resources: Resources | None = None,
    priority: int = 0,
    time_limit: str | None = None,
    env: Sequence[str] = (),
    secrets: Sequence[str] = (),
    after: Sequence[str] = (),
    interactive: bool = False,
    waits_for_hosts: bool = False,
) -> Request:
    """Build the job of ``clusterd run -- ARGV``.

    Raises:
        UsageError: names the option.
    """
    if not argv:
        raise UsageError("nothing to run: give the command after --, as in clusterd run --gpus 1 -- python train.py")
    if unset := [key for key in secrets if key not in os.environ]:
        raise UsageError(f"--secret {unset[0]}: the environment variable {unset[0]} is not set")
    try:
        limit_s = parse_duration_s(time_limit) if time_limit is not None else None
    except ValueError as error:
        raise UsageError(f"--time: {error}") from None
    spec = JobSpec(
        name=checked_name(_default_name(argv) if name is None else name, "--name"),
        command=tuple(argv),
        workdir=_here(),
        env=variables(env),
        secrets=tuple(sorted(set(secrets))),
        resources=resources or Resources(),
        priority=priority,
        interactive=interactive,
        waits_for_hosts=waits_for_hosts,
        after=tuple(JobId(job) for job in after),
        time_limit_s=limit_s,
    )
    return Request(spec, {key: os.environ[key] for key in secrets})


def variables(given: Iterable[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``, and ``NAME`` alone with its value in this environment.

    Raises:
        UsageError: names the invalid item.
    """
    pairs: dict[str, str] = {}
    for item in given:
        key, assigned, value = item.partition("=")
        if not key or len(key.split()) > 1 or (not assigned and key not in os.environ):
            raise UsageError(f"--env {item}: write NAME=VALUE, or NAME of a variable that is set")
        pairs[key] = value if assigned else os.environ[key]
    return pairs


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current directory is gone: change to one that is there") from None


def _default_name(argv: Sequence[str]) -> str:
    """Default name of a job: ``train`` for ``python -u train.py --steps 5``."""
    stems = [Path(part).stem for part in argv if not part.startswith("-")]
    scripts = [
        w for w, given in zip(stems, (a for a in argv if not a.startswith("-")), strict=True) if given.endswith(".py")
    ]
    chosen = (scripts or stems or ["job"])[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", chosen).strip("-._")[:40] or "job"
    return f"job-{name}" if name.isdigit() else name


def _resources(table: Mapping[str, Any], where: str) -> Resources:
    check_keys(table, ResourceKeys.__struct_fields__, where)
    get = _Getter(table, where)
    given, devices = get("gpus", object, None), get("devices", int, None)
    try:
        named, gpus = parse_gpus(given) if given is not None else ("", None)
    except ValueError as error:
        raise ConfigError(f"{where}: gpus: {error}") from None
    nodes = get("nodes", int, 1)
    gpus_each, devices_each = get("gpus_per_node", int, None), get("devices_per_node", int, None)
    if nodes < 1:
        raise ConfigError(f"{where}: nodes is {nodes}; it must be 1 or more")
    for each, total, name in ((gpus_each, gpus, "gpus"), (devices_each, devices, "devices")):
        if each is not None and total is not None:
            raise ConfigError(f"{where}: {name} and {name}_per_node are both given: give one of them")
    gpus = gpus if gpus_each is None else gpus_each * nodes
    devices = devices if devices_each is None else devices_each * nodes
    if gpus is not None and devices is not None:
        raise ConfigError(f"{where}: gpus and devices are both given; devices means any kind: give one of them")
    requested = get("plan", object, None)
    plan = _plan(requested, f"{where}: plan") if requested is not None else None
    plans = tuple(_plan(given, f"{where}: plans") for given in get("plans", list, []))
    asked = gpus if gpus is not None else devices
    memory = get("memory", object, 0)
    try:
        memory_bytes = parse_size(memory)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: memory: {error}") from None
    try:
        device_memory_bytes = parse_size(get("gpu_memory", object, 0))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: gpu_memory: {error}") from None
    try:
        parse_capability(capability := get("compute_capability", str, ""))
    except ValueError as error:
        raise ConfigError(f"{where}: compute_capability: {error}") from None
    count = asked if asked is not None else max((p.ranks for p in (plan, *plans) if p is not None), default=0)
    if count % nodes:
        raise ConfigError(f"{where}: {count} devices cannot be spread evenly over {nodes} nodes: give a multiple")
    least = get("min_devices", int, get("min_gpus", int, 0))
    most = get("max_devices", int, get("max_gpus", int, 0))
    if not get("grow", bool, True):
        most = max(count, 1) if not most else min(most, max(count, 1))
    if most and (count > most or least > most):
        raise ConfigError(
            f"{where}: at most {counted(most, 'device')} may be used, but {max(count, least)} are asked for"
        )
    return Resources(
        devices=count,
        nodes=nodes,
        device_name=named or get("gpu_type", str, ""),
        device_memory_bytes=device_memory_bytes,
        compute_capability=capability,
        constraint=tuple(_texts(get("constraint", list, []), f"{where}: constraint")),
        min_devices=least,
        max_devices=most,
        share=get("share", int, 1),
        kind="cuda" if gpus is not None else None,
        cpus=get("cpus", int, 0),
        memory_bytes=memory_bytes,
        plan=plan,
        plans=plans,
        hosts=tuple(HostId(h) for h in _texts(get("hosts", list, []), f"{where}: hosts")),
    )


def _plan(given: Any, where: str) -> Plan:
    if not isinstance(given, str | dict):
        raise ConfigError(f'{where} is {given!r}; write it as "dp=2,tp=2" or {{ dp = 2, tp = 2 }}')
    try:
        return Plan.parse(given) if isinstance(given, str) else Plan.from_dict(given)
    except (PlanError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _number(table: Mapping[str, Any], key: str, where: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where}: {key} is a number of {len(str(value))} digits; write a smaller one") from None


def _secrets(table: Mapping[str, Any], where: str) -> dict[str, str]:
    """Read ``NAME = "env:VARIABLE"`` and ``NAME = "file:PATH"``; a bare value is refused: the file may be public."""
    found: dict[str, str] = {}
    for name, source in text_table(table, where).items():
        kind, _, at = source.partition(":")
        if kind == "env":
            if at not in os.environ:
                raise ConfigError(f"{where}: {name}: the environment variable {at} is not set here")
            found[name] = os.environ[at]
        elif kind == "file":
            try:
                found[name] = Path(at).expanduser().read_text(encoding="utf-8").rstrip("\n")
            except OSError as error:
                raise ConfigError(f"{where}: {name}: {at}: {error.strerror}") from None
            except (ValueError, RuntimeError) as error:  # not text, a null byte in the path, or an unknown user's home
                raise ConfigError(f"{where}: {name}: {at!r} cannot be read as text: {error}") from None
        else:
            raise ConfigError(
                f"{where}: {name}: write env:VARIABLE or file:PATH, so that the secret is not in this file"
            )
    return found


class _Getter:
    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.values = table
        self.where = where

    def __call__(self, key: str, kind: type, default: Any) -> Any:
        value = self.values.get(key, default)
        if key in self.values and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ConfigError(f"{self.where}: {key} is {value!r}; it must be {_TYPES.get(kind, kind.__name__)}")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} is {value!r}; it must be a table, [{key}]")
        return value

    def duration_s(self, key: str, default: float | None) -> float | None:
        if isinstance(self.values.get(key), list | dict):
            raise ConfigError(f"{self.where}: {key} is {self.values[key]!r}; it must be a time, as in 90s or 12h")
        try:
            return parse_duration_s(self.values[key]) if key in self.values else default
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self.where}: {key}: {error}") from None


def checked_name(name: str, where: str) -> str:
    """Return a valid name of a job.

    Raises:
        ConfigError: an invalid name; names `where` it was given.
    """
    if re.fullmatch(r"[0-9]+", name):
        raise ConfigError(f"{where}: the name {name!r} would be taken for the id of a job: add a letter")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or len(name) > NAME_LENGTH_MAX:
        raise ConfigError(
            f"{where}: the name {name!r} must be letters, digits, '.', '_' and '-', {NAME_LENGTH_MAX} at most"
        )
    return name


def _texts(values: list[Any], where: str) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {value!r} is no text; put it in quotes")
    return values
