"""`profiling predictability`: probabilities that hold for later jobs, and messages about unusable tables."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from profiling.__main__ import main
from profiling.predictability.classifier import auc, features_of
from profiling.predictability.job_table import REQUIRED, read_jobs
from tests.profiling.job_tables import write


def test_probabilities_separate_later_jobs_and_are_calibrated(tmp_path, capsys):
    write(tmp_path / "jobs.csv", 1500)
    assert main(["predictability", str(tmp_path / "jobs.csv"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["submit"]["auc"] > 0.8
    assert figures["online"]["auc"] > figures["submit"]["auc"] + 0.01
    for of_kind in figures.values():
        assert of_kind["calibration_error"] < 0.06
        assert sum(b["jobs"] for b in of_kind["bins"]) == of_kind["jobs"] == 1200
    assert main(["predictability", str(tmp_path / "jobs.csv")]) == 0
    shown = capsys.readouterr().out
    assert "AUC" in shown and "first steps" in shown


def test_a_job_is_judged_by_what_was_over_when_it_was_submitted(tmp_path):
    write(tmp_path / "jobs.csv", 200)
    jobs = read_jobs(tmp_path / "jobs.csv")
    honest = features_of(jobs, online=True)
    for index in (50, 199):
        # Its own end, those of later jobs, and those of jobs that still run tell nothing.
        forged = [
            replace(job, end="failed", actual_s=max(job.actual_s, 1e9))
            if job.submitted_s + job.actual_s > jobs[index].submitted_s
            else job
            for job in jobs
        ]
        np.testing.assert_array_equal(features_of(forged, online=True)[: index + 1], honest[: index + 1])


def test_auc_is_the_share_of_pairs_in_order():
    random = np.random.default_rng(0)
    values, truth = random.integers(0, 5, 40).astype(float), random.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in values[truth] for b in values[~truth]]
    assert auc(values, truth) == pytest.approx(np.mean(pairs))


GOOD = ["a", "u", "m", "1", "10", "9", "completed"]


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("size", "big", "give a number"),
        ("size", "-1", "give a number"),
        ("actual_s", "", "give a number"),
        ("requested_s", "nan", "give a number"),
        ("actual_s", "inf", "give a number"),
        ("end", "", "write completed"),
        ("name", "a", "too few"),
    ],
)
def test_unusable_tables_are_refused_with_one_line(tmp_path, capsys, column, value, expected):
    row = list(GOOD)
    row[REQUIRED.index(column)] = value
    (tmp_path / "t.csv").write_text("\n".join([",".join(REQUIRED), ",".join(row)]) + "\n")
    assert main(["predictability", str(tmp_path / "t.csv")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and expected in message


def test_jobs_that_all_end_alike_and_absent_columns_are_refused(tmp_path, capsys):
    lines = [",".join(REQUIRED), *[",".join(GOOD)] * 60]
    (tmp_path / "alike.csv").write_text("\n".join(lines))
    assert main(["predictability", str(tmp_path / "alike.csv")]) == 2
    assert "alike" in capsys.readouterr().err
    (tmp_path / "short.csv").write_text("name,user\na,b\n")
    assert main(["predictability", str(tmp_path / "short.csv")]) == 2
    assert "requested_s" in capsys.readouterr().err


def test_without_times_of_submission_rows_are_in_order(tmp_path, capsys):
    write(tmp_path / "jobs.csv", 300)
    lines = [",".join(line.split(",")[: len(REQUIRED)]) for line in (tmp_path / "jobs.csv").read_text().splitlines()]
    (tmp_path / "bare.csv").write_text("\n".join(lines))
    assert main(["predictability", str(tmp_path / "bare.csv"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"submit"}
