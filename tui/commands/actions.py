"""Key commands that act on the cluster: ask where needed, call the daemon, report the outcome.

Parsers of what is typed return the value, or raise ValueError with a message that says what is expected.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterd.errors import ClusterError
from clusterd.rows import (
    CalendarEntry,
    Cancelled,
    CheckpointWritten,
    Explanation,
    MigrationPreview,
    Plans,
    SubmittedJob,
)
from clusterd.tui.model import rows
from clusterd.tui.model.columns import forecast_texts, start_facts
from clusterd.tui.model.fleet import calendar_lines
from clusterd.tui.model.lines import Line, clock, line, printable
from clusterd.units import counted, duration

if TYPE_CHECKING:
    from clusterd.tui.app import Top

LOG_BYTES_MAX = 256 << 20
"""Limit of a log copied to a temporary file for the pager."""


class ClusterCommands:
    """Commands that read from or change the cluster; method names are the actions of `tui.model.keys`."""

    def __init__(self, app: Top) -> None:
        self._app = app
        self._last_directory = ""

    @property
    def _jobs(self) -> list[rows.Job]:
        """The marked jobs, or the one under the cursor.

        Raises:
            ClusterError: there is none.
        """
        app = self._app
        found = [app.shared.model.jobs[job] for job in app.board.jobs() if job in app.shared.model.jobs]
        if not found:
            raise ClusterError("no job is under the cursor: go to 2 Queue and choose one")
        return found

    @property
    def _job(self) -> rows.Job:
        return self._jobs[0]

    @property
    def _hosts(self) -> list[rows.Host]:
        app = self._app
        found = [app.shared.model.hosts[host] for host in app.board.hosts() if host in app.shared.model.hosts]
        if not found:
            raise ClusterError("no host is under the cursor: go to 1 Fleet and choose one")
        return found

    async def _each(self, verb: str, done: str, items: list[tuple[str, dict[str, Any]]]) -> None:
        """Call `verb` for each item; report successes in one notice and refusals in a dialog."""
        refused: list[Line] = []
        for name, args in items:
            try:
                await self._app.shared.source.call(verb, **args)
            except ClusterError as error:
                refused.append(line((f"{name}: ", "bold"), printable(str(error))))
        await self._report(done, [name for name, _ in items] if len(refused) < len(items) else [], refused)

    async def _report(self, done: str, names: list[str], refused: list[Line]) -> None:
        if names:
            self._app.notify(f"{done}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
        if refused:
            await self._app.show_text("refused", refused)
        self._app.clear_marks()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def why(self) -> None:
        """Show the daemon's explanation of a job's state."""
        job = self._job
        answer = rows.read(Explanation, await self._app.shared.source.call("why", job=job.id))
        now_s = self._app.shared.clock()
        made = [line((f"{job.name} ({job.id}) is {answer.state}: ", "bold"), (printable(answer.reason), "warn"))]
        made += [line(("start      ", "dim"), printable(text)) for text in start_facts(job, now_s)]
        if (end := forecast_texts(job, now_s).get("end")) is not None:
            made.append(line(("end        ", "dim"), printable(end)))
        if job.on_loan:
            held = len(job.devices)
            made.append(
                line(("on loan    ", "dim"), f"{job.on_loan} of {held} devices, until another job waits for them")
            )
        if answer.ahead:
            names = ", ".join(answer.ahead[:5]) + (", ..." if len(answer.ahead) > 5 else "")
            made.append(line(("before it  ", "dim"), f"{len(answer.ahead)} in the queue: {printable(names)}"))
        if answer.after is not None:
            because = f"{answer.after.name} comes just before it, because {answer.after.why}"
            made.append(line(("           ", "dim"), printable(because)))
        if answer.state == "queued":
            for name, count in sorted(answer.holders.items(), key=lambda item: -item[1])[:8]:
                left_s = answer.holders_left_s.get(name)
                until = f", for about {duration(left_s)} more" if left_s is not None else ""
                has = f"{printable(name)} has {count} device{'s'[: count != 1]}{until}"
                made.append(line(("held       ", "dim"), has))
            made += [line(("unusable   ", "dim"), printable(reason)) for reason in answer.unusable]
        for host, reason in answer.unfit.items():
            made.append(line(("left out   ", "dim"), printable(f"{host}: {reason}")))
        made += [
            line(("no plan    ", "dim"), printable(f"{plan}: {reason}")) for plan, reason in answer.refused.items()
        ]
        made.append(line(""))
        decisions = [each for each in reversed(answer.decisions) if not each.routine]
        for decision, times in _runs(decisions):
            again = f" ({times} times)" if times > 1 else ""
            at = clock(decision.at_s, now_s)
            made.append(line((f"{at}  ", "dim"), printable(decision.sentence), (again, "dim")))
        await self._app.show_text(f"why {job.name}", made, hang=11)

    async def calendar(self) -> None:
        """Show who is expected where in the next week."""
        answer = await self._app.shared.source.call("calendar", days=7)
        entries = rows.read(list[CalendarEntry], answer)
        await self._app.show_text("the next week", calendar_lines(entries, self._app.shared.clock()), hang=11)

    async def cancel(self) -> None:
        """Cancel jobs after confirmation."""
        jobs = [job for job in self._jobs if not job.is_over]
        if not jobs:
            raise ClusterError(f"{self._job.name} is {self._job.state} already")
        lost = [f"{job.name} ({job.id}), {job.shown_state}, step {job.step}" for job in jobs]
        lines = [*(line(text) for text in lost[:8]), *([line(f"and {len(lost) - 8} more")] if len(lost) > 8 else [])]
        title = f"cancel {len(jobs)} jobs" if len(jobs) > 1 else f"cancel {jobs[0].name}"
        if await self._app.confirm(title, lines, {"y": title}):
            others = [job.id for job in jobs[1:]]
            asked = self._app.shared.source.call("cancel", job=jobs[0].id, also=others)
            answer = rows.read(Cancelled, await asked)
            refused = [line(printable(each.message)) for each in answer.refused]
            await self._report("cancelling", [job.name for job in answer.jobs], refused)

    async def priority(self) -> None:
        """Change the jobs' priority."""
        jobs = self._jobs
        names = ", ".join(job.name for job in jobs[:5])
        value = await self._app.prompt(
            "priority", [line(f"of {names}; higher goes first")], str(jobs[0].priority), whole_number
        )
        if value is not None:
            calls = [(job.name, {"job": job.id, "priority": value}) for job in jobs]
            await self._each("priority", f"priority {value}", calls)

    async def hold(self) -> None:
        """Hold queued jobs, or release them where all are held."""
        verb = "release" if all(job.held_by is not None for job in self._jobs) else "hold"
        await self._each(verb, verb, [(job.name, {"job": job.id}) for job in self._jobs])

    async def pause(self) -> None:
        """Pause jobs after confirmation, or let them go on where all are paused."""
        jobs = self._jobs
        calls = [(job.name, {"job": job.id}) for job in jobs]
        if all(job.paused_by is not None or job.held_by is not None for job in jobs):
            await self._each("unpause", "goes on", calls)
            return
        keep = {"command": "keeps its devices, and stands still"}
        lines = [line(f"{job.name} {keep.get(job.kind, 'saves its state and leaves its devices')}") for job in jobs[:8]]
        if await self._app.confirm("pause", lines, {"y": "pause"}):
            await self._each("pause", "paused", calls)

    async def migrate(self, pin: bool = False) -> None:
        """Choose a plan, show the cost, confirm, then follow the migration.

        A job with its own training loop restarts under the new plan instead.
        """
        from clusterd.tui.widgets.migrate_dialog import MigrationDialog, cost_lines

        job = self._job
        if job.kind == "command" or job.state != "running":
            raise ClusterError(
                f"{job.name} ({job.kind}) is {job.state}: only running jobs can move, and jobs of kind command cannot"
            )
        plan = await self._chosen_plan(job)
        if plan is None:
            return
        source = self._app.shared.source
        cost = rows.read(MigrationPreview, await source.call("migrate", job=job.id, plan=plan, dry_run=True))
        keys = {"P": "move and pin"} if pin else {"y": "move", "P": "move and pin it there"}
        if cost.restarts:
            keys = {"y": "restart it"}
        answer = await self._app.confirm(f"move {job.name}", cost_lines(cost), keys)
        if not answer:
            return
        begun = rows.read(MigrationPreview, await source.call("migrate", job=job.id, plan=plan, pin=answer == "P"))
        if begun.restarts:
            self._app.notify(f"{job.name} saves its state and restarts as {begun.plan}")
            return
        watch = MigrationDialog(self._app.shared, job, begun.migrations, begun.predicted_downtime_s)
        await self._app.show_dialog(watch)

    async def _chosen_plan(self, job: rows.Job) -> str | None:
        """Plan chosen from the ranking or typed; None if the user left."""
        from clusterd.tui.widgets.migrate_dialog import OTHER_PLAN, PlanDialog

        known = Plans(known="any plan that its command accepts")
        if job.kind == "elastic":
            try:
                known = rows.read(Plans, await self._app.shared.source.call("plans", job=job.id))
            except (ClusterError, rows.Malformed) as refused:
                known = Plans(known=str(refused))
        if known.rows and (plan := await self._app.show_dialog(PlanDialog(self._app.shared, job, known))) != OTHER_PLAN:
            return plan
        why = [line((printable(known.known), "dim"))] if known.known and not known.rows else []
        hint = line("dp, tp, pp, zero, accumulation ... as in ", ("dp=2,tp=2", "key"))
        title = f"move {job.name} from {job.plan} to"
        return await self._app.prompt(title, [hint, *why], job.plan or "", something("a plan, please"))

    async def pin(self) -> None:
        """Unpin a pinned job; otherwise migrate and pin."""
        job = self._job
        if not job.pinned:
            await self.migrate(pin=True)
        elif await self._app.confirm(
            f"unpin {job.name}",
            [line(f"{job.name} keeps {job.plan} until the scheduler finds a better plan")],
            {"y": "unpin"},
        ):
            await self._each("unpin", "unpinned", [(job.name, {"job": job.id})])

    async def checkpoint(self) -> None:
        """Write a job's checkpoint; training continues meanwhile."""
        job = self._job
        hint = line("an absolute directory that all its hosts share; it trains on meanwhile")
        where = await self._app.prompt(
            f"checkpoint {job.name} to", [hint], job.checkpoint or self._last_directory, absolute_path
        )
        if where is None:
            return
        self._last_directory = where
        self._app.notify(f"{job.name}: writing its checkpoint")
        reply = await self._app.shared.source.call("checkpoint", job=job.id, path=where)
        written = rows.read(CheckpointWritten, reply)
        paused = duration(written.blocked_s)
        done = f"{job.name}: step {written.step} is in {written.path} (training paused for {paused})"
        self._app.notify(done, timeout=10)

    async def submit(self) -> None:
        """Submit a job file."""
        from clusterd.submission.job_file import read_job_file

        here = await asyncio.to_thread(job_files)  # may be slow on a network file system
        lines = [line("path of a job file; workdir is relative to it")]
        lines += [line(("  " + path, "dim")) for path in here[:6]]
        file = await self._app.prompt("submit", lines, "", existing_file, suggestions=here)
        if file is None:
            return
        request = read_job_file(file)
        spec = request.spec
        want = counted(spec.resources.devices, "device") if spec.resources.devices else "CPU cores"
        about = [
            line((spec.name, "bold"), f", {spec.kind.value}, {want}, priority {spec.priority}"),
            line((shlex.join(spec.command), "dim")),
            line(("workdir ", "dim"), spec.workdir or "none"),
        ]
        if await self._app.confirm(f"submit {spec.name}", about, {"y": "submit"}):
            answer = rows.read(SubmittedJob, await self._app.shared.source.submit(request))
            self._app.notify(f"{answer.name} is queued as {answer.id}")
            self._app.goto_job_row(answer.id)

    # --- hosts --------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Place nothing new on hosts, and migrate away what can be migrated."""
        hosts = [host for host in self._hosts if host.drained is None]
        if not hosts:
            raise ClusterError(f"{self._hosts[0].name} is drained already")
        names = ", ".join(host.name for host in hosts)
        running = sorted({job for host in hosts for job in host.jobs})
        there = (
            line(f"{len(running)} job{'s'[: len(running) != 1]} there: {', '.join(running[:5])}")
            if running
            else line("no jobs there")
        )
        how = line(("elastic jobs move to other hosts if devices are free; others run to completion", "dim"))
        why = await self._app.prompt(f"drain {names}", [there, how, line("why (may stay empty):")], "", str)
        if why is not None:
            # In one request: a job that leaves one of these hosts must not be placed on the next.
            also = {"also": [host.name for host in hosts[1:]]} if hosts[1:] else {}
            await self._each("host_drain", "drained", [(names, {"host": hosts[0].name, "why": why, **also})])

    async def undrain(self) -> None:
        """Return drained hosts to service."""
        hosts = [host for host in self._hosts if host.drained is not None]
        if not hosts:
            raise ClusterError(f"{self._hosts[0].name} is not drained")
        await self._each("host_undrain", "undrained", [(host.name, {"host": host.name}) for host in hosts])

    # --- logs ---------------------------------------------------------------------------------------------------------

    async def logs(self, previous: bool = False) -> None:
        """Show a job's log full screen."""
        from clusterd.tui.screens.log import LogScreen

        job = self._job
        if previous and job.attempt < 2:
            raise ClusterError(
                f"{job.name} has had {counted(job.attempt, 'attempt')}: there is no log of an earlier one"
            )
        screen = LogScreen(self._app.shared, job, job.attempt - 1 if previous else None)
        if await self._app.show_dialog(screen) == "pager":
            await self._page(job, screen.attempt)

    async def previous_logs(self) -> None:
        """Show the log of the previous attempt."""
        await self.logs(previous=True)

    async def pager(self) -> None:
        """Open a job's whole log in a pager."""
        await self._page(self._job, None)

    async def _page(self, job: rows.Job, attempt: int | None) -> None:
        import tempfile

        given = os.environ.get("PAGER") or "less -R"
        try:
            pager = shlex.split(given)
        except ValueError as error:  # a quote without an end
            raise ClusterError(f"$PAGER is {given!r}, which is no command: {error}") from None
        source = self._app.shared.source
        try:
            with tempfile.NamedTemporaryFile("wb", prefix=f"{job.name}-", suffix=".log") as file:
                taken = 0
                async with aclosing(source.stream("logs", job=job.id, rank=0, attempt=attempt)) as chunks:
                    async for chunk in chunks:
                        file.write(bytes(chunk["data"]))
                        taken += len(chunk["data"])
                        if taken > LOG_BYTES_MAX:
                            file.write(b"\n(cut here: clusterd logs prints all of it)\n")
                            break
                file.flush()
                self._give_terminal([*pager, file.name], "set PAGER")
        except OSError as error:  # of the file; errors of the pager are handled in _give_terminal
            raise ClusterError(f"cannot write the log to a temporary file: {error.strerror}: set TMPDIR") from None

    async def shell(self) -> None:
        """Open a shell next to a job's rank 0."""
        job = self._job
        if job.state != "running":
            raise ClusterError(f"{job.name} is {job.state}: a shell is inside a running job")
        command = [sys.executable, "-m", "clusterd", "shell", job.id]
        self._give_terminal(command, "run clusterd shell in a terminal", self._app.shared.source.environment)

    def _give_terminal(self, command: list[str], hint: str, more: Mapping[str, str] | None = None) -> None:
        """Run a command with the terminal; the UI neither draws nor reads until it exits."""
        import subprocess

        from textual.app import SuspendNotSupported

        try:
            with self._app.suspend():
                subprocess.run(command, check=False, env={**os.environ, **(more or {})})
        except SuspendNotSupported:
            raise ClusterError("a browser has no terminal for this: run clusterd top in a terminal") from None
        except OSError as error:
            raise ClusterError(f"{command[0]} cannot be run: {error.strerror}: {hint}") from None


