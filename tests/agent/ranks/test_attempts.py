"""Commands on one host: launch, observation, adoption by a new agent, and a complete stop."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterd.agent.host import processes
from clusterd.agent.host.home import Home
from tests.agent.client import AgentClient, end_all, launch, rank, wait_until

Connect = Callable[..., AgentClient]

ESCAPE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(100)
    os._exit(0)
time.sleep(100)
"""

HOLDER = """
import ctypes, fcntl, os, sys, threading, time
held = open(sys.argv[1], "w")  # as /dev/nvidia0: free when the last copy of the open file is closed
fcntl.flock(held, fcntl.LOCK_EX)
"""
LOADER = (
    HOLDER
    + """
if sys.argv[2] == "0" and os.fork() == 0:
    print("loads", flush=True)
    time.sleep(100)
time.sleep(100)
"""
)
HALF_GONE = (
    HOLDER
    + """
threading.Thread(target=time.sleep, args=(100,)).start()
print("half gone", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # ends this thread alone: its process has no environment to be known by any more
"""
)


def held(place: Path) -> bool:
    with place.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def alive(pid: int) -> bool:
    found = processes.stat(pid)
    return found is not None and found.state not in "ZX"


@pytest.mark.parametrize(
    ("argv", "exit_code", "number", "reason"),
    [
        (["true"], 0, None, "exit"),
        (["sh", "-c", "exit 3"], 3, None, "exit"),
        (["sh", "-c", "exit 98"], 98, None, "exit"),  # means something for an elastic job only
        (["sh", "-c", "kill -SEGV $$"], None, signal.SIGSEGV, "signal"),
        (["sh", "-c", "kill -KILL $$"], None, signal.SIGKILL, "signal"),
        (["no-such-program"], 127, None, "exit"),
    ],
)
def test_a_command_ends_with_its_own_exit_code_or_signal(
    agent: AgentClient, argv: list[str], exit_code: int | None, number: int | None, reason: str
) -> None:
    agent.launch(argv)
    end = agent.event("rank_exited")
    assert (end["exit_code"], end["signal"], end["reason"]) == (exit_code, number, reason)
    assert (end["job"], end["attempt"], end["generation"], end["rank"]) == ("j", 1, 1, 0)


@pytest.mark.parametrize(
    ("program", "message"),
    [("no-such-program", "not found in PATH="), ("./no-such-program", "not found, or the interpreter")],
)
def test_a_program_that_is_not_there_is_named_in_the_log(agent: AgentClient, program: str, message: str) -> None:
    """One that is named by its path is not looked for in PATH."""
    agent.launch([program])
    agent.event("rank_exited")
    assert f"{program}: {message}" in agent.log()


