"""Help of the commands: grouped, and each with an example that parses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
from click.testing import CliRunner

from clusterd.cli.help import EXAMPLES
from clusterd.cli.main import cli


def commands(group: click.Command, path: str = "", shown: str = "") -> Iterator[tuple[str, click.Command, str]]:
    """Words, command, and help of the groups around it, of each command that does something."""
    context = click.Context(group)
    if not isinstance(group, click.Group):
        yield path, group, shown
        return
    for name in group.list_commands(context):
        inner = group.get_command(context, name)
        assert inner is not None
        yield from commands(inner, f"{path} {name}".strip(), shown if not path else f"{shown}{group.help}")


def test_every_command_has_an_example_whose_options_it_knows() -> None:
    known = dict.fromkeys(EXAMPLES, False)
    for path, command, around in commands(cli):
        assert path in EXAMPLES or f"clusterd {path}" in f"{command.help}{around}", f"clusterd {path} has no example"
        if path not in EXAMPLES:
            continue
        known[path] = True
        words = shlex.split(EXAMPLES[path])
        assert words[:2] == ["clusterd", path.split()[0]]
        options = {spelling for parameter in command.params for spelling in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, path
    assert all(known.values()), known
    for words in (["help", "host"], ["host", "--help"]):
        text = CliRunner().invoke(cli, words, prog_name="clusterd").output
        assert text.startswith("Usage: clusterd host [OPTIONS]")


def test_commands_are_listed_by_what_they_are_about() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Options:",
        "Jobs:",
        "Plans of training jobs:",
        "Hosts:",
        "Cluster:",
        "Research:",
        "This program:",
    ]
    for name in cli.list_commands(click.Context(cli)):
        assert f"\n  {name} " in text
