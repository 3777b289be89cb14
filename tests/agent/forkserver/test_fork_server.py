"""Elastic ranks: forks of a process that has imported torch, which behave like programs started separately."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from clusterd.agent.forkserver import client
from clusterd.agent.host import processes
from clusterd.agent.host.home import Home
from clusterd.ssh.host import AgentRefused
from tests.agent.client import AgentClient, end_all, launch, rank, wait_until
from tests.agent.conftest import STAND_IN


def run(agent: AgentClient, tmp_path: Path, source: str, *arguments: str, **more: Any) -> dict[str, Any]:
    """The end of a script that ran as an elastic rank."""
    start(agent, tmp_path, source, *arguments, **more)
    return agent.event("rank_exited")


def start(agent: AgentClient, tmp_path: Path, source: str, *arguments: str, **more: Any) -> list[dict[str, Any]]:
    (tmp_path / "train.py").write_text(dedent(source))
    argv = ["python", "train.py", *arguments]
    answer: list[dict[str, Any]] = agent.launch(argv, **{"kind": "elastic", "workdir": str(tmp_path), **more})["ranks"]
    return answer


def test_a_rank_is_forked_with_the_imports_done(standin_agent: AgentClient, tmp_path: Path) -> None:
    source = """
        import os, sys
        import preloaded_standin
        print(preloaded_standin.IMPORTED_IN == os.getppid() != os.getpid())
    """
    assert run(standin_agent, tmp_path, source)["exit_code"] == 0
    assert standin_agent.log() == "True\n"


def test_a_script_finds_itself_where_python_would_have_put_it(standin_agent: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("where = __name__\n")
    source = """
        import os, sys
        import beside, __main__
        print(__name__, __file__, sys.argv, sys.path[0] == os.getcwd(), beside.where)
        print(__main__.__dict__ is globals(), os.environ["RANK"], os.environ["MARK"], sys.stdin.read() == "")
    """
    run(standin_agent, tmp_path, source, "--lr", "3e-4", env={"MARK": "x"})
    assert standin_agent.log() == "__main__ train.py ['train.py', '--lr', '3e-4'] True beside\nTrue 0 x True\n"


def test_a_module_runs_as_with_dash_m(standin_agent: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n")
    argv = ["python3", "-u", "-m", "package", "--x"]
    standin_agent.launch(argv, kind="elastic", workdir=str(tmp_path))
    standin_agent.event("rank_exited")
    assert standin_agent.log() == "__main__ package ['--x']\n"


@pytest.mark.parametrize(
    ("source", "exit_code", "reason", "log"),
    [
        ("import sys; sys.exit(7)", 7, "exit", ""),
        ("import sys; sys.exit('no data')", 1, "exit", "no data\n"),
        ("import sys; sys.exit()", 0, "exit", ""),
        ("import sys; sys.exit(98)", 98, "port", ""),
        ("import sys; sys.exit(97)", 97, "no-torch", ""),
        ("import sys; sys.exit(96)", 96, "plan", ""),
        ("import sys; sys.exit(95)", 95, "device-oom", ""),
        ("import atexit; atexit.register(print, 'bye')", 0, "exit", "bye\n"),
        ("print('no newline', end='')", 0, "exit", "no newline"),
        (
            "import threading, time\nthreading.Timer(0.1, print, ['late']).start()\nprint('first')",
            0,
            "exit",
            "first\nlate\n",
        ),
    ],
)
def test_a_script_ends_as_python_would(
    standin_agent: AgentClient, tmp_path: Path, source: str, exit_code: int, reason: str, log: str
) -> None:
    end = run(standin_agent, tmp_path, source)
    assert (end["exit_code"], end["signal"], end["reason"]) == (exit_code, None, reason)
    assert standin_agent.log() == log


def test_a_traceback_shows_the_script_and_nothing_of_ours(standin_agent: AgentClient, tmp_path: Path) -> None:
    assert run(standin_agent, tmp_path, "def f():\n    return 1 / 0\nf()\n")["exit_code"] == 1
    lines = standin_agent.log().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "train.py", line 3')
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "clusterd" not in standin_agent.log()


def test_a_missing_script_is_named(standin_agent: AgentClient, tmp_path: Path) -> None:
    standin_agent.launch(["python", "absent.py"], kind="elastic", workdir=str(tmp_path))
    assert standin_agent.event("rank_exited")["exit_code"] == 2
    assert str(tmp_path / "absent.py") in standin_agent.log()


def test_workers_start_by_every_method(standin_agent: AgentClient, tmp_path: Path) -> None:
    source = """
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(method, pool.map(square, range(3)))
    """
    assert run(standin_agent, tmp_path, source)["exit_code"] == 0
    assert standin_agent.log() == "fork [0, 1, 4]\nspawn [0, 1, 4]\n"


def test_forked_ranks_and_their_forks_carry_the_tag(standin_agent: AgentClient, tmp_path: Path) -> None:
    """A fork does not change what /proc shows of its environment; the sweep depends on its showing the tag."""
    source = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), flush=True)
        time.sleep(100)
    """
    [started] = start(standin_agent, tmp_path, source)
    escaped = int(wait_until(standin_agent.log, "the fork to say its pid"))
    for pid in (started["pid"], escaped):
        assert b"/j.1\0" in processes.environment(pid)
    assert standin_agent.stop()["swept"] == [escaped]


