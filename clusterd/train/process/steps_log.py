"""Step log: one JSON object per step, and a progress line now and then."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

PRINT_EVERY_S = 1.0


class StepsLog:
    """Appends steps to the attempt's ``steps.jsonl`` (rank 0 only) and prints progress.

    Step numbers grow by one; if lost steps are repeated, a ``{"restart_from": n}`` object comes first (n: the last step
    that remains valid).
    """

    def __init__(self, path: Path | None, *, first_step: int, steps: int, plan: str, samples: int) -> None:
        self._plan, self._steps, self._samples = plan, steps, samples
        self._printed_at = -PRINT_EVERY_S
        self._file: TextIO | None = None
        if path is not None:
            last = last_step(path)
            self._file = path.open("a", encoding="utf-8", buffering=1)
            if ends_mid_line(path):
                self._file.write("\n")
            if last >= first_step:
                self._write({"restart_from": first_step - 1})

    def step(self, step: int, loss: float | None, time_s: float, details: dict[str, Any] | None = None) -> None:
        """Record a finished step, with phases if measured; without a loss that no rank could tell."""
        self._write(
            {
                "step": step,
                **({"loss": loss if math.isfinite(loss) else None} if loss is not None else {}),  # JSON has no NaN
                "time_s": round(time_s, 6),
                "samples": self._samples,
                "at_s": round(time.time(), 3),
                "plan": self._plan,
                **_finite(details or {}),
            }
        )
        now = time.monotonic()
        if loss is not None and (now - self._printed_at >= PRINT_EVERY_S or step == self._steps):
            self._printed_at = now
            rate = self._samples / time_s if time_s else 0.0
            print(
                f"step {step}/{self._steps}  loss {loss:.4f}  {time_s * 1e3:.1f} ms/step  {rate:.0f} samples/s",
                flush=True,
            )

    def evaluation(self, step: int, metrics: dict[str, float], time_s: float) -> None:
        """Record an evaluation after a step; its line has no ``step``, so that it is not taken for one."""
        self._write(
            {"evaluated": step, "metrics": _finite(metrics), "time_s": round(time_s, 6), "at_s": round(time.time(), 3)}
        )
        text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"step {step}/{self._steps}  evaluation: {text}  {time_s:.1f} s", flush=True)

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record the script's own metrics after a step."""
        self._write({"logged": step, "metrics": _finite(metrics), "at_s": round(time.time(), 3)})

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, with None for numbers that JSON lacks."""

    def converted(value: Any) -> Any:
        if isinstance(value, dict):
            return _finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: converted(value) for name, value in values.items()}


def ends_mid_line(path: Path) -> bool:
    """True if the log ends within a line, as after a crash."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def last_step(path: Path) -> int:
    """Newest step of a log, 0 without one; an incomplete last line is ignored."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and not {"evaluated", "logged"} & record.keys():
            return int(record.get("step") or record.get("restart_from") or 0)
    return 0
