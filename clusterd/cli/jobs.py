"""Commands about existing jobs: ls, show, logs, cancel, priority, hold, release, requeue, wait, why."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import click

from clusterd.cli.common.arguments import (
    complete_job,
    is_found,
    job_or_tasks,
    note_array,
    own_jobs,
    shown_jobs,
    since_s,
    time_s,
)
from clusterd.cli.common.following import first_failure, show_logs, until_over, wait_for
from clusterd.cli.common.output import (
    ago,
    clock,
    escaped,
    exit_when_closed,
    expected_cell,
    for_each,
    note,
    output_option,
    print_line,
    raise_all,
    show_json,
    show_table,
    shown_as,
    state_and_reason,
    use_colour,
)
from clusterd.cli.help import with_key
from clusterd.client import Client, refusal
from clusterd.errors import ClusterError, UsageError
from clusterd.protocol.calls import Failure
from clusterd.units import asked_text, compact_devices, counted, duration, expected_text, held_text, start_text

SILENT_S, SILENT_STEPS = 60.0, 20
"""A job counts as silent after this long and this many step times without a step."""

HOSTS_MAX = 8
"""Hosts that do not fit a job, and jobs that hold what it waits for, named by `why`."""

LINES_MAX = 20
"""With more jobs than this, one summary line replaces a line per job."""


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=complete_job)
@click.option("-a", "--all", "everything", is_flag=True, help="Finished jobs too.")
@click.option("--state", help="Only jobs in this state, or in one of several: queued,running.")
@click.option("--user", help="Only jobs of this user; . for your own.")
@click.option("--since", metavar="TIME", help="Only jobs submitted within this time, finished ones too: 12h or a date.")
@click.option("-n", "--limit", type=click.IntRange(1), help="At most so many jobs, the newest.")
@click.option("--tasks", is_flag=True, help="A line for each task of arrays and sweeps.")
@click.option("-l", "--long", "with_forecast", is_flag=True, help="Expected start and end, with 90% intervals.")
@output_option
def ls(
    jobs: tuple[str, ...],
    everything: bool,
    state: str | None,
    user: str | None,
    since: str | None,
    limit: int | None,
    tasks: bool,
    with_forecast: bool,
    output: str,
) -> None:
    """List active jobs, with --all also finished ones; JOBS limits the list to names, ids or patterns.

    An array or sweep is one line; its name in the place of JOBS lists its tasks. A narrow terminal leaves out columns.
    """
    begin_s = since_s("--since", since) if since is not None else 0.0
    with Client() as cluster:
        everything = everything or since is not None
        rows = cluster.all_jobs() if everything or state is not None else cluster.call("jobs")
        me = cluster.call("hello")["user"]
        status = cluster.call("status") if output == "table" else {}
        arrays = cluster.call("arrays", all=everything) if any(row.get("array") for row in rows) else []
    user = me if user == "." else user
    if jobs:
        rows = [row for row in rows if is_found(row, jobs)]
    if state is not None:
        states = _states(state)
        rows = [row for row in rows if row["state"] in states]
    rows = [row for row in rows if user in (None, row["user"]) and row["submitted_s"] >= begin_s]
    rows = rows if limit is None else sorted(rows, key=lambda row: float(row["submitted_s"]))[-limit:]
    if shown_as(output, rows, "Job"):
        return
    if said := status.get("notice"):  # absent from the reply of an older daemon
        note(f"notice of {said}")
    rows = rows if jobs or state is not None or tasks else _folded(rows, arrays)
    headings = ["id", "name", "state", "plan", "devices", "step", "left", "loss", "elapsed", "age", "reason"]
    lines = [_array_line(row) if "tasks" in row else _line(row) for row in rows]
    if with_forecast:
        headings[-1:-1] = ["expected start", "expected end"]
        for row, line in zip(rows, lines, strict=True):
            line[-1:-1] = [_expected(row, what) for what in ("start", "end")]
    if {row["user"] for row in rows} - {me}:
        headings.insert(1, "user")
        for row, line in zip(rows, lines, strict=True):
            line.insert(1, row["user"])
    empty = "no such jobs" if jobs else "no jobs"
    if not (everything or state):
        empty += " are queued or running (clusterd ls --all shows finished ones)"
    show_table(headings, lines, empty, spare=("age", "loss", "elapsed", "plan", "step", "left"))


def _folded(rows: list[dict[str, Any]], arrays: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with each active array of several tasks in the place of its first task."""
    several = {array["id"]: array for array in arrays if array["tasks"] > 1}
    folded: dict[str, dict[str, Any]] = {}
    for row in rows:
        array = several.get((row.get("array") or {}).get("id"))
        if array is None:
            folded[row["id"]] = row
            continue
        first = folded.setdefault(f"array {array['id']}", {**array, "devices": [], "submitted_s": row["submitted_s"]})
        first["devices"] += row["devices"] if row["holds_devices"] else []
    return list(folded.values())


