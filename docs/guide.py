"""Run the commands of docs/guide.md on a cluster inside this machine, and write what they print into the page.

``python -m docs.guide`` rewrites the outputs; ``--check`` compares their form with that of the page, with numbers,
times, devices and plans left out, and fails where a command fails or prints something of another form. It takes some
minutes. Blocks of ``console`` are run, in order; a block whose first line names a file is that file, from there on.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterd.client import Client
from clusterd.errors import ClusterError
from docs.recording import wait_for

PAGE = Path(__file__).with_name("guide.md")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"(?:# |--- a/)([\w.]+)\n")
LIMIT_S = 900.0
COLUMNS = 100

Condition = Callable[[dict[str, Any]], Any]
UNTIL: dict[str, tuple[str, Condition]] = {
    "clusterd why next": ("next", lambda row: row["forecast"]),
    "clusterd plans train --devices 2": ("train", lambda row: row["step"] > 500),
    "clusterd migrate night --plan dp=2,zero=1 --dry-run": ("night", lambda row: row["step"] > 20),
    "clusterd why night": ("night", lambda row: (row["forecast"] or {}).get("end")),
    "clusterd run -d --name exam --guaranteed --devices 2 -- sleep 3600": ("night", lambda row: row["started_s"]),
    "clusterd ls": ("exam", lambda row: row["state"] == "running"),
    "kill -9 $(grep -lsa ~/.local/state/clusterd/local/1/ /proc/[0-9]*/environ | cut -d/ -f3)": (
        "sharded",
        lambda row: row["step"] > 60,
    ),
}
"""State of a job in which a command is typed, where the page has it that some time has passed."""

NEUTRAL = (
    (re.compile(r"(?<=measured on ).*|(?<=× ).*?(?=;)"), "PROCESSOR"),
    (re.compile(r"\b(?:dp|tp|pp|zero|accumulation|checkpointing|offload)=[\w.]+(?:,\w+=[\w.]+)*"), "PLAN"),
    (re.compile(r"\blocal\d(?::cpu\d(?:-\d)?)?(?:,(?:local\d:)?cpu\d(?:-\d)?)*"), "PLACE"),
    (re.compile(r"\d[\d.,:]*(?:e[+-]?\d+)?"), "#"),
    (re.compile(r"# ?(?:[um]?s|m|h|d|[KMGT]i?B|bytes)\b"), "#"),
    (re.compile(r"#(?:[-/~ +]*#)+|[-+~]#"), "#"),
    (re.compile(r", between # and #"), ""),  # an interval of less than a minute is not printed
    (re.compile(r"^\* |\s+"), " "),
)
"""Differences between two runs that are none of form."""


def main(options: list[str]) -> int:
    """Rewrite or check the page; returns the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    scratch = Path(tempfile.mkdtemp(prefix="guide-", dir="/tmp")).resolve()
    wrong: list[str] = []
    try:
        _prepare(scratch)
        written = BLOCK.sub(lambda block: _block(block, scratch, wrong), text)
    finally:
        _end(scratch)
    if "--check" in options:
        print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
        return int(bool(wrong))
    PAGE.write_text(written, encoding="utf-8")
    print(f"{PAGE} is written")
    return 0


def _prepare(scratch: Path) -> None:
    """Make a home of its own, so that the paths in the page are those of any reader."""
    for name in [name for name in os.environ if name.startswith(("CLUSTERD_", "XDG_"))]:
        del os.environ[name]
    os.environ |= {
        "HOME": str(scratch), "COLUMNS": str(COLUMNS), "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    (scratch / "lab").mkdir()


def _end(scratch: Path) -> None:
    """End what a run left that did not come to the end of the page: jobs, hosts, daemon, and then any process."""
    with contextlib.suppress(ClusterError), Client() as cluster:
        if jobs := [row["id"] for row in cluster.call("jobs")]:
            subprocess.run(["clusterd", "cancel", "--wait", *jobs], stdout=subprocess.DEVNULL, check=False)
        subprocess.run(["clusterd", "host", "remove", "local0", "local1"], check=False)
        subprocess.run(["clusterd", "stop"], check=False)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(scratch) in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGTERM)
    shutil.rmtree(scratch, ignore_errors=True)


def _block(block: re.Match[str], scratch: Path, wrong: list[str]) -> str:
    language, content = block[1], block[2]
    if language != "console":
        if named := FILE.match(content):
            name = f"{named[1]}.diff" if language == "diff" else named[1]
            (scratch / "lab" / name).write_text(content, encoding="utf-8")
        return block[0]
    lines: list[str] = []
    for typed in re.split(r"^(?=\$ )", content, flags=re.MULTILINE)[1:]:
        command, _, shown = typed.partition("\n")
        printed = _run(command.removeprefix("$ "), scratch)
        wrong += _differences(command, shown, printed)
        lines.append(f"{command}\n{printed}")
    return f"```console\n{''.join(lines)}```"


def _run(command: str, scratch: Path) -> str:
    """Output of a command, typed once the cluster is in the state that the page is written for."""
    print(f"$ {command}", flush=True)
    if command in UNTIL:
        wait_for(*UNTIL[command], LIMIT_S)
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=scratch / "lab", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        if not done.returncode or "| grep" not in command or time.monotonic() > deadline_s:
            break
        time.sleep(0.2)  # what it looks for is yet to come
    printed = re.sub(r"(?m)^(?:sending|fetching) .*\n", "", done.stdout).replace(str(scratch), "~")
    user = pwd.getpwuid(os.getuid()).pw_name
    printed = re.sub(
        rf"\b{user}\b( *)", lambda found: f"ann{found[1]}{' ' * (len(user) - 3) * (len(found[1]) > 1)}", printed
    )
    printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    print(printed, end="", flush=True)
    if done.returncode:
        raise SystemExit(f"$ {command}: exit code {done.returncode}")
    return printed


def form(text: str) -> list[str]:
    """Lines of an output without what differs from run to run; equal lines in a row are one."""
    lines: list[str] = []
    for line in text.splitlines():
        for pattern, word in NEUTRAL:
            line = pattern.sub(word, line)
        if lines[-1:] != [line := line.strip()]:
            lines.append(line)
    return lines


def _differences(command: str, shown: str, printed: str) -> list[str]:
    found = list(difflib.unified_diff(form(shown), form(printed), "the page", "now", lineterm="", n=1))
    return [command, *found, printed] if found else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
