"""Options of commands that submit a job, made from the declarations of its keys."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from clusterd.cli.common.job_options import given_values
from clusterd.cli.main import cli
from clusterd.core.queueing.edits import EDITABLE
from clusterd.errors import UsageError
from clusterd.keys import Edit, keys_of
from clusterd.submission.job_file import parse_changes
from clusterd.types import JobSpec

SAMPLES = ("2", "true", "1h", "+2h", "USR1@2m", "text", "dp=2", ">=8.0")


@pytest.mark.parametrize("command", ["run", "submit"])
def test_every_option_of_a_key_is_there(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--help"]).output
    assert [key.option for key in keys_of(JobSpec) if key.option and key.option not in shown] == []


def test_a_zero_is_a_value_and_a_flag_that_is_not_set_is_none() -> None:
    """Regression: a priority of 0 on the command line must go before that of the file."""
    assert given_values({"priority": 0, "guaranteed": False, "hosts": (), "name": None}) == {"priority": 0}


def test_a_time_without_a_unit_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """To Slurm it is minutes."""
    assert given_values({"time": "90"}) == given_values({"time": "90s"})
    assert capsys.readouterr().err == "--time 90 is 90 seconds; 90m would be minutes\n"


def test_options_are_refused_by_their_names() -> None:
    for options, message in (
        ({"gpus": "many"}, "--gpus: 'many' is no number of GPUs"),
        ({"nodes": 0}, "--nodes is 0; it must be 1 or more"),
        ({"constraint": ("nv link",)}, "--constraint: 'nv link' is no label"),
    ):
        with pytest.raises(UsageError, match=message):
            given_values(options)


def accepted(short: str) -> dict[str, object]:
    """Changes for the first sample that the key takes."""
    for text in SAMPLES:
        try:
            return parse_changes([f"{short}={text}"])
        except UsageError:
            continue
    raise AssertionError(f"no sample fits {short}")


def test_every_key_that_edit_takes_is_one_that_the_daemon_changes() -> None:
    """Regression: `edit` offered preemptible, which the daemon refused."""
    keys = [key for key in keys_of(JobSpec) if key.edit is not Edit.NEVER]
    assert len(keys) > 20
    for key in keys:
        assert set(accepted(key.short)) <= EDITABLE, key.name
