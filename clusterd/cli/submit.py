"""``clusterd submit`` and ``clusterd run``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from clusterd.cli.attached import answered_first, attend, has_input
from clusterd.cli.common.arguments import complete_job
from clusterd.cli.common.following import first_failure, until_over
from clusterd.cli.common.job_options import given_values, job_options
from clusterd.cli.common.output import drop_output, expected_cell, is_unread, note, output_option, print_line, show_json
from clusterd.client import Client
from clusterd.errors import ConfigError, UsageError
from clusterd.protocol.launch import SCHEDULE_VARIABLE, STAGE_VARIABLE
from clusterd.submission.batch_script import is_script, read_batch_script, read_script_text
from clusterd.submission.job_file import (
    Request,
    check_environment,
    command_line_job,
    fields_of,
    parse_fields,
    parse_job,
    read_job_file,
    variables,
    with_fields,
)
from clusterd.submission.submit import hand_over, pack_workdir, plain, with_workdir
from clusterd.submission.sweep import (
    array_tasks,
    in_array,
    in_chain,
    parse_array,
    parse_stages,
    parse_sweep,
    staged,
    swept,
)
from clusterd.submission.workdir import commit_of
from clusterd.toml import parse_toml
from clusterd.types import JobSpec
from clusterd.units import counted, local_time

_ENV = click.option("--env", multiple=True, help="NAME=VALUE, or NAME to pass on; may be repeated.")
_SWEEP = click.option(
    "--sweep",
    metavar="NAME=V1,V2,...",
    multiple=True,
    help="One job per value, set in its environment and for {NAME} in its command; repeated: per combination.",
)
_ARRAY = click.option(
    "--array",
    metavar="INDICES[%N]",
    help="One job per index, as in 0-99%8 (at most 8 at once); {index} in its command, $CLUSTERD_ARRAY_TASK_ID.",
)


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1)
@click.option("--wrap", metavar="COMMAND", help="A line of shell in the place of FILE, as with sbatch.")
@job_options
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="Overrides a key of the file, as in gpus=4, time=2h, memory=64GB or guaranteed=true; may be repeated.",
)
@_ENV
@_SWEEP
@_ARRAY
@click.option(
    "--stages",
    metavar="A,B,...",
    help="One job per stage of a training script, each after the one before; $CLUSTERD_STAGE, stage= of train.run.",
)
@click.option(
    "--from",
    "restore",
    metavar="JOB|DIR[@STEP]",
    shell_complete=complete_job,
    help="Start from the newest checkpoint of a job that is over, or from one in DIR, which its hosts must see.",
)
@click.option(
    "--schedule",
    type=click.Choice(("saved", "script")),
    help="With --from: take values of parameter groups and schedule from the checkpoint, the default, or the script.",
)
@click.option("--dry-run", is_flag=True, help="Print where the job would start, or why it would wait; submit nothing.")
@click.option("--wait", "and_wait", is_flag=True, help="Wait for the end; return the exit code.")
@output_option
def submit(file: Path | None, arguments: tuple[str, ...], wrap: str | None, output: str, **options: Any) -> int:
    """Submit the job of FILE; prints its id.

    FILE is a job file, or a script that begins with #! and says what it needs in #CLUSTERD or #SBATCH lines; - or no
    FILE is either on standard input. Options override it; those that may be repeated add to it. ARGUMENTS are
    for a script; -- goes before those that begin with -.
    """
    request = _given(file, arguments, wrap, options)
    spec = request.spec
    if options["changes"]:
        spec = with_fields(spec, parse_fields(options["changes"]))
    spec = _with_options(spec, options)
    spec = replace(spec, env={**spec.env, **variables(options["env"])}, restore=options["restore"])
    if options["schedule"] is not None:
        if options["restore"] is None:
            raise UsageError("--schedule chooses between a checkpoint and the script: give --from too")
        spec = replace(spec, env={**spec.env, SCHEDULE_VARIABLE: options["schedule"]})
    stages = parse_stages(options["stages"] or request.stages)
    expand = _expansion(options["sweep"], options["array"] or request.array, stages)
    with Client() as cluster:
        if options["dry_run"]:
            return _dry_run(cluster, spec, expand, output, snapshot=True)
        first = expand(spec)[0]  # refuses wrong indices before anything is sent
        spec = with_workdir(cluster, spec, note, first)
        answers = _queue(cluster, Request(spec, request.secrets), expand, output)
    if output == "table":
        begin, last = answers[0], answers[-1]
        if begin is last:
            note(f"{last['name']} is queued: clusterd why {last['id']} shows its state")
        else:
            note(f"{len(answers)} jobs are queued, {begin['name']} to {last['name']}: clusterd ls lists them")
    if options["and_wait"] or request.wait:
        return first_failure(until_over(answer["id"]) for answer in answers)
    return 0


_TEMPLATE = """name = "{name}"
command = {command}
# python = "~/envs/llm"          # interpreter or virtual environment on the hosts