def test_siblings_have_keys_of_their_own(standin_agent: AgentClient, tmp_path: Path) -> None:
    source = "import multiprocessing.process as p; print(bytes(p.current_process().authkey))"
    start(standin_agent, tmp_path, source, ranks=[rank(0, 2), rank(1, 2)])
    standin_agent.event("rank_exited", rank=0)
    standin_agent.event("rank_exited", rank=1)
    assert standin_agent.log(rank=0) != standin_agent.log(rank=1)


def test_all_ranks_of_a_job_draw_and_hash_alike_and_those_of_another_job_do_not(
    standin_agent: AgentClient, tmp_path: Path
) -> None:
    """A script that splits its data by a draw, or by the order of a set, must split alike in every process."""
    source = "import random; print(random.random(), hash('x'))"
    start(standin_agent, tmp_path, source, ranks=[rank(0, 2), rank(1, 2)])
    standin_agent.event("rank_exited", rank=0)
    standin_agent.event("rank_exited", rank=1)
    run(standin_agent, tmp_path, source, job="second")
    first, hashed = standin_agent.log(rank=0).split()
    assert standin_agent.log(rank=1).split() == [first, hashed]
    other, same = standin_agent.log(job="second").split()
    assert other != first and same == hashed


def test_variables_that_python_reads_at_its_start_take_effect(standin_agent: AgentClient, tmp_path: Path) -> None:
    env = {"PYTHONHASHSEED": "7", "PYTHONPATH": f"{tmp_path}/lib:{STAND_IN}"}
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "own.py").write_text("")
    run(standin_agent, tmp_path, "import own; print(hash('x'))", env=env)
    first = standin_agent.log()
    run(standin_agent, tmp_path, "import own; print(hash('x'))", env=env, job="second")
    assert first == standin_agent.log(job="second") != ""


def test_a_command_that_is_no_plain_python_is_executed(standin_agent: AgentClient, tmp_path: Path) -> None:
    source = "import sys, clusterd.protocol; print(sys.flags.optimize, 'preloaded_standin' in sys.modules)"
    (tmp_path / "train.py").write_text(source)
    standin_agent.launch(["python", "-O", "train.py"], kind="elastic", workdir=str(tmp_path))
    assert standin_agent.event("rank_exited")["exit_code"] == 0
    assert standin_agent.log() == "1 False\n"


def test_the_rank_file_names_the_place_in_the_plan(standin_agent: AgentClient, tmp_path: Path) -> None:
    source = """
        import json, os
        path = os.environ["CLUSTERD_RANK_FILE"]
        place = json.load(open(path))
        print(place["rank"], place["world_size"], place["plan"], place["generation"], oct(os.stat(path).st_mode)[-3:])
        print(len(place["token"]) >= 32, os.path.exists(place["control_socket"]))
    """
    run(standin_agent, tmp_path, source, ranks=[rank(plan={"dp": 1})])
    assert standin_agent.log() == "0 1 {'dp': 1} 1 600\nTrue True\n"


