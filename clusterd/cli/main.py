"""The command line: one module per group of commands, imported when a command of it is called."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
from typing import Any

import click

from clusterd import __version__
from clusterd.cli.common.output import HUNG_UP, drop_output, escaped, is_unread, was_closed
from clusterd.cli.help import add_examples
from clusterd.errors import ClusterError
from clusterd.trusted_paths import UnsafePath

_GROUPS = {
    # heading: name: (module, attribute, first line of help)
    "Jobs": {
        "submit": ("submit", "submit", "Submit a job file; prints the job's id."),
        "run": ("submit", "run", "Run a command on the cluster: streams its log, returns its exit code."),
        "shell": ("shell", "shell", "Open a shell with its own devices, or inside a running job."),
        "ls": ("jobs", "ls", "List jobs."),
        "when": ("queue.calendar", "when", "Compare when a job would start and end, before submitting it."),
        "why": ("jobs", "why", "Explain a job's state."),
        "show": ("jobs", "show", "Show all details of jobs."),
        "logs": ("jobs", "logs", "Print a job's output."),
        "wait": ("jobs", "wait", "Wait for jobs; returns the exit code of the first that failed."),
        "cancel": ("jobs", "cancel", "Cancel jobs and free their devices."),
        "get": ("files", "get", "Copy files that a job wrote, from any host."),
        "results": ("queue.report", "results", "Show the tasks of an array or sweep with what they measured."),
        "edit": ("queue.edit", "edit", "Change what a job asks for: time limit, devices, name."),
        "priority": ("jobs", "priority", "Change a job's priority."),
        "hold": ("jobs", "hold", "Keep queued jobs from starting."),
        "release": ("jobs", "release", "Let held jobs start."),
        "pause": ("jobs", "pause", "Stop running jobs where they are, or with their state saved."),
        "unpause": ("jobs", "unpause", "Let paused jobs go on."),
        "requeue": ("jobs", "requeue", "Stop running jobs and queue them again."),
        "rerun": ("queue.edit", "rerun", "Run a job, or the failed tasks of an array, again."),
        "resume": ("queue.edit", "resume", "Go on from where a job ended, with another limit or more steps."),
        "forget": ("files", "forget", "Delete logs and files of finished jobs."),
        "template": ("submit", "template", "Print a job file for torchrun, accelerate, deepspeed or torchtitan."),
        "notebook": ("forward", "notebook", "Run Jupyter Lab as a job, and open it from this machine."),
        "forward": ("forward", "forward", "Make ports of a job's host reachable on this machine."),
        "ssh-config": ("forward", "ssh_config", "Print an OpenSSH block for the host of a job."),
    },
    "Plans of training jobs": {
        "estimate": ("plans", "estimate", "Estimate a job's plans and duration before submitting it."),
        "plans": ("plans", "plans", "Rank a job's plans, and explain excluded ones."),
        "profile": ("plans", "profile", "Show measurements and fitted performance of a job's model."),
        "migrate": ("plans", "migrate", "Move a running job to another plan or other devices, in memory."),
        "checkpoint": ("plans", "checkpoint", "Write a running job's state to disk."),
        "unpin": ("plans", "unpin", "Let the scheduler choose a job's plan again."),
        "measurements": ("plans", "measurements", "Export and import measured step times."),
    },
    "Hosts": {
        "host": ("hosts", "host", "Add, list, drain and remove hosts."),
        "notice": ("queue.claims", "notice", "Tell all users something."),
        "claim": ("queue.claims", "claim", "Keep devices from the scheduler for some time."),
        "calendar": ("queue.calendar", "calendar", "Show who is expected where."),
        "book": ("queue.claims", "book", "Book devices ahead for your jobs."),
        "agent": ("hosts", "agent", "Join a cluster from this machine, as from an allocation of Slurm."),
    },
    "Cluster": {
        "start": ("head_node.daemon", "start", "Start the daemon."),
        "stop": ("head_node.daemon", "stop", "Stop the daemon; jobs keep running."),
        "status": ("head_node.daemon", "status", "Show the state of the daemon."),
        "top": ("top", "top", "Watch and control the cluster in this terminal."),
        "doctor": ("head_node.doctor", "doctor", "Check this machine, the daemon and its hosts."),
        "history": ("history", "history", "Print past events and decisions."),
        "report": ("queue.report", "report", "Print device-hours, utilisation and waiting times."),
        "metrics": ("metrics", "metrics", "Print metrics of hosts, devices and jobs for Prometheus."),
        "login": ("head_node.daemon", "login", "Let the cluster run your jobs under your own account."),
        "config": ("head_node.settings", "config", "Check a configuration or job file; print their schemas."),
        "reload": ("head_node.daemon", "reload", "Read the daemon's settings file again: roles, tenants and limits."),
        "service": ("head_node.service", "service", "Run the daemon as a service of systemd."),
        "backup": ("head_node.daemon", "backup", "Copy what another daemon needs to lead the hosts."),
        "journal": ("history", "journal", "Check the file of the daemon's events."),
    },
    "Research": {
        "simulate": ("simulate", "simulate", "Simulate a workload under several policies and compare them."),
        "advise": ("simulate", "advise", "Answer scheduling situations, one JSON object per line."),
    },
    "This program": {
        "help": ("help", "help_command", "Explain a message by its key: cause and remedy."),
        "man": ("help", "man", "Print the manual page of all commands."),
        "completion": ("help", "completion", "Print the shell's completion script."),
    },
}

_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}


EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h."""


