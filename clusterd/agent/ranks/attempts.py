"""Attempts on this host: launched once per generation, adopted from disk, stopped until no process is left."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterd.agent.background_tasks import Background
from clusterd.agent.forkserver import child
from clusterd.agent.forkserver.client import ForkServers
from clusterd.agent.host import attempt_records, cgroups, files, processes, rank_environment
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import Home, read_json, write_json
from clusterd.agent.host.login_environment import LoginEnvironment, clean
from clusterd.agent.log import log_line
from clusterd.agent.ranks import containers, launching, stopping
from clusterd.agent.ranks.reports import STRAGGLER_GRACE_S, Emit, ExitReports
from clusterd.exit_reasons import Reason
from clusterd.protocol.forkserver import RankRecord
from clusterd.protocol.launch import Launched, LaunchRequest, StartedRank
from clusterd.protocol.requests import Stopped

FAILURE_CHARACTERS_MAX = 1 << 14
"""Of a rank's failure message, which goes into the journal."""

StopFlags = Mapping[str, Any]
"""Fields of the stop message for ranks that do something before they exit."""

Ask = Callable[[Attempt, str, float, StopFlags], set[int]]


class Attempts:
    """All attempts on this host, and the ranks in them.

    Args:
        emit: sends an event to the daemon, if one listens.
        ask: sends the stop message to the connected ranks of an attempt; returns their pids.
        before_end: called before an exit report is sent, to send the rank's last progress first.
        preload: module that fork servers of elastic jobs import.
        cgroup_base: control group below which those of attempts are made; None: there is none.
    """

    def __init__(
        self,
        home: Home,
        agent_id: str,
        emit: Emit,
        ask: Ask,
        before_end: Callable[[Attempt], None],
        preload: str,
        cgroup_base: Path | None = None,
    ) -> None:
        self._home = home
        self._agent_id = agent_id
        self._ask = ask
        self._cgroup_base = cgroup_base
        self._known: dict[str, Attempt] = {}
        self.login = LoginEnvironment()
        # Generations that were stopped before their launch arrived; few, so that they stay until the agent restarts.
        self._fences: dict[tuple[str, int], int] = {}
        self._background = Background()
        self._exit_reports = ExitReports(emit, before_end, self.tag, self._background)
        self.fork_servers = ForkServers(home, self._on_exited, preload)
        self.gpu_indices: Mapping[str, int] = {}  # CUDA index by uuid; empty where the numbering is uncertain
        self.gpu_cores: Mapping[str, tuple[int, ...]] = {}  # of each GPU's NUMA node, by uuid
        self._launcher = launching.Launcher(self.fork_servers, self.tag, self._group, self._background.start)

    # ---- look-up -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._known.values()))

    def generations(self, job: str, attempt: int) -> list[Attempt]:
        """All generations of an attempt on this host, the oldest first."""
        found = [known for known in self if (known.job, known.attempt) == (job, attempt)]
        return sorted(found, key=lambda known: known.generation)

    def get(self, job: str, attempt: int, generation: int | None = None) -> Attempt:
        """Return a generation of an attempt, by default the newest; raise `Refused` (``unknown``) if there is none."""
        if generation is not None:
            found = self._known.get(self._home.attempt(job, attempt, generation).name)
        else:
            found = next(reversed(self.generations(job, attempt)), None)
        if found is None:
            raise Refused("unknown", f"attempt {attempt} of {job} was never here, or is forgotten")
        return found

    def any_of(self, job: str, attempt: int) -> list[Attempt]:
        """As `generations`, but raise `Refused` (``unknown``) if this host has none."""
        self.get(job, attempt)
        return self.generations(job, attempt)

    def have_ended(self, job: str, attempt: int) -> bool:
        """True if no generation of the attempt runs, or is being launched, on this host."""
        return not any(known.running or known.lock.locked() for known in self.generations(job, attempt))

    def tag(self, name: str) -> str:
        """Tag of the processes of attempt `name`. The agent's id separates agents that share a machine."""
        return f"{self._agent_id}/{name}"

    def _group(self, name: str) -> Path | None:
        """Control group of attempt `name`; None if this agent cannot make any."""
        return cgroups.group_of(self._cgroup_base, self._agent_id, name) if self._cgroup_base else None

    @property
    def running(self) -> list[str]:
        """Names of attempts with a running rank or an unfinished sweep."""
        return [attempt.name for attempt in self if attempt.running]

    def admit(self, job: str, attempt: int, generation: int, rank: int, token: str) -> Attempt:
        """Return the attempt of a rank that sends hello.

        Raises:
            Refused: no such rank, an older generation, or a wrong token.
        """
        found = self.get(job, attempt, generation)
        known = found.ranks.get(rank)
        if known is not None and not hmac.compare_digest(known.token.encode(), token.encode()):
            raise Refused("token", f"rank {rank} of {found.name} shows a wrong token")
        if generation != found.generation or known is None:
            raise Refused(
                "stale", f"rank {rank} of {found.name} is of generation {generation}, now is {found.generation}"
            )
        return found

    # ---- adoption ------------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Adopt the attempts of an earlier agent.

        Records are read before connecting to the fork servers and again after, to find ranks that exited in between.
        """
        for directory in sorted(self._home.attempts.iterdir()):
            if attempt := attempt_records.load(directory):
                self._known[attempt.name] = attempt
        await self.fork_servers.adopt()
        tags, marks = processes.tags(self.tag("")), processes.marks()
        for attempt in self:
            tag = self.tag(attempt.name)
            if not attempt.running:
                if tag in tags or processes.mark_of(tag) in marks or any(map(cgroups.is_populated, attempt.cgroups)):
                    self._finish_sweep(attempt)
            elif attempt.stopped:  # the earlier agent died while it stopped this attempt
                attempt.grace_s = attempt.launch.grace_s
                attempt.stopping = asyncio.create_task(self._stop(attempt, "stopped"))
            else:
                self._exit_reports.poll(attempt)

        self._background.start(self._end_orphaned_containers())  # its runtime may hang

    async def _end_orphaned_containers(self) -> None:
        """End containers that an earlier agent left, of attempts that are over or of which nothing is known."""
        for runtime in containers.OUTLIVE_CLIENTS:
            for tag in await containers.tags(self.tag(""), runtime):
                attempt = self._known.get(tag.removeprefix(self.tag("")))
                if attempt is None:
                    await containers.remove(tag, runtime)
                elif not attempt.running and not attempt.lock.locked():
                    self._finish_sweep(attempt)

    def _finish_sweep(self, attempt: Attempt) -> None:
        """Sweep an attempt whose agent died between the last rank's exit and the sweep."""
        for rank in attempt.ranks.values():
            record = attempt.read_rank(rank.rank)
            rank.end = record if record and record.state == "exited" else rank.lost(time.time())
            rank.state = "running"
        self._exit_reports.flush(attempt)

    def poll(self) -> None:
        """Detect ranks and fork servers that exited without a report. Called once a second."""
        self.fork_servers.reap()
        for attempt in self:
            if attempt.running and not attempt.lock.locked():
                self._exit_reports.poll(attempt)

    def _on_exited(self, state: str, record: RankRecord) -> None:
        path = Path(state)
        attempt = self._known.get(path.parent.name)
        number = path.name.removeprefix("rank-").removesuffix(".state.json")
        if attempt is None or not number.isdigit() or record.generation != attempt.generation:
            return
        rank = attempt.ranks.get(int(number))
        if rank is not None:
            self._exit_reports.add(attempt, rank, record)

    # ---- launch --------------------------------------------------------------------------------------------------

    async def launch(self, request: LaunchRequest, control_socket: Path, snapshot: Path | None) -> Launched:
        """Start the ranks of a generation; return the pids and start times of all of them.

        The launch, without its secrets and variables, is on disk before the first process starts. A repeated request
        starts only the ranks that were never started, as after an agent died during the launch.

        Raises:
            Refused: ``stale`` (the generation was stopped), ``login`` (its profile fails), ``environment`` or
                ``workdir`` (not on this host, or the directory belongs to another job), ``disk-full``.
        """
        launch = launching.launch_record(request, self._home.root / "data", self.gpu_indices, self.gpu_cores)
        directory = self._home.attempt(launch.job, launch.attempt, launch.generation)
        attempt = self._known.get(directory.name)
        if attempt is None:
            newest = max((known.generation for known in self.generations(launch.job, launch.attempt)), default=0)
            fence = max(newest, self._fences.get((launch.job, launch.attempt), 0))
            if fence >= launch.generation:
                raise Refused(
                    "stale", f"generation {launch.generation} of {directory.name} came after {fence}, or its stop"
                )
            rank_environment.check(launch)
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            attempt = self._known[directory.name] = Attempt(directory, launch)
        elif attempt.launch.born_s != launch.born_s:
            cause = "its id was given out again, as after a cluster's state was restored from a backup"
            raise Refused("environment", f"{directory.name} of another job is on this host: {cause}")
        attempt.launch = replace(attempt.launch, env=launch.env)
        await self.log_in(attempt)  # outside of the lock, for which a stop waits
        versions: dict[str, str] = {}
        async with attempt.lock:
            if attempt.stopped and not attempt.ranks:
                raise Refused(
                    "stale", f"generation {attempt.generation} of {attempt.name} was stopped before it started"
                )
            if not attempt.stopped:
                try:
                    # Under the lock, which holds exit reports back: they must not arrive before this launch's reply.
                    versions = await self._launcher.launch(attempt, request.secrets, control_socket, snapshot)
                except Refused:
                    if attempt.running:
                        self._background.start(self._abandon(attempt))
                    raise
        self._exit_reports.flush(attempt)
        self._exit_reports.repeat(attempt)
        started = tuple(StartedRank(r.rank, r.pid, r.start_time) for r in attempt.ranks.values())
        return Launched(started, versions)

    async def log_in(self, attempt: Attempt) -> None:
        """Give an attempt the variables of the newest login, or those of a clean environment."""
        is_clean = attempt.launch.clean_env or attempt.launch.container
        attempt.login = clean() if is_clean else (await self.login.get()).variables

    async def _abandon(self, attempt: Attempt) -> None:
        """Stop the ranks that a failed launch had started."""
        reason = "the launch failed"
        self._mark_stopped(attempt, reason)
        attempt.grace_s = 0.0
        await self._stop(attempt, reason)

    # ---- stop ----------------------------------------------------------------------------------------------------

    def _mark_stopped(self, attempt: Attempt, reason: str) -> None:
        """Record the stop before the first signal, for exit reasons and for a launch in progress.

        The marker is on disk for the fork server and for the next agent. If the disk is full, the stop is recorded in
        memory only: the job that filled the disk must be stoppable too.
        """
        now_s = time.time()
        marker = read_json(attempt.stop_marker) or {}
        if int(marker.get("generation", 0)) < attempt.generation:
            try:
                write_json(attempt.stop_marker, {"generation": attempt.generation, "reason": reason, "at_s": now_s})
            except OSError as error:
                log_line(f"agent: cannot write {attempt.stop_marker}: {error}")
                attempt.unmarked_stop_s = attempt.unmarked_stop_s or now_s
        attempt.stop_asked.set()

    async def stop(
        self, job: str, attempt: int, generation: int, grace_s: float, reason: str, flags: StopFlags
    ) -> Stopped:
        """Stop one generation of the attempt; return once no process carries its tag.

        A repeated call may shorten the grace. For an unknown attempt, only processes with its tag are killed.

        Args:
            flags: requests to ranks that support them, before they exit: `keep` the state of the last step in this
                host's memory; be `done`, and write the trained result; `save` a checkpoint.
        """
        directory = self._home.attempt(job, attempt, generation)
        known = self._known.get(directory.name)
        if known is None:
            self._fences[job, attempt] = max(generation, self._fences.get((job, attempt), 0))
            group = self._group(directory.name)
            groups = {group} if group else set()
            tag = self.tag(directory.name)
            swept = await stopping.sweep(tag, min(grace_s, STRAGGLER_GRACE_S), groups=groups)
            return Stopped((), tuple(swept))
        self._mark_stopped(known, reason)
        if known.stopping is None or known.stopping.done():
            known.grace_s = grace_s
            known.stopping = asyncio.create_task(self._stop(known, reason, flags))
        else:
            known.grace_s = min(known.grace_s, grace_s)
        # A broken connection of the caller does not cancel the stop.
        swept = await asyncio.shield(known.stopping)
        return Stopped(known.rank_rows, tuple(swept))

    async def _stop(self, attempt: Attempt, reason: str, flags: StopFlags | None = None) -> list[int]:
        async with attempt.lock:
            if attempt.is_paused:
                with contextlib.suppress(Refused):  # what is frozen hears no request to end; it is removed at last
                    await self.signal(attempt, signal.SIGCONT, set())
            swept = await stopping.end_ranks(
                lambda: self._leaders(attempt),
                attempt.sessions,
                self.tag(attempt.name),
                attempt.cgroups,
                lambda: attempt.grace_s,
                lambda: self._ask(attempt, reason, attempt.grace_s, flags or {}),
                lambda pid, start_time, seconds: _show_threads(attempt, pid, start_time, seconds),
            )
            await containers.remove(self.tag(attempt.name), containers.runtime_of(attempt.launch.container))
            for rank in attempt.ranks.values():
                if rank.state == "running" and rank.end is None:
                    rank.end = await self._exit_reports.wait_for(attempt, rank)
                elif rank.state == "lost" and rank.pid == 0:  # its start was cancelled
                    rank.state, rank.reason, rank.at_s = "exited", Reason.STOPPED, time.time()
            self._exit_reports.report_all(attempt)
            return swept

    def _leaders(self, attempt: Attempt) -> list[tuple[int, int]]:
        return [
            (rank.pid, rank.start_time)
            for rank in attempt.ranks.values()
            if rank.state == "running" and rank.end is None and processes.lives(rank.pid, rank.start_time, rank.boot_id)
        ]

    async def signal(self, attempt: Attempt, number: int, others: Set[int], first_only: bool = False) -> None:
        """Send a signal to the processes in the sessions of an attempt's ranks.

        Those that left these sessions, as workers of torchrun do, are stopped and continued too, but for those in
        `others`: sessions of what people run beside the ranks. So are containers: their client passes no stop on.

        Raises:
            Refused: ``container``: the runtime cannot pause it.
        """
        for pid, start_time in self._leaders(attempt):
            stopping.signal_session(pid, start_time, number, first_only)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in processes.of_attempt(self.tag(attempt.name)):
                if (found := processes.stat(pid)) and found.session not in others:
                    processes.send(pid, found.start_time, number)
            attempt.is_paused = number == signal.SIGSTOP
            runtime = containers.runtime_of(attempt.launch.container)
            await containers.set_paused(self.tag(attempt.name), runtime, attempt.is_paused)

    async def forget(self, job: str, attempt: int) -> int:
        """Remove an attempt's files; return the bytes freed.

        Raises:
            Refused: the attempt still runs.
        """
        freed = 0
        for found in self.generations(job, attempt):
            async with found.lock:
                if found.running:
                    raise Refused("busy", f"{found.name} still runs here; stop it first")
                if found.input is not None:
                    found.input.close()
                del self._known[found.name]
                loop = asyncio.get_running_loop()
                freed += await loop.run_in_executor(None, files.remove_tree, found.directory)
        return freed

    def failed(self, attempt: Attempt, rank: int, reason: str, message: str) -> None:
        """Store a rank's failure message for its exit report."""
        reason, message = reason[:FAILURE_CHARACTERS_MAX], message[:FAILURE_CHARACTERS_MAX]
        attempt.ranks[rank].message = message
        file = attempt.directory / f"rank-{rank}.failed.json"
        try:
            write_json(file, {"reason": reason, "message": message})
        except OSError as error:
            log_line(f"agent: cannot write {file}: {error}")

    async def settle(self) -> None:
        """Wait for sweeps in progress before this agent exits."""
        await self._background.wait()


def _show_threads(attempt: Attempt, pid: int, start_time: int, seconds: float) -> None:
    """Dump the threads of a rank that ignored a stop request into its log."""
    rank = next((rank for rank in attempt.ranks.values() if rank.pid == pid), None)
    if rank is None or not rank_environment.runs_in_fork(attempt.launch):
        return
    try:
        with open(attempt.log(rank.rank), "ab") as log:
            log.write(f"\nclusterd: did not stop within {seconds:.1f} s of being asked; its threads now:\n".encode())
    except OSError as error:
        log_line(f"agent: cannot write {attempt.log(rank.rank)}: {error}")
    processes.send(pid, start_time, child.SHOW_THREADS)