def test_an_environment_without_torch_is_the_reason(connect: Any, tmp_path: Path) -> None:
    agent = connect(env={"CLUSTERD_PRELOAD": "no_such_torch"})
    answer = agent.launch(["python", "train.py"], kind="elastic", ranks=[rank(0, 2), rank(1, 2)])
    assert [r["pid"] for r in answer["ranks"]] == [0, 0]
    end = agent.event("rank_exited", rank=1)
    assert (end["exit_code"], end["reason"]) == (97, "no-torch")
    assert agent.log(rank=1) == f"clusterd: {end['message']}\n"
    assert f"{sys.executable} (Python" in end["message"]
    assert "cannot import torch: No module named 'no_such_torch'" in end["message"]


def test_cancel_does_not_wait_for_an_import(connect: Any, tmp_path: Path) -> None:
    """A first job of an environment on a slow network file system is cancelled while torch is being imported."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(100)\n")
    agent = connect(env={"CLUSTERD_PRELOAD": "slow", "PYTHONPATH": str(tmp_path)})
    launching = agent.send("launch", **launch(["python", "train.py"], kind="elastic"))
    wait_until(lambda: list(Home(agent.root).sockets.glob("????????????????.sock")), "the fork server to start")
    stopped = agent.stop()
    assert (stopped["swept"], stopped["ranks"][0]["reason"]) == ([], "stopped")
    assert [r["pid"] for r in agent.reply(launching)["ok"]["ranks"]] == [0]


HELLO = """
    import json, os, socket, sys, time
    sys.path[:0] = [{root!r}]
    from clusterd import protocol
    place = json.load(open(os.environ["CLUSTERD_RANK_FILE"]))
    line = socket.socket(socket.AF_UNIX)
    line.connect(place["control_socket"])
    hello = {{k: place[k] for k in ("job", "attempt", "generation", "rank", "token")}}
    line.sendall(protocol.encode({{"id": 1, "verb": "rank_hello", "pid": os.getpid(), **hello, **{changes!r}}}))
    {then}
    decoder = protocol.Decoder()
    while True:
        for message in decoder.feed(line.recv(65536)):
            print(json.dumps(message), flush=True)
            if message.get("event") == "stop":
                sys.exit(0)
