"""Batch scripts: ``#CLUSTERD`` lines with keys of a job file, and the usual ``#SBATCH`` lines of Slurm.

A script runs in a copy of the directory it is submitted from, under bash with the options of its first line, or under
the other interpreter that this line names. With several nodes it runs once on each of them; ``srun`` in it starts the
tasks of that node. Lines whose effect clusterd cannot give are refused by name.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterd.errors import ConfigError
from clusterd.job_signals import parse_limit_signal
from clusterd.keys import NONE, Key
from clusterd.submission.job_file import Request, job_keys, parse_job, read_job_file
from clusterd.toml import parse_toml
from clusterd.units import parse_duration_s, parse_gpus, parse_time_s

REQUEUED = 75
"""Exit code with which `scontrol requeue` in a script ends it; EX_TEMPFAIL of sysexits.h."""

PRELUDE = """
while IFS= read -r -d '' pair; do
    case $pair in
        PWD=*) cd "${pair#*=}" ;;
        BASH_FUNC_*|_=*|SHLVL=*|OLDPWD=*) ;;
        *) export "$pair" ;;
    esac
done < /proc/$$/environ 2> /dev/null
unset pair
absent() {
    echo "clusterd: $1: not on the PATH of ${USER:-$(id -un)}'s login on $HOSTNAME, nor defined by its profile; $2" >&2
    exit 127
}
declare -F conda > /dev/null || conda() {
    unset -f conda
    eval "$("${CONDA_EXE:-conda}" shell.bash hook 2> /dev/null)"
    declare -F conda > /dev/null || absent conda "run conda init there"
    conda "$@"
}
type module > /dev/null 2>&1 || module() { absent module "source its init script before"; }
export SLURM_JOB_ID=$CLUSTERD_JOB SLURM_JOBID=$CLUSTERD_JOB SLURM_JOB_NAME=$CLUSTERD_JOB_NAME
export SLURM_SUBMIT_DIR=$PWD SLURM_NNODES=${NNODES:-1} SLURM_JOB_NUM_NODES=${NNODES:-1}
[ "${CLUSTERD_ATTEMPT:-1}" = 1 ] || export SLURM_RESTART_COUNT=$((CLUSTERD_ATTEMPT - 1))
export SLURM_CPUS_ON_NODE=$(nproc)
[ -z "${SLURM_NTASKS-}" ] || export SLURM_NPROCS=$SLURM_NTASKS
export SLURM_NODEID=${NODE_RANK:-0} SLURM_PROCID=${NODE_RANK:-0} SLURM_LOCALID=0
export SLURM_JOB_NODELIST=${MASTER_ADDR:-localhost} SLURM_NODELIST=${MASTER_ADDR:-localhost}
for name in JOB_ID TASK_ID TASK_COUNT TASK_MIN TASK_MAX; do
    given=CLUSTERD_ARRAY_$name
    [ -z "${!given-}" ] || export "SLURM_ARRAY_$name=${!given}"
