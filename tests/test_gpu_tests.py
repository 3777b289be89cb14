"""The parts of tests on GPUs that need none: processes of their own, and the file of figures."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import aims  # by the path above
import own_process
from figures import Figures


def end_by_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("of the test's own")


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (fail, "ValueError: of the test's own"),
        (end_by_a_signal, "the process of the test ended with -9"),
        (lambda: time.sleep(1000), "not over after 1 s"),
    ],
)
def test_an_end_of_any_kind_is_the_failure_of_one_test(work: Callable[[], None], message: str) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        own_process.run(work, 1.0 if "not over" in message else 60.0)
    assert message in str(failed.value)


def test_a_test_may_pass_or_skip_in_its_process() -> None:
    own_process.run(lambda: None, 60.0)
    with pytest.raises(pytest.skip.Exception, match="no GPU here"):
        own_process.run(lambda: pytest.skip("no GPU here"), 60.0)


def test_figures_of_cards_lie_in_one_file_and_the_newest_of_each_name_counts(tmp_path: Path) -> None:
    file = tmp_path / "measured" / "gpu.json"
    for card, value in (("H100", 1.0), ("A10", 2.0), ("H100", 3.00001)):
        Figures(file, card, "2.13").record("copy", value, "GB/s")
    Figures(None, "", "2.13").record("copy", 4.0, "GB/s")
    common = {"name": "copy", "unit": "GB/s", "torch": "2.13", "date": str(datetime.now(UTC).date())}
    assert json.loads(file.read_text()) == [
        {**common, "card": "A10", "value": 2.0},
        {**common, "card": "H100", "value": 3.0},
    ]


def test_every_aim_is_printed_with_what_was_measured() -> None:
    met, missed, *others = aims.AIMS
    assert met.most is not None and missed.most is not None
    lines = aims.table({met.figure: met.most, missed.figure: 2 * missed.most})
    assert len(lines) == len(aims.AIMS)
    assert lines[0].endswith(" met") and lines[1].endswith(" missed")
    assert all(line.endswith("not measured") and aim.limit in line for line, aim in zip(lines[2:], others, strict=True))