[resources]
nodes = {nodes}{more_nodes}
gpus_per_node = 4
# gpu_type = "a100"              # part of the GPU's name
# gpu_memory = "40GB"            # least memory of each
# cpus = 32                      # in all; default: one per GPU
# memory = "128GB"               # host memory in all

[limits]
time = "12h"                     # lets shorter jobs start before it where that delays nobody
retries = 1                      # after failures of its own; lost hosts do not count
"""

_LAUNCHERS = {
    "torchrun": (2, '["torchrun", "train.py"]'),
    "accelerate": (
        2,
        """["sh", "-c", '''
    accelerate launch --num_machines $NNODES --machine_rank $NODE_RANK --num_processes $WORLD_SIZE \\
        --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT train.py
''']""",
    ),
    "deepspeed": (2, '["torchrun", "train.py", "--deepspeed", "deepspeed.json"]'),
    "torchtitan": (2, '["torchrun", "--tee", "3", "-m", "torchtitan.train", "--job.config_file", "train.toml"]'),
    "single": (1, '["python", "train.py"]'),
}


def job_file_template(launcher: str) -> str:
    """Text of a job file for a launcher, to begin with."""
    nodes, command = _LAUNCHERS[launcher]
    note = "                        # one launcher on each; torchrun finds the others by itself" if nodes > 1 else ""
    return _TEMPLATE.format(name=f"{launcher}-job", command=command, nodes=nodes, more_nodes=note)


@click.command()
@click.argument("launcher", type=click.Choice(tuple(_LAUNCHERS)))
def template(launcher: str) -> None:
    """Print a job file for LAUNCHER, to begin with: clusterd template torchrun > job.toml."""
    print(job_file_template(launcher), end="")


SCRIPTS = {".sh": "sh", ".bash": "bash", ".py": "python"}
"""Programs that run files with these endings."""


def _given(file: Path | None, arguments: Sequence[str], wrap: str | None, options: dict[str, Any]) -> Request:
    """Job of a file, of a line of shell, or of what is on standard input or in a pipe, which can be read once.

    Raises:
        UsageError: none, or several, are given.
    """
    named = file is not None and str(file) != "-"
    if named and wrap is not None:
        raise UsageError(f"--wrap is in the place of a file: leave {file} out")
    if file is not None and named and not file.is_fifo() and not file.is_char_device():
        return _read(file, arguments, options)
    if not named and wrap is None and sys.stdin.isatty():
        raise UsageError("give the FILE of a job, --wrap COMMAND, or a job file or script on standard input")
    if wrap is not None:
        text = f"#!/bin/bash\n{wrap}\n"
    elif file is not None and named:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    else:
        text = sys.stdin.read()
    if arguments:
        raise UsageError(f"{arguments[0]} is an argument for a script on standard input: give it as a FILE")
    if not text.strip():
        raise UsageError("there is no job on standard input: it is empty")
    if not text.startswith("#!"):
        try:
            values = parse_toml(text, "standard input")
        except ConfigError as error:
            raise ConfigError(f"{error}; a job file is TOML, and a batch script begins with #!") from None
        return parse_job(values, Path("stdin"), "standard input")
    request, ignored = read_script_text(text, "stdin" if wrap is None else "wrap", _of_script(options))
    _tell_of_ignored("the script", ignored)
    return request


def _of_script(options: dict[str, Any]) -> dict[str, str]:
    """Options as of sbatch, taken out of the others: a script runs once on each node, and its srun starts the tasks."""
    given = {"--ntasks": options.pop("tasks"), "--nodes": options.pop("nodes")}
    return {name: str(count) for name, count in given.items() if count is not None}


def _tell_of_ignored(name: str, ignored: list[str]) -> None:
    if ignored:
        note(f"{name}: without effect here: {', '.join(dict.fromkeys(ignored))}")


def _read(file: Path, arguments: Sequence[str], options: dict[str, Any]) -> Request:
    """Read a job file or a batch script, which alone takes arguments."""
    if not is_script(file):
        if not file.exists():
            raise UsageError(f"{file}: No such file or directory: give the path of a job file or a batch script")
        if file.suffix in SCRIPTS:
            raise UsageError(
                f"{file} is neither a job file nor a script that begins with #! (docs/scheduling.md); or use "
                f"clusterd run -d --gpus 1 -- {SCRIPTS[file.suffix]} {file}"
            )
        if file.suffix in (".yaml", ".yml", ".json"):
            raise UsageError(f"{file}: job files are TOML: clusterd template single > job.toml begins one")
        if arguments:
            raise UsageError(f"{arguments[0]} is an argument for a batch script, and {file} is a job file: see --set")
        return read_job_file(file)
    request, ignored = read_batch_script(file, arguments, _of_script(options))
    _tell_of_ignored(str(file), ignored)
    return request


def _with_options(spec: JobSpec, options: dict[str, Any]) -> JobSpec:
    """The job with the values of options; lists are added to its own.

    Raises:
        UsageError: names the option.
    """
    fields = fields_of(given_values(options), lambda key: key.option, spec.resources.nodes)
    for added in ("after", "mounts"):
        fields[added] = (*getattr(spec, added), *fields.get(added, ()))
    built = [name for name in ("uv", "requirements") if name in fields]  # in the place of each other
    spec = with_fields(spec, {**(dict.fromkeys(("uv", "requirements"), "") if built else {}), **fields})
    if built:
        check_environment(spec, f"--{built[0]}")
    return spec


TRIED_MAX = 200
"""Jobs of a sweep or array in one dry run: a request is bounded, and so is what somebody reads."""

Expansion = Callable[[JobSpec], list[JobSpec]]
"""From a job to the jobs of its sweep or array; a list of one where there is none."""


def _expansion(sweep: Sequence[str], array: str, stages: Sequence[str] = ()) -> Expansion:
    """Expansion of a job by these options.

    Raises:
        UsageError: both are given, or wrong.
    """
    values = parse_sweep(sweep)
    if values and array:
        raise UsageError("--sweep and --array are both given: give one of them")
    if stages and (values or array):
        raise UsageError("stages are given together with --sweep or --array: give one of them")
    if stages:
        return lambda spec: staged(spec, stages)
    if array:
        parse_array(array)
        return lambda spec: array_tasks(spec, array)
    return lambda spec: swept(spec, values)


def _queue(cluster: Client, request: Request, expand: Expansion, output: str) -> list[dict[str, Any]]:
    """Submit the job, or the jobs of a sweep or array, printing the ids accepted so far even if a later one is refused.

    A closed standard output does not stop it: half a sweep is of no use.
    """
    answers: list[dict[str, Any]] = []
    unread: OSError | None = None
    _note_past_begin(request.spec)
    try:
        for spec in expand(request.spec):
            spec = in_array(spec, answers[0]["id"] if answers else "")
            if STAGE_VARIABLE in spec.env:
                spec = in_chain(spec, answers[-1]["id"] if answers else "")
            with answered_first() as interrupts:
                answers.append(hand_over(cluster, Request(spec, request.secrets)))
            if output == "table":
                try:
                    print(answers[-1]["id"], flush=True)
                except OSError as error:
                    drop_output(sys.stdout)
                    unread = error
            if interrupts:
                raise KeyboardInterrupt
    finally:
        if answers and output != "table":
            show_json(answers if len(answers) > 1 else answers[0], output)
    if unread is not None and not is_unread(sys.stdout, unread):
        note(f"{', '.join(answer['id'] for answer in answers)} queued")
        raise unread
    return answers


@click.command(context_settings={"allow_interspersed_args": False})
@job_options
@click.option("--secret", multiple=True, help="NAME of a variable to pass on without showing it; may be repeated.")
@_ENV
@_SWEEP
@_ARRAY
@click.option("--no-snapshot", is_flag=True, help="Run in this directory itself, not a copy; the hosts must share it.")
@click.option("--dry-run", is_flag=True, help="Print where the job would start, or why it would wait; run nothing.")
@click.option("-d", "--detach", is_flag=True, help="Print the id and return at once.")
@output_option
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def run(argv: tuple[str, ...], output: str, **options: Any) -> int:
    """Run ARGV on the cluster: passes input on, streams its output, returns its exit code. Ctrl-C cancels it.

    With --nodes ARGV is started once on each host, with the variables of torchrun: MASTER_ADDR, MASTER_PORT, NNODES,
    NODE_RANK, WORLD_SIZE, and PET_*, by which a plain torchrun finds the others. Lines have the first rank of their
    node before them.

    \b
    clusterd run --gpus 2 -- python train.py
    clusterd run --nodes 2 --gpus-per-node 4 -- torchrun train.py
    """
    expand, snapshot = _expansion(options["sweep"], options["array"] or ""), not options["no_snapshot"]
    if (options["sweep"] or options["array"]) and not (options["detach"] or options["dry_run"]):
        option = "--sweep" if options["sweep"] else "--array"
        raise click.UsageError(f"{option} submits several jobs, whose logs cannot be shown together: add --detach")
    if output != "table" and not (options["detach"] or options["dry_run"]):
        raise click.UsageError("-o is for the answer of --detach or --dry-run; without them the output is the job's")
    attached = not options["detach"]
    request = command_line_job(
        argv,
        given_values(options),
        env=options["env"],
        secrets=options["secret"],
        interactive=attached,
        is_attached=attached,
        reads_input=attached and has_input(),
    )
    if request.spec.is_built:
        check_environment(request.spec, "--uv" if request.spec.uv else "--requirements")
    with Client() as cluster:
        if options["dry_run"]:
            return _dry_run(cluster, request.spec, expand, output, snapshot=snapshot)
        if snapshot:
            first = expand(request.spec)[0]
            request = replace(request, spec=with_workdir(cluster, request.spec, note, first))
        elif request.spec.workdir is not None:
            request = replace(request, spec=replace(request.spec, commit=commit_of(Path(request.spec.workdir))))
        if options["detach"]:
            _queue(cluster, request, expand, output)
            return 0
        _note_past_begin(request.spec)
        with answered_first() as interrupts:
            answer = hand_over(cluster, request)
    return attend(answer, request.spec, interrupts)


def _note_past_begin(spec: JobSpec) -> None:
    if spec.begin_s is not None and spec.begin_s < time.time() - 60.0:  # a time of day is one of its whole minute
        note(f"begin: {local_time(spec.begin_s)} is over, so that it delays nothing")


def _dry_run(cluster: Client, spec: JobSpec, expand: Expansion, output: str, *, snapshot: bool) -> int:
    if snapshot and spec.workdir is not None:
        pack_workdir(cluster, spec).archive.close()  # refuses what a submission would refuse
    specs = expand(spec)
    # A later stage waits for the one before.
    first, *others = specs[:1] if STAGE_VARIABLE in specs[0].env else specs[:TRIED_MAX]
    answers = cluster.call("dry_run", spec=plain(first), also=[plain(each) for each in others])
    if output == "table":
        for each, answer in zip(specs, answers, strict=False):
            print_line(f"{each.name} {_outcome(answer)}")
            if each is first and answer["state"] == "queued":
                print_line(f"  {_expected(cluster, each)}")
        if left := len(specs) - len(answers):
            print_line(f"{counted(left, 'further job')} would be queued behind {specs[len(answers) - 1].name}")
        for verb in ("stops", "migrates"):
            for change in answers[0][verb]:
                print_line(f"  the scheduler {verb} {change['name']}: {change['reason']}")
    if output != "table":
        show_json(answers if len(answers) > 1 else answers[0], output)
    sys.stdout.flush()
    return 0


def _expected(cluster: Client, spec: JobSpec) -> str:
    """Words for when a job that would wait would start and end."""
    (answer,) = cluster.call("when", spec=plain(spec), meanwhile="playing the queue forward")
    start, end = (expected_cell(answer["forecast"], what) for what in ("start", "end"))
    why = f" ({answer['why']})" if answer["why"] else ""
    return f"expected start: {start}, end: {end}{why}"


def _outcome(answer: dict[str, Any]) -> str:
    """Words for what would become of one job."""
    if answer["starts"]:
        where = ", ".join(place["device"] or f"{place['host']} (CPU cores)" for place in answer["ranks"])
        return f"would start now on {where}: {answer['reason']}"
    if answer["state"] != "queued":
        return f"would be {answer['state']}: {answer['reason']}"
    after = answer["after"]
    behind = f" ({after['name']} comes just before it, because {after['why']})" if after else ""
    place = f" behind {counted(answer['ahead'], 'job')}{behind}" if answer["ahead"] else ""
    return f"would be queued{place}: {answer['reason']}"
