"""Batch scripts: what their #SBATCH and #CLUSTERD lines ask for, and refusals by line and option."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterd.errors import ConfigError, UsageError
from clusterd.submission.batch_script import command_line, is_script, read_batch_script, read_script_text
from clusterd.submission.job_file import command_line_job
from clusterd.types import HostId
from clusterd.units import local_time
from tests.conftest import RunningCluster, until

COMMON = """#!/bin/bash
#SBATCH --job-name=finetune     # a comment
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH -c 8
#SBATCH --mem=64G
#SBATCH --time=1-12:30:00
#SBATCH --partition=long
#SBATCH --output=%x-%j.out
#SBATCH --mail-type=END

module_dir=$HOME
#SBATCH --nodes=9
srun torchrun train.py
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(text: str, name: str = "train.sh") -> Path:
    file = Path.cwd() / name
    file.write_text(text)
    return file


def test_a_script_of_a_common_shape_says_what_it_needs() -> None:
    request, ignored = read_batch_script(script(COMMON))
    spec = request.spec
    assert (spec.name, spec.time_limit_s, spec.workdir) == ("finetune", 131400.0, str(Path.cwd()))
    wanted = spec.resources
    assert (wanted.nodes, wanted.devices, wanted.per_node, wanted.kind) == (2, 8, 4, "cuda")
    assert (wanted.device_name, wanted.cpus, wanted.memory_bytes) == ("a100", 16, 128 << 30)
    assert spec.command[-1] == "train.sh"
    assert spec.output == "%x-%j.out"
    assert ignored == ["--partition", "--mail-type"]


@pytest.mark.parametrize(("line", "seconds"), [("30", 1800.0), ("5:30", 330.0), ("2:00:00", 7200.0), ("1-6", 108000.0)])
def test_times_are_read_as_slurm_reads_them(line: str, seconds: float) -> None:
    request, _ = read_batch_script(script(f"#!/bin/bash\n#SBATCH -t {line}\ntrue\n"))
    assert request.spec.time_limit_s == seconds


def test_own_lines_take_every_key_of_a_job_file() -> None:
    text = "#!/bin/bash\n#SBATCH --gpus=a100:2\n#CLUSTERD priority = 5\n#CLUSTERD resources.hosts = ['a']\ntrue\n"
    spec = read_batch_script(script(text))[0].spec
    assert (spec.priority, spec.resources.devices, spec.resources.device_name) == (5, 2, "a100")
    assert spec.resources.hosts == (HostId("a"),)


def test_constraints_are_labels_that_all_hold() -> None:
    text = "#!/bin/bash\n#SBATCH -C nvlink&rack=a\ntrue\n"
    assert read_batch_script(script(text))[0].spec.resources.constraint == ("nvlink", "rack=a")
    with pytest.raises(ConfigError, match="joined by & or a comma"):
        read_batch_script(script("#!/bin/bash\n#SBATCH --constraint=a|b\ntrue\n"))


def test_a_comment_ends_no_options() -> None:
    text = "#!/bin/bash\n\n  # which GPUs\n#SBATCH --gpus=2\ntrue\n"
    assert read_batch_script(script(text))[0].spec.resources.devices == 2


def test_dependencies_keep_their_conditions() -> None:
    text = "#!/bin/bash\n#SBATCH -d afterok:1:2,afterany:3,afternotok:4\ntrue\n"
    assert read_batch_script(script(text))[0].spec.after == ("1:ok", "2:ok", "3:any", "4:failed")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("#SBATCH -L matlab:2", "line 2: --licenses of Slurm is not understood here: none are counted"),
        ("#SBATCH --ntasks=3 --nodes=2 --gpus=2", "3 tasks on 2 nodes: give a multiple"),
        ("#SBATCH --gres=shard:2", "line 2: --gres=shard:2: only gpu is known"),
        ("#SBATCH --time=soon", "line 2: --time=soon: write it as in 30"),
        ("#SBATCH --mem=lots", "line 2: --mem=lots: write it as in 64G"),
        ("#SBATCH --nodes=2-4", "line 2: --nodes=2-4: it must be a whole number"),
        ("#SBATCH -y gpu3", "line 2: -y of Slurm is not understood here"),
        ("#SBATCH --job-name='a", "line 2: No closing quotation"),
        ("#CLUSTERD priorty = 1", "did you mean 'priority'?"),
        ("#CLUSTERD priority: 1", "#CLUSTERD lines"),
    ],
)
def test_lines_without_a_meaning_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_batch_script(script(f"#!/bin/bash\n{line}\ntrue\n"))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value).strip()


