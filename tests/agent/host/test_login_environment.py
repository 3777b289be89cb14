"""Environment of a login: what profiles set reaches jobs, and a profile that fails says so."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host import login_environment, processes
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.login_environment import capture, expanded
from clusterd.submission.batch_script import read_script_text
from tests.agent.client import AgentClient, launch

PROFILE = """\
echo welcome to gpu01
export SCRATCH=/scratch/ann PATH=/opt/tools:/usr/bin:/bin
module() { echo "loads $2"; }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home of an account whose shell is bash."""
    own = pwd.getpwuid(os.getuid())
    with_bash = pwd.struct_passwd([*own[:6], "/bin/bash"])
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: with_bash)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_login_gives_what_its_profile_exports_whatever_it_prints_or_asks(home: Path) -> None:
    """Programs that it leaves running do not delay it, and a question finds no one to answer."""
    (home / ".bash_profile").write_text(
        f"{PROFILE}sleep 1000 & read -p 'which project? ' project\necho on to $project\n"
    )
    found = capture().variables
    assert (found["SCRATCH"], found["PATH"]) == ("/scratch/ann", "/opt/tools:/usr/bin:/bin")
    assert not {"SHLVL", "PWD", "_"} & found.keys()


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("while :; do sleep 1000; done", "does not end within"),
        ("echo no such module >&2; exit 4", "exits with 4 before its end, after: no such module"),
        ("exec true", "exits with 0 before its end"),
    ],
)
def test_a_profile_that_fails_is_named_with_the_way_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, profile: str, message: str
) -> None:
    monkeypatch.setattr(login_environment, "TIMEOUT_S", 0.5)
    (home / ".bash_profile").write_text(profile)
    with pytest.raises(Refused, match=message) as refused:
        capture()
    assert refused.value.kind == "login"
    assert "(/bin/bash)" in str(refused.value) and "clean_env" in str(refused.value)


@pytest.fixture
def usual_home(home: Path) -> Path:
    """Home as Debian makes it, whose ~/.bashrc returns at once in a shell that is not interactive."""
    for name, otherwise in ((".profile", ". ~/.bashrc\n"), (".bashrc", "case $- in *i*) ;; *) return;; esac\n")):
        usual = Path("/etc/skel", name)
        (home / name).write_text(usual.read_text() if usual.exists() else otherwise)
    return home


CONDA = """\
#!/bin/sh
cat << 'EOF'
export CONDA_EXE=HOME/conda/bin/conda PATH=HOME/conda/condabin:$PATH
conda() { export CONDA_DEFAULT_ENV=$2 PATH="HOME/conda/envs/$2/bin:$PATH"; }
conda activate base
EOF
"""

CONDA_INIT = """
# >>> conda initialize >>>
# !! Contents within this block are managed by 'conda init' !!
__conda_setup="$('HOME/conda/bin/conda' 'shell.bash' 'hook' 2> /dev/null)"
if [ $? -eq 0 ]; then
    eval "$__conda_setup"
else
    export PATH="HOME/conda/bin:$PATH"
fi
unset __conda_setup
# <<< conda initialize <<<
"""

OF_A_PROMPT = """
echo welcome back
stty -ixon
bind 'set bell-style none'
read -p 'start the agent? ' answer
export PS1='\\u@\\h $ '
"""


def test_what_conda_init_wrote_behind_the_guard_of_the_usual_bashrc_counts(usual_home: Path) -> None:
    """`python` is that of conda's base environment, and `conda activate` works in a batch script."""
    conda = usual_home / "conda"
    for path, text in {
        "bin/conda": CONDA.replace("HOME", str(usual_home)),
        "envs/base/bin/python": "#!/bin/sh\necho python of base\n",
        "envs/llm/bin/python": "#!/bin/sh\necho python of llm\n",
    }.items():
        (conda / path).parent.mkdir(parents=True)
        (conda / path).write_text(text)
        (conda / path).chmod(0o755)
    with open(usual_home / ".bashrc", "a") as file:
        file.write(OF_A_PROMPT + CONDA_INIT.replace("HOME", str(usual_home)))
    login = capture()
    assert login.note == ""
    assert not {"PS1", "TERM"} & login.variables.keys()
    script = read_script_text("#!/bin/bash\npython\nconda activate llm\npython\n", "job")[0].spec.command
    env = {**login.variables, "CLUSTERD_JOB": "1", "CLUSTERD_JOB_NAME": "job"}
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "python of base\npython of llm\n"


