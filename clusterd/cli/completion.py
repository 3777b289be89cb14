"""``clusterd completion``: shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


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
