"""An example of each command, which ends its help."""

from __future__ import annotations

import click

EXAMPLES = {
    "submit": "clusterd submit job.toml --gpus 2 --sweep LR=1e-3,3e-4",
    "ls": "clusterd ls 'gpt_*' --user . --since 1d",
    "when": "clusterd when job.toml --gpus 1,2,4 --guaranteed",
    "why": "clusterd why gpt-small",
    "show": "clusterd show gpt-small -o json",
    "logs": "clusterd logs -f gpt-small",
    "wait": "clusterd wait prep train --timeout 8h",
    "cancel": "clusterd cancel 'net_*' --wait",
    "get": "clusterd get gpt-small gpt.pt",
    "results": "clusterd results sweep -o json",
    "priority": "clusterd priority gpt-small 10",
    "hold": "clusterd hold 'net_*'",
    "release": "clusterd release 'net_*'",
    "pause": "clusterd pause gpt-small",
    "unpause": "clusterd unpause gpt-small",
    "requeue": "clusterd requeue gpt-small",
    "forget": "clusterd forget --older 30d",
    "notebook": "clusterd notebook --gpus 1",
    "estimate": "clusterd estimate job.toml",
    "plans": "clusterd plans gpt-small --devices 8",
    "profile": "clusterd profile gpt-small --html curve.html",
    "migrate": "clusterd migrate gpt-small --plan dp=2,tp=2 --dry-run",
    "checkpoint": "clusterd checkpoint gpt-small /shared/gpt/now",
    "unpin": "clusterd unpin gpt-small",
    "measurements export": "clusterd measurements export steps.csv",
    "measurements import": "clusterd measurements import steps.csv",
    "host add": "clusterd host add gpu01 me@10.0.0.7",
    "host check": "clusterd host check gpu01 --python ~/envs/llm",
    "host drain": "clusterd host drain gpu01 --why 'new fan'",
    "host ls": "clusterd host ls",
    "host remove": "clusterd host remove gpu01",
    "host show": "clusterd host show gpu01",
    "host trust": "clusterd host trust gpu01",
    "host undrain": "clusterd host undrain gpu01",
    "notice": "clusterd notice 'gpu03 gets a new fan on Friday'",
    "claim add": "clusterd claim gpu01:3 --from 14:00 --for 2h --reason 'new fan'",
    "claim ls": "clusterd claim ls",
    "claim rm": "clusterd claim rm 3",
    "calendar": "clusterd calendar --days 7 --host gpu01",
    "book add": "clusterd book --gpus a100:4 --from 'mon 9:00' --for 4h",
    "book ls": "clusterd book ls",
    "book cancel": "clusterd book cancel 3",
    "start": "clusterd start --local 2",
    "stop": "clusterd stop",
    "status": "clusterd status",
    "top": "clusterd top",
    "doctor": "clusterd doctor",
    "history": "clusterd history --job gpt-small --since 2d",
    "report": "clusterd report --since 30d --by user",
    "login": "clusterd login",
    "config check": "clusterd config check --job job.toml",
    "config show": "clusterd config show",
    "reload": "clusterd reload",
    "service install": "clusterd service install",
    "service remove": "clusterd service remove",
    "service show": "clusterd service show",
    "backup": "clusterd backup --every 1m host2:/srv/clusterd",
    "journal check": "clusterd journal check",
    "help": "clusterd help queued",
    "advise": "clusterd advise --stdio < situations.jsonl",
}
"""By the words of the command; those whose help has examples are not among them."""


def add_examples(command: click.Command, path: str) -> click.Command:
    """Add the example of a command, and of those in it, to its help."""
    if path in EXAMPLES:
        command.epilog = f"Example: {EXAMPLES[path]}"
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            add_examples(inner, f"{path} {name}")
    return command
