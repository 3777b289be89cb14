"""Numbers of GPUs, and parts of one, as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterd.errors import ConfigError
from clusterd.submission.job_file import read_job_file
from clusterd.types import Resources


def asked(tmp_path: Path, gpus: str) -> Resources:
    file = tmp_path / "job.toml"
    file.write_text(f'name = "x"\ncommand = ["true"]\nworkdir = ""\nresources = {{ gpus = {gpus} }}\n')
    return read_job_file(file).spec.resources


@pytest.mark.parametrize(
    ("gpus", "devices", "share", "name"),
    [
        ("2", 2, 1, ""),
        ('"a100:2"', 2, 1, "a100"),
        ("0.5", 1, 2, ""),
        ('"0.25"', 1, 4, ""),
        ("0.33", 1, 3, ""),
        ('"a100:.5"', 1, 2, "a100"),
    ],
)
def test_a_part_of_a_gpu_is_a_share_of_one(tmp_path: Path, gpus: str, devices: int, share: int, name: str) -> None:
    wanted = asked(tmp_path, gpus)
    assert (wanted.devices, wanted.share, wanted.device_name, wanted.kind) == (devices, share, name, "cuda")


@pytest.mark.parametrize("gpus", ["0.7", "0.0", '"a100:0.9"', "1.5", "1.0", "-0.5", "nan", '"half"'])
def test_what_is_no_part_that_jobs_can_share_is_refused(tmp_path: Path, gpus: str) -> None:
    with pytest.raises(ConfigError, match="gpus"):
        asked(tmp_path, gpus)