done
[ -z "${CUDA_VISIBLE_DEVICES-}" ] || {
    given=${CUDA_VISIBLE_DEVICES//[!,]/}
    export SLURM_GPUS_ON_NODE=$((${#given} + 1))
}
unset name given
srun() { eval "$CLUSTERD_STEP" '"$@"'; }
scontrol() {
    case "${1-} ${2-}" in
        "show hostnames") echo "$SLURM_JOB_NODELIST" ;;
        "requeue $SLURM_JOB_ID" | "requeue ${SLURM_ARRAY_JOB_ID-}_${SLURM_ARRAY_TASK_ID-}")
            echo "clusterd: exit code 75 queues it again, by retry_on, in a new copy of its directory" >&2
            exit 75 ;;
        *) echo "clusterd: scontrol $*: in a job it knows show hostnames, and requeue of the job itself" >&2; false ;;
    esac
}
export -f srun scontrol
script=$1; shift
"""
"""Run by bash before the script, as a login shell, whose profile defines functions such as module.

The job's variables come first, as a profile sets PATH anew; then Slurm's, and its two commands that scripts use.
"""

_SCRIPT = "script=$1; shift\n"
"""Last line of the prelude: what follows runs ``$script``, a file in the working directory or the text itself."""

_SHELLS = ("bash", "sh", "dash", "ksh")
"""Interpreters whose scripts bash reads itself: they may use functions of the profile."""

_SHORT = {
    "-J": "--job-name", "-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task", "-t": "--time",
    "-p": "--partition", "-A": "--account", "-o": "--output", "-e": "--error", "-w": "--nodelist", "-d": "--dependency",
    "-C": "--constraint", "-a": "--array", "-x": "--exclude", "-H": "--hold", "-W": "--wait", "-D": "--chdir",
    "-b": "--begin", "-q": "--qos", "-l": "--label", "-i": "--input", "-L": "--licenses", "-F": "--nodefile",
    "-M": "--clusters", "-B": "--extra-node-info", "-m": "--distribution", "-S": "--core-spec", "-k": "--no-kill",
    "-O": "--overcommit", "-s": "--oversubscribe", "-Q": "--quiet", "-v": "--verbose",
}  # fmt: skip

IGNORED = (
    "--partition", "--account", "--qos", "--error", "--mail-type", "--mail-user", "--open-mode", "--comment",
    "--requeue", "--no-requeue", "--exclusive", "--parsable", "--quiet", "--verbose", "--clusters", "--wckey",
    "--acctg-freq", "--profile", "--extra", "--contiguous", "--switches", "--prefer", "--spread-job", "--use-min-nodes",
    "--time-min", "--delay-boot", "--reboot", "--power", "--network", "--oversubscribe", "--overcommit", "--hint",
    "--distribution", "--extra-node-info", "--sockets-per-node", "--cores-per-socket", "--threads-per-core",
    "--ntasks-per-socket", "--ntasks-per-core", "--core-spec", "--thread-spec", "--cpu-freq", "--mem-bind",
    "--gpu-bind", "--gpu-freq", "--propagate", "--get-user-env", "--no-kill", "--kill-on-invalid-dep",
    "--wait-all-nodes",
)  # fmt: skip
"""Options without a meaning here: there are no partitions and accounts, stderr is where stdout is, and no choice of
sockets, clock rates and topologies changes what a job computes."""


def command_line(command: Sequence[str]) -> str:
    """A job's command as one types it; of a batch script its file, or its text."""
    for number, word in enumerate(command[:-2]):
        if _SCRIPT in word:
            script = command[number + 2]
            return script if script.startswith("#!") else shlex.join(command[number + 2 :])
    return shlex.join(command)


def option_here(name: str) -> str:
    """Option of `clusterd submit` or `run`, or another way, for one of sbatch and srun; empty: none is known."""
    name = _SHORT.get(name, name)
    alike = next((key.option for key in job_keys().values() if key.sbatch == name), "")
    return alike or _TYPED.get(name, "") or _INSTEAD.get(name, "") or ("leave it out" if name in IGNORED else "")


def is_script(file: Path) -> bool:
    """True for a file that begins like a script, and is no job file."""
    try:
        with file.open("rb") as stream:
            return stream.read(5).removeprefix(codecs.BOM_UTF8).startswith(b"#!")
    except OSError:
        return False  # whoever reads it as a job file says what is wrong


Typed = Mapping[str, str] | None


def read_batch_script(file: Path, arguments: Sequence[str] = (), typed: Typed = None) -> tuple[Request, list[str]]:
    """Read the job of a batch script, which is run with these arguments.

    Args:
        typed: options of sbatch in the place of those in the script.
    Returns:
        The job, and the options that were ignored.

    Raises:
        ConfigError: names file, line and option.
    """
    try:
        text = file.read_bytes().decode(errors="replace")  # only its options are read here
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if "\r\n" in text or text.startswith("\ufeff"):
        remedy = f"sed -i 's/\\r$//; 1s/^\\xef\\xbb\\xbf//' -- {shlex.quote(str(file))}"
        raise ConfigError(f"{file} has the line ends or the mark of Windows, which become part of words: {remedy}")
    script = os.path.relpath(file.resolve(), Path.cwd())
    if script.startswith(".."):
        raise ConfigError(f"{file} is outside of this directory, which is sent to the hosts: change to its directory")
    return _read(text, file, ["bash", script, *arguments], typed, is_file=True)


def read_job_or_script(file: Path) -> Request:
    """Read a job file, or the job of a batch script; raises as they do."""
    return read_batch_script(file)[0] if is_script(file) else read_job_file(file)


def read_script_text(text: str, name: str, typed: Typed = None) -> tuple[Request, list[str]]:
    """As `read_batch_script`, of a script that is no file: on standard input, or on a command line."""
    return _read(text, Path(name), ["bash", text], typed, is_file=False)


def _read(text: str, file: Path, words: list[str], typed: Typed, *, is_file: bool) -> tuple[Request, list[str]]:
    values: dict[str, Any] = {}
    ignored: list[str] = []
    own: list[str] = []
    options: dict[str, tuple[str, str]] = {}
    alike = {key.sbatch: key for key in job_keys().values() if key.sbatch}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{file}, line {number}"
        if line.startswith("#SBATCH"):
            for name, value in _options(line.removeprefix("#SBATCH"), where):
                # Without a file there is a log all the same, by which a task that fails can be understood.
                if (name in IGNORED and name not in alike) or (name, value) == ("--output", os.devnull):
                    ignored.append(name)
                else:
                    options[name] = (value, where)
        elif line.startswith("#CLUSTERD"):
            own.append(line.removeprefix("#CLUSTERD").strip())
        elif line.strip() and not line.lstrip().startswith("#"):
            break  # as for sbatch, what follows the first command is no option
    other = re.search(r"^#(PBS|BSUB|\$|OAR|PJM|COBALT)[ \t]+-", text, re.MULTILINE)
    if other and not (own or options or ignored):
        raise ConfigError(f"{file}: lines of #{other[1]} are not read: write #SBATCH, or #CLUSTERD KEY = VALUE")
    options |= {name: (value, "options") for name, value in (typed or {}).items()}
    _translate(options, alike, values)
    for key, value in parse_toml("\n".join(own), f"{file}: #CLUSTERD lines").items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    if re.search(r"\bscontrol\s+requeue\b", text):
        limits = values.setdefault("limits", {})
        limits["retry_on"] = [*limits.get("retry_on", ()), REQUEUED]
    values.setdefault("name", _name(file))
    shell = ("-c",) if values.get("clean_env") else ("-l", "-c")
    rest = _interpreted(text.partition("\n")[0], file, is_file=is_file)
    if folder := values.pop("chdir", ""):
        whole = "script=$PWD/$script\n" if is_file else ""
        rest = f"{whole}cd -- {shlex.quote(folder)} || exit\n{rest}"
        if "output" in values:
            values["output"] = os.path.join(folder, values["output"])
    if (number := values.pop("passes_on", None)) is not None:
        rest = f"trap : {number}\n{rest}"
    values.setdefault("command", ["bash", *shell, PRELUDE + rest, *words])
    values["workdir"] = str(Path.cwd())
    return parse_job(values, file, str(file)), ignored


def _interpreted(first_line: str, file: Path, *, is_file: bool) -> str:
    """Lines of bash that run ``$script`` as its first line says."""
    try:
        words = shlex.split(first_line.removeprefix("#!"))
    except ValueError as error:
        raise ConfigError(f"{file}, line 1: {error}") from None
    named = 0
    if words and os.path.basename(words[0]) == "env":
        named = next((n for n, word in enumerate(words) if n and not word.startswith("-") and "=" not in word), 0)
    program = os.path.basename(words[named]) if words else "sh"
    if program not in _SHELLS:
        script = '"$script"' if is_file else '<(printf %s "$script")'
        return f'exec {shlex.join(words)} {script} "$@"\n'
    # Of bash's own options, those of the login it is already.
    options = [re.sub("[li]", "", word) if re.fullmatch("-[a-z]+", word) else word for word in words[named + 1 :]]
    options = [word for word in options if word != "-" and not word.startswith("--")]
    return f"set {shlex.join(options)}\n" * bool(options) + ('source "$script"\n' if is_file else 'eval "$script"\n')


def _options(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Options of one line with their values: ``--time=1:00``, ``--time 1:00``, ``-t 1:00``, ``-t1:00``."""
    try:
        tokens = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    while tokens:
        token = tokens.pop(0)
        name, equals, value = token.partition("=")
        if not token.startswith("--"):
            name, equals, value = _SHORT.get(token[:2], token[:2]), token[2:], token[2:].removeprefix("=")
        if not name.startswith("-"):
            raise ConfigError(f"{where}: {token} is not understood: take the line out, or write #CLUSTERD KEY = VALUE")
        if not equals and tokens and not tokens[0].startswith("-"):
            value = tokens.pop(0)
        yield name, value


def _translate(options: dict[str, tuple[str, str]], alike: dict[str, Key], values: dict[str, Any]) -> None:
    """Keys of a job file for these options of sbatch; those of `alike` need no translation."""
    resources: dict[str, Any] = {}
    known = dict.fromkeys((*alike, *_MEANINGS))
    wrong: list[str] = []
    unknown: list[str] = []
    for name, (value, where) in options.items():
        if name not in known:
            unknown = list(known)
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            wrong.append(f"{where}: {name} of Slurm is not understood here{instead}")
            continue
        try:
            if name in _MEANINGS:
                _MEANINGS[name](value, values, resources)
            else:
                key = alike[name]
                (resources if key.section else values)[key.short] = _of_key(key, value)
        except ValueError as error:
            wrong.append(f"{where}: {name}{f'={value}' if value else ''}: {error}")
    if wrong:
        raise ConfigError("; ".join(wrong) + (f"; these are: {', '.join(unknown)}" if unknown else ""))
    nodes = resources.get("nodes", 1)
    told = {"tasks", "tasks_per_node"} & resources.keys()
    tasks = resources.pop("tasks", nodes * resources.pop("tasks_per_node", 1))
    resources.pop("tasks_per_node", None)
    if tasks % nodes:
        raise ConfigError(f"{tasks} tasks on {nodes} nodes: give a multiple, as each node gets as many")
    _set_tasks(tasks // nodes, nodes, values, resources, told=bool(told))
    gpus = resources.get("gpus_per_node", -(-parse_gpus(resources.get("gpus", nodes))[1] // nodes))
    if (of_gpu := resources.pop("cpus_per_gpu", None)) is not None:
        resources["cpus"] = of_gpu * gpus
    if (per := resources.pop("memory_per", None)) is not None:
        resources["memory_each"] *= resources.get("cpus", 1) if per == "cpus" else gpus
    for name in ("cpus", "memory_each"):
        if name in resources:
            resources[name] *= nodes
    if (memory := resources.pop("memory_each", None)) is not None:
        resources["memory"] = memory
    if resources:
        values["resources"] = resources


def _of_key(key: Key, value: str) -> object:
    """Value in a job file of an option that is spelled as in sbatch."""
    if key.value.accepts is bool:
        return True
    if key.value.separator:
        return _names(value)
    return _number(value) if key.value.accepts is int else value


def _export(value: str, values: dict[str, Any], _: dict[str, Any]) -> None:
    """Variables that are named; jobs start with those of a login, whatever the shell of their submission has."""
    for item in value.split(","):
        name, given, text = item.partition("=")
        if given or name in os.environ:
            values.setdefault("env", {})[name] = text if given else os.environ[name]


def _names(value: str) -> list[str]:
    if "[" in value:
        raise ValueError("name the hosts one by one, separated by commas")
    return value.split(",")


def _set_tasks(each: int, nodes: int, values: dict[str, Any], resources: dict[str, Any], *, told: bool) -> None:
    """Variables about the tasks that `srun` starts in the script, and what all on one node need together.

    Their number is there if it was `told`, as in Slurm: by it Lightning takes itself for one of that many tasks, and
    starts no process for a second GPU.
    """
    env = {"SLURM_NTASKS": str(each * nodes), "SLURM_NTASKS_PER_NODE": str(each)} if told else {}
    if "cpus" in resources:
        env["SLURM_CPUS_PER_TASK"] = str(resources["cpus"])
        resources["cpus"] *= each
    elif each > 1:
        resources["cpus"] = each  # as Slurm's default gives each a core
    if (gpus := resources.pop("gpus_per_task", None)) is not None:
        env["SLURM_GPUS_PER_TASK"] = gpus.rpartition(":")[2]
        _gpus_per_node(gpus, values, resources)
        resources["gpus_per_node"] *= each
    if env:
        values["env"] = {**env, **values.get("env", {})}


def _gres(value: str, _: dict[str, Any], resources: dict[str, Any]) -> None:
    kind, *rest = value.split(":")
    if kind != "gpu":
        raise ValueError("only gpu is known, as in gpu:2 or gpu:a100:2")
    count = rest.pop() if rest and rest[-1].isdigit() else "1"
    _gpus_per_node(":".join([*rest, count]), {}, resources)


def _gpus_per_node(value: str, _: dict[str, Any], resources: dict[str, Any]) -> None:
    named, _colon, count = value.rpartition(":")
    resources["gpus_per_node"] = _number(count)
    if named:
        resources["gpu_type"] = named


def _gpus_per_task(value: str, _: dict[str, Any], resources: dict[str, Any]) -> None:
    _number(value.rpartition(":")[2])
    resources["gpus_per_task"] = value


def _after(value: str, values: dict[str, Any], _: dict[str, Any]) -> None:
    conditions = {"afterok": "ok", "afterany": "any", "afternotok": "failed", "aftercorr": "corr"}
    for part in value.split(","):
        if part == "singleton":
            values.setdefault("after", []).append(part)
            continue
        how, *jobs = part.split(":")
        if how not in conditions or not jobs:
            raise ValueError(
                f"write it as afterok:12, afterany:12, afternotok:12, aftercorr:12 or singleton, not {part!r}"
            )
        values.setdefault("after", []).extend(f"{job}:{conditions[how]}" for job in jobs)


def _memory(value: str, _: dict[str, Any], resources: dict[str, Any]) -> None:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)
    if match is None:
        raise ValueError("write it as in 64G; the unit is megabytes by default")
    resources["memory_each"] = int(match[1]) << {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[match[2].upper()]


def _time(value: str, values: dict[str, Any], _: dict[str, Any]) -> None:
    if value and value.lower() in NONE:
        return
    if re.fullmatch(r"[\d:-]+", value) is None:
        raise ValueError("write it as in 30 (minutes), 2:30:00 or 1-12:00:00")
    of_minutes = re.fullmatch(r"(\d+)(:\d+)?", value)
    if total_s := parse_duration_s(f"0:{value}{'' if of_minutes[2] else ':0'}" if of_minutes else value):  # 0: no limit
        values.setdefault("limits", {})["time"] = f"{total_s:.0f}s"


def _number(value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise ValueError("it must be a whole number")
    return int(value)


def _set(key: str) -> Callable[[str, dict[str, Any], dict[str, Any]], None]:
    def meaning(value: str, _: dict[str, Any], resources: dict[str, Any]) -> None:
        if not (count := _number(value)):
            raise ValueError("it must be at least 1")
        resources[key] = count

    return meaning


def _hosts(value: str, _: dict[str, Any], resources: dict[str, Any]) -> None:
    resources["hosts"] = _names(value)


def _signal(value: str, values: dict[str, Any], _: dict[str, Any]) -> None:
    asked = parse_limit_signal(value.removeprefix("R:"))
    values.setdefault("limits", {})["signal"] = value.removeprefix("R:")
    if not asked.first_only:  # the script itself goes on, as the signal is meant for what it runs
        values["passes_on"] = asked.number


def _begin(value: str, values: dict[str, Any], _: dict[str, Any]) -> None:
    parse_time_s(value)
    values["begin"] = value


def _chdir(value: str, values: dict[str, Any], _: dict[str, Any]) -> None:
    values["chdir"] = value


def _constraint(value: str, _: dict[str, Any], resources: dict[str, Any]) -> None:
    if re.search(r"[|*()\[\]!]", value):
        raise ValueError("labels are joined by & or a comma: each host must have all of them")
    resources["constraint"] = re.split("[&,]", value)


def _nice(value: str, values: dict[str, Any], _: dict[str, Any]) -> None:
    values["priority"] = -int(value or "100")


def _memory_per(count: str) -> Callable[[str, dict[str, Any], dict[str, Any]], None]:
    def meaning(value: str, values: dict[str, Any], resources: dict[str, Any]) -> None:
        _memory(value, values, resources)
        resources["memory_per"] = count

    return meaning


_INSTEAD = {
    "--wrap": "clusterd submit --wrap COMMAND",
    "--test-only": "clusterd submit --dry-run",
    "--reservation": "#CLUSTERD booking = NUMBER, of clusterd book",
    "--licenses": "none are counted; --array=0-9%2 has two tasks at a time",
    "--priority": "#CLUSTERD priority = N",
    "--container": '#CLUSTERD container = "docker:IMAGE"',
    "--input": "read it in the script, as in python train.py < FILE",
    "--export-file": "--export=NAME=VALUE,...",
    "--nodefile": "--nodelist=NAME,...",
    "--ntasks-per-gpu": "--ntasks=N",
    "--gpus-per-socket": "--gpus-per-node=N",
    "--deadline": "--time=LIMIT ends it after so long",
}
"""What does the same here as options that a script cannot give."""

_TYPED = {
    "--gres": "--gpus N", "--gpus-per-task": "--gpus N, for all tasks", "--cpus-per-task": "--cpus N, for all tasks",
    "--ntasks-per-node": "--ntasks N, on all nodes", "--mem": "--memory SIZE", "--mem-per-cpu": "--memory SIZE, in all",
    "--mem-per-gpu": "--memory SIZE, in all", "--nice": "--priority -N", "--time": "--time 12h",
    "--nodelist": "--host NAME", "--dependency": "--after JOB", "--array": "--array 0-9", "--export": "--env NAME",
    "--partition": "there are none, leave it out", "--parsable": "leave it out, stdout is the id alone",
    "--mail-type": "[notify] of the settings",
    "--output": "clusterd logs JOB", "--error": "clusterd logs JOB", "--pty": "clusterd shell",
    "--rm": "leave it out, clusterd forget deletes it", "--image": "--container docker:IMAGE", "--volume": "--mount",
    "--input": "clusterd shell for a terminal, or < FILE", "--restart": "retries in a job file",
    "--tenant": "tenant in a job file",
    "--chdir": "submit it from that directory", "--label": "lines of several tasks have their number",
}  # fmt: skip
"""What does the same on a command line as options that scripts have, or `srun`."""

_MEANINGS: dict[str, Callable[[str, dict[str, Any], dict[str, Any]], None]] = {
    "--ntasks": _set("tasks"),
    "--ntasks-per-node": _set("tasks_per_node"),
    "--gpus-per-node": _gpus_per_node,
    "--gres": _gres,
    "--cpus-per-task": _set("cpus"),
    "--cpus-per-gpu": _set("cpus_per_gpu"),
    "--export": _export,
    "--mem": _memory,
    "--mem-per-cpu": _memory_per("cpus"),
    "--mem-per-gpu": _memory_per("gpus_per_node"),
    "--gpus-per-task": _gpus_per_task,
    "--nice": _nice,
    "--time": _time,
    "--nodelist": _hosts,
    "--dependency": _after,
    "--constraint": _constraint,
    "--begin": _begin,
    "--chdir": _chdir,
    "--signal": _signal,
}


def _name(file: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-._")[:40]
    return name if name and not name.isdigit() else f"job-{name or 'script'}"
