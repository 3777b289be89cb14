"""Handlers of a daemon's requests, one per verb. The `server` module handles the connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from clusterd.agent.host import append_only_files, checks, files
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import Home, read_json
from clusterd.agent.host.ports import Ports
from clusterd.agent.host.workdirs import Workdirs
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.ranks.progress import Progress
from clusterd.agent.ranks.terminals import Terminals
from clusterd.agent.server.connection import Message
from clusterd.agent.tensors.datasets import Datasets, evict_cached_files
from clusterd.agent.tensors.moves import Moves
from clusterd.agent.threads import in_thread
from clusterd.protocol.codec import from_map
from clusterd.protocol.control import TO_RANKS, BeginMigration
from clusterd.protocol.launch import DatasetSpec, LaunchRequest
from clusterd.protocol.messages import read_event
from clusterd.protocol.migration import MigrationRequest

Verb = Callable[[Message], Awaitable[Message]]


class Verbs:
    """Table of handlers: each takes the request message and returns the reply."""

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
    ) -> None:
        self._home, self._attempts, self._progress = home, attempts, progress
        self._workdirs, self._datasets, self._moves, self._ports = workdirs, datasets, moves, ports
        self._terminals = terminals

    @property
    def table(self) -> dict[str, Verb]:
        """Handlers by verb, as on the wire."""
        return {
            "launch": self._launch,
            "stop": self._stop,
            "forget": self._forget,
            "logs": self._logs,
            "steps": self._steps,
            "files": self._files,
            "file": self._file,
            "model": self._model,
            "snapshot_has": self._snapshot_has,
            "snapshot_put": self._snapshot_put,
            "port": self._port,
            "fabric": self._fabric,
            "check": self._check,
            "snapshot_keep": self._snapshot_keep,
            "snapshot_kept": self._snapshot_stored,
            "snapshot_admit": self._snapshot_admit,
            "data_serve": self._data_serve,
            "data_from": self._data_from,
            "move": self._move,
            "quiesce": self._forward,
            "abort": self._forward,
            "resume": self._forward,
            "tell": self._message_ranks,
            "drop": self._drop,
            "terminal_open": self._terminal_open,
            "terminal_read": self._terminal_read,
            "terminal_write": self._terminal_write,
            "terminal_hold": self._terminal_hold,
            "terminal_close": self._terminal_close,
        }

    async def _launch(self, message: Message) -> Message:
        request = from_map(LaunchRequest, message, "launch")
        snapshot = self._workdirs.need(request.snapshot) if request.snapshot else None
        if request.datasets:
            await in_thread(lambda: evict_cached_files(self._home.root / "data"), "data")
        if request.move is not None:
            self._moves.admit(request.move)
        return await self._attempts.launch(request, self._home.rank_socket, snapshot)

    async def _stop(self, message: Message) -> Message:
        job, attempt = message["job"], message["attempt"]
        report = await self._attempts.stop(
            job,
            attempt,
            int(message["generation"]),
            float(message.get("grace_s") or 0.0),
            str(message.get("reason") or "stopped"),
            {flag: bool(message.get(flag)) for flag in ("keep", "done")},
        )
        if self._attempts.have_ended(job, attempt):
            self._moves.end(job, attempt)
        return report

    async def _forget(self, message: Message) -> Message:
        generations = self._attempts.generations(message["job"], message["attempt"])
        freed = await self._attempts.forget(message["job"], message["attempt"])
        names = {attempt.name for attempt in generations}
        self._datasets.forget(f"{message['job']}.{message['attempt']}")
        for attempt in generations:
            self._progress.forget(attempt.name)
            self._moves.forget(attempt)
        self._ports.release(lambda owner, _generation, _age_s: owner in names)
        return {"bytes": freed}

    async def _logs(self, message: Message) -> Message:
        attempt = self._attempts.get(message["job"], message["attempt"], message.get("generation"))
        rank = int(message["rank"])
        if rank not in attempt.ranks:
            raise Refused(
                "unknown", f"rank {rank} of {attempt.name} is not on this host; here are {sorted(attempt.ranks)}"
            )
        ended = (
            attempt.ranks[rank].state != "running"
        )  # read before the file, which then holds all of the rank's output
        return append_only_files.pull(attempt.log(rank), int(message["offset"]), int(message["limit"]), ended)

    async def _steps(self, message: Message) -> Message:
        attempt = self._attempts.get(message["job"], message["attempt"], message.get("generation"))
        ended = not attempt.running
        return append_only_files.pull(attempt.steps, int(message["offset"]), int(message["limit"]), ended)

    async def _files(self, message: Message) -> Message:
        found = self._attempts.any_of(message["job"], message["attempt"])
        return await asyncio.get_running_loop().run_in_executor(None, files.written, found)

    async def _file(self, message: Message) -> Message:
        found = self._attempts.any_of(message["job"], message["attempt"])
        asked = str(message["path"]), int(message["offset"]), int(message["limit"])
        return await asyncio.get_running_loop().run_in_executor(None, files.read, found, *asked)

    async def _model(self, message: Message) -> Message:
        attempt = self._attempts.get(message["job"], message["attempt"], message.get("generation"))
        return {"model": read_json(attempt.directory / "model.json")}

    async def _snapshot_has(self, message: Message) -> Message:
        return {"have": self._workdirs.has(message["digest"])}

    async def _snapshot_put(self, message: Message) -> Message:
        put = (message["digest"], int(message["offset"]), bytes(message["data"]), bool(message["last"]))
        await asyncio.get_running_loop().run_in_executor(None, self._workdirs.put, *put)
        return {}

    async def _port(self, message: Message) -> Message:
        name = self._home.attempt(message["job"], message["attempt"], int(message["generation"])).name
        return {"port": self._ports.lease(name, int(message["generation"]))}

    async def _snapshot_keep(self, message: Message) -> Message:
        return await self._moves.replicas.keep(message)

    async def _snapshot_stored(self, message: Message) -> Message:
        return self._moves.replicas.confirm(str(message["name"]))

    async def _snapshot_admit(self, message: Message) -> Message:
        self._moves.admit_reader(str(message["set"]), str(message["token"]))
        return self._moves.fabric(str(message.get("address") or ""))

    async def _data_serve(self, message: Message) -> Message:
        self._datasets.serve(str(message["token"]), str(message["dataset"]), str(message["path"]))
        return self._moves.fabric(str(message.get("address") or ""))

    async def _data_from(self, message: Message) -> Message:
        datasets = {n: from_map(DatasetSpec, d, f"datasets.{n}") for n, d in message["datasets"].items()}
        self._datasets.know(f"{message['job']}.{message['attempt']}", datasets)
        return {}

    async def _fabric(self, message: Message) -> Message:
        return self._moves.fabric(str(message.get("address") or ""))

    async def _check(self, message: Message) -> Message:
        return await in_thread(lambda: checks.check(message["peers"], message.get("python")), "check")

    async def _move(self, message: Message) -> Message:
        attempt = self._attempts.get(message["job"], message["attempt"], int(message["generation"]))
        event = BeginMigration(from_map(MigrationRequest, message["move"], "move"))
        return self._moves.forward(attempt, event)

    async def _forward(self, message: Message) -> Message:
        attempt = self._attempts.get(message["job"], message["attempt"], int(message["generation"]))
        event = read_event(TO_RANKS, {"event": message["verb"], "move": message["move"]})
        return self._moves.forward(attempt, event)

    async def _message_ranks(self, message: Message) -> Message:
        attempt = self._attempts.get(message["job"], message["attempt"], int(message["generation"]))
        return self._moves.forward(attempt, read_event(TO_RANKS, message["message"]))

    async def _drop(self, message: Message) -> Message:
        return await asyncio.get_running_loop().run_in_executor(None, self._moves.drop, str(message["move"]))

    async def _terminal_open(self, message: Message) -> Message:
        attempt = self._attempts.get(message["job"], message["attempt"], int(message["generation"]))
        argv = [str(part) for part in message["argv"]]
        secrets = {str(k): str(v) for k, v in message["secrets"].items()}
        tag = self._attempts.tag(attempt.name)
        name = await self._terminals.open(attempt, int(message["rank"]), argv, tag, secrets, message.get("screen"))
        return {"terminal": name}

    async def _terminal_read(self, message: Message) -> Message:
        return await self._terminals.get(str(message["terminal"])).read()

    async def _terminal_write(self, message: Message) -> Message:
        terminal = self._terminals.get(str(message["terminal"]))
        if message.get("screen"):
            terminal.resize(message["screen"])
        await terminal.write(bytes(message.get("data") or b""))
        if message.get("end"):
            terminal.end_input()
        return {}

    async def _terminal_hold(self, message: Message) -> Message:
        self._terminals.get(str(message["terminal"]))
        return {}

    async def _terminal_close(self, message: Message) -> Message:
        self._terminals.close(str(message["terminal"]))
        return {}
