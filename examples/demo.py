"""The main job in two minutes on a laptop: a cluster inside this machine, three jobs, real training over real SSH.

Starts a daemon with two embedded hosts of two CPU devices each, submits two elastic jobs under different plans, each
across both hosts, and a command; one has to wait for another. Ends non-zero on any surprise. ``DEMO_KEEP=1`` leaves the
daemon up, to look around.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from clusterd.client import Client
from clusterd.units import duration

GPT = Path(__file__).parent / "gpt"
TIME_LIMIT_S = 240.0

JOBS = {
    "gpt-wide": """
        kind = "elastic"
        command = ["python", "train.py", "--steps", "80"]
        resources = { devices = 4, plan = { dp = 2, tp = 2 } }
    """,
    "gpt-deep": """
        kind = "elastic"
        command = ["python", "train.py", "--steps", "80", "--depth", "6"]
        resources = { devices = 4, plan = { dp = 2, pp = 2, accumulation = 4 } }
    """,
    "hello": """
        command = ["python3", "-c", "import platform; print('hello from', platform.node())"]
        resources = { devices = 1 }
    """,
}


def main() -> int:
    """Run it; 0 if every job finished."""
    console = Console()
    keep = bool(os.environ.get("DEMO_KEEP"))
    scratch = Path(os.environ.get("CLUSTERD_STATE_DIR") or tempfile.mkdtemp(prefix="clusterd-demo-"))
    os.environ["CLUSTERD_STATE_DIR"] = str(scratch)
    _clusterd("start", "--local", "2", "--devices", "2")
    try:
        with Client() as cluster:
            jobs = [_submit(scratch, name, text) for name, text in JOBS.items()]
            rows = _watch(cluster, jobs, console)
        console.print(_table(rows, final=True))
        surprises = _surprises(rows)
        for surprise in surprises:
            console.print(f"[red]{surprise}[/red]")
        if surprises:
            return 1
    finally:
        if keep:
            console.print(f"the daemon stays up: export CLUSTERD_STATE_DIR={scratch}")
        else:
            _clusterd("host", "remove", "local0", "local1")
            _clusterd("stop")
    print(f"demo: ok, {len(rows)} jobs finished")
    return 0


def _submit(scratch: Path, name: str, text: str) -> str:
    file = scratch / f"{name}.toml"
    lines = [line.strip() for line in text.strip().splitlines()]
    # The training environment is the one this runs in.
    head = [f'name = "{name}"', f'workdir = "{GPT}"', f'python = "{sys.executable}"']
    file.write_text("\n".join([*head, *lines]) + "\n")
    return _clusterd("submit", str(file)).strip()


def _clusterd(*arguments: str) -> str:
    """One command, as a user would type it."""
    print("$ clusterd " + " ".join(arguments), flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "clusterd.cli.main", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"demo: clusterd {arguments[0]} failed with exit code {done.returncode}")
    return done.stdout


def _watch(cluster: Client, jobs: list[str], console: Console) -> list[dict[str, Any]]:
    """Show progress until every job is over."""
    rows: dict[str, dict[str, Any]] = {}
    deadline_s = time.monotonic() + TIME_LIMIT_S
    last = ""
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for item in cluster.stream("watch"):
            for row in item["snapshot"]["jobs"] if "snapshot" in item else item.get("jobs", ()):
                rows[row["id"]] = row
            mine = [rows[job] for job in jobs if job in rows]
            live.update(_table(mine))
            states = ", ".join(f"{row['name']} {row['state']}" for row in mine)
            if not console.is_terminal and states != last:
                console.print(states)
                last = states
            if len(mine) == len(jobs) and all(row["ended_s"] for row in mine):
                return mine
            if time.monotonic() > deadline_s:
                raise SystemExit(f"demo: not over after {TIME_LIMIT_S:.0f} s: {states}")
    raise SystemExit("demo: the daemon went away")


def _table(rows: list[dict[str, Any]], final: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("job", "state", "plan", "devices", "step", "first loss", "last loss", "waited", "ran"):
        numeric = name in ("step", "first loss", "last loss", "waited", "ran")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name in ("job", "state", "devices"))
    now_s = time.time()
    for row in rows:
        started_s, ended_s = row["started_s"], row["ended_s"]
        table.add_row(
            row["name"],
            row["state"],
            (row["plan"] or "-").replace(",", " "),
            _where(row),
            f"{row['step']}/{row['steps']}" if row["steps"] else "-",
            f"{row['first_loss']:.4f}" if row["first_loss"] is not None else "-",
            f"{row['loss']:.4f}" if row["loss"] is not None else "-",
            duration((started_s or ended_s or now_s) - row["submitted_s"]),
            duration((ended_s or now_s) - started_s) if started_s else "-",
        )
    if not final:
        waiting = [f"{row['name']}: {row['reason']}" for row in rows if row["state"] == "queued"]
        table.caption = "\n".join(waiting) or None
    return table


def _where(row: dict[str, Any]) -> str:
    hosts = len(row["hosts"])
    return f"{len(row['devices'])} on {hosts} hosts" if hosts > 1 else " ".join(row["devices"])


def _surprises(rows: list[dict[str, Any]]) -> list[str]:
    """Everything that is not as it must be."""
    wrong = [f"{row['name']} {row['state']}: {row['reason']}" for row in rows if row["state"] != "finished"]
    for row in rows:
        if row["kind"] != "elastic":
            continue
        if row["step"] != row["steps"]:
            wrong.append(f"{row['name']} ended at step {row['step']} of {row['steps']}")
        if not row["loss"] or row["loss"] >= row["first_loss"]:
            wrong.append(f"{row['name']} did not learn: {row['first_loss']} -> {row['loss']}")
        if len(row["hosts"]) < 2:
            wrong.append(f"{row['name']} ran on {row['hosts']} alone")
    first, second = sorted(rows[:2], key=lambda row: row["started_s"] or 0.0)
    if not wrong and second["started_s"] < first["ended_s"] - 1.0:
        wrong.append(f"{second['name']} did not wait for {first['name']}, though both need every device")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
