"""On a stop request all ranks finish the same step and exit with 0."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool, Run

from clusterd import protocol
from tests.hang import HANG_S

FOREVER = 1_000_000


class Agent:
    """The agent's side of the ranks' socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[tuple[int, dict[str, Any]]] = []  # (rank, message)
        self._connections: dict[int, socket.socket] = {}
        self._news = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def wait_for(self, what: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(what, HANG_S), self.heard

    def count(self, key: str, value: str) -> int:
        return sum(message.get(key) == value for _, message in self.heard)

    def send(self, rank: int, message: dict[str, Any]) -> None:
        self._connections[rank].sendall(protocol.encode(message))

    def hang_up(self, rank: int) -> None:
        self._connections[rank].shutdown(socket.SHUT_RDWR)

    def pid(self, rank: int) -> int:
        return next(int(m["pid"]) for r, m in self.heard if r == rank and m.get("verb") == "rank_hello")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(HANG_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._read, args=[connection], daemon=True))
            self._threads[-1].start()

    def _read(self, connection: socket.socket) -> None:
        decoder, rank = protocol.Decoder(), -1
        with connection:
            while data := connection.recv(65536):
                for message in decoder.feed(data):
                    rank = int(message.get("rank", rank))
                    with self._news:
                        self._connections[rank] = connection
                        self.heard.append((rank, message))
                        self._news.notify_all()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "agent.sock")
    yield agent
    agent.close()


@pytest.fixture
def start(ranks: RankPool, agent: Agent, tmp_path: Path) -> Iterator[Callable[..., Future[list[Run]]]]:
    """Start ranks that would train forever, and return when all of them train."""
    with ThreadPoolExecutor(1) as threads:

        def start(plan: str, **options: Any) -> Future[list[Run]]:
            variation = {"steps": FOREVER, "optimizer": "sgd", **options}
            run = threads.submit(ranks.run_each, tmp_path / "run", plan, [variation], control_socket=str(agent.path))
            world_size = 4 if "pp=2" in plan else 2
            agent.wait_for(lambda: agent.count("event", "ready") >= world_size)
            return run

        yield start


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=2", "tp=2,pp=2,accumulation=2"])
def test_a_stop_that_reaches_one_rank_stops_all_at_the_same_step(
    plan: str, agent: Agent, start: Callable[..., Future[list[Run]]]
) -> None:
    """Hosts receive a stop at different times; ranks must not wait for one that stopped a step earlier."""
    run = start(plan)
    agent.send(1, {"event": "stop", "reason": "cancelled by ana", "deadline_s": 30})
    assert_stopped_together(run.result(HANG_S)[0], "cancelled by ana")


@pytest.mark.slow
def test_a_stop_that_saves_leaves_a_checkpoint_of_the_last_step(
    agent: Agent, start: Callable[..., Future[list[Run]]], tmp_path: Path
) -> None:
    """The job is cancelled; the request reaches one rank, and all of them write."""
    run = start("dp=2,zero=1")
    agent.send(1, {"event": "stop", "reason": "cancelled by ana", "deadline_s": 30, "save": str(tmp_path / "saved")})
    ended = run.result(HANG_S)[0]
    assert_stopped_together(ended, "cancelled by ana")
    (said,) = (m["said"] for rank, m in agent.heard if m.get("said", {}).get("what") == "checkpointed" and rank == 0)
    assert (said["step"], said["path"]) == (ended.steps[-1]["step"], str(tmp_path / "saved"))
    assert (tmp_path / "saved" / ".metadata").is_file()


@pytest.mark.slow
def test_a_stop_that_cannot_save_says_so(agent: Agent, start: Callable[..., Future[list[Run]]], tmp_path: Path) -> None:
    """A file is in the place of the folder; nobody waits for it to go away."""
    (tmp_path / "taken").write_text("")
    run = start("dp=2")
    agent.send(0, {"event": "stop", "reason": "time limit", "save": str(tmp_path / "taken" / "saved")})
    for rank in run.result(HANG_S)[0].ranks:
        assert (rank.exit_code, "the checkpoint at the stop could not be written" in rank.output) == (1, True)


def test_sigterm_finishes_the_step(agent: Agent, start: Callable[..., Future[list[Run]]]) -> None:
    """Also with data-loader workers, which are in the same process group."""
    run = start("dp=2", num_workers=1)
    for process in [agent.pid(0), *children(agent.pid(0))]:
        os.kill(process, signal.SIGTERM)
    assert_stopped_together(run.result(HANG_S)[0], "SIGTERM")


def test_ranks_train_on_without_an_agent_and_find_the_next_one(
    agent: Agent, start: Callable[..., Future[list[Run]]]
) -> None:
    """The agent is killed and restarted; the ranks notice only by the closed socket."""
    run = start("dp=2")
    agent.hang_up(0)
    agent.wait_for(lambda: agent.count("verb", "rank_hello") == 3)
    agent.wait_for(lambda: agent.count("event", "ready") == 3)
    assert not run.done()
    agent.send(0, {"event": "something of a newer version"})
    agent.send(0, {"event": "stop", "reason": "time limit"})
    assert_stopped_together(run.result(HANG_S)[0], "time limit")


def test_ranks_introduce_themselves(agent: Agent, start: Callable[..., Future[list[Run]]]) -> None:
    run = start("dp=2")
    hello = next(m for r, m in agent.heard if r == 1)
    assert {k: hello[k] for k in ("verb", "job", "attempt", "generation", "token")} == {
        "verb": "rank_hello",
        "job": "test",
        "attempt": 1,
        "generation": 1,
        "token": "secret",
    }
    agent.send(0, {"event": "stop", "reason": "enough"})
    run.result(HANG_S)[0].checked()


def assert_stopped_together(run: Run, why: str) -> None:
    last = {rank.result["step"] for rank in run.checked().ranks}
    assert len(last) == 1
    assert [s["step"] for s in run.steps] == list(range(1, last.pop() + 1))
    assert any(why in rank.output for rank in run.ranks)


def children(pid: int) -> list[int]:
    return [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
