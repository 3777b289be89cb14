"""Launches on this host: the stored launch record, and starting the missing ranks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from clusterd.agent.forkserver.client import ForkServers, SpawnFailed
from clusterd.agent.host import cgroups, programs, rank_environment
from clusterd.agent.host.attempt_records import Attempt, Rank, Refused
from clusterd.agent.host.home import is_disk_full
from clusterd.agent.host.rank_input import RankInput
from clusterd.agent.ranks import containers
from clusterd.exit_reasons import EXIT_CODE_OF, Reason
from clusterd.protocol.forkserver import Spawn
from clusterd.protocol.launch import LaunchRequest, RankSpec

PROBE_TIMEOUT_S = 10.0
INTERPRETERS_MAX = 256

DRIVER = Path("/sys/module/nvidia/version")

_PYTHON = re.compile(r"python[0-9.]*")

_PROBE = """\
import importlib.util, json, os, sys, sysconfig
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
torch = importlib.util.find_spec("torch")
if torch is not None and torch.origin:
    about = {}
    with open(os.path.join(os.path.dirname(torch.origin), "version.py")) as file:
        exec(file.read(), about)
    found.update(torch=str(about["__version__"]), cuda=str(about.get("cuda") or ""))
print(json.dumps([found, sysconfig.get_path("purelib")]))
"""


class Versions:
    """Versions by interpreter; one whose packages have not changed since is not asked again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[dict[str, str], str, float]] = {}

    async def of(self, launch: LaunchRequest, env: Mapping[str, str]) -> dict[str, str]:
        """Versions for the ranks of a launch, by name; empty ones are left out.

        Args:
            env: environment of one rank.
        """
        python = _python(launch, env)
        found = await asyncio.get_running_loop().run_in_executor(None, self._asked, python, env) if python else {}
        return {name: value for name, value in {**found, "driver": _driver()}.items() if value}

    def _asked(self, python: str, env: Mapping[str, str]) -> dict[str, str]:
        key = (python, env.get("PYTHONPATH", ""))
        if (known := self._known.get(key)) is not None and _changed_s(python, known[1]) == known[2]:
            return known[0]
        try:
            done = subprocess.run(
                [python, "-c", _PROBE],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=PROBE_TIMEOUT_S,
                env=env,
                cwd="/",
            )
            found, packages = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return {}  # no Python that runs: the command may not need any
        found["interpreter"] = python
        while len(self._known) >= INTERPRETERS_MAX:
            del self._known[next(iter(self._known))]
        self._known[key] = (found, packages, _changed_s(python, packages))
        return dict(found)


def _python(launch: LaunchRequest, env: Mapping[str, str]) -> str | None:
    """Interpreter of the job: that which it names, or its command does, else the first on its PATH."""
    if launch.python or launch.kind == "elastic":
        try:
            return programs.interpreter(launch.python)
        except FileNotFoundError:  # removed since the ranks started
            return None
    path = env.get("PATH", os.defpath)
    program = launch.argv[0]
    names: Sequence[str] = [program] if _PYTHON.fullmatch(Path(program).name) else ["python", "python3"]
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _changed_s(*paths: str) -> float:
    """Newest change of these files and directories; 0: one is gone."""
    try:
        return max(os.stat(path).st_mtime for path in paths)
    except OSError:
        return 0.0


def _driver() -> str:
    """Version of the loaded NVIDIA driver; empty: none."""
    try:
        return DRIVER.read_text().strip()
    except OSError:
        return ""


