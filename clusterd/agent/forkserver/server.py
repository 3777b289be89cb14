"""The fork server: parent process of ranks, one per environment, which outlives agents.

Single-threaded, so that a fork is safe. For elastic jobs it runs under the job's Python with torch imported once, and
a rank is a fork of it; for commands it runs under the agent's Python and a rank is a fork and an exec. It writes exit
records before it reports them, so that no exit is lost while no agent runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterd import protocol
from clusterd.agent.forkserver import child
from clusterd.agent.host import cgroups, processes
from clusterd.agent.host.home import forget_directory, read_json, write_json
from clusterd.agent.log import log_line
from clusterd.exit_reasons import EXIT_CODES, Reason
from clusterd.protocol import calls
from clusterd.protocol.forkserver import REQUESTS, Exited, ProcessIdentity, RankRecord, ServerState, Shutdown, Spawn
from clusterd.protocol.messages import Done, Request, from_map, to_map
from clusterd.socket_files import inode, is_still

IDLE_S = 600.0
"""A fork server without children and without an agent exits after this long."""

UNUSED_S = 3600.0
"""A fork server without children exits after this long, even with an agent: torch occupies a few hundred MB."""

LOCK_WAIT_S = 10.0
"""Wait for another fork server of this environment that is exiting."""

RETRY_S = 1.0
"""Between two tries to write records that a full disk did not take."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Child:
    state: Path
    record: RankRecord
    kind: str
    stop_marker: Path


@dataclass
class _Peer:
    connection: socket.socket
    decoder: protocol.Decoder = field(default_factory=protocol.Decoder)
    outgoing: bytearray = field(default_factory=bytearray)


class PendingRecords:
    """Exit records that could not be written, as on a full disk: retained in memory and retried, by path."""

    def __init__(self) -> None:
        self._records: dict[Path, RankRecord] = {}
        self._tried_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._records)

    def write(self, path: Path, record: RankRecord) -> None:
        """Write a record now, or retain it for a retry."""
        try:
            write_json(path, to_map(record))
        except FileNotFoundError:
            log_line(f"spawner: {path} is no longer needed")  # its attempt was removed meanwhile
        except OSError as error:
            log_line(f"spawner: cannot write {path}, will retry: {error}")
            self._records[path] = record

    def retry(self) -> None:
        """Retry the writes, at most once a second."""
        if not self._records or time.monotonic() - self._tried_at < RETRY_S:
            return
        self._tried_at = time.monotonic()
        for path, record in list(self._records.items()):
            try:
                write_json(path, to_map(record))
            except FileNotFoundError:
                pass
            except OSError:
                continue  # logged by `write`
            del self._records[path]

    def drop(self, path: Path) -> None:
        """Discard a record whose path is reused for another rank."""
        self._records.pop(path, None)

    def all(self) -> tuple[tuple[str, RankRecord], ...]:
        """Path and record of each, for a newly connected agent."""
        return tuple((str(path), record) for path, record in self._records.items())


