"""The daemon's own log: JSON lines in a file, words on a terminal."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from pathlib import Path

from clusterd.errors import ClusterError

FILE_BYTES_MAX = 16 << 20
FILES_KEPT = 3


class JsonLines(logging.Formatter):
    """One object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        fields = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up(file: Path, level: str, foreground: bool) -> None:
    """Log into `file`, and in the foreground on standard error too: for people on a terminal, else as JSON.

    Raises:
        ClusterError: the file cannot be written.
    """
    root = logging.getLogger()
    root.setLevel(level.upper())
    try:
        kept = logging.handlers.RotatingFileHandler(
            file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8"
        )
    except OSError as error:
        raise ClusterError(f"{file}: {error.strerror}: make it a file that can be written, or remove it") from None
    kept.setFormatter(JsonLines())
    root.addHandler(kept)
    if foreground:
        shown = logging.StreamHandler(sys.stderr)
        human = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        shown.setFormatter(human if sys.stderr.isatty() else JsonLines())
        root.addHandler(shown)
    logging.getLogger("asyncssh").setLevel(max(logging.WARNING, root.level))