_ELSEWHERE = {
    "sbatch": "submit", "srun": "run", "salloc": "shell", "squeue": "ls", "sinfo": "host ls", "sacct": "ls --since 1d",
    "scancel": "cancel", "scontrol": "show, hold, release, requeue, edit", "sprio": "why", "attach": "logs -f",
    "ps": "ls", "list": "ls", "jobs": "ls", "queue": "ls", "hosts": "host ls", "nodes": "host ls", "kill": "cancel",
    "node": "host", "cp": "get JOB FILE", "scp": "get JOB FILE", "version": "--version", "watch": "top",
    "exec": "shell", "rm": "forget", "tail": "logs -f", "sattach": "logs -f", "sstat": "show", "sreport": "report",
    "smap": "top", "launch": "submit", "down": "cancel", "up": "start", "delete": "cancel, or forget", "info": "show",
    "describe": "show", "ssh": "shell JOB", "add": "host add", "drain": "host drain", "host rm": "host remove",
    "host delete": "host remove", "host list": "host ls", "host info": "host show", "host describe": "host show",
    "host cordon": "host drain", "host uncordon": "host undrain", "host resume": "host undrain",
    "host rename": "host remove; the name is that of ssh", "qsub": "submit", "qstat": "ls", "qdel": "cancel",
    "qhold": "hold", "qrls": "release", "pbsnodes": "host ls", "bsub": "submit", "bjobs": "ls", "bkill": "cancel",
    "bpeek": "logs", "bhosts": "host ls", "apply": "submit", "create": "submit", "events": "history", "job": "ls",
    "quota": "report --by tenant", "users": "report", "whoami": "status", "gpus": "host ls", "nvidia-smi": "top",
    "restart": "rerun, or requeue", "suspend": "pause", "stat": "show", "undrain": "host undrain", "inspect": "show",
    "pull": "get JOB FILE", "scale": "edit JOB devices=N", "stop JOB": "cancel JOB", "status JOB": "show JOB",
    "host label": "host remove, then host add --label",
}  # fmt: skip
"""Commands of Slurm, PBS, LSF, tmux, SkyPilot, pueue, docker and kubectl that hands type, and what does the same."""

_OPTIONS_ELSEWHERE = {
    "cancel": {
        "-u": "clusterd cancel '*', for all of your own", "--user": "clusterd cancel '*', for all of your own",
        "--all": "clusterd cancel '*'", "-n": "clusterd cancel 'NAME*'", "--name": "clusterd cancel 'NAME*'",
        "-t": "--state STATE", "-s": "--signal SIGNAL", "-9": "--now", "-f": "--now", "--force": "--now",
        "-y": "leave it out", "--yes": "leave it out",
    },
    "add": {"--until": "--for TIME", "--to": "--for TIME"},
    "forget": {"--all": "clusterd forget '*'"}, "notice": {"--rm": "--clear"},
    "ls": {
        "-u": "--user NAME", "--me": "--user .", "-t": "--state STATE", "--states": "--state STATE", "-S": "--since 1d",
        "--starttime": "--since 1d", "-j": "clusterd ls JOB", "--jobs": "clusterd ls JOB", "-w": "clusterd top",
        "--watch": "clusterd top", "--host": "clusterd host show HOST", "--format": "-o csv or -o json",
        "--start": "clusterd why JOB", "--sort": "-o csv | sort -t , -k 3", "-i": "clusterd top", "-f": "clusterd top",
        "-p": "there are no partitions, leave it out", "--partition": "there are no partitions, leave it out",
    },
    "logs": {"--tail": "--lines N", "-F": "--follow", "--since": "--lines N", "--previous": "--attempt N"},
}  # fmt: skip
"""Options of scancel, squeue, sacct, tail and kubectl, and what does the same."""


