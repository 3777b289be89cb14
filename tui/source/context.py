"""Context shared by all screens: source, model, clock and terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clusterd.tui.model.columns import CellContext
from clusterd.tui.model.model import Model
from clusterd.tui.model.state_styles import Look
from clusterd.tui.source.sources import Source


@dataclass(slots=True)
class Context:
    """Shared state of the screens; seeking back in a recording replaces `model` as a whole."""

    source: Source
    look: Look
    clock: Callable[[], float]  # displayed time: now, or the instant of the recording
    readonly: bool = False
    model: Model = field(default_factory=Model)
    job: str | None = None  # shown by the job screen

    @property
    def cell_context(self) -> CellContext:
        """Inputs of table cells besides their rows."""
        return CellContext(self.clock(), self.look, self.model.jobs)

    @property
    def can_act(self) -> bool:
        """Commands that change the cluster are allowed."""
        return self.source.can_act and not self.readonly
