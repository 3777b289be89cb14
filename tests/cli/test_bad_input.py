"""Every mistake gets one line (what, where, what to do) and its exit code; nothing accepted is lost."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterd.errors import ClusterError, UsageError
from clusterd.submission.job_file import read_job_file
from tests.conftest import GPT, RunningCluster
from tests.hang import HANG_S


def refused(cluster: RunningCluster, *arguments: str, code: int, **options: object) -> str:
    """The one-line error message of a refused command."""
    done = cluster.run(*arguments, check=False, **options)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("sending ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("comand = ['true']", "unknown key 'comand'; did you mean 'command'?"),
        ("command = ['true']\n[resources]\ngpu = 1", "[resources]: unknown key 'gpu'; did you mean 'gpus'?"),
        ("command = 'true'", "command is 'true'; it must be a list"),
        ("command = ['true']\npriority = 'high'", "priority is 'high'; it must be a whole number"),
        ("command = ['true']\npriority = true", "priority is True; it must be a whole number"),
        ("command = ['true']\nkind = 'elastik'", "it must be one of command, checkpointable, elastic"),
        ("command = []", "command is empty"),
        ("name = 'a b'\ncommand = ['true']", "the name 'a b' must be letters"),
        ("name = '12'\ncommand = ['true']", "the name '12' would be taken for the id of a job"),
        (
            "command = ['true']\n[limits]\ntime = 'soon'",
            "time: 'soon' is no duration; write it as in 90s, 12h or 1h30m",
        ),
        ("command = ['true']\n[resources]\nmemory = '16 potatoes'", "memory: '16 potatoes' is no size"),
        (
            "command = ['true']\n[resources]\nplan = { dp = 0 }",
            "plan: dp is 0; it must be a whole number of at least 1",
        ),
        ("command = ['true']\n[resources]\nplan = { np = 2 }", "plan: a plan has no field 'np'"),
        ("command = ['true']\n[resources]\ndevices = 2\nplan = { dp = 4 }", "has 4 ranks, resources ask for 2 devices"),
        ("command = ['true']\n[secrets]\nKEY = 'hunter2'", "KEY: write env:VARIABLE or file:PATH"),
        ("command = ['true']\n[secrets]\nKEY = 'env:NOT_SET_HERE'", "the environment variable NOT_SET_HERE is not set"),
        (
            "command = ['true']\n[datasets]\ncorpus = '/data'",
            "[datasets] is read through clusterd.train",
        ),
        ("command = [", "Invalid value"),
    ],
)
def test_job_files(cluster: RunningCluster, text: str, message: str) -> None:
    """Refused before a daemon is asked, or by it; the file is named where it is at fault."""
    file = cluster.directory / "job.toml"
    file.write_text(text)
    if message.startswith(("command is empty", "has 4 ranks", "is not supported")):
        cluster.start()
    assert message in refused(cluster, "submit", str(file), code=2)


def test_without_a_daemon(cluster: RunningCluster) -> None:
    """69, and how to get one."""
    assert "clusterd start" in refused(cluster, "ls", code=69)


def test_a_second_daemon(cluster: RunningCluster) -> None:
    """One per state directory."""
    cluster.start()
    message = refused(cluster, "start", code=1)
    assert f"a daemon (pid {cluster.pid}) already serves {cluster.directory}" in message


def test_a_second_daemon_on_the_same_socket(cluster: RunningCluster) -> None:
    """Commands would reach the one or the other."""
    cluster.start()
    file = cluster.directory / "other.toml"
    file.write_text('[daemon]\nstate_dir = "other"\n')
    del cluster.environment["CLUSTERD_STATE_DIR"]
    cluster.environment["CLUSTERD_SOCKET"] = str(cluster.socket)
    assert f"another daemon serves {cluster.socket}" in refused(cluster, "start", "--config", "other.toml", code=1)
    assert cluster.call("status")["pid"] == cluster.pid
    cluster.kill()  # leaves its socket, which nobody serves
    cluster.run("start", "--config", "other.toml")
    assert cluster.call("status")["state_dir"] == str(cluster.directory / "other")
    cluster.run("stop")
    cluster.socket.write_text("somebody else's")
    assert f"{cluster.socket} is there, and no socket" in refused(cluster, "start", "--config", "other.toml", code=1)
    assert cluster.socket.read_text() == "somebody else's"


def test_the_environment_goes_before_the_file(cluster: RunningCluster) -> None:
    """Clients do not read the file: they would look for the daemon elsewhere."""
    file = cluster.directory / "clusterd.toml"
    file.write_text('[daemon]\nstate_dir = "there"\nsocket = "there/sock"\n')
    message = cluster.run("start", "--config", "clusterd.toml").stderr
    assert cluster.call("status")["state_dir"] == str(cluster.directory)
    assert "export CLUSTERD_SOCKET" not in message
    cluster.run("stop")
    del cluster.environment["CLUSTERD_STATE_DIR"]
    cluster.environment["XDG_RUNTIME_DIR"] = str(cluster.directory)
    cluster.socket = cluster.directory / "there" / "sock"
    assert f"export CLUSTERD_SOCKET={cluster.socket}" in cluster.run("start", "--config", "clusterd.toml").stderr


def test_relative_directories_are_the_same_for_daemon_and_clients(cluster: RunningCluster) -> None:
    """The daemon runs in its state directory, where a relative path would mean another place."""
    cluster.environment["CLUSTERD_STATE_DIR"] = "state"
    cluster.socket = cluster.directory / "state" / "clusterd.sock"
    cluster.start()
    cluster.run("ls")
    cluster.run("stop")
    file = cluster.directory / "clusterd.toml"
    file.write_text('[daemon]\nstate_dir = "there"\nsocket = "there/sock"\n')
    del cluster.environment["CLUSTERD_STATE_DIR"]
    cluster.environment["CLUSTERD_SOCKET"] = str(cluster.directory / "there" / "sock")
    cluster.socket = cluster.directory / "there" / "sock"
    cluster.run("start", "--config", "clusterd.toml")
    assert {entry.name for entry in (cluster.directory / "there").iterdir()} >= {"journal.db", "sock"}


@pytest.mark.slow
def test_no_name_is_no_job(shared_cluster: RunningCluster) -> None:
    """An unset variable in a script must not cancel the only job."""
    shared_cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "1000")
    assert "no job is named" in refused(shared_cluster, "cancel", "", code=2)
    assert shared_cluster.call("jobs")[0]["state"] in ("queued", "starting", "running")


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[daemon]\npolicie = 'default'", "[daemon]: unknown key 'policie'; did you mean 'policy'?"),
        (
            "[daemon]\noperators = 'ann'",
            '[daemon]: operators is \'ann\'; it must be a list of names, as in ["ann", "bob"]',
        ),
        (
            "[daemon]\nsocket = '~nosuch/x'",
            "[daemon]: a path begins with the home of a user who has none: write it out",
        ),
        ("[daemon]\npolicy = 'nope'", "[daemon]: policy is 'nope'; it must be one of aiturbo, aiturbo+plans, default,"),
        (
            "[daemon]\nsocket_group = 'no-such-group'",
            "[daemon]: socket_group is 'no-such-group'; there is no such group on this machine",
        ),
        ("[daemon]\nsocket_group = 5", "[daemon]: socket_group is 5; put it in quotes"),
        ("[daemon]\nhost_lost_after = '0s'", "[daemon]: host_lost_after is '0s'; it must be above 0, and fit 64 bits"),
        ("[daemon]\nhost_lost_after = inf", "[daemon]: host_lost_after is inf; it must be above 0, and fit 64 bits"),
        ("[daemon]\nworkdir_max = -5", "[daemon]: workdir_max is -5; it must be above 0, and fit 64 bits"),
        ('[datasets]\ncorpus = "/a\\u0000b"', "[datasets]: corpus is '/a\\x00b'; write \"HOST:/folder\""),
        ("[hosts]\ngpu01 = 5", "[hosts.gpu01] is 5; it must be a table"),
        ("[hosts.a]\ncpu_devices = 'two'", "[hosts.a]: cpu_devices is 'two'; it must be a whole number from 0 to 1024"),
        (
            "[hosts.a]\ncpu_devices = 99999999999999999999999",
            "[hosts.a]: cpu_devices is 99999999999999999999999; it must",
        ),
        ("[tenants.vision]\nquota = 'many'", "[tenants.vision]: quota is 'many'; it must be a number of devices"),
        ("[tenants.vision]\nquota = 99999999999999999999999", "[tenants.vision]: quota is 99999999999999999999999;"),
        (f"[tenants.vision]\nshare = {'9' * 400}", "[tenants.vision]: share is 9999"),
        (f"[daemon]\nworkdir_max = {'9' * 5000}", "Exceeds the limit (4300 digits) for integer string conversion"),
        (f"[daemon]\noperators = {'[' * 3000}", "a value is nested too deeply"),
        (
            "[daemon]\nhost_lost_after = 00:02:00",
            "[daemon]: host_lost_after: 00:02:00 is no duration",
        ),
        ('[daemon]\nsocket = "a\\u0000b"', "[daemon]: socket is 'a\\x00b'; it must be a path"),
        ('[daemon]\nsocket_group = "a\\u0000b"', "[daemon]: socket_group is 'a\\x00b'; there is no such group"),
        ('[notify]\ncommand = ["a\\u0000b"]', "[notify]: command is ['a\\x00b']; it must be a command"),
        ('[notify]\ncommand = [""]', "[notify]: command is ['']; it must be a command"),
        ('[daemon]\nssh_config = "a\\u0000b"', "[daemon]: ssh_config is 'a\\x00b'; it must be a path"),
        ('[hosts.a]\nagent_home = "a\\u0000b"', "[hosts.a]: agent_home is 'a\\x00b'; it must be a path"),
        ("[tenants.vision]\nshare = 0", "[tenants.vision]: share is 0; it must be a number above 0"),
    ],
)
def test_a_configuration_that_cannot_be(cluster: RunningCluster, text: str, message: str) -> None:
    """Named with file, table, and what would be right; also before anything is started."""
    file = cluster.directory / "clusterd.toml"
    file.write_text(text)
    answer, checked = (
        re.sub(r"(?<=\.toml):\d+(?=: )", "", refused(cluster, *command, str(file), code=2))
        for command in (("start", "--config"), ("config", "check"))
    )
    assert f"{file}: {message}" in answer
    assert checked == answer


def test_a_log_that_cannot_be_written(cluster: RunningCluster) -> None:
    """The file may belong to another user who started the daemon earlier."""
    (cluster.directory / "daemon.log").mkdir()
    assert f"{cluster.directory}/daemon.log: Is a directory: make it a file" in refused(cluster, "start", code=1)


def test_a_state_directory_with_a_file_in_the_place_of_a_folder(cluster: RunningCluster) -> None:
    """Regression: the error was reported as a bug of the daemon."""
    (cluster.directory / "attempts").touch()
    assert f"{cluster.directory}/attempts: File exists: make it a writable directory" in refused(
        cluster, "start", code=1
    )


def test_an_action_for_several_hosts_skips_unknown_ones(shared_cluster: RunningCluster) -> None:
    message = shared_cluster.run("host", "drain", "nosuch", "local0", check=False)
    assert message.returncode == 2
    assert "local0 is drained; no jobs" in message.stderr
    assert [row["name"] for row in shared_cluster.call("hosts") if row["drained"] is not None] == ["local0"]
    assert shared_cluster.run("host", "undrain", "local*").stderr.startswith("local0 is undrained\n")
    message = shared_cluster.run("host", "drain", "gpu*", check=False)
    assert message.returncode == 2 and message.stderr.startswith("clusterd: no host matches gpu* (hosts: local0")
    message = shared_cluster.run("host", "add", "--cpu-devices", "99999999", "gpu01", check=False)
    assert "99999999 is not in the range 0<=x<=1024" in message.stderr
    with pytest.raises(ClusterError, match="the host's options: cpu_devices is -1; it must be a whole number"):
        shared_cluster.call("host_add", address="gpu01", accept=[], options={"cpu_devices": -1})


def in_shell(cluster: RunningCluster, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", line], env=cluster.environment, capture_output=True, text=True, check=False)


def test_a_standard_input_that_is_closed(shared_cluster: RunningCluster) -> None:
    """Some service managers start programs with standard input closed."""
    job = shared_cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "1000").stdout.strip()
    shared_cluster.wait_for(job, lambda row: row["state"] == "running")
    clusterd = f"{sys.executable} -m clusterd"
    message = in_shell(shared_cluster, f"{clusterd} shell {job} -- echo there <&-; {clusterd} top <&-")
    assert message.stdout == "there\n"
    assert "top needs a terminal" in message.stderr
    mine, theirs = pty.openpty()
    dumb = {**shared_cluster.environment, "TERM": "dumb"}
    top = subprocess.run(
        [sys.executable, "-m", "clusterd", "top"], env=dumb, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    os.close(mine)
    os.close(theirs)
    assert top.returncode == 2 and b"no dumb one (TERM)" in top.stderr
    assert "bug" not in message.stderr


def test_what_cannot_be_shown_on_a_closed_standard_output_is_a_failure(shared_cluster: RunningCluster) -> None:
    """A job that runs meanwhile goes on, and gives its exit code."""
    for command, code, why in (
        ("run --no-snapshot -- sh -c 'echo x; exit 3'", 3, "keeps running"),
        ("ls --all", 1, "the output cannot be written"),
        ("ls --all -o json", 1, "the output cannot be written"),
    ):
        done = in_shell(shared_cluster, f"{sys.executable} -m clusterd {command} >&-")
        assert (done.returncode, why in done.stderr) == (code, True), done.stderr


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b'\xef\xbb\xbfcommand = ["true"]\r\n')
    assert read_job_file(tmp_path / "job.toml").spec.command == ("true",)


def test_a_workdir_that_is_too_large_names_its_largest_files(cluster: RunningCluster) -> None:
    """A checkpoint lies beside the script."""
    config = cluster.directory / "clusterd.toml"
    config.write_text("[daemon]\nworkdir_max = '1MiB'\n")
    work = cluster.directory / "work"
    work.mkdir()
    with (work / "model.ckpt").open("wb") as file:
        file.truncate(3 << 20)
    cluster.run("start", "--config", str(config))
    message = refused(cluster, "run", "--", "true", code=2, cwd=work)
    assert "the limit is 1.0 MiB; largest: model.ckpt (3.0 MiB)" in message
    assert ".clusterdignore" in message


@pytest.mark.slow
def test_a_plan_that_cannot_be_and_a_host_without_torch(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """Both end the job with the reason, before any device is taken."""
    text = 'kind = "elastic"\ncommand = ["python", "train.py"]\nresources = {{ devices = {0}, plan = {{ {1} }} }}'
    wrong = local_cluster.submit(text.format(3, "dp = 3"), "odd")
    row = local_cluster.wait_for(wrong, lambda row: row["state"] == "failed")
    assert "a global batch of 16 cannot be cut into 3 equal shares" in row["reason"] or "asks for 3" in row["reason"]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    file = local_cluster.directory / "bare.toml"
    file.write_text(f'name = "bare"\nworkdir = "{GPT}"\npython = "{bare}"\n' + text.format(2, "dp = 2"))
    job = local_cluster.run("submit", str(file)).stdout.strip()
    row = local_cluster.wait_for(job, lambda row: row["state"] == "failed")
    assert "torch" in row["reason"]
    assert str(bare) in row["reason"]
    assert row["devices"] == []


def test_why_a_rank_failed_is_told_in_its_words(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """Not by its exit code alone: nobody should have to look for the one line of a log."""
    work = tmp_path / "work"
    shutil.copytree(GPT, work, ignore=shutil.ignore_patterns("__pycache__"))
    script = (work / "train.py").read_text()
    broken = "        if i:\n            raise KeyError(i)\n        window ="
    (work / "train.py").write_text(script.replace("        window =", broken))
    text = f'kind = "elastic"\nworkdir = "{work}"\ncommand = ["python", "train.py"]\n'
    text += "resources = { devices = 1, plan = { dp = 1 } }\n"
    job = shared_cluster.submit(text, "broken")
    row = shared_cluster.wait_for(job, lambda row: row["state"] == "failed")
    assert re.search(r"exit code 1 on local\d: KeyError: \d+", row["reason"]), row["reason"]
    (tmp_path / "taken").touch()
    job = shared_cluster.submit(f'{text}checkpoints = {{ directory = "{tmp_path}/taken/here" }}\n', "nowhere")
    row = shared_cluster.wait_for(job, lambda row: row["state"] == "failed")
    assert f"cannot create {tmp_path}/taken/here/nowhere-{job} for checkpoints" in row["reason"]


def test_options_after_the_command_are_its_own(shared_cluster: RunningCluster) -> None:
    """Options after the command belong to it, even if clusterd has the same ones, with or without `--`."""
    for terms in (("python", "-u", "train.py", "--gpus", "many"), ("--", "./train", "--name", "-d", "--", "x")):
        job = shared_cluster.run("run", "-d", "--no-snapshot", *terms).stdout.strip()
        assert shared_cluster.job(job)["spec"]["command"] == list(terms[terms[0] == "--" :])


def test_ended_jobs_are_not_changed(shared_cluster: RunningCluster) -> None:
    """A job that ended has no priority and no pin; a host is added once, and one inside this machine has no key."""
    job = shared_cluster.run("run", "-d", "--", "true").stdout.strip()
    shared_cluster.run("wait", job)
    for terms in (("priority", job, "5"), ("unpin", job), ("cancel", job)):
        assert f"job {job} (true) is finished already" in refused(shared_cluster, *terms, code=1)
    assert "local0 is in the cluster already" in refused(shared_cluster, "host", "add", "local0", code=1)
    other = refused(shared_cluster, "host", "add", "root@local0:2201", code=1)
    assert "another port or account there needs a name of its own: Host in the SSH configuration" in other
    assert "has the known key" in shared_cluster.run("host", "trust", "local0").stderr


def test_the_settings_file_in_force_is_told(cluster: RunningCluster) -> None:
    """The file was given at the first start only, not at the restart."""
    file = cluster.directory / "lab.toml"
    file.write_text("[daemon]\npolicy = 'default'\n")
    assert f"settings from {file}" in cluster.run("start", "--config", str(file)).stderr
    assert f"settings {file}" in cluster.run("status").stdout
    cluster.run("stop")
    cluster.environment["XDG_CONFIG_HOME"] = str(cluster.directory)
    assert "no settings file" in cluster.run("start").stderr


def test_an_interrupt_before_anything_is_imported() -> None:
    """Ctrl-C in the first tenth of a second ends as it does later: without a traceback."""
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from clusterd.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_reader_that_is_gone(cluster: RunningCluster) -> None:
    """``clusterd ls | head -0``: no word, no traceback, at whatever moment the pipe closes."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "clusterd", "completion", "bash"]
    done = subprocess.run(command, env=cluster.environment, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_state_directory_that_cannot_be(cluster: RunningCluster) -> None:
    """A file is in its place."""
    (cluster.directory / "file").touch()
    cluster.environment["CLUSTERD_STATE_DIR"] = str(cluster.directory / "file" / "state")
    assert "set CLUSTERD_STATE_DIR to a writable directory" in refused(cluster, "start", code=1)


def test_a_command_is_shown_and_not_obeyed(shared_cluster: RunningCluster) -> None:
    shared_cluster.call("submit", spec={"name": "odd", "command": ["echo", "\x1b[2J\nnext"], "user": ""})
    done = shared_cluster.run("show", "odd")
    assert "command    echo '\\x1b[2J\\nnext'" in done.stdout and "\x1b" not in done.stdout


def test_a_tenant_that_there_is_not(cluster: RunningCluster) -> None:
    """No quota would apply to an unknown tenant."""
    settings = cluster.directory / "clusterd.toml"
    settings.write_text("[tenants.vision]\nquota = 1\n")
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start()
    spec = {"name": "odd", "command": ["true"], "user": ""}
    with pytest.raises(UsageError, match="there is no tenant 'visoin'; there are default, vision"):
        cluster.call("submit", spec={**spec, "tenant": "visoin"})
    for tenant in ("vision", "default"):
        cluster.call("submit", spec={**spec, "tenant": tenant})
