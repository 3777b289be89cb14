"""``clusterd man`` and ``completion``: the manual page and shell completion, as ``--help`` declares the commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click
from click.shell_completion import get_completion_class

from clusterd import __version__

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
    from clusterd.cli.main import cli

    made = get_completion_class(shell)
    assert made is not None, f"click has no completion for {shell}"
    print(made(cli, {}, "clusterd", "_CLUSTERD_COMPLETE").source())
