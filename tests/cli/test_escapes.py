"""Texts of jobs, hosts and other people neither control a terminal nor are formulas to a spreadsheet."""

from __future__ import annotations

import ast
import csv
import io
from pathlib import Path

import pytest

import clusterd.cli
from clusterd.cli import main
from clusterd.cli.common.output import show_csv, show_table
from clusterd.errors import ClusterError
from clusterd.outside_text import LINE_LETTERS_MAX, TEXT_LETTERS_MAX, bounded, one_line
from tests.conftest import RunningCluster

TITLE = "\x1b]0;mine\x07"
"""Renames the window of who prints it."""

TRAIN = f"""
import json
json.dump({{{TITLE!r}: "=HYPERLINK(1)", "\\u202eplain": 1, "@sum": "-1.5"}}, open("metrics.json", "w"))
"""


def test_results_escape_names_and_values_of_metrics(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: the names are the headings, and only cells were escaped; CSV was not escaped at all."""
    (tmp_path / "train.py").write_text(TRAIN)
    file = tmp_path / "job.toml"
    file.write_text('name = "odd"\ncommand = ["python3", "train.py"]\narray = "1"\n')
    shared_cluster.run("submit", "--wait", str(file))
    for form in ((), ("--csv",), ("--json",)):
        printed = shared_cluster.run("results", "odd", *form).stdout
        assert "mine" in printed.lower()
        assert not {"\x1b", "\x07", "\u202e"} & set(printed)
    (row,) = csv.DictReader(io.StringIO(shared_cluster.run("results", "odd", "--csv").stdout))
    assert row["\\x1b]0;mine\\x07"] == "'=HYPERLINK(1)"
    assert row["'@sum"] == "-1.5"


def test_only_texts_are_quoted_for_spreadsheets(capsys: pytest.CaptureFixture[str]) -> None:
    show_csv(["@name", "value"], [["=1+1", -1.5], ["-5", None], ["\tx", 3], ["plain-text", "+a"]])
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        ["'@name", "value"], ["'=1+1", "-1.5"], ["-5", ""], ["'\\tx", "3"], ["plain-text", "'+a"],
    ]  # fmt: skip


def test_headings_and_errors_are_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    show_table([f"a{TITLE}"], [[TITLE]], "")
    assert "\x1b" not in capsys.readouterr().out

    def refuse(**_: object) -> None:
        raise ClusterError(f"gpu01: it said: {TITLE}\nand more")

    monkeypatch.setattr(main.cli, "main", refuse)
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().err == "clusterd: gpu01: it said: \\x1b]0;mine\\x07\n          and more\n"


def test_texts_from_outside_are_bounded_where_they_enter() -> None:
    message = bounded({"a\x1b": ["x" * 10**6, {"b": "one\n\ttwo\r\u202e"}], "data": b"\x1b" * 10**5, "n": 3})
    assert message == {
        "a\\x1b": ["x" * (TEXT_LETTERS_MAX - 1) + "…", {"b": "one\n\ttwo\\r\\u202e"}], "data": b"\x1b" * 10**5, "n": 3,
    }  # fmt: skip
    assert one_line("a\nb\x1b") == "a b\\x1b"
    assert len(one_line("\x1b" * 10**6)) == LINE_LETTERS_MAX


def test_commands_print_values_through_the_functions_that_escape() -> None:
    """A bare `print` of a formatted text is one that somebody forgot to escape."""
    folder = Path(clusterd.cli.__file__).parent
    bare = [
        f"{file.relative_to(folder)}:{call.lineno}"
        for file in sorted(folder.rglob("*.py"))
        if file.name not in ("output.py", "main.py", "settings.py", "shell.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
        if any(isinstance(argument, ast.JoinedStr) for argument in call.args)
    ]
    assert bare == []
