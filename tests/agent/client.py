"""A client of an agent for tests: it speaks through `attach`, in frames, as the daemon does."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterd import protocol
from clusterd.agent.host import cgroups, processes
from clusterd.agent.host.home import Home, read_json
from clusterd.agent.server import attach
from clusterd.protocol.launch import LaunchRequest
from clusterd.protocol.messages import from_map
from clusterd.protocol.proof import proof
from tests.hang import HANG_S
from tests.leftovers import shared_memory

KEY = "5" * 64
"""Of the cluster whose agents the tests start."""


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = HANG_S) -> Any:
    """Return the result of `condition` once it is true; fail, naming `what`, if it never becomes true."""
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.01)
    return found


def processes_of(root: Path) -> list[int]:
    """Agents, fork servers and ranks that belong to the agent directory `root`, and what they left behind.

    Those of agents of clusters, one level below it, count too.
    """
    marks: list[bytes] = []
    sockets: list[bytes] = []
    for identity in [root / "identity.json", *root.glob("*/identity.json")]:
        home = Home(identity.parent)
        agent = (read_json(identity) or {}).get("agent", "?")
        marks += [os.fsencode(f"CLUSTERD_AGENT_HOME={home.root}\0"), f"{processes.TAG}={agent}/".encode()]
        sockets.append(os.fsencode(home.sockets))
    found = []
    for pid in processes.everyone():
        if pid == os.getpid():
            continue
        environment = processes.environment(pid) + b"\0"
        ours = any(mark in environment for mark in marks)
        if not ours:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                ours = any(path in command for path in sockets)
            except OSError:
                continue
        if ours:
            found.append(pid)
    return found


def end_all(root: Path) -> None:
    """Kill whatever belongs to `root`, and see that it is gone."""

    def none_left() -> bool:
        left = processes_of(root)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not left

    wait_until(none_left, f"the processes of {root} to end")
    for store in shared_memory([os.fsencode(root)]):
        shutil.rmtree(store, ignore_errors=True)  # agents of other tests sweep it too
    for identity in [root / "identity.json", *root.glob("*/identity.json")]:
        # An agent that was killed removed nothing.
        if (sockets := Home(identity.parent).sockets).parent == Path("/tmp"):
            shutil.rmtree(sockets, ignore_errors=True)
        for group in groups_of((read_json(identity) or {}).get("agent", "?")):
            cgroups.remove(group)


def groups_of(agent: str) -> list[Path]:
    """Control groups of the attempts of an agent."""
    base = cgroups.find_base()
    return list(base.glob(f"{cgroups.PREFIX}{agent}-*")) if base else []


def start_attach(
    root: Path, python: str = sys.executable, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`attach` for the agent in `root`, with the key as the daemon gives it."""
    pipe, sink = os.pipe()
    os.write(sink, KEY.encode())
    os.close(sink)
    try:
        return subprocess.Popen(
            [python, "-m", "clusterd.agent", "attach", "--key-fd", str(pipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CLUSTERD_AGENT_LOGIN": "inherited", **(env or {}), "CLUSTERD_AGENT_HOME": str(root)},
            pass_fds=(pipe,),
        )
    finally:
        os.close(pipe)


class AgentClient:
    """One connection to the agent in `root`, which is started if it does not live."""

    def __init__(self, root: Path, python: str = sys.executable, env: dict[str, str] | None = None) -> None:
        self.root = root
        self.key = KEY
        self.events: list[dict[str, Any]] = []
        self._decoder = protocol.Decoder()
        self._received: list[dict[str, Any]] = []
        self._next = 0
        self._bridge = start_attach(root, python, env)
        assert self._bridge.stdout is not None
        self.greeting = b""
        while not self.greeting.endswith(b"\n"):
            self.greeting += os.read(self._bridge.stdout.fileno(), 1) or b"(closed)\n"
        assert self.greeting.startswith(b"clusterd-attached"), self.greeting

    def hello(self, epoch: int = 1, daemon: str = "test") -> dict[str, Any]:
        return self.ok("hello", **self.identity(epoch, daemon))

    def identity(self, epoch: int = 1, daemon: str = "test", key: str = KEY) -> dict[str, Any]:
        """Arguments of a hello that proves `key`."""
        nonce = self.ok("challenge")["nonce"]
        shown = proof(key, "hello", nonce, daemon, epoch)
        return {"protocol": protocol.VERSION, "daemon": daemon, "epoch": epoch, "proof": shown}

    def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """The whole reply, `ok` or `error`."""
        number = self.send(verb, **arguments)
        return self.reply(number)

    def send(self, verb: str, **arguments: Any) -> int:
        self._next += 1
        assert self._bridge.stdin is not None
        self._bridge.stdin.write(protocol.encode({"id": self._next, "verb": verb, **arguments}))
        self._bridge.stdin.flush()
        return self._next

    def reply(self, number: int) -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            for message in self._received:
                if message.get("id") == number:
                    self._received.remove(message)
                    return message
            self._receive()
            return None

        return wait_until(find, f"the reply to request {number}", 60.0)

    def ok(self, verb: str, **arguments: Any) -> dict[str, Any]:
        reply = self.request(verb, **arguments)
        assert "ok" in reply, reply
        return reply["ok"]

    def refused(self, verb: str, **arguments: Any) -> dict[str, Any]:
        reply = self.request(verb, **arguments)
        assert "error" in reply, reply
        return reply["error"]

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """The first event of this name with these fields, now or to come."""

        def find() -> dict[str, Any] | None:
            for event in self.events:
                if event["event"] == name and all(event.get(k) == v for k, v in fields.items()):
                    self.events.remove(event)
                    return event
            self._receive()
            return None

        return wait_until(find, f"event {name} with {fields}")

    def _receive(self) -> None:
        assert self._bridge.stdout is not None
        ready, _, _ = select.select([self._bridge.stdout], [], [], 0.05)
        if ready:
            data = os.read(self._bridge.stdout.fileno(), 1 << 16)
            assert data, "the agent closed the connection"
            for message in self._decoder.feed(data):
                (self.events if "event" in message else self._received).append(message)

    def launch(self, argv: list[str], job: str = "j", **more: Any) -> dict[str, Any]:
        return self.ok("launch", **launch(argv, job, **more))

    def stop(self, job: str = "j", grace_s: float = 5.0, generation: int = 1, **more: Any) -> dict[str, Any]:
        return self.ok("stop", job=job, attempt=1, generation=generation, grace_s=grace_s, reason="cancelled", **more)

    def log(self, job: str = "j", rank: int = 0, **more: Any) -> str:
        return self.ok("logs", job=job, attempt=1, rank=rank, offset=0, limit=1 << 20, **more)["data"].decode()

    @property
    def agent_pid(self) -> int:
        return int((read_json(Home(self.root).record) or {})["pid"])

    def kill_agent(self) -> None:
        """Kill the agent as a crash or the kernel's OOM killer would."""
        pid = self.agent_pid
        os.kill(pid, signal.SIGKILL)
        # Its sockets close when its last thread ends, which may be after it became a zombie.
        wait_until(lambda: not attach.held(Home(self.root)), "the agent to be gone")
        self.close()

    def close(self) -> None:
        assert self._bridge.stdin is not None and self._bridge.stdout is not None
        try:
            self._bridge.stdin.close()
        except BrokenPipeError:
            pass
        self._bridge.stdout.close()
        self._bridge.wait(10)


def rank(number: int = 0, world: int = 1, **more: Any) -> dict[str, Any]:
    """A RankLaunch on one CPU core."""
    place = {
        "rank": number,
        "world_size": world,
        "local_rank": number,
        "local_world_size": world,
        "hosts": 1,
        "node": 0,
    }
    device = {"kind": "cpu", "uuid": f"cpu-{number}", "cores": [], "threads": 1}
    return {
        **place,
        "master_addr": "127.0.0.1",
        "master_port": 20000,
        "interface": None,
        "plan": None,
        "device": device,
        **more,
    }


def launch(argv: list[str], job: str = "j", **more: Any) -> dict[str, Any]:
    """A launch request of one command rank."""
    request = {
        "job": job,
        "attempt": 1,
        "generation": 1,
        "ranks": [rank()],
        "kind": "command",
        "argv": argv,
        "env": {},
        "secrets": {},
        "snapshot": None,
        "workdir": None,
        "python": None,
        "grace_s": 5.0,
    }
    return {**request, **more}


def accepted(argv: list[str] | None = None, job: str = "j", **more: Any) -> LaunchRequest:
    """A launch request as an agent keeps it."""
    return from_map(LaunchRequest, launch(argv or ["true"], job, **more))