@pytest.mark.parametrize(
    ("rc", "message"),
    [
        ("exec sh", "exits with 0 before its end"),
        ("exec tmux-that-is-not-here", "exits with 127 before its end, after: .*not found"),
        ("while :; do sleep 1000; done", "does not end within"),
    ],
)
def test_an_rc_file_that_leads_elsewhere_is_left_out_and_told_of(
    usual_home: Path, monkeypatch: pytest.MonkeyPatch, rc: str, message: str
) -> None:
    if "sleep" in rc:
        monkeypatch.setattr(login_environment, "TIMEOUT_S", 1.0)
    with open(usual_home / ".profile", "a") as file:
        file.write("export SCRATCH=/scratch/ann\n")
    with open(usual_home / ".bashrc", "a") as file:
        file.write(f"{rc}\n")
    login = capture()
    assert login.variables["SCRATCH"] == "/scratch/ann"
    assert re.search(rf"\(/bin/bash\), when it is interactive, {message}", login.note), login.note


def test_what_a_login_leaves_running_is_ended(usual_home: Path) -> None:
    """As an ssh-agent of each login: in a session of its own, with another environment."""
    with open(usual_home / ".bashrc", "a") as file:
        file.write("env -i setsid sh -c 'echo $$ > started; exec sleep 1000' &\nwhile [ ! -s started ]; do :; done\n")
    assert capture().note == ""
    state = processes.stat(int((usual_home / "started").read_text()))
    assert state is None or state.state in "ZX"


