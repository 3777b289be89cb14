"""The main job in two minutes on a laptop: a cluster inside this machine, real training over real SSH, moved meanwhile.

Starts a daemon with two embedded hosts of two CPU devices each. A job has the whole lab at night; a guaranteed one
arrives in the morning, for which it shrinks, and when that is over it grows back, without losing a step. A command
passes. Once the job has grown back, a third arrives: it waits, or they share, whichever is better by the speeds of this
machine; while it trains it takes a few steps under other plans, from which its speed on any number of devices is
learned. Ends non-zero on any surprise. ``DEMO_KEEP=1`` leaves the daemon up, to look around.
"""

from __future__ import annotations

import json
import os
import shutil
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
from clusterd.units import compact_devices, duration, size

GPT = Path(__file__).parent / "gpt"
TIME_LIMIT_S = 900.0
"""Two minutes on two good cores; others have slow ones, and something else to do."""

JOBS = {
    "night": """
        kind = "elastic"
        trials = false
        command = ["python", "train.py", "--steps", "1000", "--save", "gpt.pt"]
        resources = { devices = 4, plan = { dp = 2, tp = 2 } }
    """,
    "morning": """
        kind = "elastic"
        guaranteed = true
        trials = false
        command = ["python", "train.py", "--steps", "40", "--depth", "6"]
        resources = { devices = 2, plan = { pp = 2, accumulation = 4 } }
    """,
    "hello": """
        command = ["python3", "-c", "import platform; print('hello from', platform.node())"]
        priority = 1
    """,
    "study": """
        kind = "elastic"
        command = ["python", "train.py", "--steps", "1000"]
        resources = { devices = 4, plan = { dp = 4, zero = 3 } }
    """,
}


def main() -> int:
    """Run it; 0 if every job finished."""
    console = Console()
    keep = bool(os.environ.get("DEMO_KEEP"))
    # A cluster of its own, whatever the surroundings say of another one: its jobs are cancelled at the end.
    scratch = Path(tempfile.mkdtemp(prefix="clusterd-demo-"))
    (scratch / "clusterd.toml").touch()
    os.environ |= {"CLUSTERD_STATE_DIR": str(scratch), "CLUSTERD_CONFIG": str(scratch / "clusterd.toml")}
    os.environ.pop("CLUSTERD_SOCKET", None)
    _clusterd("start", "--local", "2", "--devices", "2")
    try:
        with Client() as cluster:
            rows = _watch(cluster, scratch, console)
            console.print(_table(rows, final=True))
            console.print(_moves(rows))
            trained_s = max(row["ended_s"] for row in rows) - min(row["started_s"] for row in rows)
            spent_s = cluster.call("status")["scheduling_s"]
            console.print(f"scheduling took {spent_s:.2f} s of processor time: {spent_s / trained_s:.2%} of the time")
            for question in (("profile", "study"), ("plans", "study", "--devices", "2"), ("why", "night")):
                print(_clusterd(*question))
            console.print("comparing the losses of night with a run that was left alone, in this process")
            surprises = [
                *_surprises(rows),
                *_losses_differ(cluster, rows[0], console),
                *_model_is_odd(scratch, console),
            ]
        for surprise in surprises:
            console.print(f"[red]{surprise}[/red]")
        if surprises:
            console.print(f"what the daemon wrote is in {scratch}")
            return 1
    finally:
        if keep:
            console.print(f"the daemon stays up: CLUSTERD_STATE_DIR={scratch} clusterd top")
        else:
            with Client() as cluster:
                left = [row["id"] for row in cluster.call("jobs")]
            if left:
                _clusterd("cancel", "--wait", *left)
            _clusterd("host", "remove", "local0", "local1")
            _clusterd("stop")
    if not keep:
        shutil.rmtree(scratch)
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
        [sys.executable, "-m", "clusterd", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"demo: clusterd {arguments[0]} failed with exit code {done.returncode}")
    return done.stdout


def _watch(cluster: Client, scratch: Path, console: Console) -> list[dict[str, Any]]:
    """Submit each job when its time has come, and show progress until every job is over."""
    ids: dict[str, str] = {}
    rows: dict[str, dict[str, Any]] = {}
    deadline_s = time.monotonic() + TIME_LIMIT_S
    last = ""
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for item in cluster.stream("watch"):
            for row in item["snapshot"]["jobs"] if "snapshot" in item else item.get("jobs", ()):
                rows[row["id"]] = row
            mine = [rows[job] for job in ids.values() if job in rows]
            live.update(_table(mine))
            states = ", ".join(
                f"{row['name']} {row['state']}{' (' + row['plan'] + ')' if row['plan'] else ''}" for row in mine
            )
            if not console.is_terminal and states != last:
                console.print(states)
                last = states
            due = [name for name in JOBS if name not in ids and _is_time(name, mine)]
            ids |= {name: _submit(scratch, name, JOBS[name]) for name in due}
            if len(mine) == len(JOBS) and all(row["ended_s"] for row in mine):
                return mine
            if time.monotonic() > deadline_s:
                raise SystemExit(f"demo: not over after {TIME_LIMIT_S:.0f} s: {states}")
    raise SystemExit("demo: the daemon went away")


def _is_time(name: str, rows: list[dict[str, Any]]) -> bool:
    """Whether a job is to be submitted, given those before it."""
    if name == "night":
        return True
    if name == "study":
        # Earlier, it could have the devices that night is to grow back to.
        grown = bool(rows) and (len(rows[0]["devices"]) == 4 or rows[0]["ended_s"])
        return len(rows) == 3 and grown and all(row["ended_s"] for row in rows[1:])
    return bool(rows) and rows[0]["step"] >= 5


