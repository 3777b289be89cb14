"""Python environments that this host builds for jobs: once per content, under a lock, and complete or not at all.

An environment is a directory named by its key, the hash of all that decides its content: the requirements or the lock,
the packages in the workdir that they name, the interpreter, and the job's settings of pip and uv. What an index serves
for an unpinned requirement is not covered. Scripts in it contain its path, so it is built in place, and valid only with
the mark that is written after the last step of the build.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from clusterd.agent.host import processes, programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import read_json, write_json
from clusterd.agent.host.rank_environment import make_writable
from clusterd.agent.log import log_line
from clusterd.agent.ranks import stopping
from clusterd.process_attributes import inherited_umask
from clusterd.protocol.requests import BuildEnvironment, BuiltEnvironment

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


UNUSED_S = 14 * 86400.0
"""An environment that no attempt has used for this long is removed."""

TOTAL_BYTES_MAX = 100 << 30
RECENT_S = 3600.0
"""Beyond the total size, those unused for longest are removed first, but none that was used this recently."""

TAIL_LINES = 6
_ENTRY = re.compile(r"([0-9a-f]{16})(\.json|\.log|\.source)?")
Key = tuple[str, int, int]


@dataclass
class _Build:
    """A build under way, and the number of attempts that wait for it."""

    task: asyncio.Task[float]
    waiting: int = 0


class Environments:
    """Built environments of this host.

    Args:
        tag: returns the tag of a build's processes, by name.
    """

    def __init__(self, directory: Path, tag: Callable[[str], str]) -> None:
        self._directory = directory
        self._tag = tag
        self._builds: dict[str, _Build] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._requests: dict[Key, set[asyncio.Task[BuiltEnvironment]]] = {}

    async def adopt(self) -> None:
        """Kill builds of an earlier agent; they are begun anew when they are asked for again."""
        for tag in processes.tags(self._tag("environment-")):
            await stopping.sweep(tag, 0.0)

    async def build(self, request: BuildEnvironment, snapshot: Path | None) -> BuiltEnvironment:
        """Build the environment of a job, or wait until another attempt's build of it is done.

        Args:
            snapshot: directory of the unpacked workdir; None: the request names a directory.
        Raises:
            Refused: ``build`` (the job's files are at fault), ``environment`` (the host is), ``disk-full``, ``stale``
                (the attempt was stopped meanwhile).
        """
        key = (request.job, request.attempt, request.generation)
        work = asyncio.ensure_future(self._find_or_build(request, snapshot))
        self._requests.setdefault(key, set()).add(work)
        try:
            return await work
        except asyncio.CancelledError:
            raise Refused(
                "stale", f"{request.job}.{request.attempt} was stopped while its environment was built"
            ) from None
        finally:
            self._requests[key].discard(work)
            if not self._requests[key]:
                del self._requests[key]

    async def cancel(self, job: str, attempt: int, generation: int) -> None:
        """Cancel the build for an attempt; it goes on while another attempt waits for it."""
        requests = set(self._requests.get((job, attempt, generation), ()))
        for work in requests:
            work.cancel()
        if requests:
            await asyncio.wait(requests)

    async def close(self) -> None:
        """Cancel all builds before the agent exits."""
        for job, attempt, generation in list(self._requests):
            await self.cancel(job, attempt, generation)

    async def _find_or_build(self, request: BuildEnvironment, snapshot: Path | None) -> BuiltEnvironment:
        loop = asyncio.get_running_loop()
        recipe = await loop.run_in_executor(None, recipe_of, request, snapshot)
        python = str(self._directory / recipe.key / "bin" / "python")
        if await loop.run_in_executor(None, self._use, recipe.key):
            return BuiltEnvironment(python)
        if request.only_look:
            return BuiltEnvironment("")
        build = self._builds.get(recipe.key)
        if build is None:
            build = self._builds[recipe.key] = _Build(asyncio.ensure_future(self._make(recipe)))
        build.waiting += 1
        try:
            return BuiltEnvironment(python, await asyncio.shield(build.task))
        finally:
            build.waiting -= 1
            if (not build.waiting or build.task.done()) and self._builds.get(recipe.key) is build:
                del self._builds[recipe.key]
            if not build.waiting and not build.task.done():
                build.task.cancel()
                await asyncio.wait([build.task])

    def _use(self, key: str) -> bool:
        """True if the environment is complete; notes its use. One whose base interpreter is gone is built anew."""
        mark = self._directory / f"{key}.json"
        if read_json(mark) is None or not os.access(self._directory / key / "bin" / "python", os.X_OK):
            return False
        os.utime(mark)
        return True

    async def _make(self, recipe: Recipe) -> float:
        """Build an environment; returns the seconds that it took."""
        loop = asyncio.get_running_loop()
        tag = self._tag(f"environment-{recipe.key}")
        async with self._locks.setdefault(recipe.key, asyncio.Lock()):
            began_s = time.monotonic()
            is_complete = False
            try:
                await stopping.sweep(tag, 0.0)
                source = await loop.run_in_executor(None, self._begin, recipe)
                for command in recipe.commands:
                    await self._run(command, source, recipe, tag)
                await loop.run_in_executor(None, self._complete, recipe.key)
                is_complete = True
                return time.monotonic() - began_s
            except OSError as error:
                raise Refused("environment", f"cannot build its environment in {self._directory}: {error}") from error
            finally:
                if not is_complete:
                    await stopping.sweep(tag, 0.0)
                    await loop.run_in_executor(None, self._remove, recipe.key, ("", ".json"))
                await loop.run_in_executor(None, self._remove, recipe.key, (".source",))

    def _begin(self, recipe: Recipe) -> Path:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove(recipe.key)
        if not recipe.copies:
            return recipe.source
        copy = self._directory / f"{recipe.key}.source"
        shutil.copytree(recipe.source, copy, symlinks=True)
        make_writable(copy)
        return copy

    async def _run(self, command: tuple[str, ...], source: Path, recipe: Recipe, tag: str) -> None:
        venv = self._directory / recipe.key
        log = self._directory / f"{recipe.key}.log"
        env = {
            **programs.own_environment(os.environ),
            **recipe.variables,
            "UV_PROJECT_ENVIRONMENT": str(venv),
            "UV_NO_PROGRESS": "1",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            processes.TAG: tag,
        }
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"):
            env.pop(name, None)
        arguments = [argument.replace(VENV, str(venv)) for argument in command]
        with open(log, "ab", buffering=0) as output:  # noqa: ASYNC230  # a local file
            output.write(f"$ {' '.join(arguments)}\n".encode())
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                cwd=source,
                start_new_session=True,
                umask=inherited_umask(),
            )
            status = await process.wait()
        if status:
            raise _failure(arguments, status, log)

    def _complete(self, key: str) -> None:
        venv = self._directory / key
        os.sync()  # a power failure must not leave the mark without the files
        size = sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(venv) for name in names)
        write_json(self._directory / f"{key}.json", {"bytes": size, "at_s": time.time()})

    def _remove(self, key: str, parts: Collection[str] = ("", ".json", ".log", ".source")) -> None:
        for suffix in sorted(parts, key=lambda part: part != ".json"):  # the mark first: half of one is never used
            path = self._directory / f"{key}{suffix}"
            if path.is_dir() and not path.is_symlink():
                make_writable(path)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def clean(self, used: Collection[Path]) -> None:
        """Remove environments that are unused for `UNUSED_S`, and beyond `TOTAL_BYTES_MAX` those unused for longest.

        Args:
            used: interpreters of running attempts.
        """
        if not self._directory.is_dir():
            return
        entries = [match[1] for path in self._directory.iterdir() if (match := _ENTRY.fullmatch(path.name))]
        in_use = {path.parent.parent.name for path in used} | set(self._builds)
        for key in in_use & set(entries):
            self._use(key)
        idle: list[tuple[float, int, str]] = []
        total_bytes = 0
        for key in set(entries):
            mark = self._directory / f"{key}.json"
            about = read_json(mark)
            newest = max(_modified_s(self._directory / f"{key}{suffix}") for suffix in (".json", ".log", ""))
            size_bytes = int(about.get("bytes", 0)) if about is not None else 0
            total_bytes += size_bytes
            if key not in in_use:
                idle.append((time.time() - newest, size_bytes, key))
        for idle_s, size_bytes, key in sorted(idle, reverse=True):
            if idle_s > UNUSED_S or (total_bytes > TOTAL_BYTES_MAX and idle_s > RECENT_S):
                log_line(f"agent: removing environment {key}, unused for {idle_s / 86400:.1f} days")
                self._remove(key)
                total_bytes -= size_bytes


def _failure(command: list[str], status: int, log: Path) -> Refused:
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    tail = "; ".join(lines[-TAIL_LINES:])
    program = " ".join(Path(part).name if "/" in part else part for part in command[:4])
    ended = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
    full = "No space left on device" in text or "Disk quota exceeded" in text
    return Refused(
        "disk-full" if full else "build",
        f"its environment could not be built: {program} {ended}: {tail} (all of its output: {log})",
    )


def _modified_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
