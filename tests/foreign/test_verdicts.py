"""Verdicts about runs: nothing that went wrong passes as right, told or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_pool import Rank

from tests.foreign import registry, table
from tests.foreign.runs import Verdict, judge

EXPECTED = [2.0, 1.5, 1.0]
REFUSAL = Rank(92, "clusterd: the loss is a list\n")
CRASH = Rank(1, "Traceback (most recent call last)\nKeyError: 1\n")
LINE = "clusterd: the model draws random numbers\n"


@pytest.mark.parametrize(
    ("output", "losses", "verdict"),
    [
        ("", EXPECTED, "right"),
        (LINE, EXPECTED, "right"),
        ("", [2.0, 1.50001], "right"),
        (LINE, [2.0, 1.6, 1.0], "told"),
        ("", [2.0, 1.6, 1.0], "WRONG"),
        (LINE, [2.0, float("nan")], "told"),
        ("", [2.0, float("nan")], "WRONG"),
        ("clusterd: stopped after step 3 of 9: enough\n", [3.0], "WRONG"),
        ("", [], "WRONG"),
    ],
)
def test_a_difference_without_a_line_about_it_is_wrong(output: str, losses: list[float], verdict: str) -> None:
    assert judge([Rank(0, output)], losses, EXPECTED, 1e-4).verdict == verdict


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([REFUSAL, Rank(92, "")], "refused"),
        (
            [Rank(92, "clusterd: the loss is a list\n"), Rank(1, "Traceback (most recent call last)\nKeyError: 1\n")],
            "WRONG",
        ),
        ([Rank(1, "")], "WRONG"),
        ([Rank(-9, LINE), Rank(-9, "")], "WRONG"),
    ],
)
def test_only_a_line_makes_a_refusal(ranks: list[Rank], verdict: str) -> None:
    assert judge(ranks, [], EXPECTED, 1e-4).verdict == verdict


def test_a_row_of_the_table_is_replaced_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "train.md"
    page.write_text("before\n<!-- scripts -->\n<!-- end of scripts -->\nafter\n")
    monkeypatch.setattr(table, "PAGE", page)
    first, second = (registry.Script(name, "g", "A script", dict, (), "do this") for name in ("a", "b"))
    table.write(
        second, {"one": Verdict("right"), "dp=2": Verdict("told", "why"), "pp=2,accumulation=2": Verdict("right")}
    )
    table.write(first, {"one": Verdict("refused", "why")})
    table.write(first, {"one": Verdict("right")})
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert rows == [
        "| `a`: A script | right |  |  |  |  |  |  |  |",
        "| `b`: A script | right | told |  | pp=2 accumulation=2: right |  |  |  | do this |",
    ]
    assert page.read_text().endswith("<!-- end of scripts -->\nafter\n")
