"""``clusterd help``, ``man`` and ``completion``: entries about trouble, examples, the manual page, shell completion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from clusterd import __version__
from clusterd.errors import UsageError

PAGE = Path(__file__).with_name("troubleshooting.md")
"""The entries; docs/troubleshooting.md is a copy that docs/verbs.py makes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One heading of the page.

    Args:
        messages: pattern of the messages that it is about; empty: of none.
    """

    key: str
    title: str
    messages: str
    text: str


@cache
def entries() -> tuple[Entry, ...]:
    """All entries in the order of the page, which goes from narrow patterns to wide ones."""
    found = re.split(r"^## ([\w-]+): (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    made = []
    for key, title, text in zip(found[::3], found[1::3], found[2::3], strict=True):
        pattern = re.match(r"\s*<!-- (.*) -->\n", text)
        made.append(Entry(key, title, pattern[1] if pattern else "", text[pattern.end() if pattern else 0 :].strip()))
    return tuple(made)


def with_key(message: str) -> str:
    """The message with the command that prints its entry behind it, if there is one."""
    key = next((entry.key for entry in entries() if entry.messages and re.search(entry.messages, message)), None)
    return f"{message} (clusterd help {key})" if key else message


@click.command(name="help")
@click.argument("key", required=False)
def help_command(key: str | None) -> None:
    """Explain a message by its KEY: cause and remedy; without KEY, list the keys.

    The name of a command shows the help of that command.
    """
    from clusterd.cli.main import cli

    known, context = {entry.key: entry for entry in entries()}, cli.make_context("clusterd", ["help"])
    if key is None:
        width = max(map(len, known))
        click.echo("\n".join(f"{entry.key:{width}}  {entry.title}" for entry in known.values()))
    elif key in known:
        click.echo(f"{key}: {known[key].title}\n\n{_plain(known[key].text)}")
    elif isinstance(cli, click.Group) and (command := cli.get_command(context, key)):
        click.echo(command.get_help(click.Context(command, parent=context, info_name=key)))
    else:
        import difflib  # rarely needed: the command line starts faster without

        near = difflib.get_close_matches(key, known, 1)
        raise UsageError(
            f"there is no entry {key!r}{f', did you mean {near[0]}?' if near else ''}: clusterd help lists them"
        )


def _plain(text: str) -> str:
    """Markdown as a terminal shows it: messages indented, links as their text with the page in docs/ behind it."""
    text = re.sub(r"^```\n(.*?)^```$", lambda block: re.sub("(?m)^", "  ", block[1].rstrip()), text, flags=re.M | re.S)
    text = re.sub(
        r"\[([^]]+)\]\(([\w.]+)(?:#[^)]*)?\)",
        lambda link: link[1] if link[1] == link[2] else f"{link[1]} ({link[2]})",
        text,
    )
    return text.replace("`", "")


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


EXIT_CODES = (
    ("0", "success"),
    ("1", "an error"),
    ("2", "wrong usage"),
    ("69", "no daemon answers"),
    ("70", "a bug in clusterd"),
    ("75", "valid, but not possible now"),
    ("124", "a time limit is over"),
    ("130", "interrupted"),
)

VARIABLES = (
    ("CLUSTERD_HOST", "ssh://HEAD: the daemon of that machine"),
    ("CLUSTERD_SOCKET", "the daemon's socket"),
    ("CLUSTERD_STATE_DIR", "the daemon's state directory; the socket is in it, too"),
    ("CLUSTERD_CONFIG", "the daemon's configuration file"),
    ("NO_COLOR", "print no colours"),
)


@click.command()
def man() -> None:
    """Print the manual page of all commands.

    \b
    man clusterd              where pip installed it, with its bin on PATH
    clusterd man | man -l -   with the one-file program
    """
    from clusterd.cli.main import cli

    assert isinstance(cli, click.Group)
    click.echo("\n".join(page(cli)))


def page(root: click.Group) -> Iterator[str]:
    """Lines of the manual page, in the language of man(7)."""
    context = click.Context(root, info_name="clusterd")
    yield f'.TH CLUSTERD 1 "" "clusterd {__version__}" "User Commands"'
    yield from (".SH NAME", r"clusterd \- cluster manager for machines that SSH reaches", ".SH SYNOPSIS")
    yield from (".B clusterd", r"\fICOMMAND\fR [\fIOPTION\fR]... [\fIARGUMENT\fR]...", ".SH DESCRIPTION")
    yield from _paragraphs(root.help or "")
    yield ".SH COMMANDS"
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        yield from _command(command, click.Context(command, info_name=name, parent=context))
    yield ".SH EXIT STATUS"
    yield r"\fBrun\fR and \fBwait\fR return that of the job. Else:"
    yield from _terms(EXIT_CODES)
    yield ".SH ENVIRONMENT"
    yield from _terms(VARIABLES)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SS {_escaped(context.command_path)} {_escaped(usage)}"
    yield from _paragraphs(command.help or "")
    records = [record for option in command.get_params(context) if (record := option.get_help_record(context))]
    yield from _terms(record for record in records if "--help" not in record[0])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=context))


def _terms(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in rows:
        yield from (".TP", rf"\fB{_escaped(term)}\fR", _escaped(text))


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a help text; those after click's mark for it are not filled."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = paragraph.splitlines()
        is_verbatim = lines[0].strip() == "\b"
        yield ".PP"
        if is_verbatim:
            yield from (".nf", *map(_escaped, lines[1:]), ".fi")
        else:
            yield from (_escaped(line.strip()) for line in lines)


def _escaped(text: str) -> str:
    """Text without meaning to troff: escapes, requests at the beginning of a line; hyphens as they are typed."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text[:1] in (".", "'") else text


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL, for commands, jobs and hosts.

    \b
    bash: eval "$(clusterd completion bash)"   in ~/.bashrc
    zsh:  eval "$(clusterd completion zsh)"    in ~/.zshrc
    fish: clusterd completion fish > ~/.config/fish/completions/clusterd.fish
    """
    from click.shell_completion import get_completion_class

    from clusterd.cli.main import cli

    made = get_completion_class(shell)
    assert made is not None, f"click has no completion for {shell}"
    print(made(cli, {}, "clusterd", "_CLUSTERD_COMPLETE").source())
