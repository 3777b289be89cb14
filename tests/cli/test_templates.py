"""Templates are job files that are accepted unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterd.cli.submit import _LAUNCHERS, job_file_template
from clusterd.submission.job_file import read_job_file


@pytest.mark.parametrize("name", list(_LAUNCHERS))
def test_a_template_is_a_job_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(job_file_template(name))
    spec = read_job_file(file).spec
    assert spec.resources.per_node == 4 and spec.resources.kind == "cuda"
    assert (spec.resources.nodes > 1) == (name != "single")
    assert "train" in " ".join(spec.command)