def test_a_file_that_is_no_program_yet_is_told_what_it_lacks(agent: AgentClient, tmp_path: Path) -> None:
    for name, text, mode in (("bare", "echo hi\n", 0o755), ("plain", "#!/bin/sh\n", 0o644)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    for job, program, message in (
        ("a", "./bare", "it has no line #!"),
        ("b", "./plain", "chmod +x"),
        ("c", "bare", "the file in this directory is ./bare"),
    ):
        agent.launch([program], job=job, workdir=str(tmp_path))
        agent.event("rank_exited", job=job)
        assert message in agent.log(job)


def test_a_command_sees_its_job_its_secrets_and_no_trace_of_the_agent(agent: AgentClient, tmp_path: Path) -> None:
    agent.launch(
        ["sh", "-c", "env; pwd"],
        env={"LEARNING_RATE": "3e-4"},
        secrets={"WANDB_API_KEY": "hush-hush-7"},
        workdir=str(tmp_path),
    )
    agent.event("rank_exited")
    lines = agent.log().splitlines()
    assert "LEARNING_RATE=3e-4" in lines
    assert "WANDB_API_KEY=hush-hush-7" in lines
    assert "CLUSTERD_JOB=j" in lines
    assert lines[-1] == str(tmp_path)
    names = {line.partition("=")[0] for line in lines}
    assert "CLUSTERD_AGENT_HOME" not in names
    assert "RANK" not in names  # a lone command is no rank: torchrun inside it makes its own world


def test_ranks_of_one_command_know_their_places(agent: AgentClient) -> None:
    agent.launch(["sh", "-c", "echo $RANK/$WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"], ranks=[rank(0, 2), rank(1, 2)])
    agent.event("rank_exited", rank=0)
    agent.event("rank_exited", rank=1)
    assert [agent.log(rank=r) for r in (0, 1)] == ["0/2 at 127.0.0.1:20000\n", "1/2 at 127.0.0.1:20000\n"]


def test_a_rank_runs_on_its_cores_with_its_devices(agent: AgentClient) -> None:
    core = max(os.sched_getaffinity(0))
    device = {"kind": "cuda", "uuid": "GPU-1,GPU-2", "cores": [core], "threads": 3}
    command = (
        "import os; e = os.environ; print(os.sched_getaffinity(0), e['CUDA_VISIBLE_DEVICES'], e['OMP_NUM_THREADS'])"
    )
    agent.launch(["python3", "-c", command], ranks=[rank(device=device)])
    agent.event("rank_exited")
    assert agent.log() == f"{{{core}}} GPU-1,GPU-2 3\n"


def test_a_checkpointable_script_finds_its_gpu_by_its_local_rank(agent: AgentClient) -> None:
    """All GPUs of the host are visible, and each rank takes the one with its local number, as under torchrun."""
    command = (
        "import os; e = os.environ; print(e['CUDA_VISIBLE_DEVICES'].split(',')[int(e['LOCAL_RANK'])], "
        "e['NCCL_SOCKET_IFNAME'])"
    )
    ranks = [rank(r, 2, device={"kind": "cuda", "uuid": f"GPU-{r}"}, interface="eth1") for r in (1, 0)]
    agent.launch(["python3", "-c", command], kind="checkpointable", ranks=ranks)
    agent.event("rank_exited", rank=0)
    agent.event("rank_exited", rank=1)
    assert [agent.log(rank=r) for r in (0, 1)] == ["GPU-0 =eth1\n", "GPU-1 =eth1\n"]


def test_secrets_are_never_written_down(agent: AgentClient) -> None:
    agent.launch(["sleep", "100"], secrets={"TOKEN": "hush-hush-8"}, env={"PASSWORD": "also-hush-hush-8"})
    found = subprocess.run(["grep", "-rl", "hush-hush-8", str(agent.root)], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "hush-hush-8" not in shown.stdout


def test_a_launch_that_the_next_agent_repeats_has_its_variables(connect: Connect, tmp_path: Path) -> None:
    """The first agent died before it started the second rank; the record on disk has no variables."""
    agent = connect()
    agent.launch(["sh", "-c", "echo $PASSWORD"], env={"PASSWORD": "again"}, ranks=[rank(0, 2), rank(1, 2)])
    for number in (0, 1):
        agent.event("rank_exited", rank=number)
    directory = Home(agent.root).attempt("j", 1)
    agent.kill_agent()
    (directory / "rank-1.state.json").unlink()
    (directory / "rank-1.log").unlink()
    agent = connect()
    agent.launch(["sh", "-c", "echo $PASSWORD"], env={"PASSWORD": "again"}, ranks=[rank(0, 2), rank(1, 2)])
    wait_until(lambda: agent.log(rank=1) == "again\n", "the second rank to print its variable")


def test_a_repeated_launch_returns_what_runs(agent: AgentClient) -> None:
    first = agent.launch(["sleep", "100"])
    assert agent.launch(["sleep", "100"]) == first


@pytest.mark.parametrize("is_new_agent", [False, True])
def test_a_repeated_launch_reports_again_what_has_ended(connect: Connect, is_new_agent: bool) -> None:
    """The connection broke before the daemon heard of the launch and of the end: it asks for the launch again."""
    agent = connect()
    agent.launch(["sh", "-c", "exit 3"])
    agent.event("rank_exited")
    if is_new_agent:
        agent.kill_agent()
    again = connect()
    again.launch(["sh", "-c", "exit 3"])
    assert again.event("rank_exited")["exit_code"] == 3


def test_a_launch_that_arrives_late_is_refused(agent: AgentClient) -> None:
    agent.launch(["true"], generation=2)
    agent.event("rank_exited")
    assert agent.refused("launch", **launch(["true"], generation=1))["kind"] == "stale"


def test_a_launch_that_was_overtaken_by_its_stop_is_refused(agent: AgentClient) -> None:
    agent.stop(generation=3)
    assert agent.refused("launch", **launch(["sleep", "100"], generation=3))["kind"] == "stale"
    agent.launch(["true"], generation=4)


def test_two_generations_run_side_by_side_in_one_directory_and_end_apart(agent: AgentClient) -> None:
    """During a move the old ranks train while the new ones get ready."""
    agent.launch(["sh", "-c", "echo one; echo kept > file; exec sleep 100"])
    wait_until(lambda: agent.log() == "one\n", "the first line")
    agent.launch(["sh", "-c", "cat file; exec sleep 100"], generation=2)
    wait_until(lambda: agent.log(generation=2) == "kept\n", "what the other generation wrote")
    agent.stop()
    running = {
        (report["generation"], rank["state"])
        for report in agent.hello(epoch=9, daemon="d")["attempts"]
        for rank in report["ranks"]
    }
    assert running == {(1, "exited"), (2, "running")}
    assert agent.log(generation=1) == "one\n"
    agent.stop(generation=2)


def test_an_older_daemon_is_told_that_it_is_over(connect: Connect) -> None:
    old, new = connect(epoch=1), connect(epoch=2)
    assert old.refused("facts")["kind"] == "stale"
    assert old.refused("hello", **old.identity(epoch=1))["kind"] == "stale"
    new.kill_agent()
    again = connect(hello=False)
    assert again.refused("hello", **again.identity(epoch=1))["kind"] == "stale"
    assert again.hello(epoch=2)["attempts"] == []


def test_ranks_live_through_the_agents_death_and_are_found_again(connect: Connect) -> None:
    """The agent is killed in mid-training; one rank ends while no agent lives, another one after."""
    agent = connect()
    wait_for_file = ["sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit $CODE"]
    agent.launch(wait_for_file, job="ends-unseen", env={"CODE": "4"})
    stays = agent.launch(wait_for_file, job="ends-later", env={"CODE": "5"})["ranks"][0]
    home = Home(agent.root)
    agent.kill_agent()
    (home.attempt("ends-unseen", 1) / "work" / "go").touch()
    record = home.attempt("ends-unseen", 1) / "rank-0.state.json"
    wait_until(lambda: '"exited"' in record.read_text(), "the fork server to write the exit down")

    agent = connect(hello=False)
    reports = {report["job"]: report["ranks"][0] for report in agent.hello()["attempts"]}
    assert (reports["ends-unseen"]["state"], reports["ends-unseen"]["exit_code"]) == ("exited", 4)
    assert (reports["ends-later"]["state"], reports["ends-later"]["pid"]) == ("running", stays["pid"])
    (home.attempt("ends-later", 1) / "work" / "go").touch()
    end = agent.event("rank_exited", job="ends-later")
    assert (end["exit_code"], end["reason"]) == (5, "exit")


def test_an_attempt_that_was_being_stopped_when_the_agent_died_is_stopped_by_the_next(connect: Connect) -> None:
    agent = connect()
    request = launch(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], grace_s=0.0)
    pid = agent.ok("launch", **request)["ranks"][0]["pid"]
    agent.send("stop", job="j", attempt=1, generation=1, grace_s=60.0, reason="cancelled")
    wait_until((Home(agent.root).attempt("j", 1) / "stop.json").exists, "the stop to be written down")
    agent.kill_agent()
    agent = connect()
    wait_until(lambda: not alive(pid), "the rank to be killed")
    wait_until(lambda: agent.hello()["attempts"][0]["ranks"][0]["reason"] == "stopped", "its end to be known")


def test_processes_that_outlive_rank_and_agent_are_swept_by_the_next_agent(connect: Connect) -> None:
    """The agent dies after the last rank has ended and before the sweep: the device is not free yet."""
    agent = connect()
    script = "trap '' TERM; (trap '' TERM; exec setsid sleep 100) & echo $!; while [ ! -e go ]; do sleep 0.02; done"
    agent.launch(["sh", "-c", script])
    left = int(wait_until(agent.log, "the pid of what will be left"))
    directory = Home(agent.root).attempt("j", 1)
    agent.kill_agent()
    (directory / "work" / "go").touch()
    wait_until(lambda: '"exited"' in (directory / "rank-0.state.json").read_text(), "the exit to be written down")
    assert alive(left)
    agent = connect()
    wait_until(lambda: not alive(left), "the sweep")
    wait_until(lambda: agent.hello()["attempts"][0]["ranks"][0]["exit_code"] == 0, "the end to be reported")


def test_a_rank_whose_fork_server_died_with_it_is_lost(agent: AgentClient) -> None:
    """No process is left that knows the exit status, so none is reported."""
    pid = agent.launch(["sleep", "100"])["ranks"][0]["pid"]
    found = processes.stat(pid)
    assert found is not None
    os.kill(found.parent, signal.SIGKILL)
    wait_until(lambda: not alive(found.parent), "the fork server to be gone")
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    end = agent.event("rank_exited")
    assert (end["reason"], end["exit_code"], end["signal"]) == ("lost", None, None)
    agent.launch(["true"], job="next")
    assert agent.event("rank_exited", job="next")["exit_code"] == 0


def test_cancel_finds_processes_that_left_the_session(agent: AgentClient) -> None:
    """Such as a data-loader worker that was re-parented to init, in its own session, and still held the device."""
    leader = agent.launch(["python3", "-c", ESCAPE])["ranks"][0]["pid"]
    escaped = int(wait_until(agent.log, "the escaped process to say its pid"))
    answer = agent.stop()
    assert not alive(leader)
    assert not alive(escaped)
    assert answer["swept"] == [escaped]
    assert [r["reason"] for r in answer["ranks"]] == ["stopped"]


def test_cancel_kills_processes_that_ignore_sigterm_after_the_grace(agent: AgentClient) -> None:
    agent.launch(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
    wait_until(agent.log, "the trap to be set")
    report = agent.stop(grace_s=0.3)["ranks"][0]
    assert (report["state"], report["signal"], report["reason"]) == ("exited", signal.SIGKILL, "stopped")


def test_a_second_stop_cuts_the_grace_of_the_first_short(agent: AgentClient) -> None:
    """Somebody gave a job a day to save, and cannot wait for it."""
    agent.launch(["sh", "-c", "trap 'echo told' TERM; echo ready; while :; do sleep 0.1; done"])
    wait_until(agent.log, "the trap to be set")
    first = agent.send("stop", job="j", attempt=1, generation=1, grace_s=86400.0, reason="cancelled")
    wait_until(lambda: "told" in agent.log(), "the first to be heeded")
    assert agent.stop(grace_s=0.0)["ranks"][0]["signal"] == signal.SIGKILL
    assert agent.reply(first)["ok"]["ranks"][0]["signal"] == signal.SIGKILL


def test_cancel_lets_a_command_finish_within_the_grace(agent: AgentClient) -> None:
    agent.launch(["sh", "-c", "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"])
    wait_until(agent.log, "the trap to be set")
    report = agent.stop(grace_s=20.0)["ranks"][0]
    assert (report["exit_code"], report["reason"]) == (0, "stopped")
    assert agent.log().endswith("saved\n")


def test_the_end_of_the_last_rank_ends_its_leftover_processes(agent: AgentClient) -> None:
    """A rank's end frees its devices, so the end is reported only after they are free."""
    agent.launch(["sh", "-c", "setsid sleep 100 & echo $!"])
    agent.event("rank_exited")
    assert not alive(int(agent.log()))


def test_an_end_is_reported_after_its_processes_released_the_device(agent: AgentClient, tmp_path: Path) -> None:
    """The last rank's, of whose child the kernel still closes the files."""
    (tmp_path / "holder.py").write_text(HALF_GONE)
    agent.launch(["sh", "-c", f"{sys.executable} {tmp_path}/holder.py {tmp_path}/device & while :; do sleep 0.1; done"])
    wait_until(agent.log, "the child to be half gone")
    assert held(tmp_path / "device")
    agent.stop(grace_s=0.2)
    assert not held(tmp_path / "device")


def test_the_end_of_one_rank_is_reported_after_its_loaders_released_the_device(
    agent: AgentClient, tmp_path: Path
) -> None:
    """A rank that takes over from it would find no memory there."""
    (tmp_path / "loader.py").write_text(LOADER)
    script = f"exec {sys.executable} {tmp_path}/loader.py {tmp_path}/device$RANK $RANK"
    ranks = agent.launch(["sh", "-c", script], kind="elastic", ranks=[rank(0, 2), rank(1, 2)])["ranks"]
    wait_until(agent.log, "the loader to run")
    assert held(tmp_path / "device0")
    os.kill(ranks[0]["pid"], signal.SIGKILL)
    assert agent.event("rank_exited", rank=0)["signal"] == signal.SIGKILL
    assert not held(tmp_path / "device0")
    assert alive(ranks[1]["pid"])


def test_stopping_an_unknown_attempt_succeeds(agent: AgentClient) -> None:
    assert agent.stop(job="unheard-of") == {"ranks": [], "swept": []}


def test_a_suspended_job_may_still_save_when_it_is_stopped(agent: AgentClient) -> None:
    agent.launch(["sh", "-c", "trap 'echo saved; exit 0' TERM; echo begun; kill -STOP $$; while :; do sleep 1; done"])
    wait_until(lambda: "begun" in agent.log(), "the job to begin")
    pid = agent.hello()["attempts"][0]["ranks"][0]["pid"]
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "its suspension")
    agent.stop(grace_s=60.0)
    assert agent.log().endswith("saved\n")


@pytest.mark.parametrize(
    "variable",
    ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "TORCHELASTIC_RUN_ID", "CONDA_PREFIX", "VIRTUAL_ENV"],
)
def test_a_job_does_not_inherit_the_scheduler_of_the_agents_shell(connect: Connect, variable: str) -> None:
    agent = connect(env={variable: "leftover"})
    agent.launch(["sh", "-c", f"echo ${{{variable}:-none}}"])
    agent.event("rank_exited")
    assert agent.log() == "none\n"


