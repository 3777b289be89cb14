"""Figures that tests on GPUs measure, in one JSON file: a list of name, value, unit, card, torch's version and date."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Figures:
    """Writes each figure at once, so that a run which is ended keeps what it has measured.

    A figure replaces the one of the same name and card, and those of other cards stay.

    Args:
        path: None: figures are not written, as in a dry run.
    Attributes:
        measured: figures of this run, by name.
    """

    def __init__(self, path: Path | None, card: str, torch_version: str) -> None:
        self._path, self._card, self._torch_version = path, card, torch_version
        self.measured: dict[str, float] = {}

    def record(self, name: str, value: float, unit: str) -> None:
        """Write one figure."""
        self.measured[name] = value
        if self._path is None:
            return
        known: list[dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else []
        others = [figure for figure in known if (figure["name"], figure["card"]) != (name, self._card)]
        rounded = float(f"{value:.4g}")
        about = {"card": self._card, "torch": self._torch_version, "date": str(datetime.now(UTC).date())}
        made = {"name": name, "value": rounded, "unit": unit, **about}
        ordered = sorted([*others, made], key=lambda figure: (figure["card"], figure["name"]))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text("[\n" + ",\n".join(f"  {json.dumps(figure)}" for figure in ordered) + "\n]\n")
        part.replace(self._path)
