"""Handlers of a daemon's requests, one per verb. The `server` module handles the connections."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from clusterd.agent.background_tasks import in_thread
from clusterd.agent.host import checks, files
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import Home, read_json
from clusterd.agent.host.ports import Ports
from clusterd.agent.host.workdirs import Workdirs
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.ranks.environments import Environments
from clusterd.agent.ranks.reports import Progress
from clusterd.agent.ranks.terminals import READ_WAIT_S, Terminals
from clusterd.agent.tensors.datasets import Datasets, evict_cached_files
from clusterd.agent.tensors.moves import Moves
from clusterd.protocol import control
from clusterd.protocol import requests as r
from clusterd.protocol.launch import Launched, LaunchRequest
from clusterd.protocol.messages import Done, Event, Request, read_event

Handlers = dict[type[Request[Any]], Callable[[Any], Awaitable[object]]]
ToRanks = r.MoveRanks | r.QuiesceRanks | r.AbortRanks | r.ResumeRanks | r.SendToRanks


def handlers_of(server: object) -> Handlers:
    """Methods of a server that take a `request`, by its type."""
    found = {}
    for name, function in vars(type(server)).items():
        if "request" in getattr(function, "__annotations__", ()):
            found[get_type_hints(function)["request"]] = getattr(server, name)
    return found


class Verbs:
    """Handlers of requests: each takes a checked `request` and returns the reply."""

    def __init__(
        self,
        home: Home,
        attempts: Attempts,
        progress: Progress,
        workdirs: Workdirs,
        datasets: Datasets,
        moves: Moves,
        ports: Ports,
        terminals: Terminals,
        environments: Environments,
    ) -> None:
        self._home, self._attempts, self._progress = home, attempts, progress
        self._workdirs, self._datasets, self._moves, self._ports = workdirs, datasets, moves, ports
        self._terminals, self._environments = terminals, environments

    async def _launch(self, request: LaunchRequest) -> Launched:
        snapshot = self._workdirs.need(request.snapshot) if request.snapshot else None
        if request.move is not None:
            self._moves.admit(request.move)
        # No await before this: a hello on a newer connection either reports this attempt, or prevents it.
        launched = await self._attempts.launch(request, self._home.rank_socket, snapshot)
        if request.datasets:
            await in_thread(lambda: evict_cached_files(self._home.root / "data"), "data")
        return launched

    async def _build_environment(self, request: r.BuildEnvironment) -> r.BuiltEnvironment:
        # No await before this: a stop that came after the request must find it.
        snapshot = self._workdirs.need(request.snapshot) if request.snapshot else None
        return await self._environments.build(request, snapshot)

    async def _stop(self, request: r.StopRanks) -> r.Stopped:
        await self._environments.cancel(request.job, request.attempt, request.generation)
        report = await self._attempts.stop(
            request.job,
            request.attempt,
            request.generation,
            request.grace_s,
            request.reason,
            {"keep": request.keep, "done": request.done, "save": request.save},
        )
        if self._attempts.have_ended(request.job, request.attempt):
            self._moves.end(request.job, request.attempt)
        return report

    async def _forget(self, request: r.ForgetAttempt) -> r.Forgotten:
        generations = self._attempts.generations(request.job, request.attempt)
        freed = await self._attempts.forget(request.job, request.attempt)
        names = {attempt.name for attempt in generations}
        self._datasets.forget(f"{request.job}.{request.attempt}")
        for attempt in generations:
            self._progress.forget(attempt.name)
            self._moves.forget(attempt)
        self._ports.release(lambda owner, _generation, _age_s: owner in names)
        return r.Forgotten(freed)

    async def _logs(self, request: r.ReadLog) -> r.Chunk:
        attempt = self._attempts.get(request.job, request.attempt, request.generation)
        if request.rank not in attempt.ranks:
            here = f"here are {sorted(attempt.ranks)}"
            raise Refused("unknown", f"rank {request.rank} of {attempt.name} is not on this host; {here}")
        # Read before the file, which then holds all of the rank's output.
        ended = attempt.ranks[request.rank].state != "running"
        file = attempt.streams(request.rank) if request.streams else attempt.log(request.rank)
        return files.pull(file, request.offset, request.limit, ended)

    async def _input(self, request: r.WriteInput) -> Done:
        attempt = self._attempts.get(request.job, request.attempt, request.generation)
        if attempt.input is None:
            raise Refused("input", f"the agent was restarted before {attempt.name} had all of its input")
        if not await attempt.input.write(request.data, request.offset, request.end, lambda: attempt.running):
            raise Refused("input", f"an earlier attempt took the first {request.offset} bytes of its input")
        return Done()

    async def _signal(self, request: r.SignalRanks) -> Done:
        attempt = self._attempts.get(request.job, request.attempt, request.generation)
        await self._attempts.signal(attempt, request.number, self._terminals.sessions, request.first_only)
        return Done()

    async def _steps(self, request: r.ReadSteps) -> r.Chunk:
        attempt = self._attempts.get(request.job, request.attempt, request.generation)
        ended = not attempt.running
        return files.pull(attempt.steps, request.offset, request.limit, ended)

    async def _record(self, request: r.ReadRecord) -> r.Record:
        return r.Record(self._attempts.get(request.job, request.attempt, request.generation).launch.record)

    async def _files(self, request: r.ListFiles) -> r.Files:
        found = self._attempts.any_of(request.job, request.attempt)
        return await in_thread(lambda: files.written(found, self._submitted(found), request.after), "files")

    def _submitted(self, generations: list[Attempt]) -> Path | None:
        """The unpacked workdir of which an attempt got a copy; None: it submitted none."""
        digest = generations[-1].launch.snapshot
        return self._workdirs.path(digest) if digest else None

    async def _file(self, request: r.ReadFile) -> r.FileChunk:
        found = self._attempts.any_of(request.job, request.attempt)
        path = os.fsdecode(request.name) or request.path
        if request.written:
            await in_thread(lambda: files.refuse_submitted(found, self._submitted(found), path), "files")
        return await in_thread(lambda: files.read(found, path, request.offset, request.limit), "files")

    async def _model(self, request: r.ReadModel) -> r.Model:
        attempt = self._attempts.get(request.job, request.attempt, request.generation)
        return r.Model(read_json(attempt.directory / "model.json"))

    async def _has_workdir(self, request: r.HasWorkdir) -> r.Has:
        return r.Has(self._workdirs.has(request.digest))

    async def _put_workdir(self, request: r.PutWorkdir) -> Done:
        put = (request.digest, request.offset, request.data, request.last)
        await asyncio.get_running_loop().run_in_executor(None, self._workdirs.put, *put)
        return Done()

    async def _port(self, request: r.LeasePort) -> r.Port:
        name = self._home.attempt(request.job, request.attempt, request.generation).name
        return r.Port(self._ports.lease(name, request.generation))

    async def _keep_replica(self, request: r.KeepReplica) -> r.Step:
        return await self._moves.replicas.keep(request)

    async def _replica_is_done(self, request: r.ReplicaIsDone) -> Done:
        self._moves.replicas.confirm(request.name)
        return Done()

    async def _admit_readers(self, request: r.AdmitReaders) -> r.Port:
        self._moves.admit_reader(request.set, request.token)
        return self._moves.serve(request.address)

    async def _serve_dataset(self, request: r.ServeDataset) -> r.Port:
        self._datasets.serve(request.token, request.dataset, request.path)
        return self._moves.serve(request.address)

    async def _set_datasets(self, request: r.SetDatasets) -> Done:
        self._datasets.know(f"{request.job}.{request.attempt}", request.datasets)
        return Done()

    async def _serve_segments(self, request: r.ServeSegments) -> r.Port:
        return self._moves.serve(request.address)

    async def _check(self, request: r.CheckHost) -> r.HostCheck:
        self._attempts.login.renew()
        found = await in_thread(lambda: checks.check(request.peers, request.python, request.gpus), "check")
        fault, note = "", ""
        try:
            note = (await self._attempts.login.get()).note
        except Refused as refused:
            fault = str(refused)
        free = shutil.disk_usage(self._home.root).free
        return replace(found, disk_free_bytes=free, login_fault=fault, login_note=note)

    async def _move(self, request: r.MoveRanks) -> r.Receivers:
        return self._forward(request, control.BeginMigration(request.move))

    async def _quiesce(self, request: r.QuiesceRanks) -> r.Receivers:
        return self._forward(request, control.Quiesce(request.move))

    async def _abort(self, request: r.AbortRanks) -> r.Receivers:
        return self._forward(request, control.Abort(request.move))

    async def _resume(self, request: r.ResumeRanks) -> r.Receivers:
        if request.record:
            self._attempts.get(request.job, request.attempt, request.generation).keep_record(request.record)
        return self._forward(request, control.Resume(request.move))

    async def _send_to_ranks(self, request: r.SendToRanks) -> r.Receivers:
        return self._forward(request, read_event(control.TO_RANKS, request.message))

    def _forward(self, asked: ToRanks, event: Event) -> r.Receivers:
        attempt = self._attempts.get(asked.job, asked.attempt, asked.generation)
        return self._moves.forward(attempt, event)

    async def _drop(self, request: r.DropMigration) -> Done:
        await asyncio.get_running_loop().run_in_executor(None, self._moves.drop, request.move)
        return Done()

    async def _open_terminal(self, request: r.OpenTerminal) -> r.Terminal:
        attempt = self._attempts.get(request.job, request.attempt, request.generation)
        tag = self._attempts.tag(attempt.name)
        variables = {**request.env, **request.secrets}
        if not attempt.login:  # an earlier agent launched it
            await self._attempts.log_in(attempt)
        name = await self._terminals.open(attempt, request.rank, request.argv, tag, variables, request.screen)
        return r.Terminal(name)

    async def _open_port(self, request: r.OpenPort) -> r.Terminal:
        attempt = self._attempts.get(request.job, request.attempt, request.generation)
        return r.Terminal(await self._terminals.open_port(attempt, request.rank, request.port))

    async def _read_terminal(self, request: r.ReadTerminal) -> r.Output:
        return await self._terminals.get(request.terminal).read(READ_WAIT_S)

    async def _write_terminal(self, request: r.WriteTerminal) -> Done:
        terminal = self._terminals.get(request.terminal)
        if request.screen is not None:
            terminal.resize(request.screen)
        await terminal.write(request.data or b"")
        if request.end:
            terminal.end_input()
        return Done()

    async def _hold_terminal(self, request: r.HoldTerminal) -> Done:
        self._terminals.get(request.terminal)
        return Done()

    async def _close_terminal(self, request: r.CloseTerminal) -> Done:
        self._terminals.close(request.terminal)
        return Done()
