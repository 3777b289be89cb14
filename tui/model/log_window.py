"""A log's last lines, out of bytes that may come faster than anybody can read. Pure."""

from __future__ import annotations

import re
from collections import deque

LINES_KEPT = 5000
LINE_BYTES_MAX = 4096
"""A longer line is cut: nobody reads it here, and a pager shows all of it."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


class LogWindow:
    """The newest lines; what falls out is counted, not kept."""

    def __init__(self, kept: int = LINES_KEPT) -> None:
        self._kept = kept
        self._partial = b""
        self.lines: deque[str] = deque(maxlen=kept)
        self.total = 0
        """Lines so far, kept or not."""

    def feed(self, data: bytes) -> None:
        """Take in a piece; only what will be shown is looked at."""
        data = self._partial + data
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > LINE_BYTES_MAX:  # a progress bar without an end, or no text at all
            rest = rest[-LINE_BYTES_MAX:]
        self._partial = rest
        if not newline:
            return
        count = whole.count(b"\n") + 1
        self.total += count
        newest = whole.rsplit(b"\n", self._kept)[-self._kept :] if count > self._kept else whole.split(b"\n")
        self.lines.extend(readable(raw) for raw in newest)

    @property
    def partial(self) -> str:
        """The line that is not over yet."""
        return readable(self._partial) if self._partial else ""

    def say(self, text: str) -> None:
        """A line of our own between those of the log."""
        if self._partial:
            self.feed(b"\n")
        self.total += 1
        self.lines.append(text)


def readable(raw: bytes) -> str:
    """One line as a terminal would leave it: after the last carriage return, without escapes and controls."""
    text = raw[:LINE_BYTES_MAX].rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    text = text.expandtabs(4)
    return text if text.isprintable() else "".join(c if c.isprintable() else "·" for c in text)
