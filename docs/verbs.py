"""Write the arguments of the verbs in docs/client.md from the methods that serve them, which also check what is sent.

``python docs/verbs.py`` rewrites the page; ``--check`` fails if it is out of date, or has no row for a verb.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from clusterd.daemon.api import (
    accounts,
    files,
    host_check,
    hosts,
    job_logs,
    jobs,
    migration,
    performance,
    retention,
    terminals,
)

PAGE = Path(__file__).with_name("client.md")
ROW = re.compile(r"^\| `(\w+)\(([\w, ]*)\)`", re.MULTILINE)
CLASSES = (
    jobs.JobVerbs, migration.MigrationVerbs, host_check.HostChecks, files.FileVerbs, retention.RetentionVerbs,
    hosts.HostVerbs, accounts.Accounts, performance.PerformanceVerbs, terminals.Terminals,
)  # fmt: skip


def arguments() -> dict[str, str]:
    """Arguments of each verb: the parameters behind the peer, which the server adds."""
    found = {"logs": _parameters(job_logs.JobLogs.follow)}
    for kind in CLASSES:
        for name, verb in inspect.getmembers(kind, inspect.isfunction):
            is_verb = inspect.iscoroutinefunction(verb) or inspect.isasyncgenfunction(verb)
            if is_verb and not name.startswith("_") and list(inspect.signature(verb).parameters)[1:2] == ["peer"]:
                found[name] = _parameters(verb)
    return found


def _parameters(verb: object) -> str:
    return ", ".join(list(inspect.signature(verb).parameters)[2:])  # type: ignore[arg-type]


def main(options: list[str]) -> int:
    """Rewrite or check the page; returns the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    known = arguments()
    rows = {name for name, _ in ROW.findall(text)}
    if rows != known.keys():
        print(f"{PAGE}: rows without a verb, or verbs without a row: {sorted(rows ^ known.keys())}", file=sys.stderr)
        return 1
    wanted = ROW.sub(lambda row: f"| `{row[1]}({known[row[1]]})`", text)
    if wanted == text:
        return 0
    if "--check" in options:
        print(f"{PAGE} is out of date: python {Path(__file__).name}", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
