"""Aims that figures of one GPU are held against; measured on an H100 by `make test-gpu`, and printed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SMALL, LARGE = "a GPT of 300M parameters", "a GPT of 1.2B parameters"


@dataclass(frozen=True)
class Aim:
    """A limit of one figure.

    Attributes:
        most: upper limit; None: it has a lower one.
    """

    figure: str
    unit: str
    most: float | None = None
    least: float | None = None

    def is_met(self, value: float) -> bool:
        """True within the limit."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    @property
    def limit(self) -> str:
        """The limit in words."""
        return f"at most {self.most:g} {self.unit}" if self.most is not None else f"at least {self.least:g} {self.unit}"


AIMS = (
    Aim(f"downtime of {SMALL}", "s", most=0.06),
    Aim(f"downtime of {LARGE}", "s", most=0.1),
    Aim(f"copy of a move of {SMALL}", "GB/s", least=40.0),
    Aim(f"preparing a move of {SMALL}", "s", most=3.0),
    Aim(f"preparing a move of {LARGE}", "s", most=6.0),
    Aim("step of a rank over a step of plain torch: bf16", "times", most=1.0),
    Aim("step of a rank over a step of plain torch: fp32", "times", most=1.0),
    Aim(f"submit to the third step of {SMALL}", "s", most=11.5),
    Aim("share of a card with which a job changes its plan live", "%", least=70.0),
)


def table(measured: Mapping[str, float]) -> list[str]:
    """Lines with each aim, what was measured in this run, and whether that is enough."""
    lines = []
    for aim in AIMS:
        value = measured.get(aim.figure)
        found = "not measured" if value is None else f"{value:.4g} {aim.unit}"
        verdict = "" if value is None else "met" if aim.is_met(value) else "missed"
        lines.append(f"{aim.figure:<58} {aim.limit:<22} {found:<16} {verdict}".rstrip())
    return lines
