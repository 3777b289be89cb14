"""Table of verdicts: as text for a terminal, and as rows of docs/train.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.foreign.registry import Script
from tests.foreign.runs import RIGHT, Verdict

PAGE = Path(__file__).parents[2] / "docs/train.md"
TABLE = re.compile(r"(?<=<!-- scripts -->\n).*?(?=<!-- end of scripts -->)", re.DOTALL)
COLUMNS = {
    "one": "one process",
    "dp=2": "dp=2",
    "dp=2,zero=3": "dp=2 zero=3",
    "": "further plan",
    "move": "live move",
    "resume": "cancel, resume",
    "restart": "kill, restart",
}


def text(name: str, verdicts: Mapping[str, Verdict]) -> str:
    """Lines for a terminal."""
    lines = [name]
    for plan, v in verdicts.items():
        lines.append(f"  {plan:22} {v.verdict:8} {v.difference:8.1e}  {v.reason}")
    return "\n".join(lines)


def write(script: Script, verdicts: Mapping[str, Verdict]) -> None:
    """Add or replace the row of a script on the page; the other rows stay."""
    page = PAGE.read_text()
    found = TABLE.search(page)
    assert found is not None, f"{PAGE} has no table of scripts"
    rows = {row.split("`")[1]: row for row in found[0].splitlines() if row.startswith("| `")}
    rows[script.name] = _row(script, verdicts)
    head = f"| script | {' | '.join(COLUMNS.values())} | where it is not right |\n|---|{'---|' * (len(COLUMNS) + 1)}\n"
    body = head + "".join(f"{rows[name]}\n" for name in sorted(rows))
    PAGE.write_text(TABLE.sub(lambda _: body, page))


def _row(script: Script, verdicts: Mapping[str, Verdict]) -> str:
    cells = []
    for plan in COLUMNS:
        further = {p: v for p, v in verdicts.items() if p not in COLUMNS}
        if plan:
            cells.append(verdicts[plan].verdict if plan in verdicts else "")
        else:
            cells.append(", ".join(f"{p.replace(',', ' ')}: {v.verdict}" for p, v in further.items()))
    faulty = any(v.verdict != RIGHT for v in verdicts.values())
    return f"| `{script.name}`: {script.summary} | {' | '.join(cells)} | {script.advice if faulty else ''} |"
