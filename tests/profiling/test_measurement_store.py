"""Measurements outlive their jobs and can be moved to other clusters."""

from __future__ import annotations

import csv
import io
import json
import sqlite3

import pytest

from clusterd.plans.plan import Plan
from clusterd.profiling.model import Row
from clusterd.profiling.placement import Allocation, HostShare
from clusterd.profiling.store import Key, Measurement, Store
from clusterd.profiling.table import TableError
from tests.profiling.worlds import TRANSFORMER

KEY = Key("gpt-1234", "A800", "torch 2.7", "100 Gbit/s")
ROW = Row(TRANSFORMER, Plan(dp=2, tp=2), Allocation((HostShare(2, 8, "A800"), HostShare(2, 8, "A800", 0.9))))


def measurement(step_time_s: float, key: Key = KEY, **more: object) -> Measurement:
    return Measurement(key, ROW, step_time_s, steps=20, phases=(("forward", 0.1),), device_peak_bytes=7, **more)


def test_measurements_serve_the_next_job(tmp_path):
    with Store(tmp_path / "m.sqlite") as store:
        store.add(measurement(0.5, at_s=1.0), Measurement(KEY, ROW, 0.0, kind="out-of-memory", at_s=2.0))
        store.add(measurement(0.7, key=Key("other", "A800")))
    with Store(tmp_path / "m.sqlite") as store:
        first, second = store.find(KEY)
        assert first == measurement(0.5, at_s=1.0)
        assert second.kind == "out-of-memory"
        assert store.find(Key("gpt-1234", "A800")) == []
        assert len(store.find(Key("gpt-1234", "A800"), any_environment=True)) == 2
        assert {k.signature for k in store.known()} == {"gpt-1234", "other"}


def test_measurements_on_one_host_hold_over_every_link():
    with Store() as store:
        store.add(measurement(0.5, key=Key("gpt-1234", "A800", "torch 2.7")), measurement(0.6))
        assert [m.step_time_s for m in store.find(KEY)] == [0.5, 0.6]
        slow = Key("gpt-1234", "A800", "torch 2.7", "1 Gbit/s")
        assert [m.step_time_s for m in store.find(slow)] == [0.5]


def test_measurements_travel_as_csv_and_are_not_doubled():
    with Store() as here, Store() as there:
        here.add(measurement(0.5), measurement(0.6))
        text, count = here.to_csv()
        assert count == 2
        assert there.add_csv(text, "m.csv") == 2
        assert there.add_csv(text, "m.csv") == 0
        assert there.find(KEY) == here.find(KEY)


def test_a_spoilt_line_is_named_and_nothing_is_imported():
    with Store() as here, Store() as there:
        here.add(measurement(0.5), measurement(0.6))
        text, _ = here.to_csv()
        with pytest.raises(TableError, match=r"m.csv, line 3: step_time_s is -0.6"):
            there.add_csv(text.replace(",0.6,", ",-0.6,"), "m.csv")
        assert there.find(KEY) == []
        with pytest.raises(TableError, match="no column signature"):
            there.add_csv("a,b\n1,2\n", "m.csv")
        with pytest.raises(TableError, match=r"m.csv, line \d+: .*is a quote left open"):
            there.add_csv(text + '"' + "x" * 200_000, "m.csv")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("workload", {"global_batch": "16"}),
        ("workload", {"flops_per_sample": None}),
        ("workload", {"flops_per_sample": -1.0}),
        ("workload", {"parameters": float("nan")}),
        ("workload", []),
        ("allocation", [[2, "two", "A800", 1.0]]),
        ("allocation", [[2, -1, "A800", 1.0]]),
        ("allocation", [[2, 2, "A800", float("nan")]]),
        ("allocation", [5]),
        ("phases", [["forward", float("inf")]]),
        ("phases", [["forward", -1.0]]),
        ("step_time_s", "1e300"),
        ("steps", "99999999999999999999999"),
        ("device_peak_bytes", "-1"),
        ("at_s", "nan"),
        ("at_s", "inf"),
    ],
)
def test_impossible_measurements_are_not_imported(column, value):
    """Regression: imported impossible values spoilt every later prediction for that model."""
    with Store() as here, Store() as there:
        here.add(measurement(0.5))
        rows = list(csv.DictReader(io.StringIO(here.to_csv()[0])))
        if isinstance(value, dict):
            value = {**json.loads(rows[0][column]), **value}
        rows[0][column] = value if isinstance(value, str) else json.dumps(value)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        with pytest.raises(TableError, match=r"m\.csv, line 2"):
            there.add_csv(text.getvalue(), "m.csv")
        assert there.known() == []


def test_impossible_measurements_are_refused():
    with pytest.raises(ValueError, match="must be 1e-06 to 86400 seconds"):
        measurement(0.0)
    with pytest.raises(ValueError, match="kind is 'guess'"):
        measurement(1.0, kind="guess")


def test_another_file_is_not_taken_for_a_store(tmp_path):
    (tmp_path / "notes.txt").write_text("no database at all, but long enough to be read as a header " * 20)
    with pytest.raises(TableError, match="not a store of measurements"):
        Store(tmp_path / "notes.txt")
    newer = sqlite3.connect(tmp_path / "newer.sqlite")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(TableError, match="newer version"):
        Store(tmp_path / "newer.sqlite")