def test_two_stops_at_once_get_the_same_answer(agent: AgentClient) -> None:
    agent.launch(["sleep", "100"])
    numbers = [agent.send("stop", job="j", attempt=1, generation=1, grace_s=5.0, reason="x") for _ in range(2)]
    answers = [agent.reply(number) for number in numbers]
    assert answers[0]["ok"] == answers[1]["ok"]


def test_two_agents_on_one_machine_do_not_sweep_each_others_ranks(agent: AgentClient, tmp_path: Path) -> None:
    """Embedded hosts share the process table, and a job's ranks on both have the same name."""
    other = AgentClient(tmp_path / "other")
    try:
        other.hello()
        agent.launch(["sleep", "100"])
        pid = other.launch(["sleep", "100"])["ranks"][0]["pid"]
        agent.stop()
        assert alive(pid)
    finally:
        end_all(tmp_path / "other")
        other.close()


def test_forget_removes_ended_attempts_and_refuses_running_ones(agent: AgentClient) -> None:
    agent.launch(["sleep", "100"])
    assert agent.refused("forget", job="j", attempt=1)["kind"] == "busy"
    agent.stop()
    agent.ok("forget", job="j", attempt=1)
    assert not Home(agent.root).attempt("j", 1).exists()
    assert agent.refused("logs", job="j", attempt=1, rank=0, offset=0, limit=10)["kind"] == "unknown"


