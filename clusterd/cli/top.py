"""``clusterd top``: the terminal UI, on a daemon or on a recording."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from socket import socket as Connection
from typing import TYPE_CHECKING

import click

from clusterd.cli.common.output import exit_when_closed
from clusterd.errors import ClusterError, UsageError
from clusterd.process_attributes import collect_seldom
from clusterd.tui.source.preconnect import preconnect

if TYPE_CHECKING:
    from clusterd.tui.source.sources import Source


@click.command()
@click.option("--readonly", is_flag=True, help="Hide all keys that change something.")
@click.option("--socket", type=click.Path(path_type=Path), help="Socket of the daemon, instead of the usual one.")
@click.option("--system", is_flag=True, help="The system's daemon, not the user's.")
@click.option("--ascii", "plain", is_flag=True, help="Draw with ASCII characters only; NO_COLOR is respected, too.")
@click.option(
    "--replay", type=click.Path(path_type=Path), help="Play a recording, or the journal of a daemon's state directory."
)
def top(readonly: bool, socket: Path | None, system: bool, plain: bool, replay: Path | None) -> int:
    """Watch and control the cluster; press ? for the keys."""
    if importlib.util.find_spec("textual") is None:
        raise ClusterError("the terminal UI needs textual: pip install 'clusterd[tui]'")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if not is_terminal and "TEXTUAL_DRIVER" not in os.environ:
        raise UsageError(
            "top needs a terminal for input and output, and no dumb one (TERM): clusterd ls and clusterd status do not"
        )
    path = socket or _usual_socket(system)
    preconnected = None if replay else preconnect(path)
    collect_seldom()
    exit_when_closed(0)  # Textual reads the end of its input again and again
    from clusterd.tui.app import Top  # slow to import; meanwhile the daemon prepares its baseline

    app = Top(_source(replay, path, preconnected), readonly=readonly, ascii=plain or _needs_ascii())
    app.run()
    return app.return_code or 0


def _source(replay: Path | None, path: Path, preconnected: Connection | None) -> Source:
    if replay is None:
        from clusterd.tui.source.sources import DaemonSource

        return DaemonSource(path, preconnected=preconnected)
    from clusterd.config import load
    from clusterd.replay import recording
    from clusterd.tui.source.playback import RecordingSource

    return RecordingSource(list(recording(replay, load().policy)))


def _usual_socket(system: bool) -> Path:
    from clusterd.config import client_socket

    return client_socket(system)


def _needs_ascii() -> bool:
    """The terminal or the locale cannot show drawing characters."""
    return "utf" not in (sys.stdout.encoding or "").lower() or os.environ.get("TERM") in ("linux", "dumb")
