"""Record the first minutes with clusterd as an animation: docs/first_minutes.svg, which the README shows.

``python docs/recording.py`` starts a cluster inside this machine and types the commands there; what they print is
drawn as it came, and only the waiting between them is left out. It takes some minutes.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterd.client import Client

FOLDER = Path(__file__).parent
GPT = FOLDER.parent / "examples" / "gpt"

LIMIT_S = 600.0
TYPED_S, PRINTED_S, READ_S = 0.9, 0.1, 1.6
"""Time for a command to be typed, for a line to be printed, and to read what was printed."""
FONT_PX, LINE_PX, COLUMN_PX, MARGIN_PX, COLUMNS = 13, 19, 7.85, 18, 116

JOBS = {
    "gpt": 'kind = "elastic"\ncommand = ["python", "train.py", "--steps", "20000"]\nresources = { devices = 4 }',
    "urgent": 'command = ["sleep", "600"]\nguaranteed = true\nresources = { devices = 2 }',
}


def main() -> None:
    """Run the commands and write the animation."""
    scratch = Path(tempfile.mkdtemp(prefix="clusterd-recording-"))
    (scratch / "clusterd.toml").touch()
    os.environ |= {
        "CLUSTERD_STATE_DIR": str(scratch / "state"), "CLUSTERD_CONFIG": str(scratch / "clusterd.toml"),
        "COLUMNS": str(COLUMNS), "NO_COLOR": "1",
    }  # fmt: skip
    for name, text in JOBS.items():
        work = scratch / name
        shutil.copytree(GPT, work)
        (work / f"{name}.toml").write_text(f'name = "{name}"\npython = "{sys.executable}"\n{text}\n')
    typed: list[tuple[str, list[str]]] = []

    def run(command: str, name: str = "gpt", only: str = "") -> None:
        shown = f"{command} | grep {only}" if only else command
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=scratch / name, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if only in line and not line.startswith("sending ")]
        typed.append((shown, [line.replace(str(scratch), "~") for line in lines]))

    try:
        run("clusterd start --local 2 --devices 2")
        run("clusterd submit gpt.toml")
        wait_for("gpt", lambda row: any(move["ended_s"] for move in row["migrations"]))
        run("clusterd ls")
        run("clusterd submit urgent.toml", "urgent")
        wait_for("urgent", lambda row: row["state"] == "running")
        wait_for("gpt", lambda row: row["state"] == "running" and len(row["devices"]) == 2)
        run("clusterd ls")
        run("clusterd why gpt")
        run("clusterd show gpt", only="move")
    finally:
        subprocess.run([sys.executable, "-m", "clusterd", "cancel", "--wait", "gpt", "urgent"], check=False)
        subprocess.run([sys.executable, "-m", "clusterd", "host", "remove", "local0", "local1"], check=False)
        subprocess.run([sys.executable, "-m", "clusterd", "stop"], check=False)
    (FOLDER / "first_minutes.svg").write_text(animated(typed))
    print("docs/first_minutes.svg is written")
    shutil.rmtree(scratch)


def wait_for(job: str, condition: Callable[[dict[str, Any]], Any], limit_s: float = LIMIT_S) -> None:
    """Wait until the job's row satisfies the condition."""
    deadline_s = time.monotonic() + limit_s
    with Client() as cluster:
        while not condition(row := cluster.call("job", job=job)):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{job} is {row['state']} after {limit_s:g} s: {row['reason']}")
            time.sleep(0.2)


def animated(typed: list[tuple[str, list[str]]]) -> str:
    """A terminal in which lines appear one after the other, as SVG."""
    texts: list[str] = []
    at_s, row = 0.5, 0
    for command, lines in typed:
        for number, line in enumerate([f"$ {command}", *lines]):
            kind = "c" if number == 0 else "o"
            y = MARGIN_PX + FONT_PX + row * LINE_PX
            texts.append(
                f'<text class="{kind}" x="{MARGIN_PX}" y="{y}" style="animation-delay:{at_s:.1f}s">'
                f"{html.escape(line if len(line) <= COLUMNS else f'{line[: COLUMNS - 3]}...')}</text>"
            )
            at_s += TYPED_S if number == 0 else PRINTED_S
            row += 1
        at_s += READ_S
        row += 1
    width, height = 2 * MARGIN_PX + int(COLUMNS * COLUMN_PX), 2 * MARGIN_PX + (row - 1) * LINE_PX
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>",
        f"text {{ font: {FONT_PX}px ui-monospace, Menlo, Consolas, monospace; white-space: pre; opacity: 0;",
        "  animation: show 0.1s linear forwards; }",
        ".c { fill: #e6edf3; font-weight: bold; } .o { fill: #9fb1c1; }",
        "@keyframes show { to { opacity: 1; } }",
        "</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        *texts,
        "</svg>",
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
