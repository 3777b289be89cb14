"""``clusterd help``: entries about trouble, by key; messages that have one end with it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

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

    known = {entry.key: entry for entry in entries()}
    if key is None:
        width = max(map(len, known))
        click.echo("\n".join(f"{entry.key:{width}}  {entry.title}" for entry in known.values()))
    elif key in known:
        click.echo(f"{key}: {known[key].title}\n\n{_plain(known[key].text)}")
    elif isinstance(cli, click.Group) and (command := cli.get_command(context := click.Context(cli), key)):
        click.echo(command.get_help(click.Context(command, parent=context, info_name=key)))
    else:
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