def _array_line(row: dict[str, Any]) -> list[Any]:
    states = row["states"]
    waits_or_ended = next((state for state in ("queued", "failed", "cancelled") if states.get(state)), "finished")
    state = "running" if states.keys() & {"starting", "running", "stopping"} else waits_or_ended
    most = f", at most {row['most']} at once" if row["most"] else ""
    names = {"queued": "pending", "finished": "done"}
    counts = ", ".join(f"{states[state]} {names.get(state, state)}" for state in _ORDER if states.get(state))
    devices = compact_devices(row["devices"])
    reason = f"{row['tasks']} tasks{most}: {counts}"
    return [f"{row['id']}_*", row["name"], state, "", devices, "", "", "", "", ago(row["submitted_s"]), reason]


_RIGHTS = ("guaranteed", "preemptible")
_ORDER = ("queued", "starting", "running", "stopping", "finished", "failed", "cancelled")
"""States in which tasks of an array are counted."""


_OF_SLURM = {
    "pending": "queued", "pd": "queued", "configuring": "starting", "cf": "starting", "r": "running",
    "completing": "stopping", "cg": "stopping", "completed": "finished", "cd": "finished", "f": "failed",
    "ca": "cancelled",
}  # fmt: skip


def _states(names: str) -> set[str]:
    """States of these names, separated by commas; Slurm's words and letters are understood."""
    from clusterd.types import JobState

    states = {_OF_SLURM.get(name, name) for name in names.lower().replace(" ", "").split(",")}
    if unknown := sorted(states.difference(JobState)):
        raise UsageError(f"--state {unknown[0]}: unknown state; known ones are {', '.join(JobState)}")
    return states


def _line(row: dict[str, Any]) -> list[Any]:
    loan = f" ({row['on_loan']} on loan)" if row.get("on_loan") else ""
    cores = row.get("cores", 0)  # absent from the reply of an older daemon
    devices = asked_text(row["asked"], cores)
    if row["holds_devices"]:
        devices = held_text(row["devices"], row["hosts"], cores) + loan
    step = f"{row['step']}/{row['steps']}" if row["steps"] else (row["step"] or "")
    loss = f"{row['loss']:.4f}" if row["loss"] is not None else ""
    age = ago(row["submitted_s"])
    shown = [row["id"], row["name"], row["state"], row["plan"], devices, step, _left(row), loss]
    return [*shown, _elapsed(row), age, reason_now(row)]


def _left(row: dict[str, Any]) -> str:
    """Time to the end of a running job: as expected, else at this speed, else ``<`` that to its time limit."""
    left_s, by_s = row.get("left_s"), row.get("ends_by_s")  # absent from the reply of an older daemon
    end = (row.get("forecast") or {}).get("end")
    if left_s is not None and end is not None and end["p50_s"] > time.time():
        left_s = end["p50_s"] - time.time()  # the roll-outs know of trials, moves and loans to come
    most_s = max(by_s - time.time(), 0.0) if by_s is not None else None
    if row["state"] != "running" or (left_s is None and most_s is None):
        return ""
    if left_s is None or (most_s is not None and most_s < left_s):
        return f"<{duration(most_s or 0.0)}"
    return duration(left_s)


def _elapsed(row: dict[str, Any]) -> str:
    """Time from the first start of a job to its end, or to now."""
    if row["started_s"] is None:
        return ""
    return duration(max((row["ended_s"] or time.time()) - row["started_s"], 0.0))


def reason_now(row: dict[str, Any]) -> str:
    """Reason of the job's state; of a build of its environment with the time that it has taken."""
    building: dict[str, float] = row.get("building", {})  # absent from the reply of an older daemon
    if not building or row.get("away"):
        return str(row["reason"])
    return f"building its environment on {', '.join(f'{host}, {ago(at_s)}' for host, at_s in building.items())}"


