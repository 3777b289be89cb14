"""Parser of job files and command lines into `JobSpec`; an error is one line that names file and key."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from clusterd import keys as k
from clusterd.errors import ConfigError, UsageError
from clusterd.keys import NONE, RESOURCES, Edit, Key, checked_name, keys_of, read_values
from clusterd.plans.plan import Plan
from clusterd.toml import check_keys, nearest, read_toml, refuse_mistakes
from clusterd.types import JobKind, JobSpec, Resources

UV_FILES = ("pyproject.toml", "uv.lock")
"""Files of a project that uv needs; a job names one of them."""


@dataclass(frozen=True, slots=True)
class Request:
    """Job to submit: its specification, and its secrets, which never enter the journal."""

    spec: JobSpec
    secrets: dict[str, str]
    array: Annotated[str, Key(k.TEXT, '"0-99%8": a job for each index, 8 at a time.', "one job", sbatch="--array")] = ""
    wait: Annotated[
        bool, Key(k.YES_OR_NO, "clusterd submit waits for its end, and returns its exit code.", sbatch="--wait")
    ] = False
    stages: Annotated[str, Key(k.TEXTS, "A job for each stage of a training script, in turn.", "one job")] = ""


@cache
def job_keys() -> dict[str, Key]:
    """All keys of a job file, by their name with its section."""
    return {key.name: key for key in (*keys_of(JobSpec), *keys_of(Request))}


def read_job_file(file: Path) -> Request:
    """Read the job that a TOML file describes; its workdir is relative to the file.

    Raises:
        ConfigError: names file, line and key of each mistake.
    """
    values = read_toml(file)
    refuse_mistakes(file, values, lambda some: parse_job(some, file, str(file)))
    return parse_job(values, file, str(file))


def parse_job(values: dict[str, Any], file: Path, where: str) -> Request:
    """Job of the keys of a job file; its workdir is relative to `file`.

    Raises:
        ConfigError: names file and key.
    """

    def at(key: Key) -> str:
        if key.value.accepts is dict:
            return f"{where}: [{key.short}]"
        return f"{where}: [{key.section}]: {key.short}" if key.section else f"{where}: {key.short}"

    sections: dict[str, dict[str, Key]] = {"": {}}
    for key in job_keys().values():
        sections.setdefault(key.section, {})[key.short] = key
    elsewhere = {key.short: key.section for key in job_keys().values() if key.section}
    found: dict[str, Any] = {}
    for section, keys in sections.items():
        table = values if not section else values.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {section} is {table!r}; it must be a table, [{section}]")
        known = {*keys, *(sections.keys() - {""})} if not section else {*keys}
        check_keys(table, known, f"{where}: [{section}]" if section else where, elsewhere)
        found |= read_values(((key, table[short]) for short, key in keys.items() if short in table), at)
    if "checkpoints.every" in found and "checkpoints.directory" not in found:
        raise ConfigError(f'{where}: [checkpoints] needs a place: directory = "/shared/folder", seen by all its hosts')
    if "command" not in found:
        raise ConfigError(f'{where}: command is missing: the argv to run, as in command = ["python", "train.py"]')
    if found.get("datasets") and found.get("kind", JobKind.COMMAND) == JobKind.COMMAND:
        raise ConfigError(
            f"{where}: [datasets] is read through clusterd.train, which a command has not: "
            'kind = "elastic" or "checkpointable", or give it the paths'
        )
    secrets = _secrets(found.pop("secrets", {}), f"{where}: [secrets]")
    array, stages, wait = found.pop("array", ""), ",".join(found.pop("stages", ())), found.pop("wait", False)
    try:
        named = {"name": checked_name(file.stem)} if "name" not in found else {}
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    found = {**named, **found, "workdir": _workdir(file, found.get("workdir", "."), where)}
    fields = fields_of(found, at)
    wanted = fields["resources"]
    count = wanted.setdefault("devices", _ranks_max((wanted.get("plan"), *wanted.get("plans", ()))))
    if not found.get("resources.grow", True):
        wanted["max_devices"] = min(wanted.get("max_devices") or max(count, 1), max(count, 1))
    spec = JobSpec(**{**fields, "secrets": tuple(sorted(secrets)), "resources": Resources(**wanted)})
    check_environment(spec, where)
    return Request(spec, secrets, array, wait, stages)


def _ranks_max(plans: Iterable[Plan | None]) -> int:
    return max((plan.ranks for plan in plans if plan is not None), default=0)


_COUNTS = ("resources.gpus", "resources.devices", "resources.gpus_per_node", "resources.devices_per_node")
"""Keys that set the number of devices."""


def fields_of(found: Mapping[str, Any], at: Callable[[Key], str], nodes: int = 1) -> dict[str, Any]:
    """Fields of a specification, and of its resources, for values by key.

    Args:
        nodes: number that the job has, if it is not given.
    Raises:
        ConfigError: two keys set the number of devices.
    """
    fields: dict[str, Any] = {RESOURCES: {}}
    for name, value in found.items():
        key = job_keys()[name]
        if name not in (*_COUNTS, "resources.grow"):
            (fields[RESOURCES] if key.section == RESOURCES else fields).setdefault(key.field, value)
    asked = [name for name in _COUNTS if name in found]
    if len(asked) > 1:
        first, *others = (at(job_keys()[name]) for name in asked)
        named = " and ".join((first, *(other.rpartition(" ")[2] for other in others)))
        raise ConfigError(f"{named} are both given: give one of them (devices means any kind)")
    for name in asked:
        device_name, count, share = found[name] if name == "resources.gpus" else ("", found[name], 1)
        count *= found.get("resources.nodes", nodes) if name.endswith("_per_node") else 1
        fields[RESOURCES] |= {"devices": count, "kind": "cuda" if "gpus" in name else None}
        fields[RESOURCES] |= {"device_name": device_name} if device_name else {}
        fields[RESOURCES] |= {"share": share} if share > 1 else {}
    return fields


def with_fields(spec: JobSpec, fields: Mapping[str, Any]) -> JobSpec:
    """The specification with other values of these fields; those of its resources are in a table of their own."""
    return replace(spec, **{**fields, RESOURCES: replace(spec.resources, **fields.get(RESOURCES, {}))})


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


def _workdir(file: Path, given: str, where: str) -> str:
    try:
        return str((file.parent / os.path.expanduser(given)).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a null byte
        raise ConfigError(f"{where}: workdir is {given!r}, which is not a path to a directory: {error}") from None


_BUILT_IN = ("cd", "export", "source", ".", "set", "unset", "ulimit", "umask", "alias", "eval", "exec", "trap")
"""Commands that are a shell's own; as variables in front of a command are."""


