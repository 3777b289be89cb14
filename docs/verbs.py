"""Write the pages whose text is in the code: ``python docs/verbs.py``; ``--check`` fails if one is out of date.

The arguments of the verbs in docs/client.md come from the methods that serve them, which also check what is sent; the
rules of the verbs in docs/security.md from the table that the server enforces, docs/clusterd.1 from the commands,
docs/troubleshooting.md from the entries of ``clusterd help``, the tables of docs/job_file.md from the declarations of
the keys of a job, and those of docs/json.md from the structs of the rows. A verb without a row or a rule is an error.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from dataclasses import MISSING
from itertools import groupby
from pathlib import Path

import click
import msgspec

from clusterd import rows
from clusterd.cli.help import PAGE as TROUBLE
from clusterd.cli.help import page
from clusterd.cli.main import cli
from clusterd.daemon import api
from clusterd.daemon.access import RULES, Callers, Others
from clusterd.daemon.api.server import verbs_of
from clusterd.submission.job_file import job_keys

PAGE = Path(__file__).with_name("client.md")
RULES_PAGE = Path(__file__).with_name("security.md")
JOB_PAGE = Path(__file__).with_name("job_file.md")
JSON_PAGE = Path(__file__).with_name("json.md")
TROUBLE_PAGE = Path(__file__).with_name("troubleshooting.md")
MANUAL_PAGE = Path(__file__).with_name("clusterd.1")
TABLE = re.compile(r"(?<=<!-- rules -->\n).*?(?=<!-- end of rules -->)", re.DOTALL)
KEYS = re.compile(r"(?<=<!-- keys: written by docs/verbs.py -->\n).*?(?=<!-- end of keys -->)", re.DOTALL)
STRUCT = re.compile(r"(<!-- row (\w+): .*? -->\n).*?(?=<!-- end of row -->)", re.DOTALL)
ROW = re.compile(r"^\| `(\w+)\(([\w, ]*)\)`", re.MULTILINE)


def arguments() -> dict[str, str]:
    """Arguments of each verb: the parameters behind the peer, which the server adds."""
    found = {}
    for module in pkgutil.iter_modules(api.__path__):
        for _, kind in inspect.getmembers(importlib.import_module(f"{api.__name__}.{module.name}"), inspect.isclass):
            for verb in verbs_of(kind):
                found[verb] = ", ".join(list(inspect.signature(getattr(kind, verb)).parameters)[2:])
    return found


def rules() -> str:
    """Table of the rules: verbs by who may call them and by what they show of other users' jobs."""
    rows = ["| who | verbs | about another user's job |", "|---|---|---|"]
    for callers in Callers:
        for others in Others:
            verbs = sorted(verb for verb, rule in RULES.items() if (rule.callers, rule.others) == (callers, others))
            if verbs:
                rows.append(f"| {callers} | {', '.join(f'`{verb}`' for verb in verbs)} | {others} |")
    return "\n".join(rows) + "\n"


def keys() -> str:
    """Tables of the keys of a job file, by section."""
    lines: list[str] = []
    for section, found in groupby(sorted(job_keys().values(), key=lambda key: key.section), lambda key: key.section):
        lines += ["", f"## `[{section}]`" if section else "## The job", ""]
        lines += ["| key | meaning | default | may change |", "|---|---|---|---|"]
        for key in found:
            default = key.default or ("" if key.initial is MISSING else key.words(key.initial))
            lines.append(f"| `{key.short}` | {key.doc} | {default} | {key.edit.value} |")
    return "\n".join([*lines[1:], ""])


def fields(name: str) -> str:
    """Table of the fields of a row that have a meaning of their own: those of its base have another table."""
    kind = getattr(rows, name)
    inherited = getattr(kind.__bases__[0], "__struct_fields__", ())
    lines = ["| field | meaning |", "|---|---|"]
    for field in msgspec.structs.fields(kind):
        notes = [note.description for note in getattr(field.type, "__metadata__", ()) if note.description]
        if notes and field.name not in inherited:
            lines.append(f"| `{field.encode_name}` | {notes[0]} |")
    return "\n".join([*lines, ""])


def main(options: list[str]) -> int:
    """Rewrite or check the pages; returns the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    known = arguments()
    listed = {name for name, _ in ROW.findall(text)}
    for place, found in ((PAGE, listed), ("clusterd.daemon.access.py", set(RULES))):
        if found != known.keys():
            wrong = sorted(found ^ known.keys())
            print(f"{place}: rows without a verb, or verbs without a row: {wrong}", file=sys.stderr)
            return 1
    wanted = ROW.sub(lambda row: f"| `{row[1]}({known[row[1]]})`", text)
    table = RULES_PAGE.read_text(encoding="utf-8")
    manual = MANUAL_PAGE.read_text(encoding="utf-8") if MANUAL_PAGE.exists() else ""
    job_file = JOB_PAGE.read_text(encoding="utf-8")
    trouble = TROUBLE_PAGE.read_text(encoding="utf-8")
    answers = JSON_PAGE.read_text(encoding="utf-8")
    assert isinstance(cli, click.Group)
    return max(
        _write(PAGE, text, wanted, "--check" in options),
        _write(MANUAL_PAGE, manual, "\n".join(page(cli)) + "\n", "--check" in options),
        _write(TROUBLE_PAGE, trouble, TROUBLE.read_text(encoding="utf-8"), "--check" in options),
        _write(JOB_PAGE, job_file, KEYS.sub(lambda _: keys(), job_file), "--check" in options),
        _write(JSON_PAGE, answers, STRUCT.sub(lambda row: row[1] + fields(row[2]), answers), "--check" in options),
        _write(RULES_PAGE, table, TABLE.sub(lambda _: rules(), table), "--check" in options),
    )


def _write(page: Path, text: str, wanted: str, only_check: bool) -> int:
    if wanted == text:
        return 0
    if only_check:
        print(f"{page} is out of date: python {Path(__file__).name}", file=sys.stderr)
        return 1
    page.write_text(wanted, encoding="utf-8")
    print(f"{page} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