@click.command()
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@output_option
def show(jobs: tuple[str, ...], output: str) -> None:
    """Show all details of jobs, by name, id or pattern."""
    with Client() as cluster:
        rows = [row | newest_metrics(cluster, row) for row in shown_jobs(cluster, jobs)]
    if not shown_as(output, rows if len(rows) > 1 else rows[0]):
        for row in rows:
            _show_job(row)


def _show_job(row: dict[str, Any]) -> None:
    from clusterd.rows import SEARCHED  # imported only if needed: the command line starts faster without

    spec, cores = row["spec"], row.get("cores", 0)  # absent from the reply of an older daemon
    print_line(f"{row['id']}  {row['name']}  {state_and_reason(row | {'reason': reason_now(row)})}")
    facts = {
        "kind": row["kind"],
        **{name: row.get(name) for name in SEARCHED},  # absent from the reply of an older daemon
        "command": row.get("command") or " ".join(spec["command"]),  # absent from the reply of an older daemon
        "python": _environment(spec),
        "container": spec.get("container"),
        "commit": spec.get("commit"),
        "user": f"{row['user']} (tenant {row['tenant']})",
        "priority": ", ".join([str(row["priority"]), *(key for key in _RIGHTS if row["spec"].get(key))]),
        "asked": counted(row["asked"], "device") if row["asked"] else counted(cores, "CPU core") if cores else None,
        "env": " ".join(f"{name}={value}" for name, value in spec["env"].items()),
        "after": ", ".join(spec["after"]),
        "ports": ", ".join(map(str, spec.get("ports", ()))),
        "sees batch": "a replica sees its own part of it, as the script accepts: results depend on the plan"
        if row.get("sees_batch") == "replica"
        else None,
        "time limit": duration(limit_s) if (limit_s := row.get("time_limit_s")) else None,
        "elapsed": ", ".join(filter(None, (_elapsed(row), (left := _left(row)) and f"{left} left"))),
        "submitted": _when(row["submitted_s"]),
        "started": _when(row["started_s"]),
        "ended": _when(row["ended_s"]),
        "exit code": row["exit_code"],
        "step": f"{row['step']} of {row['steps']}" if row["steps"] else row["step"] or None,
        "loss": f"{row['first_loss']:.4f} -> {row['loss']:.4f}" if row["loss"] is not None else None,
        "step time": duration(row["step_time_s"]) if row["step_time_s"] else None,
        "metrics": _metric_text(row["metrics"]),
        "evaluation": f"step {row['evaluation']['step']}: {_metric_text(row['evaluation']['metrics'])}"
        if row["evaluation"]
        else None,
    }
    for name, value in facts.items():
        if value is not None and value != "":
            print_line(f"  {name:<10} {value}")
    for migration in row["migrations"]:
        downtime_s, step = migration["downtime_s"], migration["step"]
        cost = f"downtime {duration(downtime_s)}" if downtime_s is not None else migration["failure"]
        at = f"after step {step}, " if step is not None else ""
        plans = f"{migration['from']} -> {migration['to']}"
        print_line(f"  move {migration['number']}: {plans} {at}{cost}: {migration['reason']}")
    for attempt in row["attempts"]:
        parts = [attempt["state"]]
        parts += [f"plan {attempt['plan']}"] if attempt["plan"] else []
        parts += [f"{count} CPU cores on {host}" for host, count in attempt["cores"].items()]
        built = attempt.get("build_times_s", {})  # absent from the reply of an older daemon
        parts += [f"environment built on {host} in {duration(took_s)}" for host, took_s in built.items()]
        parts += [attempt["why"]] if attempt["why"] else []
        print_line(f"  attempt {attempt['number']}: {', '.join(parts)}")
        if start := attempt.get("start"):  # absent from the reply of an older daemon
            phases = ", ".join(f"{phase['phase']} {duration(phase['seconds'])}" for phase in start)
            print_line(f"    first step after {duration(sum(phase['seconds'] for phase in start))}: {phases}")
        for line in _version_lines(attempt.get("versions", {})):  # absent from the reply of an older daemon
            print_line(f"    {line}")
        for rank in attempt["ranks"]:
            where = rank["device"] or f"{rank['host']} (CPU cores)"
            print_line(f"    rank {rank['rank']:<4} {where:<24} {rank['end'] or ''}".rstrip())