def test_all_lines_that_are_refused_are_named_at_once() -> None:
    text = "#!/bin/bash\n#SBATCH --reservation=mine\n#SBATCH --mem=lots\n#SBATCH --test-only\n#SBATCH -y\ntrue\n"
    with pytest.raises(ConfigError) as refused:
        read_batch_script(script(text))
    for part in (
        "line 2: --reservation of Slurm is not understood here: #CLUSTERD booking = NUMBER",
        "line 3: --mem=lots",
        "line 4: --test-only of Slurm is not understood here: clusterd submit --dry-run",
        "line 5: -y of Slurm",
    ):
        assert part in str(refused.value)


def test_common_options_of_memory_gpus_and_time_have_their_meaning() -> None:
    text = "#!/bin/bash\n#SBATCH --time=0 --nice=50 -c 4 --mem-per-cpu=2G --gpus-per-task=a100:2\ntrue\n"
    spec = read_batch_script(script(text))[0].spec
    assert (spec.time_limit_s, spec.priority, spec.resources.devices) == (None, -50, 2)
    assert spec.resources.memory_bytes == 8 << 30
    text = "#!/bin/bash\n#SBATCH --gpus=2 --mem-per-gpu=3G\ntrue\n"
    assert read_batch_script(script(text))[0].spec.resources.memory_bytes == 6 << 30


