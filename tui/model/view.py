"""Header, breadcrumbs, banner and job summary as text: pure functions of the model and the time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from clusterd.criterion import Criterion
from clusterd.tui.model import rows
from clusterd.tui.model.columns import forecast_texts, ran_s, start_facts, time_left_s, waited_s
from clusterd.tui.model.fleet import fleet_totals
from clusterd.tui.model.lines import Line, clock, fit, line, printable, width
from clusterd.tui.model.model import Model
from clusterd.tui.model.state_styles import Look, job_colour
from clusterd.units import counted, duration, held_text, size

SCREENS = ("fleet", "queue", "job", "decisions", "events")


class LinkState(StrEnum):
    """State of the connection to the daemon."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"  # gone or not answering; reconnects automatically
    REFUSED = "refused"  # refused by the daemon; retried less often
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Link:
    """The connection, with details to display."""

    state: LinkState = LinkState.CONNECTING
    why: str = ""
    since_s: float = 0.0
    user: str = ""
    is_operator: bool = False
    version: str = ""


def header(model: Model, link: Link, now_s: float, look: Look, cells: int, readonly: bool) -> Line:
    """Cluster totals at the left, state of the daemon at the right."""
    right = _health(model, link, now_s, look, readonly)
    for left in _totals(model, look):
        if width(left) + width(right) <= cells:
            return (*fit(left, cells - width(right)), *right)
    return fit(right, cells, more=look.glyph("more"))


def _totals(model: Model, look: Look) -> list[Line]:
    """Host, device and job counts, from the longest form to the shortest."""
    name = (" clusterd ", "bold reverse")
    if model.number < 0:
        return [line(name), line("")]
    up, leased, free, devices = fleet_totals(model.hosts)
    counts: dict[str, int] = {}
    for job in model.jobs.values():
        counts[job.shown_state] = counts.get(job.shown_state, 0) + 1
    states = ("running", "moving", "silent", "starting", "stopping", "queued", "failed")
    shown = [state for state in states if counts.get(state)]
    jobs = [(f"{look.shape(state)[0]} {counts[state]} {state}  ", look.shape(state)[1]) for state in shown]
    short = [(f"{look.shape(state)[0]}{counts[state]} ", look.shape(state)[1]) for state in shown]
    return [
        line(name, f" hosts {up}/{len(model.hosts)} up  devices {leased}/{devices} leased, {free} free  ", *jobs),
        line(f" hosts {up}/{len(model.hosts)} up  devices {leased}/{devices}, {free} free  ", *jobs),
        line(f" hosts {up}/{len(model.hosts)}  devices {leased}/{devices}  ", *jobs),
        line(f" hosts {up}/{len(model.hosts)}  devices {leased}/{devices}  ", *short),
        line(" ", *short),
    ]


def _health(model: Model, link: Link, now_s: float, look: Look, readonly: bool) -> Line:
    role = "read-only" if readonly else "operator" if link.is_operator else link.user
    if link.state is LinkState.LIVE:
        started_s = model.status.started_s
        age = f" {duration(max(now_s - started_s, 0.0))}" if started_s is not None else ""
        if model.status.recovering:
            return line((f"{look.shape('connecting')[0]} daemon recovering ", "warn"), (f"{role} ", "dim"))
        return line((f"{look.shape('up')[0]} daemon up{age} ", "good"), (f"{role} ", "dim"))
    if link.state is LinkState.REPLAY:
        return line((f"{look.glyph('play')} recording ", "info"))
    text = {LinkState.CONNECTING: "connecting", LinkState.LOST: "no daemon", LinkState.REFUSED: "refused"}[link.state]
    return line((f"{look.shape('connecting' if text == 'connecting' else 'lost')[0]} {text} ", "bad"))