class ForkServer:
    """Forks ranks on request, reaps them and records their exits (`clusterd.protocol.forkserver`)."""

    def __init__(self, path: Path, listener: socket.socket, lock: int) -> None:
        self._path = path
        self._made = inode(path)
        self._listener = listener
        self._lock = lock
        self._children: dict[int, _Child] = {}
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._pending_records = PendingRecords()
        self._oom = OomWatch()
        self._leaving = False
        self._quiet_since = time.monotonic()
        self._used_at = time.monotonic()

    def run(self) -> None:
        """Serve until shut down, or unused for `IDLE_S` or `UNUSED_S`."""
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while not self._finished():
            for key, mask in self._selector.select(timeout=1.0):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._serve(self._peers[key.fileobj], mask)  # type: ignore[index]
            self._reap()
            self._pending_records.retry()
            self._listen_again()
            if self._children:
                self._oom.look()
        self._listener.close()

    @property
    def has_agent(self) -> bool:
        """True if a connected agent stays: it will start other fork servers in the same directory."""
        return bool(self._peers) and not self._leaving

    def _finished(self) -> bool:
        now = time.monotonic()
        if self._children:
            self._used_at = now
        if self._children or self._peers:
            self._quiet_since = now
        if self._children or self._pending_records:
            return False
        return self._leaving or now - self._quiet_since > IDLE_S or now - self._used_at > UNUSED_S

    def _listen_again(self) -> None:
        """Recreate a removed socket: the next agent would start another server, which could not take the lock."""
        if is_still(self._path, self._made):
            return
        try:
            listener = _listen(self._path)
        except OSError:
            return  # its directory is gone too; the agent recreates it
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._made = listener, inode(self._path)
        self._selector.register(listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._peers[connection] = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, peer: _Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(peer)
            if mask & selectors.EVENT_READ:
                data = peer.connection.recv(1 << 16)
                if not data:
                    self._drop(peer)
                    return
                for message in peer.decoder.feed(data):
                    self._send(peer, calls.reply(message.get("id"), self._answer(message)))
        except BlockingIOError:
            return
        except (OSError, protocol.ProtocolError):
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.connection, None):
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _send(self, peer: _Peer, message: protocol.Message) -> None:
        peer.outgoing += protocol.encode(message)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.outgoing:
                del peer.outgoing[: peer.connection.send(peer.outgoing)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        self._selector.modify(peer.connection, events)

    def _answer(self, message: protocol.Message) -> calls.Ok | calls.Failure:
        verb = str(message.get("verb"))
        if verb not in REQUESTS:
            return calls.Failure(f"a fork server knows no {verb!r}", "verb")
        try:
            return calls.Ok(to_map(self._carry_out(from_map(REQUESTS[verb], message, verb))))
        except protocol.ProtocolError as error:
            return calls.Failure(str(error), "request")
        except OSError as error:
            return calls.Failure(f"cannot start a process: {error}", "spawn")

    def _carry_out(self, request: Request[Any]) -> ServerState | ProcessIdentity | Done:
        if isinstance(request, Spawn):
            return self._spawn(request)
        if isinstance(request, Shutdown):
            self._leaving = True
            return Done()
        ranks = {str(child.state): pid for pid, child in self._children.items()}
        return ServerState(os.getpid(), ranks, self._pending_records.all())

    def _spawn(self, request: Spawn) -> ProcessIdentity:
        self._used_at = time.monotonic()
        gate_read, gate_write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(gate_read)
            os.close(gate_write)
            raise
        if pid == 0:
            os.close(gate_write)
            child.become(request, gate_read, self._close_inherited)
        os.close(gate_read)
        try:
            found = processes.stat(pid)
            group = request.cgroup
            if group and not cgroups.add(Path(group), pid):
                log_line(f"spawner: cannot put process {pid} into {group}")
                group = ""
            record = RankRecord(
                pid=pid,
                start_time=found.start_time if found else 0,
                boot_id=processes.boot_id(),
                state="running",
                at_s=time.time(),
                generation=request.generation,
                spawner=ProcessIdentity(os.getpid(), own_start_time()),
                cgroup=group,
            )
            state = Path(request.state)
            self._pending_records.drop(state)
            self._children[pid] = _Child(state, record, request.kind, Path(request.stop_marker))
            write_json(state, to_map(record))
            os.write(gate_write, b"!")
        finally:
            os.close(gate_write)
        return ProcessIdentity(pid, record.start_time)

    def _close_inherited(self) -> None:
        """Close the server's descriptors in the child. Those that preloaded libraries opened stay open."""
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        os.close(self._lock)  # else no new server could take it while ranks of a killed one live
        self._listener.close()
        for peer in self._peers.values():
            peer.connection.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self._children.pop(pid, None)
            if ended is not None:  # others are orphans of ranks, adopted as their subreaper
                self._record(ended, status)

    def _record(self, ended: _Child, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        number = -code if code < 0 else None
        marker = read_json(ended.stop_marker)
        record = replace(
            ended.record,
            state="exited",
            exit_code=None if number else code,
            signal=number,
            reason=reason_of(
                exit_code=code,
                number=number,
                kind=ended.kind,
                stopped=marker is not None and marker.get("generation", 0) >= ended.record.generation,
                out_of_memory=number == signal.SIGKILL and self._ran_out_of_memory(ended.record.cgroup),
            ),
            at_s=time.time(),
        )
        self._pending_records.write(ended.state, record)
        for peer in list(self._peers.values()):
            try:
                self._send(peer, Exited(str(ended.state), record).to_message())
            except OSError:
                self._drop(peer)

    def _ran_out_of_memory(self, group: str) -> bool:
        """True if the kernel killed a process for host memory: of this group, or of anyone where there is no count."""
        kills = cgroups.out_of_memory_kills(Path(group)) if group else None
        return self._oom.killed_lately() if kills is None else kills > 0


def own_start_time() -> int:
    """Start time of this process in clock ticks since boot."""
    found = processes.stat(os.getpid())
    return found.start_time if found else 0


def main(arguments: list[str]) -> int:
    """Run a fork server; return 3 if another one holds the lock."""
    parser = argparse.ArgumentParser(prog="spawner")
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--preload", default="")
    options = parser.parse_args(arguments)
    lock = options.socket.with_suffix(".lock")
    held = _held(lock)
    if held is None:
        log_line(f"spawner: another process holds {lock}")
        return 3
    _adopt_orphans()
    listener = _listen(options.socket)
    is_last = False
    try:
        failure = _preload(options.preload)
        if failure:
            _refuse(listener, failure)
            return 1
        gc.collect()
        gc.freeze()  # what is loaded now stays shared with every child
        if threading.active_count() > 1:
            log_line("spawner: the preloaded modules started threads; forks may hang")
        server = ForkServer(options.socket, listener, held)
        server.run()
        is_last = not server.has_agent
    finally:
        for ours in (options.socket, lock):
            ours.unlink(missing_ok=True)
        if is_last:
            forget_directory(options.socket.parent)
    return 0


def _held(lock: Path) -> int | None:
    """Take the lock for the life of this process; None if another server holds it beyond `LOCK_WAIT_S`.

    An exiting server removes the lock file, so a lock only counts on the file that is at the path now.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < deadline:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        os.close(descriptor)
        time.sleep(0.05)
    return None


def _listen(path: Path) -> socket.socket:
    """Listen before the import of torch: an agent that connects meanwhile waits for the first reply."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    path.chmod(0o600)
    listener.listen(16)
    return listener


def _preload(module: str) -> calls.Failure | None:
    """Import `module`; return the error to reply with if that fails."""
    if not module:
        return None
    # A library that queries GPUs while it loads would initialise CUDA here and make it unusable in forks. With this
    # variable torch queries NVML instead.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        importlib.import_module(module)
    except ImportError as error:
        version = ".".join(map(str, sys.version_info[:3]))
        return calls.Failure(f"{sys.executable} (Python {version}) cannot import torch: {error}", "no-torch")
    except Exception as error:
        return calls.Failure(f"{sys.executable} fails to import torch: {type(error).__name__}: {error}", "no-torch")
    return None


def _refuse(listener: socket.socket, failure: calls.Failure) -> None:
    """Reply to the agent with the failure, then exit: torch may be installed by the next try."""
    listener.settimeout(30.0)
    try:
        connection, _ = listener.accept()
        connection.settimeout(10.0)
        decoder = protocol.Decoder()
        while not (messages := decoder.feed(connection.recv(1 << 16))):
            continue
        connection.sendall(protocol.encode(calls.reply(messages[0].get("id"), failure)))
        connection.close()
    except (OSError, protocol.ProtocolError) as error:
        log_line(f"spawner: {failure.message} (and no agent connected: {error})")


def _adopt_orphans() -> None:
    """Become the subreaper of the ranks' orphans, which pid 1 of a container may never reap."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError) as error:
        log_line(f"spawner: orphans of ranks will go to pid 1: {error}")


def reason_of(*, exit_code: int | None, number: int | None, kind: str, stopped: bool, out_of_memory: bool) -> Reason:
    """Reason of a rank's exit.

    The codes of `EXIT_CODES` count only for elastic jobs, whose training loop sets them: a command may use any code.
    """
    if stopped:
        return Reason.STOPPED
    if number is not None:
        return Reason.OOM if number == signal.SIGKILL and out_of_memory else Reason.SIGNAL
    if kind == "elastic" and exit_code in EXIT_CODES:
        return EXIT_CODES[exit_code]
    return Reason.EXIT


class OomWatch:
    """Detects recent OOM kills by the kernel.

    The counter is read once a second: it grows when the kernel picks its victim, which may exit seconds later, once its
    memory is released. A SIGKILL is attributed to the kernel if the counter grew within `WINDOW_S` before it.
    """

    WINDOW_S = 20.0

    def __init__(self, counters: tuple[tuple[Path, bytes], ...] | None = None) -> None:
        self._counters = oom_counters() if counters is None else counters
        self._seen: deque[tuple[float, int]] = deque()
        self.look()

    def look(self) -> int:
        """Read the counter and store it with its time."""
        now = time.monotonic()
        count = self._count()
        while len(self._seen) > 1 and now - self._seen[1][0] > self.WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, count))
        return count

    def killed_lately(self) -> bool:
        """True if the counter grew within the window; each kill accounts for one exit."""
        count = self.look()
        if count <= self._seen[0][1]:
            return False
        self._seen = deque((at, seen + 1) for at, seen in self._seen)
        self._seen[-1] = (self._seen[-1][0], count)
        return True

    def _count(self) -> int:
        for path, kills in self._counters:
            try:
                for line in path.read_bytes().splitlines():
                    name, _, value = line.partition(b" ")
                    if name == kills:
                        return int(value)
            except (OSError, ValueError):
                continue
        return 0


def oom_counters() -> tuple[tuple[Path, bytes], ...]:
    """Readable OOM-kill counters (file, field), the narrowest first: our own cgroup, then the whole machine."""
    found: list[tuple[Path, bytes]] = []
    for controllers, path in cgroups.own_groups():
        if controllers == "":
            found.append((Path("/sys/fs/cgroup" + path) / "memory.events", b"oom_kill"))
        elif "memory" in controllers.split(","):
            found.append((Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control", b"oom_kill"))
    found.append((Path("/proc/vmstat"), b"oom_kill"))
    return tuple((path, kills) for path, kills in found if os.access(path, os.R_OK))
