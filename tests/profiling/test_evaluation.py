"""`profiling evaluate`: errors of the model on any table, and messages about unusable ones."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest

from clusterd.profiling.__main__ import main
from clusterd.profiling.evaluate import _regrets, evaluate
from clusterd.profiling.table import REQUIRED, TableError, read_table
from tests.profiling.worlds import CONVOLUTIONS, TRANSFORMER, measured, truth

REPOSITORY = Path(__file__).parents[2]
DATA = Path(os.environ.get("CLUSTERD_DATA", REPOSITORY.parent / "shared" / "data"))
A800 = DATA / "a800" / "step_times.csv"

GOOD = {
    "model": "m", "parameters": "1000000", "layers": "4", "hidden": "64", "seq_len": "128", "global_batch": "16",
    "family": "dp", "dp": "2", "tp": "1", "pp": "1", "zero_stage": "0", "offload": "0", "act_ckpt": "0",
    "micro_batches": "", "gpus": "2", "nodes": "1", "gpus_per_node": "2", "step_time_s": "0.5",
}  # fmt: skip


def write(path: Path, *rows: dict[str, str], leave_out: str = "") -> Path:
    """A table of these rows."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in GOOD if name != leave_out], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("column", REQUIRED)
def test_a_missing_column_is_named(tmp_path, capsys, column):
    path = write(tmp_path / "t.csv", GOOD, leave_out=column)
    assert main(["evaluate", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(path) in message and column in message


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("step_time_s", "0", "outside"),
        ("step_time_s", "-1", "outside"),
        ("step_time_s", "nan", "outside"),
        ("step_time_s", "530168", "seconds per step"),
        ("step_time_s", "fast", "not a number"),
        ("step_time_s", "", "not a number"),
        ("parameters", "0", "outside"),
        ("parameters", "1e99", "outside"),
        ("hidden", "-5", "outside"),
        ("global_batch", "0.5", "outside"),
        ("global_batch", "1", "cannot be shared by dp=2"),
        ("dp", "1.5", "not whole"),
        ("dp", "4", "devices, but dp*tp*pp is 4"),
        ("zero_stage", "7", "outside"),
        ("offload", "yes", "not a number"),
        ("gpus_per_node", "1+x", "write devices of each host"),
        ("gpus_per_node", "", "write devices of each host"),
        ("nodes", "3", "gpus_per_node lists 1"),
        ("micro_batches", "0", "outside"),
        ("model", "", "name the model"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_place(tmp_path, capsys, column, value, expected):
    path = write(tmp_path / "t.csv", GOOD, {**GOOD, column: value})
    assert main(["evaluate", str(path), "--json"]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert "line 3" in answer.err and expected in answer.err


def test_one_row_is_not_enough_to_judge_by(tmp_path, capsys):
    assert main(["evaluate", str(write(tmp_path / "t.csv", GOOD))]) == 2
    assert "one to measure and one to predict" in capsys.readouterr().err


def test_a_quote_left_open_is_named_and_markup_is_text(tmp_path, capsys):
    odd = {**GOOD, "model": "[/b]x", "family": "[/i]"}
    file = write(tmp_path / "t.csv", odd, {**odd, "dp": "1", "gpus": "1", "gpus_per_node": "1"})
    assert main(["evaluate", str(file), "--fast", "--seeds", "1"]) == 0
    assert "[/b]x" in capsys.readouterr().out
    file.write_text(file.read_text() + '"' + "x" * 200_000)
    assert main(["evaluate", str(file)]) == 2
    assert "is a quote left open?" in capsys.readouterr().err


def test_an_empty_or_absent_table_is_refused(tmp_path, capsys):
    assert main(["evaluate", str(write(tmp_path / "t.csv"))]) == 2
    assert "no rows" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TableError):
        read_table(tmp_path / "binary.csv")


def test_repeats_of_a_row_are_not_predicted_from_themselves(tmp_path, capsys):
    assert main(["evaluate", str(write(tmp_path / "t.csv", *[GOOD] * 8))]) == 2
    assert "2 different rows" in capsys.readouterr().err
    alone = {**GOOD, "dp": "1", "gpus": "1", "gpus_per_node": "1"}
    thrice = [{**GOOD, "step_time_s": seconds} for seconds in ("0.4", "0.5", "9")]
    repeated = read_table(write(tmp_path / "t.csv", alone, *thrice))
    once = read_table(write(tmp_path / "u.csv", alone, GOOD))
    assert evaluate(repeated, seeds=1, leave_one_out=False) == evaluate(once, seeds=1, leave_one_out=False)


def test_two_rows_give_a_prediction_that_admits_how_little_it_knows(tmp_path):
    far = {**GOOD, "dp": "8", "gpus": "8", "nodes": "8", "gpus_per_node": "+".join("1" * 8), "step_time_s": "0.25"}
    result = evaluate(read_table(write(tmp_path / "t.csv", GOOD, far)), seeds=1)
    assert result["models"]["m"]["trials"] == 1
    assert result["figures"]["coverage_90"] == 1.0


def test_unknown_columns_and_spaces_do_no_harm(tmp_path):
    path = write(tmp_path / "t.csv", GOOD)
    path.write_text("\ufeff" + path.read_text().replace("0.5", " 0.5 "))
    assert read_table(path)["m"][0].step_time_s == 0.5


@pytest.mark.slow
def test_models_of_other_kinds_are_evaluated_side_by_side():
    result = evaluate(
        {
            "made-up": measured(truth(), TRANSFORMER),
            "conv": measured(truth(compute_rate=0.3e12), CONVOLUTIONS, parallel=False, seed=1),
        },
        seeds=2,
        leave_one_out=False,
    )
    assert set(result["models"]) == {"made-up", "conv"}
    assert result["figures"]["mean_error"] < 0.1
    assert result["figures"]["regret_mean"] < 0.05
    json.dumps(result)


@pytest.mark.slow
def test_only_chosen_times_are_seen():
    """Times of plans that were not tried do not change the predictions."""
    table = measured(truth(), TRANSFORMER)
    from dataclasses import replace

    from clusterd.profiling.evaluate import default_method, profile

    honest = profile(table, default_method(), 7, 0)
    forged = [m if i in honest.chosen else replace(m, step_time_s=123.0) for i, m in enumerate(table)]
    again = profile(forged, default_method(), 7, 0)
    assert again.chosen == honest.chosen
    assert again.prediction.median_s.tolist() == honest.prediction.median_s.tolist()


needs_data = pytest.mark.skipif(not A800.exists(), reason=f"no measurements at {A800}; set CLUSTERD_DATA")


@pytest.mark.slow
@needs_data
def test_the_figures_of_real_measurements(capsys):
    assert main(["evaluate", str(A800), "--seeds", "2", "--json", "--fast"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["mean_error"] < 0.06
    assert figures["regret_mean"] < 0.02
    assert 0.8 <= figures["coverage_90"] <= 0.98
    assert main(["evaluate", str(A800), "--seeds", "1", "--fast"]) == 0
    assert "multi_node_mean_error" in capsys.readouterr().out


@needs_data
@pytest.mark.slow
def test_the_structure_is_not_shaped_to_one_model():
    figures = evaluate(read_table(A800), seeds=6)["figures"]
    assert figures["leave_one_model_out_error"] < 0.065


@pytest.mark.slow
@needs_data
def test_a_name_changes_nothing(tmp_path):
    """Models are told apart by their sizes and times alone."""
    lines = A800.read_text().splitlines()
    stored = [lines[0]] + [line.replace("llama7,", "anything,", 1) for line in lines if line.startswith("llama7,")]
    (tmp_path / "renamed.csv").write_text("\n".join(stored))
    named = {"llama7": read_table(A800)["llama7"]}
    one = evaluate(named, seeds=1, leave_one_out=False)["figures"]
    other = evaluate(read_table(tmp_path / "renamed.csv"), seeds=1, leave_one_out=False)["figures"]
    assert one == other


@pytest.mark.slow
def test_tables_of_a_folder_are_evaluated_together_with_the_rule_beside_the_model(tmp_path, capsys):
    """Other CSV files of the folder are ignored; one table of a kind that the rule describes, one that it does not."""
    plain = [
        {**GOOD, "dp": str(n), "gpus": str(n), "gpus_per_node": str(n), "act_ckpt": act, "step_time_s": str(t / n)}
        for n in (1, 2, 4, 8)
        for act, t in (("0", 3.0), ("1", 4.0))
    ]
    write(tmp_path / "plain.csv", *plain)
    write(tmp_path / "flat.csv", *({**row, "step_time_s": "0.5"} for row in plain))
    (tmp_path / "other.csv").write_text("name,user\na,b\n")
    assert main(["evaluate", str(tmp_path), "--json", "--fast", "--seeds", "1"]) == 0
    tables = {Path(name).stem: one for name, one in json.loads(capsys.readouterr().out)["tables"].items()}
    assert list(tables) == ["flat", "plain"]
    assert [entry["count"] for entry in tables["plain"]["by_trials"]] == [1, 2, 3, 4, 5, 6]
    for entry in tables["plain"]["by_trials"]:
        assert entry["rule"]["error"] < 1e-9 and entry["rule"]["regret_max"] < 1e-9
        assert 0 <= entry["model"]["coverage"] <= 1 and entry["model"]["score"] >= entry["model"]["width"] > 0
    assert tables["flat"]["by_trials"][0]["rule"]["error"] > 0.3
    assert main(["evaluate", str(tmp_path), "--fast", "--seeds", "1"]) == 0
    assert "rule" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "absent")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["evaluate", str(tmp_path / "empty")]) == 2


def test_equal_predictions_are_chosen_equally_often():
    """A yardstick that cannot tell plans apart must not gain from the order of the rows."""
    alike = [one for one in measured(truth(), TRANSFORMER) if one.row.allocation.counts == (8,)]
    times = np.array([one.step_time_s for one in alike])
    (regret,) = _regrets(alike, times, np.ones(len(alike)))
    assert regret == pytest.approx(times.mean() / times.min() - 1)
    assert _regrets(alike, times, times) == (0.0,)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("table", ["internevo", "bloom", "libai"])
def test_the_model_foretells_tables_of_others_better_than_the_plain_rule(table):
    rows = read_table(Path(__file__).parent / "tables" / f"{table}.csv")
    for entry in evaluate(rows, seeds=1, leave_one_out=False)["by_trials"]:
        assert entry["model"]["error"] <= entry["rule"]["error"] + 0.02
        assert entry["model"]["regret"] <= entry["rule"]["regret"] + 0.01