def _environment(spec: dict[str, Any]) -> str | None:
    """Python environment of the job, where it names one."""
    built = spec.get("uv") or spec.get("requirements")  # absent from the reply of an older daemon
    parts = [f"built from {built}"] if built else []
    parts += [f"{'with ' if built else ''}{spec['python']}"] if spec["python"] else []
    return " ".join(parts) or None


def _version_lines(versions: dict[str, dict[str, str]]) -> list[str]:
    """Versions that an attempt ran with: one line for hosts that have the same."""
    hosts_by_text: dict[str, list[str]] = {}
    for host, found in versions.items():
        cuda = f" for CUDA {found['cuda']}" if "cuda" in found else ""
        parts = [f"{name} {found[name]}" for name in ("container", "python", "torch", "driver") if name in found]
        text = ", ".join(part + cuda if part.startswith("torch ") else part for part in parts)
        at = f" ({found['interpreter']})" if "interpreter" in found else ""
        hosts_by_text.setdefault(f"{text}{at}", []).append(host)
    several = len(hosts_by_text) > 1
    return [f"{text} on {', '.join(hosts)}" if several else text for text, hosts in hosts_by_text.items()]


_METRICS_BYTES = 65536
"""End of the step log that is searched for the newest step and evaluation."""


def newest_metrics(cluster: Client, row: dict[str, Any]) -> dict[str, Any]:
    """Metrics of the newest step, and the newest evaluation, as far as the end of the step log has them."""
    found: dict[str, Any] = {"metrics": {}, "evaluation": None}
    if row["kind"] != "elastic" or not row["attempts"]:
        return found
    try:
        data = cluster.call("steps", job=row["id"], last_bytes=_METRICS_BYTES)["data"]
    except ClusterError:  # its host does not answer; the rest of the row is known
        return found
    for text in data.splitlines():
        try:
            entry = json.loads(text)
        except ValueError:  # the first one may be incomplete
            continue
        if "evaluated" in entry:
            found["evaluation"] = {"step": entry["evaluated"], "metrics": entry["metrics"]}
        elif "logged" in entry:
            found["metrics"] |= entry["metrics"]
        elif "step" in entry:
            names = ("lr", "grad_norm", "samples_per_s")
            found["metrics"] = {n: entry[n] for n in names if n in entry} | entry.get("metrics", {})
    return found


def _metric_text(metrics: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items() if value is not None)