def test_variables_that_a_script_exports_reach_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: --export was left out with a note, and the job ran without its SEED."""
    monkeypatch.setenv("DATA", "/data/here")
    monkeypatch.delenv("NOTHING", raising=False)
    text = "#!/bin/bash\n#SBATCH --export=ALL,SEED=3,DATA,NOTHING -n 2\n#CLUSTERD env.LR = '0.1'\ntrue\n"
    request, ignored = read_batch_script(script(text))
    assert (
        dict(request.spec.env).items() >= {"SEED": "3", "DATA": "/data/here", "LR": "0.1", "SLURM_NTASKS": "2"}.items()
    )
    assert not {"ALL", "NOTHING"} & dict(request.spec.env).keys() and not ignored


def test_cores_of_each_gpu_are_counted() -> None:
    spec = read_batch_script(script("#!/bin/bash\n#SBATCH -N 2 --gpus-per-node=2 --cpus-per-gpu=6\ntrue\n"))[0].spec
    assert (spec.resources.devices, spec.resources.cpus) == (4, 24)


def test_common_options_of_time_and_place_have_their_meaning() -> None:
    options = "-H -W --exclude=gpu03,gpu04 --begin=2026-12-24T08:00:00 --signal=B:TERM@90"
    request = read_batch_script(script(f"#!/bin/bash\n#SBATCH {options}\ntrue\n"))[0]
    spec = request.spec
    assert (spec.hold, request.wait, spec.resources.exclude) == (True, True, ("gpu03", "gpu04"))
    assert (local_time(spec.begin_s or 0.0), spec.limit_signal) == ("2026-12-24 08:00", "B:TERM@90")
    before_s = time.time()
    later = read_batch_script(script("#!/bin/bash\n#SBATCH --begin=now+2hours\ntrue\n"))[0].spec.begin_s
    assert later is not None and 7200.0 <= later - before_s < 7260.0
    for line, message in (
        ("--begin=soon", "line 2: --begin=soon: write it as in 14:00"),
        ("--signal=KILL@9", "line 2: --signal=KILL@9: write it as in USR1@2m; signals are HUP"),
        ("--exclude=gpu[1-3]", "name the hosts one by one"),
        ("--signal=USR1@nan", "the time before the limit must be at least 0"),
        ("--begin=now+inf", "the time from now must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read_batch_script(script(f"#!/bin/bash\n#SBATCH {line}\ntrue\n"))


def test_a_script_is_warned_before_its_time_limit_in_the_directory_that_it_names(
    shared_cluster: RunningCluster,
) -> None:
    """Without B:, what the script runs gets the signal, and not the script itself."""
    directory = shared_cluster.directory / "warned"
    (directory / "sub").mkdir(parents=True)
    child = (
        "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(3)); "
        "print('ready', flush=True); time.sleep(600)"
    )
    text = (
        "#!/bin/bash\n#SBATCH --chdir=sub --time=20:00:00 --signal=USR1@36000\n"
        f'echo "in ${{PWD##*/}}"\n{sys.executable} -c "{child}"\necho "child $?"\n'
    )
    (directory / "run.sh").write_text(text)
    job = shared_cluster.run("submit", "run.sh", cwd=directory).stdout.strip()
    until(lambda: "ready" in shared_cluster.run("logs", job).stdout)
    shared_cluster.run("edit", job, "time=10h")  # which leaves less than the ten hours before
    shared_cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert shared_cluster.run("logs", job).stdout.splitlines() == ["in sub", "ready", "child 3"]


def test_tasks_are_counted_for_srun_and_for_what_they_need() -> None:
    text = "#!/bin/bash\n#SBATCH --ntasks=4 -c 2 --gpus-per-task=a100:1 --mem-per-cpu=1G\ntrue\n"
    spec = read_batch_script(script(text))[0].spec
    assert (spec.resources.devices, spec.resources.cpus, spec.resources.memory_bytes) == (4, 8, 8 << 30)
    assert spec.env == {
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_PER_TASK": "1",
    }
    text = "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-node=4\ntrue\n"
    assert read_batch_script(script(text))[0].spec.env["SLURM_NTASKS"] == "8"
    text = "#!/bin/bash\n#SBATCH -N 2 -n 16 --mem-per-cpu=1G\nsrun work\n"
    spec = read_batch_script(script(text))[0].spec
    assert (spec.resources.cpus, spec.resources.memory_bytes) == (16, 16 << 30), "each task has a core"
    assert "SLURM_CPUS_PER_TASK" not in spec.env


def test_a_job_file_is_no_script(tmp_path: Path) -> None:
    assert not is_script(script('command = ["true"]\n', "job.toml"))
    assert is_script(script("#!/bin/sh\ntrue\n"))
    assert not is_script(tmp_path / "absent")


def test_an_sbatch_script_runs_unchanged(local_cluster: RunningCluster) -> None:
    """With Slurm's variables, srun, and its exit code."""
    text = (
        "#!/bin/bash\n#SBATCH --job-name=unchanged\n#SBATCH --time=10\n#SBATCH -n 1 --cpus-per-task=1\n"
        'echo "job $SLURM_JOB_NAME on $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"\n'
        'srun --unbuffered -K1 echo "task $SLURM_PROCID of $SLURM_NTASKS"\nexit 5\n'
    )
    directory = local_cluster.directory / "scripts"
    directory.mkdir()
    (directory / "run.sh").write_text(text)
    done = local_cluster.run("submit", "--wait", "run.sh", cwd=directory, check=False)
    job = done.stdout.split()[0]
    log = local_cluster.run("logs", job).stdout
    assert "job unchanged on localhost" in log and "task 0 of 1" in log
    assert done.returncode == 5


@pytest.mark.parametrize(
    ("first_line", "body", "code", "shown"),
    [
        ("/bin/bash -e", "false\necho went on", 1, ""),
        ("/usr/bin/env -S bash -o pipefail", "false | true && echo went on", 1, ""),
        ("/bin/bash -l", "shopt -q login_shell && echo a login", 0, "a login\n"),
        (
            "/usr/bin/env python3",
            "import os; print('job', os.environ['SLURM_JOB_NAME']); raise SystemExit(4)",
            4,
            "job s\n",
        ),
        ("/bin/sed -n 2p", "as sed reads it", 0, "as sed reads it\n"),
    ],
)
def test_a_script_runs_as_its_first_line_says(
    shared_cluster: RunningCluster, tmp_path: Path, first_line: str, body: str, code: int, shown: str
) -> None:
    """Regression: bash read scripts for Python, and went on behind a failed command in spite of `#!/bin/bash -e`."""
    text = f"#!{first_line}\n{body}\n"
    (tmp_path / "s.py").write_text(text)
    for given, typed in (("s.py", ""), ("-", text)):
        done = shared_cluster.run("submit", "--wait", "--name", "s", given, input=typed, cwd=tmp_path, check=False)
        assert done.returncode == code, done.stderr
        assert shared_cluster.run("logs", done.stdout.split()[0]).stdout == shown