def crumbs(current: str, trail: str, shown: str, look: Look, cells: int) -> Line:
    """Screens with their keys, the current one, and the active filter and order."""
    tabs: list[tuple[str, str]] = []
    for number, name in enumerate(SCREENS, 1):
        # Brackets mark the current screen in copied text and on terminals without colours.
        here = name == current
        tabs += (
            ("[" if here else " ", "bold"),
            (str(number), "key"),
            (f" {name.capitalize()}", "bold" if here else ""),
        )
        tabs.append(("]" if here else " ", "bold"))
    if trail:
        tabs.append((f" {look.glyph('crumb')} {printable(trail)}  ", "bold"))
    right = line((printable(shown), "warn")) if shown else ()
    tab_cells = max(cells - width(right) - 1, 0)
    return (*fit(tuple(tabs), tab_cells, more=look.glyph("more")), *right)


def banner(link: Link, model: Model, now_s: float) -> str:
    """Message about a lost or refused connection, else the notice of an operator; empty while there is none."""
    if link.state is LinkState.LOST:
        age = duration(max(now_s - link.since_s, 0.0))
        stale = "; the screens show the last known state" if model.number >= 0 else ""
        return f"{link.why} - for {age}; retrying{stale}. Jobs keep running."
    if link.state is LinkState.REFUSED:
        return f"{link.why} - retrying."
    return f"Notice of {model.status.notice}" if model.status.notice else ""


def _fact(name: str, *parts: str | tuple[str, str]) -> Line:
    return line((f"{name:<10} ", "dim"), *parts)


def job_head(job: rows.Job, look: Look) -> Line:
    """Name, state and exit code."""
    code = f" (exit code {job.exit_code})" if job.exit_code is not None else ""
    return line(
        (printable(job.name), f"bold job{job_colour(job.id)}"), f" {job.id}  ", look.state(job.shown_state), code
    )


def job_summary(job: rows.Job, model: Model, look: Look, now_s: float) -> list[Line]:
    """A job in a dozen lines: state and reason, resources, speed, next plan, recent decisions."""
    made = [job_head(job, look)]
    if job.reason:
        made.append(
            _fact("why", (printable(job.reason), "warn" if job.state in ("queued", "failed") or job.away else ""))
        )
    if job.state == "queued":
        made += _queue_position(job, model, now_s)
    made.append(_fact("asked", _requested(job)))
    if job.tasks:
        made.append(_fact("tasks", printable(job.tasks)))
    if job.plan:
        made.append(_fact("plan", (job.plan, "bold"), "  pinned by hand" if job.pinned else ""))
    if job.holds_devices:
        count = f"{len(job.devices)}: " if job.devices else ""
        made.append(_fact("devices", f"{count}{held_text(job.devices, job.hosts, job.cores)}{_loan(job)}"))
    if job.step or job.steps:
        share = job.step / job.steps if job.steps else 0.0
        done = f"{job.step}/{job.steps} " if job.steps else f"{job.step}"
        left_s = time_left_s(job, now_s)
        left = f" {duration(left_s)} left" if left_s is not None else ""
        made.append(_fact("step", done, (look.bar(share, 12) if job.steps else "", "info"), left))
    if job.step_time_s is not None:
        made.append(_fact("step time", *step_time(job)))
    if job.loss is not None:
        first = f"  from {job.first_loss:.4g}" if job.first_loss is not None else ""
        made.append(_fact("loss", f"{job.loss:.4g}", (first, "dim")))
    if job.profiling:
        made.append(_fact("profiling", ("trial runs under other plans", "info"), f", {job.trials} so far"))
    made += next_plan(job, look)
    if job.migrating is not None:
        migration = job.migrating
        phase = f", {migration.phases[-1].phase} done" if migration.phases else ""
        made.append(_fact("moving", (f"{migration.old} {look.glyph('to')} {migration.new}{phase}", "info")))
    for migration in job.migrations[-2:]:
        made.append(_fact("moved", *migration_line(migration, look, now_s)))
    made.append(_fact("times", _times(job, now_s)))
    if job.checkpoint:
        made.append(_fact("checkpoint", f"step {job.checkpoint_step} in {printable(job.checkpoint)}"))
    for decision in [each for each in model.decisions_on(job.id) if not each.routine][-4:]:
        made.append(_fact(clock(decision.at_s, now_s), printable(decision.sentence)))
    return made