def _when(at_s: float | None) -> str | None:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_s))} ({ago(at_s)} ago)" if at_s else None


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@click.option("--rank", type=int, help="Only this rank; default: rank 0.")
@click.option("--all-ranks", is_flag=True, help="All ranks, each line prefixed with the rank.")
@click.option("--attempt", type=int, help="Show an earlier attempt.")
@click.option("-n", "--lines", type=click.IntRange(0), help="Only the last lines; with --follow, and all later ones.")
@click.option("--raw", is_flag=True, help="Pass control sequences on to the terminal.")
def logs(
    job: str, follow: bool, rank: int | None, all_ranks: bool, attempt: int | None, lines: int | None, raw: bool
) -> None:
    """Print a job's output."""
    if all_ranks and lines is not None:
        raise click.UsageError("--lines is for the log of one rank: leave --all-ranks out")
    with Client() as cluster:
        row = cluster.call("job", job=job)
    note_array(row, job)
    if follow:
        exit_when_closed(1)
        if row["state"] == "queued":
            note(f"{row['name']} ({row['id']}) is queued: {reason_now(row)}")
    show_logs(row, None if all_ranks else (rank or 0), follow, attempt, raw=raw, last_lines=lines)


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=complete_job)
@click.option("--wait", "and_wait", is_flag=True, help="Wait until their devices are free.")
@click.option("--now", is_flag=True, help="Kill at once, without saving; also jobs being cancelled.")
@click.option("--why", "--reason", "why", help="Reason, which the job's owner and others see.")
@click.option("--state", help="Only those of JOBS in this state, as in queued; without JOBS: of all your own.")
@click.option("--signal", "signal_name", metavar="NAME", help="Send a signal to their processes instead, as in USR1.")
def cancel(
    jobs: tuple[str, ...], and_wait: bool, now: bool, why: str | None, state: str | None, signal_name: str | None
) -> None:
    """Cancel jobs and free their devices; a pattern such as 'net_*' selects your own active jobs.

    The id of an array means all of its tasks that are not over, 12_3 one of them.
    """
    failures: list[ClusterError] = []
    if not jobs and state is None:
        raise click.UsageError("give JOBS, or --state for all your own jobs in that state")
    wanted = _states(state) if state is not None else None
    with Client() as cluster:
        chosen = own_jobs(cluster, jobs or ["*"], over=False)
        if wanted is not None:
            states = {row["id"]: row["state"] for row in cluster.call("jobs")}
            # One that is over, or that is not there, is looked up, and refused, by itself.
            chosen = [job for job in chosen if (states.get(job) or cluster.call("job", job=job)["state"]) in wanted]
        if not chosen:
            raise UsageError(f"none of them is {state}: clusterd ls --state {state}")
        first, *others = chosen
        if signal_name is not None:
            _send_signal(cluster, chosen, signal_name)
            return
        at_once: dict[str, Any] = {**({"now": True} if now else {}), **({"why": why} if why else {})}
        if others:  # in one request: else the devices of the first would go to the next
            answer = cluster.call("cancel", job=first, also=others, **at_once)
            rows, failures = answer["jobs"], [refusal(Failure.of(error)) for error in answer["refused"]]
        else:
            rows = [cluster.call("cancel", job=first, **at_once)]
    many: dict[str, int] = {}
    for row in rows:
        if and_wait:
            row = until_over(row["id"])
        state = "being cancelled" if row["state"] == "stopping" else row["state"]
        many[state] = many.get(state, 0) + 1
        if len(rows) <= LINES_MAX:
            _, colon, saved = row["reason"].partition(": ") if row["state"] == "cancelled" else ("", "", "")
            note(f"{row['id']} ({row['name']}) is {state}{colon}{saved}")
    if len(rows) > LINES_MAX:
        note(f"{len(rows)} jobs: {', '.join(f'{count} {state}' for state, count in many.items())}")
    raise_all(failures)


def _send_signal(cluster: Client, jobs: list[str], name: str) -> None:
    """Send a signal to running jobs."""
    named = name.upper().removeprefix("SIG")
    number = next((each for each in signal.Signals if named in (each.name.removeprefix("SIG"), str(int(each)))), None)
    if number is None:
        raise UsageError(f"--signal {name}: there is no such signal; write it as in USR1 or TERM")
    for job in jobs:
        cluster.call("signal", job=job, number=int(number))
        note(f"{number.name} is sent to {job}")


@click.command(context_settings={"ignore_unknown_options": True})  # so that -5 is a number
@click.argument("job", shell_complete=complete_job)
@click.argument("priority", type=int)
def priority(job: str, priority: int) -> None:
    """Change a job's priority; higher priorities start first."""
    with Client() as cluster:
        for one in own_jobs(cluster, [job], over=False):
            row = cluster.call("priority", job=one, priority=priority)
            note(f"{row['id']} ({row['name']}) has priority {row['priority']}")


_JOBS = click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)


@click.command()
@_JOBS
def hold(jobs: tuple[str, ...]) -> None:
    """Keep queued JOBS from starting until they are released; jobs behind them go first."""
    _each("hold", jobs, "is held", lambda row: row["state"] == "queued" and row["held_by"] is None)


@click.command()
@_JOBS
def release(jobs: tuple[str, ...]) -> None:
    """Let held JOBS start."""
    _each("release", jobs, "is queued", lambda row: row["held_by"] is not None)


@click.command()
@_JOBS
@click.option("--hold", "held", is_flag=True, help="They stay queued until they are released.")
def requeue(jobs: tuple[str, ...], held: bool) -> None:
    """Stop running JOBS and queue them again.

    Elastic and checkpointable jobs go on from their saved state; a command starts over.
    """
    running = ("starting", "running")
    _each("requeue", jobs, "is being stopped, and queued again", lambda row: row["state"] in running, hold=held)


@click.command()
@_JOBS
def pause(jobs: tuple[str, ...]) -> None:
    """Stop JOBS until they are unpaused.

    Elastic and checkpointable jobs save their state and leave their devices, as with requeue --hold. A command is
    stopped where it is (SIGSTOP): it keeps its devices and their memory, and its time limit goes on.
    """
    active = ("queued", "starting", "running")
    _each("pause", jobs, "", lambda row: row["state"] in active and row["paused_by"] is None)


