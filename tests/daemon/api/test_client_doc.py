"""docs/client.md describes every verb of the socket."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import RunningCluster
from tests.hang import HANG_S

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "client.md").read_text()


def test_its_example_runs(local_cluster: RunningCluster, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example],
        env=local_cluster.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("42\n")


def test_every_verb_is_told_with_its_arguments() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "verbs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
