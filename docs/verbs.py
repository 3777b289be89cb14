"""Write the arguments of the verbs in docs/client.md from the methods that serve them, which also check what is sent.

``python docs/verbs.py`` rewrites the page; ``--check`` fails if it is out of date, or has no row for a verb.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from clusterd.daemon import api
from clusterd.daemon.api import job_logs

PAGE = Path(__file__).with_name("client.md")
ROW = re.compile(r"^\| `(\w+)\(([\w, ]*)\)`", re.MULTILINE)


def arguments() -> dict[str, str]:
    """Arguments of each verb: the parameters behind the peer, which the server adds."""
    found = {"logs": _parameters(job_logs.JobLogs.follow)}
    for kind in _classes():
        for name, verb in inspect.getmembers(kind, inspect.isfunction):
            is_verb = inspect.iscoroutinefunction(verb) or inspect.isasyncgenfunction(verb)
            if is_verb and not name.startswith("_") and list(inspect.signature(verb).parameters)[1:2] == ["peer"]:
                found[name] = _parameters(verb)
    return found


def _classes() -> Iterator[type]:
    """Classes of the API that have verbs or streams."""
    for module in pkgutil.iter_modules(api.__path__):
        found = importlib.import_module(f"{api.__name__}.{module.name}")
        for _, kind in inspect.getmembers(found, inspect.isclass):
            if kind.__module__ == found.__name__ and (hasattr(kind, "verbs") or hasattr(kind, "streams")):
                yield kind


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
