"""``step ARGUMENTS...``: `srun` in a batch script, which runs a command once for each task of the job on this host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from clusterd.agent.forkserver import child, relay
from clusterd.agent.log import log_line

_ALONE = frozenset(
    ("label", "unbuffered", "kill-on-bad-exit", "exclusive", "overlap", "exact", "pty", "quiet", "verbose",
     "overcommit", "no-kill", "disable-status", "multi-prog", "preserve-env")
)  # fmt: skip
"""Options without a value, or with one behind ``=``."""

_LETTERS = {
    "n": "ntasks", "N": "nodes", "c": "cpus-per-task", "l": "label", "K": "kill-on-bad-exit", "D": "chdir",
    "o": "output", "e": "error", "i": "input", "w": "nodelist", "x": "exclude", "r": "relative",
}  # fmt: skip
_ALONE_LETTERS = "luKOQvqEksHXZ"

_HERE = "a step runs on every node of the script"
_INSTEAD = {
    "output": "write > FILE behind the command", "error": "write 2> FILE behind the command",
    "input": "write < FILE behind the command", "multi-prog": "start each program by an srun of its own",
    "nodelist": _HERE, "exclude": _HERE, "relative": _HERE,
}  # fmt: skip
"""What does here what these options would; a step without it would do something else."""


def main(arguments: Sequence[str]) -> int:
    """Run the step; returns the highest exit code of its tasks, as `srun` does."""
    options, argv = parse(arguments)
    if not argv:
        log_line("srun: no command is given")
        return 1
    if unlike := [name for name in options if name in _INSTEAD]:
        log_line(f"srun: --{unlike[0]} is not done here: {_INSTEAD[unlike[0]]}")
        return 1
    nodes = _number(os.environ, "SLURM_NNODES")
    all_tasks = _number(os.environ, "SLURM_NTASKS", nodes)
    wanted = options.get("ntasks", str(all_tasks))
    if not wanted.isdecimal() or not int(wanted):
        log_line(f"srun: -n {wanted}: it must be a number of tasks")
        return 1
    if nodes > 1 and int(wanted) != all_tasks:
        log_line(
            f"srun: the script runs on each of {nodes} nodes with {all_tasks} tasks in all, and -n {wanted} is another "
            f"number: give it to sbatch, or use clusterd run -N {nodes} -n {wanted} -- {argv[0]}"
        )
        return 1
    count = int(wanted) // nodes
    if options.get("nodes", str(nodes)) != str(nodes):
        log_line(f"srun: -N {options['nodes']}: the script has {nodes}; ask for them with #SBATCH --nodes")
        return 1
    try:
        os.chdir(options.get("chdir", "."))
    except OSError as error:
        log_line(f"srun: {options['chdir']}: {error.strerror}")
        return 1
    first = _number(os.environ, "SLURM_NODEID", 0) * count
    each = _number(options, "gpus-per-task", 0) or _number(os.environ, "SLURM_GPUS_PER_TASK", 0)
    tasks = [_environment(local, count, first, int(wanted), each) for local in range(count)]

    def start(env: Mapping[str, str]) -> NoReturn:
        child.reset_signals()
        child.execute(argv, dict(env))

    runs = relay.Relay(labels="label" in options, ends_others="kill-on-bad-exit" in options)
    runs.run(start, tasks)
    codes = [os.waitstatus_to_exitcode(status) for status in runs.statuses.values()]
    return max((code if code >= 0 else 128 - code for code in codes), default=0)


def parse(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options before the command, by their long names, and the command; what has no meaning here is accepted."""
    options: dict[str, str] = {}
    left = list(arguments)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            takes = not given and name not in _ALONE
        else:
            name, value = _LETTERS.get(word[1], word[1]), word[2:].removeprefix("=")
            takes = not value and word[1] not in _ALONE_LETTERS
        options[name] = left.pop(0) if takes and left else value
    return options, left


def _environment(local: int, count: int, first: int, world: int, gpus: int) -> dict[str, str]:
    """Environment of one task; with `gpus` for each task, it sees its own ones."""
    place = relay.place(first + local, local, world, count)
    env = {**os.environ, **{name: value for name, value in place.items() if name.startswith("SLURM_")}}
    visible = [part for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    if gpus and len(visible) >= gpus * count:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[local * gpus : (local + 1) * gpus])
    return env


def _number(given: Mapping[str, str], name: str, otherwise: int = 1) -> int:
    text = given.get(name, "")
    return int(text) if text.isdecimal() else otherwise