_JOBS = ("submit", "run", "shell")
"""Commands on which people type options of sbatch and srun."""


class _Commands(click.Group):
    """Imports a command's module when it is called: `clusterd ls` does not pay for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        return add_examples(getattr(importlib.import_module(f"clusterd.cli.{module}"), attribute), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from clusterd.submission.batch_script import option_here

            path, option = error.ctx.command_path.split() if error.ctx else [""], error.option_name
            command = path[-1] if path[-2:-1] != ["host"] else "host ls"
            here = option_here(option) if command in _JOBS else _OPTIONS_ELSEWHERE.get(command, {}).get(option)
            if here:
                raise click.UsageError(f"No such option {option!r}. Here it is: {here}", error.ctx) from None
            raise
        except click.UsageError as error:
            import difflib

            named, context = re.fullmatch(r"No such command '(.+)'\.", error.message), error.ctx
            if context is None or not (named or error.message.startswith("Got unexpected extra argument")):
                raise
            typed = named[1] if named else "JOB"
            word = typed if context.parent is None else f"{context.info_name} {typed}"
            if here := _ELSEWHERE.get(word) or _ELSEWHERE.get(f"host {word}"):
                message = f"{error.message.rstrip('.')}. Here it is: clusterd {here}"
                raise click.UsageError(message, context) from None
            group = context.command if named else None
            if isinstance(group, click.Group):
                for near in difflib.get_close_matches(typed, group.list_commands(context), 1):
                    raise click.UsageError(f"{error.message} Did you mean {near!r}?", context) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, text) for name, (_, _, text) in commands.items()])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", "-V", prog_name="clusterd")
def cli() -> None:
    """A cluster manager for machines that SSH reaches.

    \b
    clusterd start --local 2                   a cluster inside this machine
    clusterd host add gpu01                    what `ssh gpu01` reaches
    clusterd run --gpus 2 -- python train.py   any command
    """


def main() -> None:
    """Entry point: prints errors meant for users as one line and sets the exit code."""
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:  # closed by the caller, as with >&-; this order restores the descriptors
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))  # what is written to the output fails
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an 8-bit terminal cannot encode bars
    stdout = sys.stdout
    try:
        code: Any = cli.main(standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
    except ClusterError as error:
        from clusterd.cli.help import with_key

        lines = with_key(str(error)).splitlines() or [type(error).__name__]
        print("clusterd: " + "\n          ".join(map(escaped, lines)), file=sys.stderr)
        sys.exit(error.exit_code)
    except UnsafePath as error:
        print(f"clusterd: {error}", file=sys.stderr)
        sys.exit(1)
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
        # For a closed pipe click exits with 1 and wraps the stream to prevent another flush.
        sys.exit(0 if sys.stdout is not stdout else leaving.code)
    except BrokenPipeError:
        drop_output(sys.stdout)  # `clusterd ls | head` is not an error
        sys.exit(0)
    except Exception as error:
        if isinstance(error, OSError) and is_unread(sys.stdout, error):
            drop_output(sys.stdout)
            sys.exit(HUNG_UP)
        if isinstance(error, OSError) and (error.errno == errno.ENOSPC or was_closed(sys.stdout, error)):
            drop_output(sys.stdout)
            hint = ": free space there" if error.errno == errno.ENOSPC else ", it is closed"
            print(f"clusterd: the output cannot be written: {error.strerror}{hint}", file=sys.stderr)
            sys.exit(1)
        if os.environ.get("CLUSTERD_TRACEBACK"):
            raise
        print(
            f"clusterd: a bug in clusterd: {type(error).__name__}: {error}: report it with the output of "
            "the same command under CLUSTERD_TRACEBACK=1",
            file=sys.stderr,
        )
        sys.exit(EXIT_BUG)
    sys.exit(code if isinstance(code, int) else 0)