def test_a_working_directory_that_is_not_there_is_refused(agent: AgentClient) -> None:
    refused = agent.refused("launch", **launch(["true"], workdir="/no/such/place"))
    assert refused == {"kind": "workdir", "message": "the working directory /no/such/place does not exist on this host"}


def test_an_interpreter_that_is_not_there_is_refused(agent: AgentClient) -> None:
    refused = agent.refused("launch", **launch(["python", "train.py"], python="~/no/such/env"))
    assert refused["kind"] == "environment"
    assert "/no/such/env" in refused["message"]


@pytest.mark.parametrize("job", ["../up", "a/b", "", ".hidden"])
def test_a_job_id_cannot_name_another_directory(agent: AgentClient, job: str) -> None:
    assert agent.refused("launch", **launch(["true"], job=job))["kind"] == "request"


def test_shutdown_waits_for_nobody_but_is_refused_while_ranks_run(agent: AgentClient) -> None:
    agent.launch(["sleep", "100"])
    refused = agent.refused("shutdown", force=False)
    assert refused == {"kind": "busy", "message": "1 attempts run here: j.1"}
    agent.stop()
    pid = agent.agent_pid
    agent.ok("shutdown", force=False)
    wait_until(lambda: not alive(pid), "the agent to end")


def test_what_a_shell_beside_a_rank_uses_is_the_job_s(agent: AgentClient) -> None:
    """Also where it left the shell's session, as the server of tmux does; else a shell at work would look idle."""
    from clusterd.agent.host.attempt_records import load
    from clusterd.agent.server.hardware_reports import CpuUse

    agent.launch(["sleep", "1000"])
    attempt = load(Home(agent.root).attempt("j", 1))
    assert attempt is not None
    tag = "an-agent/j.1"
    busy = ["sh", "-c", "while :; do :; done"]
    process = subprocess.Popen(busy, env={**os.environ, "CLUSTERD_TAG": tag}, start_new_session=True)
    try:
        sampler = CpuUse(lambda name: f"an-agent/{name}")
        wait_until(lambda: [use for use in sampler.sample([attempt]) if use.cores > 0.2], "processor time")
    finally:
        process.kill()
        process.wait()
    agent.stop(grace_s=0.0)


def test_the_agent_samples_the_use_of_a_job(agent: AgentClient, tmp_path: Path) -> None:
    from clusterd.agent.host.attempt_records import load
    from clusterd.agent.server.hardware_reports import CpuUse

    agent.launch(["sh", "-c", "echo begun; while :; do :; done"])
    wait_until(lambda: "begun" in agent.log(), "the job to begin")
    attempt = load(Home(agent.root).attempt("j", 1))
    assert attempt is not None
    sampler = CpuUse(lambda name: f"nobody/{name}")
    (first,) = sampler.sample([attempt])
    assert first.cores == 0.0
    used = wait_until(lambda: [use for use in sampler.sample([attempt]) if use.cores > 0.0], "processor time")
    assert (used[0].job, used[0].attempt) == ("j", 1)
    assert used[0].memory_bytes > 0
    agent.stop(grace_s=0.0)
    assert sampler.sample([attempt]) == ()