def _queue_position(job: rows.Job, model: Model, now_s: float) -> list[Line]:
    """Queue position, and the jobs that hold the devices."""
    made: list[Line] = []
    if job.place is not None:
        ahead = model.queue()[: job.place - 1]
        names = ", ".join(other.name for other in ahead[:3]) + (", ..." if len(ahead) > 3 else "")
        before = f"{len(ahead)} before it: {printable(names)}" if ahead else "first in the queue"
        made.append(_fact("in queue", before))
        place = model.order.get(job.id)
        if ahead and place is not None and place.after == ahead[-1].id and place.criterion in list(Criterion):
            why = Criterion[place.criterion.upper()].sentence
            made.append(_fact("", printable(f"{ahead[-1].name} comes just before it, because {why}")))
    for index, text in enumerate(start_facts(job, now_s)):
        made.append(_fact("" if index else "start", printable(text)))
    if (end := forecast_texts(job, now_s).get("end")) is not None:
        made.append(_fact("end", printable(end)))
    held = {other.name: len(other.devices) for other in model.jobs.values() if other.holds_devices and other.devices}
    if held:
        most = sorted(held.items(), key=lambda item: -item[1])
        holders = ", ".join(f"{name} {count}" for name, count in most[:4]) + (", ..." if len(most) > 4 else "")
        made.append(_fact("held by", printable(holders)))
    unusable = [f"{host.name} is {host.shown_state}" for host in model.hosts.values() if host.shown_state != "up"]
    if unusable:
        made.append(_fact("not usable", (", ".join(unusable[:3]) + (", ..." if len(unusable) > 3 else ""), "warn")))
    return made


def _loan(job: rows.Job) -> str:
    return f" ({job.on_loan} on loan)" if job.on_loan else ""


def _requested(job: rows.Job) -> str:
    kind = f"{job.asked_kind} " if job.asked_kind else ""
    devices = counted(job.asked, f"{kind}device") if job.asked else counted(job.cores, "CPU core") if job.cores else ""
    extra = [f"priority {job.priority}", job.kind, "guaranteed" if job.guaranteed else "", job.user]
    return ", ".join(filter(None, (devices, *extra)))


def _times(job: rows.Job, now_s: float) -> str:
    ran = ran_s(job, now_s)
    text = f"submitted {clock(job.submitted_s, now_s)}, waited {duration(waited_s(job, now_s))}"
    return text + (f", ran {duration(ran)}" if ran is not None else "")


def step_time(job: rows.Job) -> list[str | tuple[str, str]]:
    """Measured step time, and the error of the prediction."""
    assert job.step_time_s is not None
    parts: list[str | tuple[str, str]] = [f"{duration(job.step_time_s)} measured"]
    if job.predicted_step_time_s:
        off = job.step_time_s / job.predicted_step_time_s - 1
        parts += [
            f", {duration(job.predicted_step_time_s)} predicted ",
            (f"({off:+.0%})", "warn" if abs(off) > 0.25 else "good"),
        ]
    return parts


def next_plan(job: rows.Job, look: Look) -> list[Line]:
    """The next plan, its gain and the cost of the migration."""
    after = job.next
    if after is None:
        return []
    gain = f", gains {after.gain:+.0%}" if after.gain is not None else ""
    cost = f", the move costs {duration(after.move_cost_s)}" if after.move_cost_s is not None else ""
    return [_fact("next", (f"{after.plan} on {counted(after.devices, 'device')}", "bold"), gain, cost)]


def restart_note(migration: rows.Migration) -> str:
    """Path by which a restarted job recovered its state."""
    return f"{size(migration.local_bytes)} through host memory" if migration.local_bytes else "from a checkpoint"


def migration_line(migration: rows.Migration, look: Look, now_s: float) -> list[str | tuple[str, str]]:
    """One migration in one line."""
    plans = f"{migration.old} {look.glyph('to')} {migration.new}"
    if migration.failure:
        return [plans, (f" failed: {printable(migration.failure)}", "bad")]
    downtime = f"downtime {duration(migration.downtime_s)}" if migration.downtime_s is not None else "in progress"
    moved = f", {size(migration.local_bytes)} in hosts, {size(migration.network_bytes)} over the network"
    if migration.restarts:
        moved = f", {restart_note(migration)}"
    return [plans, (f"  {downtime}{moved} ({clock(migration.started_s, now_s)})", "dim")]