def _paused(row: dict[str, Any]) -> str:
    if row["paused_by"] is not None:
        return "is paused, and keeps its devices: clusterd unpause lets it go on"
    if row["state"] == "queued":
        return "is held"
    return "saves its state and leaves its devices: clusterd unpause queues it again"


@click.command()
@_JOBS
def unpause(jobs: tuple[str, ...]) -> None:
    """Let paused JOBS go on, where they were stopped or from their saved state."""
    _each("unpause", jobs, "goes on", lambda row: row["held_by"] is not None or row["paused_by"] is not None)


def _each(verb: str, jobs: tuple[str, ...], done: str, accept: Callable[[dict[str, Any]], bool], **others: Any) -> None:
    """Call the daemon for each job; the others happen even if one is refused.

    Args:
        accept: tasks of an array, and jobs of a pattern, that the verb concerns.
    """
    with Client() as cluster:

        def act(job: str) -> None:
            row = cluster.call(verb, job=job, **others)
            note(f"{row['id']} ({row['name']}) {done or _paused(row)}")

        for_each(own_jobs(cluster, jobs, over=False, accept=accept), act)


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@click.option("--timeout", help="Give up after this long (exit code 124).")
@output_option
def wait(jobs: tuple[str, ...], timeout: str | None, output: str) -> int:
    """Wait until jobs end; returns the exit code of the first that failed."""
    timeout_s = time_s("--timeout", timeout, "; without it, wait has no limit") if timeout is not None else None
    deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
    with Client() as cluster:
        # An unknown name is reported now, not after the jobs before it have ended.
        ids = {job: name for name in jobs for job in job_or_tasks(cluster, name)}
    ended: list[dict[str, Any]] = []
    for job, name in ids.items():
        left_s = max(deadline_s - time.monotonic(), 0.01) if deadline_s is not None else None
        row = wait_for(job, left_s)
        if row is None:
            note(f"{name} has not ended after {duration(timeout_s or 0.0)}")
            break
        ended.append(row)
        if output == "table":
            note(f"{row['id']} ({row['name']}) {state_and_reason(row)}")
    if output != "table":
        show_json(ended, output)
    if len(ended) < len(ids):
        return 124
    return first_failure(ended)


@click.command()
@click.argument("job", shell_complete=complete_job)
@output_option
def why(job: str, output: str) -> None:
    """Explain a job's state: reason, queue position, recent decisions."""
    with Client() as cluster:
        answer = cluster.call("why", job=job)
    note_array(answer, job)
    if shown_as(output, answer):
        return
    text = escaped(with_key(f"{answer['name']} ({answer['id']}) is {state_and_reason(answer)}"))
    print(click.style(text, bold=True) if use_colour() else text)
    if silence := _silence(answer):
        print_line(f"  {with_key(silence)}")
    if answer["state"] == "running" and (left := _left(answer)):
        print_line(f"  has run for {_elapsed(answer)}, ends in {left}")
    for text in filter(None, (*forecast_lines(answer), promised(answer))):
        print_line(f"  {text}")
    if loan := answer.get("on_loan"):  # absent from the reply of an older daemon
        held = len(answer["devices"])
        print_line(f"  holds {held} devices, asked for {held - loan}: {loan} on loan until another job waits for them")
    for host, reason in answer.get("unfit", {}).items():  # absent from the reply of an older daemon
        print_line(f"  {host} is excluded: {reason}")
    for plan, reason in answer.get("refused", {}).items():
        print_line(f"  it cannot train under {plan}: {reason}")
    if answer["ahead"]:
        names = ", ".join(answer["ahead"][:5]) + (" ..." if len(answer["ahead"]) > 5 else "")
        print_line(f"  {len(answer['ahead'])} ahead in the queue: {names}")
    if after := answer.get("after"):  # absent from the reply of an older daemon
        print_line(f"  {after['name']} comes just before it, because {after['why']}")
    if answer["state"] == "queued":
        wants_cores = not answer["asked"] or "core" in answer["reason"]
        kinds = {"device": answer["holders"], "CPU core": answer.get("core_holders", {}) if wants_cores else {}}
        for noun, holders in kinds.items():  # those of cores are absent from the reply of an older daemon
            ordered = sorted(((name, count) for name, count in holders.items() if count), key=lambda item: -item[1])
            for name, count in ordered[:HOSTS_MAX]:
                print_line(f"  {name} holds {counted(count, noun)}{_until(answer, name)}")
            if others := ordered[HOSTS_MAX:]:
                rest = counted(sum(count for _, count in others), noun)
                print_line(f"  {counted(len(others), 'more job')} hold{'s' * (len(others) == 1)} {rest}")
        misfits = answer.get("misfits", [])  # absent from the reply of an older daemon
        for reason in misfits[:HOSTS_MAX]:
            print_line(f"  {reason}")
        if len(misfits) > HOSTS_MAX:
            print_line(f"  and {len(misfits) - HOSTS_MAX} more hosts do not fit either")
        for reason in answer["unusable"]:
            print_line(f"  {with_key(reason)}")
    if answer["state"] == "failed" and answer["attempt"]:
        print_line(f"  clusterd logs {answer['id']} shows its output")
    decisions = (decision for decision in answer["decisions"] if not decision["routine"])
    for text, group in groupby(decisions, lambda decision: decision["text"]):
        first, *others = group
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(first["at_s"]))
        print_line(f"  {at}  {text}{f' ({1 + len(others)} times)' if others else ''}")


