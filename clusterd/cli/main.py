"""The command line: one verb per command, each imported when it is called."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from clusterd import __version__
from clusterd.cli.output import drop_output
from clusterd.errors import ClusterError

_COMMANDS = {
    # name: (module, attribute, first line of help)
    "start": ("daemon", "start", "Start the daemon."),
    "stop": ("daemon", "stop", "Stop the daemon; jobs keep running."),
    "status": ("daemon", "status", "How the daemon is."),
    "host": ("hosts", "host", "Add, list, drain and remove hosts."),
    "submit": ("submit", "submit", "Queue the job of a job file; prints its id."),
    "run": ("submit", "run", "Run a command on the cluster: streams its log, returns its exit code."),
    "shell": ("shell", "shell", "A shell with devices of its own, or inside a running job."),
    "ls": ("jobs", "ls", "List jobs."),
    "show": ("jobs", "show", "Everything about one job."),
    "logs": ("jobs", "logs", "A job's output."),
    "get": ("fetching", "get", "Copy here what a job wrote, from whatever host."),
    "cancel": ("jobs", "cancel", "End jobs and free what they hold."),
    "forget": ("forgetting", "forget", "Remove what is kept of jobs that are over."),
    "priority": ("jobs", "priority", "Change a job's priority."),
    "migrate": ("migrate", "migrate", "Move a running job to another plan or place, in memory."),
    "profile": ("speed", "profile", "What was measured of a job's model, and learned from it."),
    "plans": ("speed", "plans", "A job's plans, fastest first, and why the others are out."),
    "estimate": ("speed", "estimate", "What a job would take, before it is submitted."),
    "measurements": ("speed", "measurements", "Export and import measured step times."),
    "checkpoint": ("migrate", "checkpoint", "Write a running job's state to disk."),
    "unpin": ("migrate", "unpin", "Let the scheduler choose a job's plan again."),
    "wait": ("jobs", "wait", "Wait for jobs; returns the exit code of the first that failed."),
    "why": ("jobs", "why", "Why a job is where it is."),
    "history": ("history", "history", "What happened, and what was decided because of it."),
    "top": ("top", "top", "Watch and steer the cluster in this terminal."),
    "metrics": ("metrics", "metrics", "Numbers about hosts, devices and jobs, for Prometheus."),
    "simulate": ("simulate", "simulate", "Run a workload under policies, without machines, and compare."),
    "advise": ("advise", "advise", "Answer others' scheduling situations, one JSON object a line."),
    "completion": ("completion", "completion", "Print what makes the shell complete commands, jobs and hosts."),
    "config": ("settings", "config", "Check a configuration or job file."),
}


EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h."""


class _Commands(click.Group):
    """Imports a command's module when it is called: `clusterd ls` does not pay for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"clusterd.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], _COMMANDS, 1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="clusterd")
def cli() -> None:
    """A cluster out of machines that SSH reaches.

    \b
    clusterd start --local 2                   a cluster inside this machine
    clusterd host add gpu01                    what `ssh gpu01` reaches
    clusterd run --gpus 2 -- python train.py   any command
    """


def main() -> None:
    """The entry point: errors meant for people become one line and an exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as with >&-; opened in turn, each gets its number back
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of eight bits has no bars
    stdout = sys.stdout
    try:
        code: Any = cli.main(standalone_mode=False)
        sys.stdout.flush()  # here, where a reader that is gone can still be caught
    except ClusterError as error:
        lines = str(error).splitlines() or [type(error).__name__]
        print("clusterd: " + "\n          ".join(lines), file=sys.stderr)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as leaving:
        # click itself ends with 1 where a pipe is closed, and wraps the stream so that nothing is tried again.
        sys.exit(0 if sys.stdout is not stdout else leaving.code)
    except BrokenPipeError:
        drop_output(sys.stdout)  # `clusterd ls | head` is no error, and nobody is left to tell
        sys.exit(0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            drop_output(sys.stdout)
            print(
                f"clusterd: the output cannot be written: {error.strerror}: free space where it goes", file=sys.stderr
            )
            sys.exit(1)
        if os.environ.get("CLUSTERD_TRACEBACK"):
            raise
        print(
            f"clusterd: a bug of clusterd's own: {type(error).__name__}: {error}: report it with what "
            "CLUSTERD_TRACEBACK=1 shows in front of the same command",
            file=sys.stderr,
        )
        sys.exit(EXIT_BUG)
    sys.exit(code if isinstance(code, int) else 0)
