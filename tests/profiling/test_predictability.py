"""`profiling predictability`: probabilities that hold for later jobs, and messages about unusable tables."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from clusterd.profiling.__main__ import main
from clusterd.profiling.predictability import REQUIRED, auc, features_of, fit_trees, read_jobs
from tests.profiling import aiturbo_jobs
from tests.profiling.job_tables import write


def test_probabilities_separate_later_jobs_and_are_calibrated(tmp_path, capsys):
    write(tmp_path / "jobs.csv", 1500)
    assert main(["predictability", str(tmp_path / "jobs.csv"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["submit"]["auc"] > 0.8
    assert figures["online"]["auc"] > figures["submit"]["auc"] + 0.01
    for of_kind in figures.values():
        assert of_kind["calibration_error"] < 0.08  # of which 0.04 is chance: bins of 120 jobs
        assert sum(b["jobs"] for b in of_kind["bins"]) == of_kind["jobs"] == 1200
    assert main(["predictability", str(tmp_path / "jobs.csv")]) == 0
    shown = capsys.readouterr().out
    assert "AUC" in shown and "first steps" in shown


def test_a_job_is_judged_by_what_was_over_when_it_was_submitted(tmp_path):
    write(tmp_path / "jobs.csv", 200)
    jobs = read_jobs(tmp_path / "jobs.csv")
    honest, _ = features_of(jobs, online=True)
    for index in (50, 199):
        # Its own end, those of later jobs, and those of jobs that still run tell nothing.
        forged = [
            replace(job, end="failed", actual_s=max(job.actual_s, 1e9))
            if job.submitted_s + job.actual_s > jobs[index].submitted_s
            else job
            for job in jobs
        ]
        np.testing.assert_array_equal(features_of(forged, online=True)[0][: index + 1], honest[: index + 1])


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


def test_without_times_of_submission_folds_are_shuffled(tmp_path, capsys):
    write(tmp_path / "jobs.csv", 300)
    lines = [",".join(line.split(",")[: len(REQUIRED)]) for line in (tmp_path / "jobs.csv").read_text().splitlines()]
    (tmp_path / "bare.csv").write_text("\n".join(lines))
    printed = []
    for _ in range(2):
        assert main(["predictability", str(tmp_path / "bare.csv"), "--json"]) == 0
        printed.append(capsys.readouterr().out)
    figures = json.loads(printed[0])
    assert set(figures) == {"submit"} and printed[0] == printed[1]
    assert figures["submit"]["split"] == "shuffled folds" and figures["submit"]["jobs"] == 300
    assert main(["predictability", str(tmp_path / "bare.csv")]) == 0
    assert "shuffled folds" in capsys.readouterr().out


def test_a_table_may_give_labels_and_further_features(tmp_path, capsys):
    """Neither a number nor a word tells the label: both together do. Two words are new to the trained classifier."""
    random = np.random.default_rng(0)
    lines = ["color,batch,predictable"]
    for number in range(400):
        color, batch = str(random.choice(["red", "blue", "green"])), "" if number % 50 == 0 else random.integers(1, 9)
        good = (color == "red") == (batch != "" and batch > 4)
        lines.append(f"{color if number % 200 else f'odd{number}'},{batch},{'yes' if good else 'no'}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert main(["predictability", str(tmp_path / "t.csv"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["submit"]
    assert figures["further_features"] == ["color", "batch"] and figures["auc"] > 0.95
    (tmp_path / "t.csv").write_text("\n".join([*lines, "red,1,maybe"]))
    assert main(["predictability", str(tmp_path / "t.csv")]) == 2
    assert "line 402, column predictable: 'maybe'; write 1 or 0" in capsys.readouterr().err
    (tmp_path / "t.csv").write_text("\n".join([*lines, "red,1,yes,7"]))
    assert main(["predictability", str(tmp_path / "t.csv")]) == 2
    assert "line 402: more values" in capsys.readouterr().err


def test_published_jobs_become_a_table(tmp_path, capsys):
    heading = "<row r='1'><c r='A1'><v>0</v></c></row>"
    values = {"A": 3, "B": 605, "C": 2, "D": 2, "E": 100, "F": 0.7, "G": 0.8, "H": 0, "I": 2, "J": 1, "K": 32, "M": 9}
    rows = [
        f"<row r='{number}'>"
        + "".join(f"<c r='{column}{number}'><v>{value}</v></c>" for column, value in values.items())
        + f"<c r='O{number}'><v>{number % 2}</v></c><c r='P{number}'><v>{number % 2}</v></c></row>"
        for number in range(2, 102)
    ]
    space = aiturbo_jobs.MAIN.strip("{}")
    with zipfile.ZipFile(tmp_path / "set.xlsx", "w") as archive:
        sheet = f"<worksheet xmlns='{space}'><sheetData>{heading}{''.join(rows)}</sheetData></worksheet>"
        archive.writestr("xl/worksheets/sheet1.xml", sheet)
    aiturbo_jobs.write(tmp_path / "set.xlsx", tmp_path / "t.csv")
    first = (tmp_path / "t.csv").read_text().splitlines()[:2]
    assert first[1] == "type3,2,2,100,0,2,1,32,,9,1,1" and "605" not in first[1]
    assert main(["predictability", str(tmp_path / "t.csv"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["submit"]
    assert figures["further_features"][-1] == "resubmitted" and figures["auc"] == 1.0


def test_trees_take_missing_and_equal_values():
    nan = float("nan")
    features = np.array([[1.0, nan, 0.0], [2.0, 1.0, 0.0]] * 50)
    known = fit_trees(features, np.array([True, False] * 50))
    assert known.probability(features[:1])[0] > 0.9 > 0.1 > known.probability(features[1:2])[0]
    alike = fit_trees(np.zeros((20, 2)), np.array([True] * 15 + [False] * 5))
    np.testing.assert_allclose(alike.probability(np.array([[0.0, 9.0]])), 16 / 22, atol=0.05)
