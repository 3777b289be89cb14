"""Recipe of a job's Python environment: the commands that build it, and a key of all that decides its content.

The key covers the requirements or the lock, the packages in the workdir that they name, the interpreter, and the job's
settings of pip and uv. What an index serves for an unpinned requirement is not covered.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clusterd.agent.host import programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.protocol.requests import BuildEnvironment

LOCAL_BYTES_MAX = 1 << 30
"""Largest local package that an environment is built from: all of it is read for the key."""

PROBE_TIMEOUT_S = 60.0

VENV = "{venv}"
"""Stands in commands for the directory of the environment."""

_DESCRIBE = "import sys, sysconfig; print(sys.version, sysconfig.get_platform(), sys.base_prefix, sep='|')"
_DECIDING = ("PIP_", "UV_")
"""Beginnings of variables of a job that decide what is installed."""

_LOCAL_IN_LOCK = re.compile(r'source = \{ (?:editable|directory|path) = "([^"]+)"')
_GENERATED = ("__pycache__", "build", "dist")
"""Directories that a build leaves in a source tree."""


@dataclass(frozen=True)
class Recipe:
    """Commands that build an environment, and its key."""

    key: str
    commands: tuple[tuple[str, ...], ...]
    source: Path  # working directory of the commands
    copies: bool  # they write there, so that a submitted workdir is copied first
    variables: dict[str, str] = field(repr=False)


def recipe_of(request: BuildEnvironment, snapshot: Path | None) -> Recipe:
    """Recipe of the environment that a request names.

    Raises:
        Refused: ``build`` or ``environment``.
    """
    root = snapshot or Path(request.workdir or "/").expanduser()
    given = request.uv or request.requirements
    file = (root / given).resolve()
    if not file.is_file() or root.resolve() not in file.parents:
        raise Refused("build", f"{given} is not in the workdir of the job on this host ({root})")
    variables = {**request.env, **request.secrets}
    try:
        if request.uv:
            source, local, parts, commands = _uv_project(request, file, variables)
        else:
            source, local, parts, commands = _requirements(request, file, root.resolve(), variables)
        parts += [_tree_digest(path) for path in local]
    except FileNotFoundError as error:
        raise Refused("environment", str(error)) from error
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError) as error:
        raise Refused("build", f"{given} cannot be read: {error}") from error
    deciding = sorted((k, v) for k, v in request.env.items() if k.startswith(_DECIDING))
    identity = json.dumps([bool(request.uv), given, parts, deciding])
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return Recipe(key, commands, source, copies=snapshot is not None and bool(local), variables=variables)


_Parts = tuple[Path, list[Path], list[str], tuple[tuple[str, ...], ...]]


def _uv_project(request: BuildEnvironment, file: Path, variables: dict[str, str]) -> _Parts:
    """Source, local packages, parts of the key, and commands for ``uv sync`` of a locked project."""
    project = file.parent
    lock, settings = project / "uv.lock", project / "pyproject.toml"
    for needed in (lock, settings):
        if not needed.is_file():
            raise Refused("build", f"{request.uv} needs {needed.name} beside it: run `uv lock` and submit again")
    uv = _find_uv(variables)
    if uv is None:
        raise Refused(
            "environment",
            "uv is not on this host: install it there for this account (https://docs.astral.sh/uv), or submit with "
            "requirements = ...",
        )
    if request.python:
        python = programs.interpreter(request.python)
    else:  # by the project's own pin and range; empty: uv downloads one
        found = subprocess.run(
            [uv, "python", "find", "--project", str(project)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            env={**programs.own_environment(os.environ), **variables},
            cwd=project,
            text=True,
        )
        python = found.stdout.strip() if found.returncode == 0 else ""
    files = [path for path in (settings, lock, project / "uv.toml", project / ".python-version") if path.is_file()]
    parts = [_file_digest(path) for path in files] + [_described(python) if python else "managed"]
    chosen = ("--python", python) if python else ()
    sync = (uv, "sync", "--frozen", "--no-editable", *chosen)
    locals_ = [(project / path).resolve() for path in _LOCAL_IN_LOCK.findall(lock.read_text())]
    return project, locals_, parts, (sync,)


def _requirements(request: BuildEnvironment, file: Path, root: Path, variables: dict[str, str]) -> _Parts:
    """Source, local packages, parts of the key, and commands for a requirements file."""
    python = programs.interpreter(request.python)
    local: list[Path] = []
    parts = [_file_digest(path) for path in _read_requirements(file, root, local, set())]
    uv = _find_uv(variables)
    inside, relative = f"{VENV}/bin/python", os.path.relpath(file, root)
    if uv is not None:
        make: tuple[str, ...] = (uv, "venv", "--python", python, VENV)
        install: tuple[str, ...] = (uv, "pip", "install", "--python", inside, "-r", relative)
    else:
        make = (python, "-m", "venv", VENV)
        install = (inside, "-m", "pip", "install", "-r", relative)
    return root, local, [*parts, _described(python)], (make, install)


def _read_requirements(file: Path, root: Path, local: list[Path], seen: set[Path]) -> Iterator[Path]:
    """The file and those that it includes; adds the local packages that they name to `local`."""
    if file in seen:
        return
    seen.add(file)
    yield file
    for line in file.read_text().replace("\\\n", " ").splitlines():
        requirement = re.sub(r"(^|\s)#.*", "", line).strip()
        option = re.match(r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)[\s=]*(.+)", requirement)
        if option is None:
            local += _local_package(requirement, root)
        elif option[1] in ("-e", "--editable"):
            raise Refused(
                "build",
                f"{os.path.relpath(file, root)} has {requirement!r}: an editable package would point into a workdir "
                f"that is removed with its job; write {option[2]!r}, which installs it as submitted",
            )
        elif option[1] in ("-f", "--find-links"):
            local += _local_package(option[2], root)
        else:
            included = (file.parent / option[2].strip()).resolve()
            if included.is_file():  # else a URL, or pip says what is missing
                yield from _read_requirements(included, root, local, seen)


def _local_package(requirement: str, root: Path) -> list[Path]:
    """Path that a requirement names: ``./pkg``, ``wheels/a.whl``, ``a @ file:///b``; empty: a name or a URL."""
    named, _, path = requirement.split(";")[0].strip().partition("file:")
    target = path.removeprefix("//") or named.split("[")[0]
    if target.startswith("-") or "://" in target or not ("/" in target or target.endswith((".", ".whl", ".tar.gz"))):
        return []
    where = (root / target).resolve()
    return [where] if where.exists() else []


