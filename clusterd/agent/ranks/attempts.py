"""Attempts on this host: launched once per generation, adopted from disk, stopped until nothing is left."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterd.agent.background_tasks import Background
from clusterd.agent.forkserver import child
from clusterd.agent.forkserver.client import Spawners
from clusterd.agent.host import attempt_records, disk, processes, rank_environment
from clusterd.agent.host.attempt_records import Attempt, Refused, Report
from clusterd.agent.host.home import Home, read_json, write_json
from clusterd.agent.log import say
from clusterd.agent.ranks import launching, stopping
from clusterd.agent.ranks.exit_reports import STRAGGLER_GRACE_S, Emit, Ends

Ask = Callable[[Attempt, str, float, Mapping[str, bool]], set[int]]


class Attempts:
    """All attempts on this host, and the ranks in them.

    Args:
        emit: sends an event to the daemon, if one listens.
        ask: sends the stop message to the ranks of an attempt that are connected; returns their pids.
        before_end: called before the end of a rank is told, to tell first what it had still written.
    """

    def __init__(
        self, home: Home, agent_id: str, emit: Emit, ask: Ask, before_end: Callable[[Attempt], None], preload: str
    ) -> None:
        self._home = home
        self._agent_id = agent_id
        self._ask = ask
        self._known: dict[str, Attempt] = {}
        self._fences: dict[tuple[str, int], int] = {}  # generations that were stopped before they came
        self._background = Background()
        self._ends = Ends(emit, before_end, self.tag, self._background)
        self.spawners = Spawners(home, self._on_exited, preload)
        self.gpu_indices: Mapping[str, int] = {}  # as CUDA counts them, by uuid; none where that is not certain
        self._launcher = launching.Launcher(self.spawners, self.tag, self._background.start)

    # ---- what there is -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._known.values()))

    def generations(self, job: str, attempt: int) -> list[Attempt]:
        """All that this host has of an attempt, the oldest first."""
        found = [known for known in self if (known.job, known.attempt) == (job, attempt)]
        return sorted(found, key=lambda known: known.generation)

    def get(self, job: str, attempt: int, generation: int | None = None) -> Attempt:
        """A generation of an attempt, or the newest; raises `Refused` (``unknown``) where this host has none."""
        if generation is not None:
            found = self._known.get(self._home.attempt(job, attempt, generation).name)
        else:
            found = next(reversed(self.generations(job, attempt)), None)
        if found is None:
            raise Refused("unknown", f"attempt {attempt} of {job} was never here, or is forgotten")
        return found

    def any_of(self, job: str, attempt: int) -> list[Attempt]:
        """As `generations`; raises `Refused` (``unknown``) where this host has none."""
        self.get(job, attempt)
        return self.generations(job, attempt)

    def are_over(self, job: str, attempt: int) -> bool:
        """Whether no generation of the attempt runs here, or is about to."""
        return not any(known.running or known.lock.locked() for known in self.generations(job, attempt))

    def tag(self, name: str) -> str:
        """What marks the processes of attempt `name`. The agent's id tells apart agents that share a machine."""
        return f"{self._agent_id}/{name}"

    @property
    def running(self) -> list[str]:
        """Names of attempts with a rank that runs, or a sweep under way."""
        return [attempt.name for attempt in self if attempt.running]

    def admit(self, job: str, attempt: int, generation: int, rank: int, token: str) -> Attempt:
        """The attempt of a rank that says hello.

        Raises:
            Refused: no such rank, an older generation, or a wrong token.
        """
        found = self.get(job, attempt, generation)
        if not hmac.compare_digest(found.token.encode(), token.encode()):
            raise Refused("token", f"rank {rank} of {found.name} shows a wrong token")
        if generation != found.generation or rank not in found.ranks:
            raise Refused(
                "stale", f"rank {rank} of {found.name} is of generation {generation}, now is {found.generation}"
            )
        return found

    # ---- adoption ------------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Take over what an earlier agent left: read, then listen, then read again what may have ended between."""
        for directory in sorted(self._home.attempts.iterdir()):
            if attempt := attempt_records.load(directory):
                self._known[attempt.name] = attempt
        await self.spawners.adopt()
        left = processes.tags(self.tag(""))
        for attempt in self:
            if not attempt.running:
                if self.tag(attempt.name) in left:
                    self._end_again(attempt)
            elif attempt.stopped:  # the agent died while it stopped this one
                attempt.grace_s = float(attempt.launch.get("grace_s") or 0.0)
                attempt.stopping = asyncio.create_task(self._stop(attempt, "stopped"))
            else:
                self._ends.look(attempt)

    def _end_again(self, attempt: Attempt) -> None:
        """The agent before died after the last rank and before the sweep: the attempt ends when that is done."""
        for rank in attempt.ranks.values():
            record = attempt.read_rank(rank.rank)
            rank.end = record if record and record["state"] == "exited" else rank.lost(time.time())
            rank.state = "running"
        self._ends.settle(attempt)

    def look_after(self) -> None:
        """Once a second: find ranks that ended without anyone to tell, and fork servers that did."""
        self.spawners.wait_for_ended()
        for attempt in self:
            if attempt.running and not attempt.lock.locked():
                self._ends.look(attempt)

    def _on_exited(self, state: str, record: dict[str, Any]) -> None:
        path = Path(state)
        attempt = self._known.get(path.parent.name)
        number = path.name.removeprefix("rank-").removesuffix(".state.json")
        if attempt is None or not number.isdigit() or record["generation"] != attempt.generation:
            return
        rank = attempt.ranks.get(int(number))
        if rank is not None:
            self._ends.came(attempt, rank, record)

    # ---- launch --------------------------------------------------------------------------------------------------

    async def launch(self, request: dict[str, Any], control_socket: Path, snapshot: Path | None) -> Report:
        """Start the ranks of a new generation, or report those of this one.

        Everything but the secrets is on disk before the first process is. A repeat of the same request starts only what
        was never started, as after an agent that died half-way.

        Raises:
            Refused: ``stale`` (a generation that was stopped), ``environment`` or ``workdir`` (not on this host, or
                another job's are), ``disk-full``.
        """
        secrets = {str(k): str(v) for k, v in (request.get("secrets") or {}).items()}
        launch = launching.kept(request, self._home.root / "data", self.gpu_indices)
        directory = self._home.attempt(launch["job"], launch["attempt"], launch["generation"])
        attempt = self._known.get(directory.name)
        if attempt is None:
            newest = max((known.generation for known in self.generations(launch["job"], launch["attempt"])), default=0)
            fence = max(newest, self._fences.get((launch["job"], launch["attempt"]), 0))
            if fence >= launch["generation"]:
                raise Refused(
                    "stale", f"generation {launch['generation']} of {directory.name} came after {fence}, or its stop"
                )
            rank_environment.check(launch)
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            attempt = self._known[directory.name] = Attempt(directory, launch)
        elif (attempt.launch.get("born_s") or 0.0) != (launch["born_s"] or 0.0):
            said = "its id was given out again, as after a cluster's state was restored from a backup"
            raise Refused("environment", f"{directory.name} of another job is on this host: {said}")
        async with attempt.lock:
            if attempt.stopped and not attempt.ranks:
                raise Refused(
                    "stale", f"generation {attempt.generation} of {attempt.name} was stopped before it started"
                )
            if not attempt.stopped:
                try:
                    await self._launcher.start_missing(attempt, secrets, control_socket, snapshot)
                except Refused:
                    if attempt.running:
                        self._background.start(self._abandon(attempt))
                    raise
        self._ends.settle(attempt)
        return {"ranks": [{"rank": r.rank, "pid": r.pid, "start_time": r.start_time} for r in attempt.ranks.values()]}

    async def _abandon(self, attempt: Attempt) -> None:
        """End what a launch that failed half-way had started."""
        reason = "the launch failed"
        self._mark_stopped(attempt, reason)
        attempt.grace_s = 0.0
        await self._stop(attempt, reason)

    # ---- stop ----------------------------------------------------------------------------------------------------

    def _mark_stopped(self, attempt: Attempt, reason: str) -> None:
        """Before the first signal: a rank's end is judged by it, and a launch that is under way heeds it.

        On disk for its fork server and the next agent. Where the disk is full, this agent's memory has to do: the job
        that filled it is to be stopped, too.
        """
        now_s = time.time()
        marker = read_json(attempt.stop_marker) or {}
        if int(marker.get("generation", 0)) < attempt.generation:
            try:
                write_json(attempt.stop_marker, {"generation": attempt.generation, "reason": reason, "at_s": now_s})
            except OSError as error:
                say(f"agent: cannot write {attempt.stop_marker}: {error}")
                attempt.unmarked_stop_s = attempt.unmarked_stop_s or now_s
        attempt.stop_asked.set()

    async def stop(
        self, job: str, attempt: int, generation: int, grace_s: float, reason: str, wishes: Mapping[str, bool]
    ) -> Report:
        """End one generation of the attempt; returns when nothing that carries its tag is left.

        Asked once more meanwhile, it may cut the grace short. Of something unknown, only what carries its tag is looked
        for.

        Args:
            wishes: of ranks that can, before they end: `keep` the state of their last step in this host's memory; be
                `done`, and write what they trained for.
        """
        directory = self._home.attempt(job, attempt, generation)
        known = self._known.get(directory.name)
        if known is None:
            self._fences[job, attempt] = max(generation, self._fences.get((job, attempt), 0))
            return {
                "ranks": [],
                "swept": await stopping.sweep(self.tag(directory.name), min(grace_s, STRAGGLER_GRACE_S)),
            }
        self._mark_stopped(known, reason)
        if known.stopping is None or known.stopping.done():
            known.grace_s = grace_s
            known.stopping = asyncio.create_task(self._stop(known, reason, wishes))
        else:
            known.grace_s = min(known.grace_s, grace_s)
        # A caller whose connection breaks does not call the stop off.
        swept = await asyncio.shield(known.stopping)
        return {"ranks": [known.ranks[rank].report() for rank in sorted(known.ranks)], "swept": swept}

    async def _stop(self, attempt: Attempt, reason: str, wishes: Mapping[str, bool] | None = None) -> list[int]:
        async with attempt.lock:
            swept = await stopping.end_ranks(
                lambda: self._leaders(attempt),
                attempt.sessions,
                self.tag(attempt.name),
                lambda: attempt.grace_s,
                lambda: self._ask(attempt, reason, attempt.grace_s, wishes or {}),
                lambda pid, start_time, seconds: _show_threads(attempt, pid, start_time, seconds),
            )
            for rank in attempt.ranks.values():
                if rank.state == "running" and rank.end is None:
                    rank.end = await self._ends.wait_for(attempt, rank)
                elif rank.state == "lost" and rank.pid == 0:  # its start was called off
                    rank.state, rank.reason, rank.at_s = "exited", "stopped", time.time()
            self._ends.tell_all(attempt)
            return swept

    def _leaders(self, attempt: Attempt) -> list[tuple[int, int]]:
        return [
            (rank.pid, rank.start_time)
            for rank in attempt.ranks.values()
            if rank.state == "running" and rank.end is None and processes.lives(rank.pid, rank.start_time, rank.boot_id)
        ]

    async def forget(self, job: str, attempt: int) -> int:
        """Remove what is on disk of an attempt; how many bytes that were.

        Raises:
            Refused: it runs.
        """
        freed = 0
        for found in self.generations(job, attempt):
            async with found.lock:
                if found.running:
                    raise Refused("busy", f"{found.name} still runs here; stop it first")
                del self._known[found.name]
                loop = asyncio.get_running_loop()
                freed += await loop.run_in_executor(None, disk.remove, found.directory)
        return freed

    def failed(self, attempt: Attempt, rank: int, reason: str, message: str) -> None:
        """Keep what a rank says about its failure, for the report of its end."""
        attempt.ranks[rank].message = message
        file = attempt.directory / f"rank-{rank}.failed.json"
        try:
            write_json(file, {"reason": reason, "message": message})
        except OSError as error:
            say(f"agent: cannot write {file}: {error}")

    async def settle(self) -> None:
        """Wait for sweeps that are under way, before this agent ends."""
        await self._background.wait()


def _show_threads(attempt: Attempt, pid: int, start_time: int, seconds: float) -> None:
    """Into the log of a rank that goes on though it was asked to stop: where it hangs, if it does."""
    rank = next((rank for rank in attempt.ranks.values() if rank.pid == pid), None)
    if rank is None or not rank_environment.runs_in_fork(attempt.launch):
        return
    try:
        with open(attempt.log(rank.rank), "ab") as log:
            log.write(f"\nclusterd: did not stop within {seconds:.1f} s of being asked; its threads now:\n".encode())
    except OSError as error:
        say(f"agent: cannot write {attempt.log(rank.rank)}: {error}")
    processes.send(pid, start_time, child.SHOW_THREADS)
