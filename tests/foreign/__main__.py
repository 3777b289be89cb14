"""Command that runs the scripts and prints or writes the table of verdicts: ``python -m tests.foreign [NAME...]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HANG_S", "150")  # before the modules of the tests read it


def main() -> int:
    """Run the scripts that the arguments name; exit code 1 if a verdict is WRONG."""
    from tests.foreign import registry, table
    from tests.foreign.runs import WRONG, Runner

    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description="Run training scripts under plans.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a script, or a group of them; default: all")
    parser.add_argument("--plan", action="append", default=[], help="only these plans; or move, resume, restart")
    parser.add_argument("--json", action="store_true", help="print verdicts as JSON, a line for each script")
    parser.add_argument("--write", action="store_true", help="write the rows of these scripts into docs/train.md")
    options = parser.parse_args()
    missing = registry.load()
    known = registry.SCRIPTS
    if unknown := set(options.names) - set(known) - set(registry.GROUPS):
        parser.error(f"no script or group has the name {min(unknown)}; there are {', '.join(known)}")
    chosen = [s for s in known.values() if not options.names or {s.name, s.group} & set(options.names)]
    groups = sorted({script.group for script in chosen})
    found = {}
    with tempfile.TemporaryDirectory(prefix="foreign-") as directory:
        runner = Runner(Path(directory), [f"tests.foreign.{group}" for group in groups])
        try:
            for script in chosen:
                found[script.name] = verdicts = runner.verdicts(script, options.plan)
                if options.json:
                    print(json.dumps({script.name: {plan: v.to_dict() for plan, v in verdicts.items()}}), flush=True)
                else:
                    print(table.text(script.name, verdicts), flush=True)
                if options.write:
                    table.write(script, verdicts)
        finally:
            runner.close()
    for group, packages in missing.items():
        if not options.names or group in options.names:
            print(f"{group}: skipped, {packages} not installed", file=sys.stderr)
    return int(any(v.verdict == WRONG for verdicts in found.values() for v in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
