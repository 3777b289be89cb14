"""Error of predicted step times after each number of trials, by table, beside a plain rule.

python tests/benchmarks/accuracy.py [--json] [--seeds 2] [--budget 7]

Tables are measured ones, found under CLUSTERD_DATA (default ../shared/data) and in tests/profiling/tables, and "drawn":
12 clusters and models of the seeds on which nothing was chosen (tests/profiling/drawn.py). At most `budget` rows of a
model are trials, the others are predicted. The models of a measured table share estimates of its links, as in a running
cluster; in "alone" they share nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from clusterd.profiling.evaluate import evaluate
from clusterd.profiling.table import Measured, read_table
from tests.benchmarks.report import Report, options
from tests.profiling import drawn, t4_tables

PUBLISHED = Path(__file__).parents[1] / "profiling" / "tables"
DATA = Path(os.environ.get("CLUSTERD_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
CLUSTERS = 12


def tables() -> dict[str, Mapping[str, Sequence[Measured]]]:
    """Measured rows by model, by name of the table."""
    with tempfile.TemporaryDirectory() as folder:
        t4 = Path(folder) / "t4.csv"
        t4_tables.write(DATA / "pollux" / "t4", t4)
        seeds = range(drawn.REPORTED, drawn.REPORTED + CLUSTERS)
        return {
            "A800": read_table(DATA / "a800" / "step_times.csv"),
            "vTrain": read_table(DATA / "heldout" / "vtrain_single.csv"),
            "llm-foundry": read_table(DATA / "heldout" / "llm_foundry.csv"),
            "T4": read_table(t4),
            "BLOOM": read_table(PUBLISHED / "bloom.csv"),
            "LiBai": read_table(PUBLISHED / "libai.csv"),
            "InternEvo": read_table(PUBLISHED / "internevo.csv"),
            "drawn": {f"drawn{seed}": drawn.table(seed) for seed in seeds},
        }


def main() -> None:
    """Measure and print."""
    given = options(__doc__ or "", seeds=2, budget=7)
    if not DATA.is_dir():
        sys.exit(f"{DATA} is not there: set CLUSTERD_DATA to the folder with the data sets")
    report = Report("accuracy")
    found: dict[str, dict[str, Any]] = {"alone": {}, "one cluster": {}}
    for name, models in tables().items():
        for kind in found if name != "drawn" else ("alone",):  # each drawn model has a cluster of its own
            result = evaluate(
                models, budget=given.budget, seeds=given.seeds, leave_one_out=False, one_cluster=kind == "one cluster"
            )
            found[kind][name] = {key: result[key] for key in ("figures", "by_trials", "hosts_beyond", "counts")}
            for entry in result["by_trials"]:
                report.add(f"{name}, {kind}, {entry['count']} trials", entry["model"]["error"])
            print(f"{name}, {kind}: done", file=sys.stderr, flush=True)
    report.details = {"seeds": given.seeds, "tables": found}
    report.show(given.json)


if __name__ == "__main__":
    main()