@pytest.mark.parametrize(
    ("option", "typed", "shown"),
    [("", (), "none\n"), ("#SBATCH -n 1\n", (), "1\n"), ("#SBATCH -n 1\n", ("-n", "2"), "2\n")],
)
def test_the_number_of_tasks_is_there_if_it_was_asked_for(
    shared_cluster: RunningCluster, tmp_path: Path, option: str, typed: tuple[str, ...], shown: str
) -> None:
    """Regression: Lightning took itself for the one task of Slurm, and refused a second device.

    A typed number is that of a line in the script, too: `submit -n 2 job.sh` ran the script twice at a time.
    """
    text = f"#!/bin/bash\n{option}echo ${{SLURM_NTASKS-none}}\n"
    done = shared_cluster.run("submit", "--wait", *typed, input=text, cwd=tmp_path)
    assert shared_cluster.run("logs", done.stdout.strip()).stdout == shown


def test_a_script_has_itself_queued_again_and_is_told_what_scontrol_does_not_do(
    shared_cluster: RunningCluster, tmp_path: Path
) -> None:
    """Regression: a trap before the time limit that ends with `exit 0` finished the job. Its comments are Latin-1."""
    text = b"""#!/bin/bash -u
# L\xe4uft bis zur Zeitgrenze
trap 'scontrol requeue $SLURM_JOB_ID; exit 0' USR1
scontrol update JobId=1 Nice=5 || echo code $?
[ "${SLURM_RESTART_COUNT-0}" = 1 ] || kill -USR1 $$
"""
    (tmp_path / "s.sh").write_bytes(text)
    job = shared_cluster.run("submit", "--wait", "s.sh", cwd=tmp_path).stdout.strip()
    assert [attempt["number"] for attempt in shared_cluster.job(job)["attempts"]] == [1, 2]
    logs = [shared_cluster.run("logs", job, "--attempt", number).stdout for number in ("1", "2")]
    assert (
        logs[1] == "clusterd: scontrol update JobId=1 Nice=5: in a job it knows show hostnames, and requeue of the job"
        " itself\ncode 1\n"
    )
    assert logs[0].removeprefix(logs[1]).startswith("clusterd: exit code 75 queues it again")


def test_a_script_with_the_line_ends_of_windows_is_refused(tmp_path: Path) -> None:
    """As by sbatch: `mkdir out` would make another folder; the remedy of the message makes a script of it."""
    file = tmp_path / "my job.sh"
    for text in (b"#!/bin/bash\r\nmkdir out\r\n", b"\xef\xbb\xbf#!/bin/bash\nmkdir out\n"):
        file.write_bytes(text)
        assert is_script(file)
        with pytest.raises(ConfigError, match="line ends or the mark of Windows") as refused:
            read_batch_script(file)
        subprocess.run(["sh", "-c", str(refused.value).partition("words: ")[2]], check=True)
        assert file.read_bytes() == b"#!/bin/bash\nmkdir out\n"


@pytest.mark.parametrize("line", ["#PBS -l nodes=1:ppn=8", "#BSUB -n 8", "#$ -pe smp 8"])
def test_lines_of_another_system_are_not_dropped_in_silence(line: str) -> None:
    """Regression: with a first line a script of PBS ran on one core, and nothing said so."""
    with pytest.raises(ConfigError, match="are not read: write #SBATCH"):
        read_batch_script(script(f"#!/bin/bash\n{line}\ntrue\n"))
    both = script(f"#!/bin/bash\n{line}\n#SBATCH -c 8\ntrue\n")  # for either system, as sbatch reads it
    assert read_batch_script(both)[0].spec.resources.cpus == 8


