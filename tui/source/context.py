"""What every screen is given: the model, the time, and what the terminal can show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tui.model.columns import CellContext
from tui.model.model import Model
from tui.model.state_styles import Look
from tui.source.sources import Source


@dataclass(slots=True)
class Context:
    """Shared by all screens; `model` is replaced as a whole when a recording goes back."""

    source: Source
    look: Look
    clock: Callable[[], float]  # the time that is shown: now, or that of the recording
    readonly: bool = False
    model: Model = field(default_factory=Model)
    job: str | None = None  # the one the job screen is about

    @property
    def frame(self) -> CellContext:
        """What cells depend on besides their row."""
        return CellContext(self.clock(), self.look, self.model.jobs)

    @property
    def can_act(self) -> bool:
        """Verbs may be available."""
        return self.source.can_act and not self.readonly
