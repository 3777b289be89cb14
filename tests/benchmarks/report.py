"""Output of benchmarks: a table with the aim beside each figure, or with ``--json`` one object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table


class Report:
    """Figures by name, with what they should be."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._figures: dict[str, float | None] = {}
        self._aims: dict[str, str] = {}
        self._met: dict[str, bool | None] = {}
        self.details: dict[str, Any] = {}

    def add(
        self, name: str, value: float | None, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """One figure; None: it could not be measured here."""
        self._figures[name] = value
        bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", at_least), ("<=", at_most)) if bound is not None]
        self._aims[name] = " and ".join(bounds)
        if value is None or (at_most is None and at_least is None):
            self._met[name] = None
        else:
            self._met[name] = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)

    def show(self, as_json: bool) -> None:
        """Print it."""
        if as_json:
            machine = {
                "date": time.strftime("%Y-%m-%d"),
                "cores": os.cpu_count(),
                "load": os.getloadavg()[0],
                "machine": platform.machine(),
                "python": platform.python_version(),
                "torch": version("torch"),
            }
            aims = {name: {"aim": self._aims[name], "met": met} for name, met in self._met.items() if met is not None}
            answer = {
                "benchmark": self.title, "figures": self._figures, "aims": aims, "machine": machine, **self.details
            }  # fmt: skip
            print(json.dumps(_rounded(answer), indent=1))
            return
        table = Table(title=self.title, title_justify="left")
        for column, justify in (("figure", "left"), ("measured", "right"), ("aim", "right"), ("", "left")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for name, value in self._figures.items():
            met = self._met[name]
            message = "" if met is None else "met" if met else "[bold]missed[/bold]"
            table.add_row(name, "not measured" if value is None else f"{value:.4g}", self._aims[name], message)
        Console().print(table)


def _rounded(value: Any) -> Any:
    """The same with five digits of each number: no benchmark measures more of them."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def options(description: str, **defaults: Any) -> argparse.Namespace:
    """``--json`` and the benchmark's own numbers."""
    parser = arguments(description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows ``--json``, and shows the description as it is written.

    From here on a benchmark that is asked to end (SIGTERM, as from `timeout`) takes its daemons and ranks with it.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