def test_srun_runs_a_step_for_each_task(shared_cluster: RunningCluster) -> None:
    """With its options apart from the command: `srun -n 2 hostname` once ran a command named 2."""
    text = (
        "#!/bin/bash\n#SBATCH --ntasks=2 --time=10 -c 1\n"
        "srun sh -c 'echo task $SLURM_PROCID of $SLURM_NTASKS, $SLURM_CPUS_PER_TASK core'\n"
        "srun -n 3 -l --mem 1G sh -c 'echo three'\n"
        "echo from a pipe | srun -n1 cat\n"
        "srun sh -c 'exit $((SLURM_PROCID + 3))'; echo code $?\n"
        "bash -c 'srun -N 2 hostname'; echo refused $?\n"
        "srun -n 2 no-such-program; echo absent $?\n"
        "srun -o here.txt hostname; echo elsewhere $?\n"
    )
    done = shared_cluster.run("submit", "--wait", input=text)
    lines = shared_cluster.run("logs", done.stdout.split()[0]).stdout.splitlines()
    assert {"task 0 of 2, 1 core", "task 1 of 2, 1 core"} <= set(lines)
    assert {"0: three", "1: three", "2: three"} <= set(lines)
    assert {"from a pipe", "code 4", "refused 1", "absent 127", "elsewhere 1"} <= set(lines)
    assert any("srun: --output is not done here: write > FILE behind the command" in line for line in lines)


def test_an_array_of_scripts_knows_its_size(shared_cluster: RunningCluster) -> None:
    show = "echo $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT, $SLURM_ARRAY_TASK_MIN to $SLURM_ARRAY_TASK_MAX"
    done = shared_cluster.run("submit", "--wait", "--array", "3,5", "--wrap", show)
    logs = [shared_cluster.run("logs", job).stdout for job in done.stdout.split()]
    assert logs == ["3 of 2, 3 to 5\n", "5 of 2, 3 to 5\n"]


def test_what_is_submitted_without_a_file_is_a_script(shared_cluster: RunningCluster) -> None:
    assert "standard input: unknown key 'x'" in shared_cluster.run("submit", input="x = 1", check=False).stderr
    assert "it is empty" in shared_cluster.run("submit", input="", check=False).stderr
    both = shared_cluster.run("submit", "--wrap", "true", "job.sh", check=False)
    assert both.returncode == 2 and "leave job.sh out" in both.stderr


def test_what_is_in_a_pipe_is_read_once(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: of `submit <(envsubst < job.toml)` the first bytes were lost: "command is missing"."""
    (tmp_path / "job.toml").write_text('command = ["echo", "a job file"]\n')
    (tmp_path / "job.sh").write_text("#!/bin/bash\necho a script\n")
    for typed, shown in (
        ("submit --wait <(cat job.toml)", "a job file\n"),
        ("submit --wait - < job.toml", "a job file\n"),
        ("submit --wait <(cat job.sh)", "a script\n"),
        ("submit --wait /dev/stdin < <(cat job.sh)", "a script\n"),
    ):
        words = f"{shlex.quote(sys.executable)} -m clusterd {typed}"
        done = subprocess.run(
            ["bash", "-c", words],
            cwd=tmp_path,
            env=shared_cluster.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert shared_cluster.run("logs", done.stdout.strip()).stdout == shown


def test_the_command_is_shown_as_it_was_typed() -> None:
    assert command_line(read_batch_script(script("#!/bin/bash\ntrue\n"))[0].spec.command) == "train.sh"
    file = script("#!/bin/bash\ntrue\n")
    assert command_line(read_batch_script(file, ["--lr", "1 e"])[0].spec.command) == "train.sh --lr '1 e'"
    assert command_line(read_script_text("#!/bin/sh\nmake", "wrap")[0].spec.command) == "#!/bin/sh\nmake"
    python = script("#!/usr/bin/env python3\n", "train.py")
    assert command_line(read_batch_script(python, ["a"])[0].spec.command) == "train.py a"
    assert command_line(["sh", "-c", "echo $HOME; ls"]) == "sh -c 'echo $HOME; ls'"


@pytest.mark.parametrize("words", [["echo $HOME && ls"], ["cd", "src"], ["LR=1", "python", "train.py"]])
def test_what_only_a_shell_understands_is_refused_with_the_shell_that_does(words):
    with pytest.raises(UsageError, match=r"clusterd run -- sh -c '.*' for a shell"):
        command_line_job(words)
    assert command_line_job(["sh", "-c", words[0]]).spec.command == ("sh", "-c", words[0])