"""
ROOT = str(Path(__file__).parents[3])


def test_a_rank_that_listens_is_asked_before_it_is_told(standin_agent: AgentClient, tmp_path: Path) -> None:
    source = dedent(HELLO).format(root=ROOT, changes={}, then="")
    start(standin_agent, tmp_path, source)
    wait_until(lambda: '"ok"' in standin_agent.log(), "the rank to be greeted")
    report = standin_agent.stop(grace_s=30.0)["ranks"][0]
    assert (report["exit_code"], report["signal"], report["reason"]) == (0, None, "stopped")
    assert '"event": "stop", "reason": "cancelled", "deadline_s": 30.0' in standin_agent.log()


def test_a_rank_that_listens_but_does_not_act_gets_a_signal_at_half_of_the_grace(
    standin_agent: AgentClient, tmp_path: Path
) -> None:
    source = dedent(HELLO).format(
        root=ROOT, changes={}, then="time.sleep(0) or print('deaf', flush=True) or time.sleep(100)"
    )
    start(standin_agent, tmp_path, source)
    wait_until(lambda: "deaf" in standin_agent.log(), "the rank to be connected")
    report = standin_agent.stop(grace_s=2.0)["ranks"][0]
    assert (report["signal"], report["reason"]) == (signal.SIGTERM, "stopped")


@pytest.mark.parametrize(
    ("changes", "kind"), [({"token": "guessed"}, "token"), ({"generation": 0}, "stale"), ({"job": "other"}, "unknown")]
)
def test_a_rank_that_is_none_of_ours_is_not_let_in(
    standin_agent: AgentClient, tmp_path: Path, changes: dict[str, Any], kind: str
) -> None:
    start(standin_agent, tmp_path, dedent(HELLO).format(root=ROOT, changes=changes, then=""))
    wait_until(lambda: f'"kind": "{kind}"' in standin_agent.log(), "the refusal")


@pytest.mark.parametrize("how", [{"id": 2, "verb": "failed"}, {"event": "failed"}], ids=["now", "formerly"])
def test_the_end_of_a_rank_carries_its_failure_report(
    standin_agent: AgentClient, tmp_path: Path, how: dict[str, Any]
) -> None:
    failed = {**how, "reason": "plan", "message": "tp=3 does not divide 4 heads"}
    source = dedent(HELLO).format(
        root=ROOT, changes={}, then=f"line.sendall(protocol.encode({failed})); line.recv(9); sys.exit(96)"
    )
    end = run(standin_agent, tmp_path, source)
    assert (end["reason"], end["message"]) == ("plan", "tp=3 does not divide 4 heads")


def spawner_alone(tmp_path: Path, change: str) -> subprocess.Popen[bytes]:
    """A fork server that no agent started, with a constant changed."""
    run = f"server.{change}; sys.exit(server.main(sys.argv[1:]))"
    source = f"import sys; from clusterd.agent.forkserver import server; {run}"
    command = [sys.executable, "-c", source, "--socket", str(tmp_path / "s.sock")]
    process = subprocess.Popen(command)
    wait_until((tmp_path / "s.sock").exists, "the fork server to listen")
    return process


def test_a_fork_server_without_children_and_agent_ends_by_itself(tmp_path: Path) -> None:
    with spawner_alone(tmp_path, "IDLE_S = 0.1") as process:
        assert process.wait(20) == 0
    assert not (tmp_path / "s.sock").exists()


def test_a_second_fork_server_on_the_same_socket_gives_up(tmp_path: Path) -> None:
    with spawner_alone(tmp_path, "LOCK_WAIT_S = 0.1") as first:
        assert subprocess.run(first.args, check=False).returncode == 3
        assert first.poll() is None
        first.terminate()


def test_a_killed_fork_server_is_replaced_while_its_ranks_live(standin_agent: AgentClient, tmp_path: Path) -> None:
    """Regression: the rank had inherited the fork server's lock, so no rank of that environment could start before its
    end.
    """
    (first,) = start(standin_agent, tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(100)\n")
    wait_until(standin_agent.log, "the script to have been read, which the second job writes anew")
    server = processes.stat(first["pid"])
    assert server is not None
    os.kill(server.parent, signal.SIGKILL)
    (second,) = start(standin_agent, tmp_path, "import time\ntime.sleep(100)\n", job="other")
    assert processes.lives(first["pid"], first["start_time"])
    assert processes.lives(second["pid"], second["start_time"])


def test_fork_servers_end_with_their_last_rank_after_a_shutdown(standin_agent: AgentClient, tmp_path: Path) -> None:
    """The agent is told to go while ranks run: they stay, and so does whoever will record their end."""
    [started] = start(standin_agent, tmp_path, "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)")
    found = processes.stat(started["pid"])
    assert found is not None
    standin_agent.ok("shutdown", force=True)
    record = Home(standin_agent.root).attempt("j", 1) / "rank-0.state.json"
    (tmp_path / "go").touch()
    wait_until(lambda: '"exited"' in record.read_text(), "the end to be written down")
    wait_until(lambda: (s := processes.stat(found.parent)) is None or s.state in "ZX", "the fork server to end")


def test_where_a_fork_cannot_be_marked_a_rank_gets_an_interpreter_of_its_own(connect: Any, tmp_path: Path) -> None:
    agent = connect(env={"CLUSTERD_PRELOAD": "preloaded_hidden", "PYTHONPATH": str(STAND_IN)})
    source = "import sys, time, clusterd.agent; print('preloaded_hidden' in sys.modules, flush=True); time.sleep(100)"
    [started] = start(agent, tmp_path, source)
    wait_until(agent.log, "the rank to begin")
    assert agent.log() == "False\n"
    assert b"/j.1\0" in processes.environment(started["pid"])
    agent.stop()


def test_a_rank_that_does_not_heed_a_stop_shows_where_it_hangs(standin_agent: AgentClient, tmp_path: Path) -> None:
    source = """
        import json, os, signal, socket, threading
        from clusterd import protocol

        place = json.load(open(os.environ["CLUSTERD_RANK_FILE"]))
        agent = socket.socket(socket.AF_UNIX)
        agent.connect(place["control_socket"])
        named = {name: place[name] for name in ("job", "attempt", "generation", "rank", "token")}
        agent.sendall(protocol.encode({"verb": "rank_hello", "pid": os.getpid(), **named}))
        agent.recv(1)

        def waits_for_a_peer_that_never_comes():
            threading.Event().wait()

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waits", flush=True)
        waits_for_a_peer_that_never_comes()
    """
    start(standin_agent, tmp_path, source)
    wait_until(lambda: "waits" in standin_agent.log(), "the rank to hang")
    standin_agent.ok("stop", job="j", attempt=1, generation=1, grace_s=1.0, reason="no step for an hour")
    message = standin_agent.log()
    assert "did not stop within 0.5 s of being asked" in message
    assert "in waits_for_a_peer_that_never_comes" in message
    assert standin_agent.event("rank_exited")["reason"] == "stopped"


def test_an_environment_that_takes_too_long_is_given_up_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the daemon stops waiting for the launch: it would never hear why."""
    (tmp_path / "imports_for_ever.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(client, "FORK_SERVER_START_TIMEOUT_S", 1.0)
    home = Home(tmp_path / "agent")
    home.make()

    async def start() -> None:
        started = client.ForkServers(home, lambda state, record: None, "imports_for_ever")
        with pytest.raises(client.SpawnFailed, match="did not start within 1 s"):
            await started.ready({"PYTHONPATH": str(tmp_path)}, sys.executable, preloaded=True)
        wait_until(lambda: started.reap() or not started._processes, "what was killed to be gone")

    try:
        asyncio.run(asyncio.wait_for(start(), 20.0))
    finally:
        end_all(home.root)


@pytest.mark.parametrize(
    ("number", "lasts"),
    [(errno.EAGAIN, False), (errno.ENOMEM, False), (errno.EMFILE, False), (errno.ENFILE, False), (errno.EACCES, True)],
)
def test_a_temporary_shortage_fails_no_job_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lasts: bool
) -> None:
    """Another job of the same user had all the processes that they may have."""

    def lacking(*command: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", lacking)
    refused = refusal(tmp_path, "unused")
    assert os.strerror(number) in str(refused)
    assert refused.is_permanent is lasts


@pytest.mark.parametrize(("number", "lasts"), [(errno.EAGAIN, False), (errno.EACCES, True)])
def test_a_shortage_while_an_environment_loads_fails_no_job(tmp_path: Path, number: int, lasts: bool) -> None:
    early = f"import os\nos.write(2, b'cannot start a thread: ' + os.strerror({number}).encode())\nos._exit(1)\n"
    (tmp_path / "lacking.py").write_text(early)
    refused = refusal(tmp_path, "lacking")
    assert "ended at once: cannot start a thread" in str(refused)
    assert refused.is_permanent is lasts


def refusal(tmp_path: Path, preload: str) -> AgentRefused:
    """Error that the daemon receives from a fork server that does not start."""
    home = Home(tmp_path / "agent")
    home.make()

    async def start() -> AgentRefused:
        started = client.ForkServers(home, lambda state, record: None, preload)
        with pytest.raises(client.SpawnFailed) as failed:
            await started.ready({"PYTHONPATH": str(tmp_path)}, sys.executable, preloaded=True)
        return AgentRefused(failed.value.kind, str(failed.value))

    return asyncio.run(asyncio.wait_for(start(), 20.0))


def test_the_end_of_older_ranks_keeps_files_of_a_waiting_launch(connect: Any, tmp_path: Path) -> None:
    """A host that came back ends what it still had of the job, while the job is moved to it: the move went wrong."""
    go = tmp_path / "go"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    )
    agent = connect(env={"CLUSTERD_PRELOAD": "slow", "PYTHONPATH": str(tmp_path)})
    agent.launch(["sleep", "100"])
    asks = 'line.sendall(protocol.encode({"id": 2, "verb": "segment", "name": "j.1.2.out0", "bytes": 1}))'
    (tmp_path / "train.py").write_text(dedent(HELLO).format(root=ROOT, changes={}, then=asks))
    side = {"generation": 1, "plan": {}, "hosts": ["here"]}
    move = {"id": "j.1.2", "token": "secret", "shape": {}, "old": side, "new": {**side, "generation": 2}}
    what = {"kind": "elastic", "generation": 2, "workdir": str(tmp_path), "move": move}
    launching = agent.send("launch", **launch(["python", "train.py"], **what))
    servers = Home(agent.root).sockets
    wait_until(lambda: len(list(servers.glob("????????????????.sock"))) == 2, "the second fork server to start")
    agent.stop()
    go.touch()
    assert "ok" in agent.reply(launching)
    wait_until(lambda: '"id": 2' in agent.log(generation=2), "the answer to the rank")
    assert "move j.1.2 is over" not in agent.log(generation=2)