def launch_record(
    request: LaunchRequest,
    data: Path,
    gpu_indices: Mapping[str, int],
    gpu_cores: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> LaunchRequest:
    """Launch request as it is remembered: without its secrets.

    Args:
        data: cache directory of data sets, unless the request names one.
        gpu_indices: CUDA index by uuid; empty if uncertain.
        gpu_cores: cores of each GPU's NUMA node, by uuid, to which ranks without cores of their own are pinned.
    """
    return replace(
        request,
        secrets={},
        data_cache=request.data_cache or str(data),
        gpu_indices=dict(gpu_indices),
        ranks=_pinned(request, gpu_cores),
    )


def _pinned(request: LaunchRequest, gpu_cores: Mapping[str, tuple[int, ...]]) -> tuple[RankSpec, ...]:
    """The ranks, those on GPUs pinned to the cores near them: memory of another NUMA node is slower to copy from.

    Nothing is pinned where the job has more cores than are near its GPUs.
    """
    near = {rank.rank: _cores_near(rank, gpu_cores) for rank in request.ranks}
    each = request.cores / max(len(request.ranks), 1)
    crowded = Counter(near.values())
    return tuple(
        replace(rank, device=replace(rank.device, cores=cores))
        if (cores := near[rank.rank]) and max(each, rank.device.threads) * crowded[cores] <= len(cores)
        else rank
        for rank in request.ranks
    )


def _cores_near(rank: RankSpec, gpu_cores: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    uuids = rank.device.uuid.split(",")
    if rank.device.kind != "cuda" or rank.device.cores or not all(uuid in gpu_cores for uuid in uuids):
        return ()
    return tuple(sorted({core for uuid in uuids for core in gpu_cores[uuid]}))


class Launcher:
    """Starts ranks through the fork servers.

    Args:
        tag: returns the tag of an attempt's processes, by attempt name.
        group: returns the control group of an attempt's processes, by attempt name; None: there is none.
        in_background: takes over work that is no longer awaited.
    """

    def __init__(
        self,
        fork_servers: ForkServers,
        tag: Callable[[str], str],
        group: Callable[[str], Path | None],
        in_background: Callable[[Awaitable[object]], None],
    ) -> None:
        self._fork_servers = fork_servers
        self._tag = tag
        self._group = group
        self._in_background = in_background
        self._versions = Versions()

    async def launch(
        self, attempt: Attempt, secrets: dict[str, str], control_socket: Path, snapshot: Path | None
    ) -> dict[str, str]:
        """Start the ranks that were never started, and wait until they run; return the versions that they run with.

        Raises:
            Refused: the working directory, the fork server or the disk of this host prevents it.
        """
        versions = asyncio.ensure_future(self._versions_of(attempt, secrets))  # while the ranks start
        try:
            await self._start_missing(attempt, secrets, control_socket, snapshot)
        except BaseException:
            versions.cancel()
            raise
        return await versions

    async def _start_missing(
        self, attempt: Attempt, secrets: dict[str, str], control_socket: Path, snapshot: Path | None
    ) -> None:
        missing = [spec for spec in attempt.launch.ranks if _never_started(attempt, spec.rank)]
        if not missing:
            return
        try:
            attempt.store()
            loop = asyncio.get_running_loop()
            work = await loop.run_in_executor(None, rank_environment.working_directory, attempt, snapshot)
            for spec in missing:
                attempt.ranks[spec.rank] = Rank(spec.rank)
                rank_environment.write_rank_file(attempt, spec, control_socket)
            if await self._server_is_ready(attempt, missing[0], secrets):
                for spec in missing:
                    if attempt.stopped:
                        return
                    await self._start(attempt, spec, secrets, work, control_socket)
        except SpawnFailed as failed:
            if failed.kind != "no-torch":
                raise Refused(failed.kind, str(failed)) from failed
            for spec in missing:
                _end_without_torch(attempt, attempt.ranks[spec.rank], str(failed))
        except OSError as error:
            kind = "disk-full" if is_disk_full(error) else "host"
            raise Refused(kind, f"cannot launch {attempt.name}: {error}") from error

    async def _versions_of(self, attempt: Attempt, secrets: dict[str, str]) -> dict[str, str]:
        """Versions of what the ranks run with; none if a stop comes first, which must not wait for them."""
        env = rank_environment.variables(attempt, attempt.launch.ranks[0], self._tag(attempt.name), secrets)
        if attempt.launch.container:
            return {"container": attempt.launch.container}
        versions = asyncio.ensure_future(self._versions.of(attempt.launch, env))
        stop = asyncio.ensure_future(attempt.stop_asked.wait())
        await asyncio.wait({versions, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if versions.done():
            return versions.result()
        self._in_background(versions)
        return {}

    async def _server_is_ready(self, attempt: Attempt, spec: RankSpec, secrets: dict[str, str]) -> bool:
        """Wait for the fork server; False if a stop came first, which must not wait for an import of torch."""
        forked = rank_environment.runs_in_fork(attempt.launch)
        python = programs.interpreter(attempt.launch.python) if forked else None
        env = rank_environment.variables(attempt, spec, self._tag(attempt.name), secrets)
        server = asyncio.ensure_future(self._fork_servers.ready(env, python, forked))
        stop = asyncio.ensure_future(attempt.stop_asked.wait())
        try:
            await asyncio.wait({server, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if server.done():
            server.result()
            return not attempt.stopped
        self._in_background(server)  # continues: the next job of this environment finds the server ready
        return False

    async def _start(
        self, attempt: Attempt, spec: RankSpec, secrets: dict[str, str], work: Path, control_socket: Path
    ) -> None:
        launch = attempt.launch
        rank = attempt.ranks[spec.rank]
        forked = rank_environment.runs_in_fork(launch)
        env = rank_environment.variables(attempt, spec, self._tag(attempt.name), secrets)
        argv = rank_environment.forked_argv(launch) if forked else rank_environment.exec_argv(launch, env)
        if launch.container:
            inside = inside_of(attempt, spec, self._tag(attempt.name), env, [*launch.env, *secrets], control_socket)
            argv, env = containers.command(inside, argv)
        threads = env.get("OMP_NUM_THREADS", "")
        tasks = launch.all_tasks // spec.hosts or 1
        if launch.reads_input and attempt.input is None:
            attempt.input = RankInput(attempt.directory / "input")
            os.mkfifo(attempt.input.path, 0o600)
        request = Spawn(
            generation=attempt.generation,
            kind=launch.kind,
            mode="python" if forked else "exec",
            argv=tuple(argv),
            env=env,
            cwd=str(work),
            cores=spec.device.cores,
            threads=int(threads) if threads.isdigit() else 0,
            log=str(attempt.log(rank.rank)),
            state=str(attempt.state_file(rank.rank)),
            stop_marker=str(attempt.stop_marker),
            streams=str(attempt.streams(rank.rank)) if launch.is_attached or launch.all_tasks > 1 else "",
            input=str(attempt.input.path) if attempt.input is not None else "",
            tasks=tasks,
            first_task=tasks * (spec.node or 0),
            all_tasks=launch.all_tasks,
        )
        if launch.output and rank.rank == launch.ranks[0].rank:
            await asyncio.get_running_loop().run_in_executor(None, _send_output, attempt, rank.rank, work)
        group = self._group(attempt.name)
        if group and cgroups.make(group):
            cgroups.limit(group, launch.memory_bytes, launch.cores)
            request = replace(request, cgroup=str(group))
        python = programs.interpreter(launch.python) if forked else None
        await self._fork_servers.spawn(request, python, forked)
        # The rank may have exited, and its exit been recorded, before this line.
        if rank.end is None and (record := attempt.read_rank(rank.rank)):
            rank.take(record)
            if record.state == "exited":
                rank.state, rank.end = "running", record


def inside_of(
    attempt: Attempt, spec: RankSpec, tag: str, env: dict[str, str], named: Iterable[str], control_socket: Path
) -> containers.Inside:
    """Place of a rank in its container.

    Args:
        env: of the rank, on the host.
        named: variables that the job sets.
    """
    agent, _, name = tag.partition("/")
    sockets = (control_socket.parent,) if attempt.launch.kind != "command" else ()
    return containers.Inside(
        launch=attempt.launch,
        rank=spec,
        name=f"clusterd-{agent[:12]}-{name}-{spec.rank}",
        tag=tag,
        env=env,
        named=frozenset(named),
        work=rank_environment.work_of(attempt),
        directories=(attempt.directory, *sockets),
    )


def _send_output(attempt: Attempt, rank: int, work: Path) -> None:
    """Make the log of a rank a link to the file that the job names; what prevents that is the log's first line.

    The file is emptied by a job's first attempt, and the others append to it.
    """
    log, file = attempt.log(rank), work / Path(attempt.launch.output).expanduser()
    if log.is_symlink():
        return  # of an agent that died in the launch
    mode = os.O_APPEND if attempt.attempt > 1 else os.O_TRUNC
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | mode, 0o666)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode) or str(file) == os.devnull
        os.close(descriptor)
        if not is_file:
            raise OSError(errno.EINVAL, "not a file")
        log.symlink_to(file)
    except (OSError, RuntimeError) as error:  # of a home directory that is not known
        why = error.strerror if isinstance(error, OSError) else str(error)
        with open(log, "ab") as own:
            own.write(f"clusterd: output {file}: {why}; it is in clusterd logs alone\n".encode())


def _never_started(attempt: Attempt, number: int) -> bool:
    rank = attempt.ranks.get(number)
    return rank is None or (rank.state == "lost" and attempt.read_rank(number) is None)


def _end_without_torch(attempt: Attempt, rank: Rank, message: str) -> None:
    with open(attempt.log(rank.rank), "ab") as log:
        log.write(f"clusterd: {message}\n".encode())
    attempt.record_end(rank.rank, EXIT_CODE_OF[Reason.NO_TORCH], Reason.NO_TORCH, time.time())
    rank.message = message
    rank.state, rank.end = "running", attempt.read_rank(rank.rank)