def test_a_profile_that_takes_too_long_gives_its_locks_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: killed at once, `pyenv init` left a lock for which each later login waited for a minute."""
    monkeypatch.setattr(login_environment, "TIMEOUT_S", 0.5)
    (home / "init").write_text("#!/bin/bash\nset -C; > lock || exit 1; trap 'rm lock' EXIT; > held; sleep 1000\n")
    (home / "init").chmod(0o755)
    (home / ".bash_profile").write_text("eval $(./init)\n")
    with pytest.raises(Refused, match="does not end within"):
        capture()
    assert (home / "held").exists() and not (home / "lock").exists()


def test_values_refer_to_variables_of_the_login() -> None:
    env = {"PATH": "/usr/bin", "SCRATCH": "/scratch/ann"}
    assert expanded("/opt/x/bin:$PATH", env) == "/opt/x/bin:/usr/bin"
    assert expanded("${SCRATCH}/hf", env) == "/scratch/ann/hf"
    assert expanded("100$ or $NOTHING", env) == "100$ or $NOTHING"


@pytest.fixture
def at_home(connect: Callable[..., AgentClient], tmp_path: Path) -> AgentClient:
    """An agent of an account with a profile, as on a remote host."""
    for name in (".bash_profile", ".profile"):
        (tmp_path / name).write_text(PROFILE)
    return connect(env={"CLUSTERD_AGENT_LOGIN": "", "HOME": str(tmp_path)})


def output(agent: AgentClient, argv: list[str], **more: Any) -> str:
    job = more.pop("job", "j")
    agent.launch(argv, job, **more)
    agent.event("rank_exited", job=job)
    return agent.log(job)


def test_jobs_start_in_the_environment_of_a_login(at_home: AgentClient, tmp_path: Path) -> None:
    shown = output(
        at_home, ["sh", "-c", "echo $SCRATCH $PATH $HF_HOME"], env={"PATH": "/x:$PATH", "HF_HOME": "$HOME/hf"}
    )
    assert shown == f"/scratch/ann /x:/opt/tools:/usr/bin:/bin {tmp_path}/hf\n"
    assert output(at_home, ["sh", "-c", "echo $SCRATCH $HOME"], job="k", clean_env=True) == f"{tmp_path}\n"


def test_a_profile_that_changes_counts_from_the_next_check_of_the_host(at_home: AgentClient, tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text("exit 3\n")
    (tmp_path / ".profile").write_text("exit 3\n")
    assert "exits with 3" in at_home.ok("check", peers={})["login_fault"]
    assert at_home.refused("launch", **launch(["true"]))["kind"] == "login"
    for name in (".bash_profile", ".profile"):
        (tmp_path / name).write_text("case $- in *i*) exit 5 ;; esac\nexport SCRATCH=/new\n")
    found = at_home.ok("check", peers={})
    assert found["login_fault"] == ""
    assert "when it is interactive, exits with 5 before its end: jobs get what it sets up" in found["login_note"]
    assert output(at_home, ["sh", "-c", "echo $SCRATCH"], job="k") == "/new\n"


def test_python_is_python3_where_the_path_has_no_other(at_home: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\necho python3 runs $1\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    path = {"PATH": f"{tmp_path}/bin:/bin"} if not Path("/bin/python").exists() else {"PATH": f"{tmp_path}/bin"}
    assert output(at_home, ["python", "train.py"], env=path) == "python3 runs train.py\n"


def batch(agent: AgentClient, home: Path, text: str, job: str, **env: str) -> str:
    argv = list(read_script_text(f"#!/bin/bash\n{text}", "job")[0].spec.command)
    return output(agent, argv, job=job, workdir=str(home), env={"CLUSTERD_JOB_NAME": job, **env})


def test_batch_scripts_have_the_functions_of_the_profile_and_the_variables_of_the_job(
    at_home: AgentClient, tmp_path: Path
) -> None:
    """A profile sets PATH anew, and goes elsewhere; the script must find neither."""
    for name in (".bash_profile", ".profile"):
        (tmp_path / name).write_text(f"{PROFILE}cd /\n")
    shown = batch(at_home, tmp_path, "module load cuda; echo $PATH in $PWD\n", "a", PATH="/env/bin:$PATH")
    assert shown.endswith(f"loads cuda\n/env/bin:/opt/tools:/usr/bin:/bin in {tmp_path}\n")


def test_conda_works_where_it_is_on_the_path(at_home: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "conda").write_text("#!/bin/sh\necho 'conda() { echo \"activates $2\"; }'\n")
    (tmp_path / "bin" / "conda").chmod(0o755)
    shown = batch(at_home, tmp_path, "conda activate llm\necho trains\n", "a", PATH=f"{tmp_path}/bin:$PATH")
    assert shown.endswith("activates llm\ntrains\n")


def test_a_script_that_needs_conda_or_modules_ends_where_there_are_none(at_home: AgentClient, tmp_path: Path) -> None:
    for name in (".bash_profile", ".profile"):
        (tmp_path / name).write_text("")
    for word in ("conda activate llm", "module load cuda"):
        job = word[0]
        argv = list(read_script_text(f"#!/bin/bash\n{word}\necho trains\n", "job")[0].spec.command)
        at_home.launch(argv, job, workdir=str(tmp_path), env={"CLUSTERD_JOB_NAME": job})
        assert at_home.event("rank_exited", job=job)["exit_code"] == 127
        assert f"clusterd: {word.split()[0]}: not on the PATH" in at_home.log(job)
        assert "trains" not in at_home.log(job)


def test_what_an_agent_was_started_from_is_left_out(connect: Callable[..., AgentClient]) -> None:
    of_a_prompt = {"FSSPEC_S3_KEY": "k", "GROUP_RANK": "1", "TMUX": "/tmp/t,1,0", "PS1": "$ ", "KEPT": "1"}
    agent = connect(env=of_a_prompt)
    names = {line.partition("=")[0] for line in output(agent, ["env"]).splitlines()}
    assert names & of_a_prompt.keys() == {"KEPT"}
