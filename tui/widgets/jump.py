"""Jump mode: a letter on every pane; that letter goes there."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.geometry import Offset
from textual.screen import ModalScreen
from textual.widgets import Static

LETTERS = "asdfghjkl"


class Jump(ModalScreen[str]):
    """Letters over what is there; any other key leaves."""

    SCOPED_CSS = False
    CSS = """
    Jump { background: $background 0%; }
    Jump > .label { width: auto; height: 1; text-style: bold reverse; color: $warning; layer: labels; }
    """

    def __init__(self, targets: Sequence[tuple[str, Offset]]) -> None:
        """`targets`: the answer, and where its letter stands."""
        super().__init__()
        self._targets = dict(zip(LETTERS, targets, strict=False))

    def compose(self) -> ComposeResult:
        """The letters."""
        for letter, (_, where) in self._targets.items():
            label = Static(f" {letter} ", classes="label")
            label.styles.position = "absolute"
            label.styles.offset = (where.x, where.y)
            yield label

    def on_key(self, event: events.Key) -> None:
        """There, or nowhere."""
        event.stop()
        target = self._targets.get(event.key)
        self.dismiss(target[0] if target else None)
