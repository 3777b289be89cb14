"""Measurements outlive their jobs and travel between clusters."""

from __future__ import annotations

import sqlite3

import pytest

from plans.plan import Plan
from profiling.model import Row
from profiling.placement import Allocation, HostShare
from profiling.store import Key, Measurement, Store
from profiling.table import TableError
from tests.profiling.worlds import TRANSFORMER

KEY = Key("gpt-1234", "A800", "torch 2.7", "100 Gbit/s")
ROW = Row(TRANSFORMER, Plan(dp=2, tp=2), Allocation((HostShare(2, 8, "A800"), HostShare(2, 8, "A800", 0.9))))


def measurement(step_time_s: float, key: Key = KEY, **more: object) -> Measurement:
    return Measurement(key, ROW, step_time_s, steps=20, phases=(("forward", 0.1),), device_peak_bytes=7, **more)


def test_what_was_measured_is_there_for_the_next_job(tmp_path):
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


def test_what_was_measured_on_one_host_holds_over_every_link():
    with Store() as store:
        store.add(measurement(0.5, key=Key("gpt-1234", "A800", "torch 2.7")), measurement(0.6))
        assert [m.step_time_s for m in store.find(KEY)] == [0.5, 0.6]
        slow = Key("gpt-1234", "A800", "torch 2.7", "1 Gbit/s")
        assert [m.step_time_s for m in store.find(slow)] == [0.5]


def test_measurements_travel_as_csv_and_are_not_doubled(tmp_path):
    with Store() as here, Store() as there:
        here.add(measurement(0.5), measurement(0.6))
        assert here.export_csv(tmp_path / "m.csv") == 2
        assert there.import_csv(tmp_path / "m.csv") == 2
        assert there.import_csv(tmp_path / "m.csv") == 0
        assert there.find(KEY) == here.find(KEY)


def test_a_spoilt_line_is_named_and_nothing_is_imported(tmp_path):
    with Store() as here, Store() as there:
        here.add(measurement(0.5), measurement(0.6))
        here.export_csv(tmp_path / "m.csv")
        text = (tmp_path / "m.csv").read_text().replace(",0.6,", ",-0.6,")
        (tmp_path / "m.csv").write_text(text)
        with pytest.raises(TableError, match=r"line 3: step_time_s is -0.6"):
            there.import_csv(tmp_path / "m.csv")
        assert there.find(KEY) == []
        (tmp_path / "m.csv").write_text("a,b\n1,2\n")
        with pytest.raises(TableError, match="no column signature"):
            there.import_csv(tmp_path / "m.csv")


def test_impossible_measurements_are_refused():
    with pytest.raises(ValueError, match="above 0 seconds"):
        measurement(0.0)
    with pytest.raises(ValueError, match="kind is 'guess'"):
        measurement(1.0, kind="guess")


def test_another_file_is_not_taken_for_a_store(tmp_path):
    (tmp_path / "notes.txt").write_text("no database at all, but long enough to be read as a header " * 20)
    with pytest.raises(TableError, match="no store of measurements"):
        Store(tmp_path / "notes.txt")
    newer = sqlite3.connect(tmp_path / "newer.sqlite")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(TableError, match="newer version"):
        Store(tmp_path / "newer.sqlite")
