"""Table of AITurbo's published jobs: ``python -m tests.profiling.aiturbo_jobs dataset.xlsx OUT.csv``.

The spreadsheet of https://github.com/LFSCODE/AITurbo has one job per row. Only columns known at submission are kept,
and the label. Its column `resubmit` is 1 for a first submission, and `predictability` 1 for an unpredictable job.
"""

from __future__ import annotations

import csv
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator
from pathlib import Path

MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
COLUMNS = {
    "A": "type", "C": "ps", "D": "workers", "E": "epochs", "H": "gpus", "I": "memory", "J": "cpus", "K": "batch",
    "L": "learning_rate", "M": "steps",
}  # fmt: skip
"""Columns known at submission. Running time, accuracy, loss and throughput are known after it."""


def write(spreadsheet: Path, path: Path) -> None:
    """Write the table of a spreadsheet."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS.values(), "resubmitted", "predictable"])
        for cells in _rows(spreadsheet):
            known = [cells.get(column, "") for column in COLUMNS]
            known[0] = f"type{float(known[0]):g}"  # a number, but a name: it has no order
            writer.writerow([*known, 1 - int(float(cells["O"])), 1 - int(float(cells["P"]))])


def _rows(spreadsheet: Path) -> Iterator[dict[str, str]]:
    """Values of each row below the heading, by letter of the column."""
    with zipfile.ZipFile(spreadsheet) as archive, archive.open("xl/worksheets/sheet1.xml") as sheet:
        for _, row in ET.iterparse(sheet):
            if row.tag != f"{MAIN}row":
                continue
            if row.get("r") != "1":
                yield {
                    cell.get("r", "").rstrip("0123456789"): value.text or ""
                    for cell in row
                    if (value := cell.find(f"{MAIN}v")) is not None
                }
            row.clear()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