def _until(answer: dict[str, Any], holder: str) -> str:
    """For how long a job that holds something is expected to hold it, or may."""
    for word, times in (("about", "holders_left_s"), ("at most", "holders_most_s")):
        if (left_s := answer.get(times, {}).get(holder)) is not None:
            return f", for {word} {duration(left_s)} more"
    return ""


def forecast_lines(job: dict[str, Any]) -> list[str]:
    """Sentences about the expected start and end of a job, and how they were made."""
    forecast = job.get("forecast")
    if "forecast" not in job or job["state"] not in ("queued", "running"):  # absent from an older daemon's reply
        return []
    if forecast is None and job["state"] == "running":
        return []
    if forecast is None:
        begin_s = job.get("begin_s") or 0.0
        is_later = begin_s > time.time()
        return [f"expected start: not before {clock(begin_s)}" if is_later else "expected start and end: not known"]
    found = []
    for what in ("start", "end"):
        if (times := forecast[what]) is not None:
            after = forecast["after"] if what == "start" else ""
            text = expected_text(times["p5_s"], times["p50_s"], times["p95_s"], clock, after)
            left_s = times["p50_s"] - time.time()
            soon = f"in {duration(left_s)}, at " if left_s > 0 and what == "start" else ""  # of an end the line above
            found.append(f"expected {what}: {soon}{text}")
        elif what == "end" or job["state"] == "queued":
            found.append(f"expected {what}: not known")
    weeks = forecast.get("weeks")
    later = f"with submissions as in the last {weeks} weeks" if weeks else "without later submissions"
    made = f"{counted(forecast['rollouts'], 'roll-out')} {later}, {ago(forecast['at_s'])} ago"
    found.append(f"(90% intervals, from {made})")
    return found


def _expected(row: dict[str, Any], what: str) -> str:
    """Cell of an expected start or end; empty: it is over, or has started."""
    forecast = row.get("forecast")  # absent from the reply of an older daemon, and from the line of an array
    if row.get("ended_s") or (what == "start" and row.get("started_s") and row["state"] != "queued") or "tasks" in row:
        return ""
    return expected_cell(forecast, what)


def promised(job: dict[str, Any]) -> str:
    """Sentence about the start of a queued job; empty without a reservation."""
    promise = job.get("promise")
    if not promise:
        return ""
    if (job.get("forecast") or {}).get("start"):  # which says when it is expected
        latest_s = promise["latest_s"]
        known = latest_s is not None and latest_s >= time.time()
        return f"promised: by {clock(latest_s)} at the latest; nobody behind it may delay it" if known else ""
    return start_text(promise["at_s"], promise["latest_s"], promise["after"], time.time(), clock)


def _silence(job: dict[str, Any]) -> str:
    """Notice about a running job that has not finished a step for much longer than a step takes."""
    if job["state"] != "running" or job["progressed_s"] is None:
        return ""
    silent_s, step_s = time.time() - job["progressed_s"], job["step_time_s"] or 0.0
    if silent_s < max(SILENT_S, SILENT_STEPS * step_s):
        return ""
    return f"no step for {duration(silent_s)} since step {job['step']}; a step takes {duration(step_s)}"