def _table(rows: list[dict[str, Any]], final: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("job", "state", "plan", "devices", "step", "loss", "waited/ran"):
        numeric = name in ("step", "loss", "waited/ran")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name != "plan")
    now_s = time.time()
    for row in rows:
        started_s, ended_s = row["started_s"], row["ended_s"]
        table.add_row(
            row["name"],
            row["state"],
            _short(row["plan"] or "-"),
            _where(row),
            f"{row['step']}/{row['steps']}" if row["steps"] else "-",
            f"{row['first_loss']:.3f}>{row['loss']:.3f}" if row["first_loss"] and row["loss"] else "-",
            f"{duration((started_s or ended_s or now_s) - row['submitted_s'])}"
            f"/{duration((ended_s or now_s) - started_s) if started_s else '-'}",
        )
    if not final:
        waiting = [f"{row['name']}: {row['reason']}" for row in rows if row["state"] == "queued"]
        table.caption = "\n".join(waiting) or None
    return table


def _short(plan: str) -> str:
    """``dp2 tp2`` of ``dp=2,tp=2``."""
    return plan.replace("accumulation", "acc").replace("=", "").replace(",", " ")


def _where(row: dict[str, Any]) -> str:
    hosts = len(row["hosts"])
    return f"{len(row['devices'])} on {hosts} hosts" if hosts > 1 else compact_devices(row["devices"])


def _moves(rows: list[dict[str, Any]]) -> Table:
    """Every move of every job, and what it cost."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("job", "move", "step", "downtime", "in hosts", "network", "why"):
        numeric = name in ("step", "downtime", "in hosts", "network")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name not in ("move", "why"))
    for row in rows:
        for move in row["migrations"]:
            table.add_row(
                row["name"],
                f"{_short(move['from'])} > {_short(move['to'])}",
                str(move["step"]),
                duration(move["downtime_s"]) if move["downtime_s"] is not None else "failed",
                size(move["local_bytes"]),
                size(move["network_bytes"]),
                move["failure"] or ("a trial" if _is_trial(move) else move["reason"].partition(": ")[2]),
            )
    return table


def _is_trial(move: dict[str, Any]) -> bool:
    """A few steps under another plan, to learn how fast it is."""
    return bool(move["reason"].startswith("trial of"))


def _surprises(rows: list[dict[str, Any]]) -> list[str]:
    """Everything that is not as it must be."""
    wrong = [f"{row['name']} {row['state']}: {row['reason']}" for row in rows if row["state"] != "finished"]
    for row in rows:
        if row["kind"] != "elastic":
            continue
        if row["step"] != row["steps"]:
            wrong.append(f"{row['name']} ended at step {row['step']} of {row['steps']}")
        if not row["loss"] or not row["first_loss"] or row["loss"] >= row["first_loss"]:
            wrong.append(f"{row['name']} did not learn: {row['first_loss']} -> {row['loss']}")
        if row["attempt"] != 1:
            wrong.append(f"{row['name']} needed {row['attempt']} attempts")
    if wrong:
        return wrong
    night, _, _, study = rows
    sizes = [len(move["devices"]) for move in night["migrations"] if not move["failure"]]
    # The command has a higher priority and may take a device too; later, study may have some of them.
    if 2 not in sizes or 4 not in sizes[sizes.index(2) :]:
        wrong.append(f"night was to shrink to 2 devices and grow back to 4; it went to {sizes}")
    if not any(_is_trial(move) and not move["failure"] for move in study["migrations"]):
        wrong.append("study was to be profiled; no other plan was tried on it")
    return wrong


def _losses_differ(cluster: Client, row: dict[str, Any], console: Console) -> list[str]:
    """Train the same in one process, undisturbed; the moved run must have the same losses, each step once."""
    moved = [json.loads(line) for line in cluster.call("steps", job=row["id"])["data"].splitlines()]
    losses = {step["step"]: step["loss"] for step in moved if "step" in step}
    if len(losses) != len(moved) or sorted(losses) != list(range(1, row["steps"] + 1)):
        return [f"night trained {len(moved)} steps of {row['steps']}, {len(losses)} of them different ones"]
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "CLUSTERD_STEPS_FILE": f"{directory}/steps.jsonl", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "train.py", "--steps", str(row["steps"])]
        done = subprocess.run(command, cwd=GPT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return [f"the undisturbed run failed: {done.stderr.strip().splitlines()[-1:]}"]
        alone = [json.loads(line) for line in Path(directory, "steps.jsonl").read_text().splitlines()]
    worst = max(abs(losses[step["step"]] - step["loss"]) / step["loss"] for step in alone)
    console.print(f"largest difference over {len(alone)} steps: {worst:.1e} relative")
    return [] if worst < 1e-4 else [f"the losses of night differ by {worst:.1e} from the undisturbed run"]


def _model_is_odd(scratch: Path, console: Console) -> list[str]:
    """Fetch the checkpoint of night and load the whole model with plain torch."""
    import torch

    _clusterd("get", "night", "gpt.pt", "--to", str(scratch))
    sys.path.insert(0, str(GPT))
    import model as example

    model = example.GPT(width=64, depth=4, heads=4, context=64)
    try:
        model.load_state_dict(torch.load(scratch / "gpt.pt", weights_only=True))
    except RuntimeError as error:
        return [f"the model of night is not whole: {error}"]
    console.print(f"night's model: {sum(p.numel() for p in model.parameters()):,} parameters, loaded by plain torch")
    return []


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