def _find_uv(variables: dict[str, str]) -> str | None:
    """Path of uv; a login over SSH often lacks the directories in which its installer puts it."""
    home = Path.home()
    places = [
        variables.get("PATH") or os.environ.get("PATH", os.defpath),
        str(home / ".local/bin"),
        str(home / ".cargo/bin"),
    ]
    return shutil.which("uv", path=os.pathsep.join(places))


def _described(python: str) -> str:
    """Version, platform and prefix of an interpreter.

    Raises:
        FileNotFoundError: it does not run.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _DESCRIBE],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            text=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FileNotFoundError(f"{python} does not run on this host: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise FileNotFoundError(f"{python} does not run on this host: {lines[-1] if lines else 'no output'}")
    return done.stdout.strip()


def _tree_digest(path: Path) -> str:
    """Digest of a local package: of a file, or of all files of a directory but hidden and generated ones."""
    if path.is_file():
        return _file_digest(path)
    found, size_bytes = hashlib.sha256(), 0
    for directory, folders, files in os.walk(path):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _GENERATED and not name.endswith(".egg-info")
        )
        for name in sorted(files):
            file = Path(directory) / name
            if name.startswith(".") or not file.is_file():
                continue
            size_bytes += file.stat().st_size
            if size_bytes > LOCAL_BYTES_MAX:
                raise Refused(
                    "build",
                    f"the local package {path} has more than {LOCAL_BYTES_MAX >> 20} MB: move its data elsewhere",
                )
            found.update(f"{os.path.relpath(file, path)}\0{_file_digest(file)}\0".encode())
    return found.hexdigest()


def _file_digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return f"{path.name}:{found.hexdigest()}"
