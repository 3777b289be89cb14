"""Hosts and their devices as tiles: holder, free, unusable, drained, out of reach."""

from __future__ import annotations

from collections.abc import Sequence

from clusterd.rows import CalendarEntry, Device, Minute, Usage
from clusterd.tui.model import rows
from clusterd.tui.model.lines import Line, Run, clock, fit, line, printable
from clusterd.tui.model.state_styles import Look, job_colour
from clusterd.units import duration, size

TILE_CELLS = 8


def tiles(host: rows.Host, look: Look, jobs: dict[str, rows.Job]) -> Line:
    """One tile per device: its job's name in the job's colour, or a pattern that says why it has none."""
    cells = 3 if len(host.devices) > 4 else TILE_CELLS
    found: list[Run] = []
    for device in host.devices:
        found += (tile(host, device, look, jobs, cells), (" ", ""))
    return tuple(found[:-1])


def tile(host: rows.Host, device: Device, look: Look, jobs: dict[str, rows.Job], cells: int) -> Run:
    """Tile of one device.

    Patterns: dots for free, a shade for foreign use, dashes for drained, question marks for an absent host.
    """
    if device.job is not None:
        job = jobs.get(device.job)
        name = printable(device.job_name or (job.name if job else "") or device.job)
        if cells <= 3:
            name = device.job.rjust(cells)
        text = "".join(part for part, _ in fit(((name, ""),), cells, more="" if cells <= 3 else look.glyph("more")))
        return text, f"tile{job_colour(device.job)}"
    if device.foreign:
        return look.glyph("foreign") * cells, "bad"
    if host.state != "up":
        return "?" * cells, "dim"
    if host.drained is not None:
        return "-" * cells, "warn"
    return look.glyph("free") * cells, "dim"


def legend(look: Look) -> Line:
    """Legend of the tile patterns."""
    return line(
        (" name ", "tile0"), " a job's  ",
        (look.glyph("free") * 3, "dim"), " free  ",
        (look.glyph("foreign") * 3, "bad"), " unusable  ",
        ("---", "warn"), " drained  ",
        ("???", "dim"), " out of reach",
    )  # fmt: skip


def host_summary(
    host: rows.Host, jobs: dict[str, rows.Job], look: Look, now_s: float, usage: Usage | None = None
) -> list[Line]:
    """Details of a host: its state, and every device with holder, utilisation and memory.

    Args:
        usage: the last hour of the devices; None: not known.
    """
    # The daemon reports since when a host is up or away, not since when it is drained.
    since = (
        f" for {duration(max(now_s - host.since_s, 0.0))}" if host.since_s and host.shown_state == host.state else ""
    )
    made = [line((printable(host.name), "bold"), "  ", look.state(host.shown_state), (since, "dim"))]
    if host.why and host.state != "up":
        made.append(line(("why       ", "dim"), (printable(host.why), "warn")))
    if host.drained is not None:
        made.append(line(("drained   ", "dim"), printable(host.drained) or "yes", ("   u undrains", "dim")))
        if host.jobs:
            still = "move away if devices are free, or run to completion"
            made.append(line(("still here", "dim"), f" {printable(', '.join(host.jobs))}", (f": {still}", "dim")))
    for claim in host.claims:
        until = f" until {clock(claim.until_s, now_s)}" if claim.until_s is not None else ""
        since = f"{'since' if claim.from_s <= now_s else 'from'} {clock(claim.from_s, now_s)}{until}"
        names = ", ".join(device.rpartition(":")[2] for device in claim.devices if device.startswith(f"{host.name}:"))
        by = f" ({'booking' if claim.owner else 'claim'} {claim.id}, {claim.by})"
        by += f": {claim.reason}" if claim.reason else ""
        label = "booked    " if claim.owner else "claimed   "
        made.append(line((label, "dim"), (f"{printable(names)} {since}", "warn"), printable(by)))
    if host.labels:
        made.append(line(("labels    ", "dim"), printable(" ".join(host.labels))))
    if host.address:
        made.append(line(("address   ", "dim"), host.address))
    if host.cpu_cores:
        bar = look.bar(host.cores_used / host.cpu_cores, 10)
        made.append(line(("cores     ", "dim"), (bar, "info"), f" {host.cores_used} of {host.cpu_cores} booked"))
    if host.memory_bytes:
        bar = look.bar(host.memory_used_bytes / host.memory_bytes, 10)
        booked = f" {size(host.memory_used_bytes)} of {size(host.memory_bytes)} booked"
        made.append(line(("memory    ", "dim"), (bar, "info"), booked))
    busy = host.utilisation
    for device in host.devices:
        local = device.id.rpartition(":")[2]
        minutes = usage.devices.get(device.id, ()) if usage is not None else ()
        made.append(_device(host, device, jobs, look, busy.get(local), local, _by_minute(minutes, now_s)))
    if not host.devices:
        made.append(line(("devices   ", "dim"), "none known yet" if host.state != "up" else "none"))
    return made