def command_line_job(
    argv: Sequence[str],
    found: Mapping[str, Any] | None = None,
    *,
    resources: Resources | None = None,
    time_limit: str | None = None,
    env: Sequence[str] = (),
    secrets: Sequence[str] = (),
    **fields: Any,
) -> Request:
    """Build the job of ``clusterd run -- ARGV``.

    Args:
        found: values of options by key.
        resources: in the place of those of `found`.
        fields: others of the specification: `name`, `priority`, `after`, `interactive`.
    Raises:
        UsageError: names the option.
    """
    if not argv:
        raise UsageError("nothing to run: give the command after --, as in clusterd run --gpus 1 -- python train.py")
    is_line = len(argv) == 1 and re.search(r"[\s;&|<>$]", argv[0])
    if (is_line or argv[0] in _BUILT_IN or re.match(r"[A-Za-z_]\w*=", argv[0])) and not os.path.exists(argv[0]):
        shell = shlex.quote(argv[0] if is_line else shlex.join(argv))
        raise UsageError(f"{shell} is no program: give its words apart, or clusterd run -- sh -c {shell} for a shell")
    if unset := [key for key in secrets if key not in os.environ]:
        raise UsageError(f"--secret {unset[0]}: the environment variable {unset[0]} is not set")
    given = {"name": fields.pop("name", None), "limits.time": time_limit}
    texts = ((job_keys()[name], text) for name, text in given.items() if text is not None)
    found = {**(found or {}), **read_values(texts, lambda key: key.option, texts=True)}
    made = {"name": _default_name(argv), **fields_of(found, lambda key: key.option)}
    made |= {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    spec = JobSpec(
        **{**made, RESOURCES: resources or Resources(**made[RESOURCES])},
        command=tuple(argv),
        workdir=_here(),
        env=variables(env),
        secrets=tuple(sorted(set(secrets))),
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


def _secrets(table: Mapping[str, Any], where: str) -> dict[str, str]:
    """Read ``NAME = "env:VARIABLE"`` and ``NAME = "file:PATH"``; a bare value is refused: the file may be public."""
    found: dict[str, str] = {}
    for name, source in table.items():
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


def parse_fields(given: Iterable[str]) -> dict[str, Any]:
    """Fields of a specification for ``time=2h``, ``gpus=a100:2``, ``after=12:any,prepare``.

    Raises:
        UsageError: names the invalid item.
    """
    keys = {key.short: key for key in keys_of(JobSpec) if key.edit is not Edit.NEVER}
    found: dict[str, Any] = {}
    items: dict[str, str] = {}
    for item in given:
        short, assigned, value = item.partition("=")
        if not assigned or short not in keys:
            hint = nearest(short, keys) or f"write KEY=VALUE with one of the keys {', '.join(keys)}"
            raise UsageError(f"{item}: {hint}")
        key = keys[short]
        items[key.name] = item
        if value.lower() in NONE and key.value.removable and not key.initial:
            found[key.name] = key.initial
        else:
            found |= read_values([(key, value)], lambda key: items[key.name], texts=True)
    if not found:
        raise UsageError(f"nothing to change: give KEY=VALUE with one of the keys {', '.join(keys)}")
    fields = fields_of(found, lambda key: items[key.name])
    return fields if fields["resources"] else {name: fields[name] for name in fields if name != "resources"}


def parse_changes(given: Iterable[str]) -> dict[str, Any]:
    """Changes for the verb ``edit``, in the form of the socket; see `parse_fields`."""
    import msgspec

    changes: dict[str, Any] = msgspec.to_builtins(parse_fields(given))
    for table in (changes, changes.get("resources", {})):
        table |= {name: list(value) for name, value in table.items() if isinstance(value, tuple)}
    return changes


def with_changes(spec: JobSpec, changes: dict[str, Any]) -> JobSpec:
    """The specification with changes of `parse_changes`.

    Raises:
        UsageError: a value of the wrong type.
    """
    import msgspec

    before = msgspec.to_builtins(spec)
    resources = {**before["resources"], **changes.get("resources", {})}
    try:
        return msgspec.convert({**before, **changes, "resources": resources}, JobSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"the change is not well-formed: {error}") from None