def _runs(decisions: list[rows.Decision]) -> list[tuple[rows.Decision, int]]:
    """Group consecutive decisions with the same kind and reason; each with its count."""
    groups = itertools.groupby(decisions, key=lambda decision: (decision.kind, decision.reason))
    return [(members[0], len(members)) for members in (list(group) for _, group in groups)]


def something(wanted: str) -> Callable[[str], str]:
    """A parser of any text except the empty one, which is refused with `wanted`."""

    def read(text: str) -> str:
        if not text:
            raise ValueError(wanted)
        return text

    return read


def whole_number(text: str) -> int:
    """An integer such as ``-7``, of at most nine digits."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise ValueError("a whole number of at most nine digits, please")
    return int(text)


def absolute_path(text: str) -> str:
    """An absolute path on the hosts; it need not exist on this machine."""
    if not text.startswith("/"):
        raise ValueError("an absolute path, please")
    return text


FILES_MAX = 200
LOOK_S = 1.0
"""Time limit of the search for job files; from the root of a file system it would take too long."""


def job_files() -> list[str]:
    """Possible job files below the current directory, nearest first.

    Skips hidden directories, unreadable ones, and names that cannot be displayed.
    """
    until_s = time.monotonic() + LOOK_S
    found: list[str] = []
    waiting = deque([""])
    while waiting and len(found) < FILES_MAX and time.monotonic() < until_s:
        here = waiting.popleft()
        try:
            with os.scandir(here or ".") as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in inside:
            path = os.path.join(here, entry.name)
            if entry.is_dir(follow_symlinks=False):
                waiting += [] if entry.name.startswith(".") else [path]
            elif entry.name.endswith(".toml") and entry.name != "pyproject.toml" and path.isprintable():
                found.append(path)
    return found[:FILES_MAX]


def existing_file(text: str) -> Path:
    """A file on this machine.

    Raises:
        ValueError: there is no such file.
        OSError, RuntimeError: the path cannot be resolved: a name too long, or ``~`` of an unknown user.
    """
    file = Path(text).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {text!r} here")
    return file