def calendar_lines(entries: Sequence[CalendarEntry], now_s: float) -> list[Line]:
    """Calendar by host: one line for each job, booking, claim or end of a host."""
    made: list[Line] = []
    host: str | None = None
    for entry in entries:
        if entry.host != host:
            made.append(line((printable(entry.host) or "host not known yet", "bold")))
            host = entry.host
        begins = "now" if entry.from_s <= now_s else clock(entry.from_s, now_s)
        until = f" until {clock(entry.until_s, now_s)}" if entry.until_s is not None else ""
        devices = ", ".join(device.rpartition(":")[2] for device in entry.devices)
        about = "  ".join(filter(None, (devices, entry.user, entry.text)))
        style = {"booking": "info", "claim": "warn", "leaves": "warn", "expected": "dim"}.get(entry.what, "")
        made.append(line((f"  {begins}{until}  ", "dim"), (printable(about), style)))
    return made or [line("Nothing is expected.")]


def _by_minute(minutes: Sequence[Minute], now_s: float) -> list[Minute | None]:
    """The last hour, oldest first; None for a minute that was not recorded."""
    known = {each.minute: each for each in minutes}
    newest = int(now_s // 60)
    return [known.get(minute) for minute in range(newest - HOUR + 1, newest + 1)]


def _timeline(hour: Sequence[Minute | None], look: Look) -> Line:
    """Utilisation of each three minutes, in the colour of the job that held the device."""
    runs: list[tuple[str, str]] = []
    for at in range(0, len(hour), 3):
        minutes = [each for each in hour[at : at + 3] if each is not None]
        known = [each.busy for each in minutes if each.busy is not None]
        job = next((each.job for each in reversed(minutes) if each.job), None)
        drawn = look.height(sum(known) / len(known) if known else None)
        runs.append((drawn, f"job{job_colour(job)}" if job is not None else "dim"))
    return tuple(runs)


def _device(
    host: rows.Host,
    device: Device,
    jobs: dict[str, rows.Job],
    look: Look,
    busy: float | None,
    local: str,
    hour: Sequence[Minute | None],
) -> Line:
    newest = next((each for each in reversed(hour) if each is not None), None)
    busy = newest.busy if newest is not None else busy
    used = line("  ", (look.bar(busy, 6), "info"), f" {busy:4.0%}") if busy is not None else ()
    if any(minute is not None for minute in hour):
        used = (*used, ("  ", ""), *_timeline(hour, look))
    if newest is not None:
        watts = f"{newest.power_w:.0f} W" if newest.power_w is not None else ""
        celsius = f"{newest.temperature_c:.0f} °C" if newest.temperature_c is not None else ""
        memory = size(newest.memory_bytes) if newest.memory_bytes is not None else ""
        used = (*used, *line("".join(f"  {part}" for part in (memory, watts, celsius) if part)))
    start = line((f"{local:<9} ", "dim"), tile(host, device, look, jobs, TILE_CELLS))
    job = jobs.get(device.job) if device.job else None
    if job is not None:
        holder = line("  ", (printable(job.name), f"job{job_colour(job.id)}"), f" ({job.id}) {job.plan or ''}")
    elif device.foreign:
        holder = line("  ", (printable(device.foreign), "bad"))
    else:
        holder = line("  ", ("free" if host.shown_state == "up" else f"not offered: {host.shown_state}", "dim"))
    about = f"  {printable(device.name)}, {size(device.memory_bytes)}" if device.memory_bytes else ""
    return (*start, *used, *holder, (about, "dim"))


def fleet_totals(hosts: dict[str, rows.Host]) -> tuple[int, int, int, int]:
    """Hosts up, devices leased, devices free, devices in all."""

    up = sum(1 for host in hosts.values() if host.state == "up")
    leased = sum(1 for host in hosts.values() for device in host.devices if device.job is not None)
    devices = sum(len(host.devices) for host in hosts.values())
    return up, leased, sum(host.free for host in hosts.values()), devices


def busy_share(hosts: dict[str, rows.Host], usage: Usage, now_s: float) -> float | None:
    """Mean utilisation of all leased devices over the last minutes; None: not known."""
    leased = (device for host in hosts.values() for device in host.devices if device.job is not None)
    recent = (each for device in leased for each in usage.devices.get(device.id, ()) if each.minute >= now_s // 60 - 3)
    known = [each.busy for each in recent if each.busy is not None]
    return sum(known) / len(known) if known else None


HOUR = 60
"""Minutes of the sparkline; a cell stands for three."""


def empty_fleet() -> list[Line]:
    """Hint shown while there is no host."""
    return [
        line(("There are no hosts yet.", "bold")),
        line(""),
        line("In a shell:  ", ("clusterd host add gpu01", "key"), "   what `ssh gpu01` reaches"),
        line("or           ", ("clusterd start --local 2", "key"), "  a cluster inside this machine"),
    ]
