"""``clusterd book``: devices for one's own jobs at a time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from clusterd.cli.common.arguments import point_in_time_s
from clusterd.cli.common.output import clock
from clusterd.cli.jobs import forecast_lines
from clusterd.cli.queue import claims
from clusterd.errors import UsageError
from tests.conftest import RunningCluster


def test_a_booking_from_its_making_to_its_cancellation(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    cluster.wait_until_up(2)
    made = cluster.run("book", "--devices", "2", "--from", "+1h", "--for", "2h", "--name", "deadline").stderr
    assert made.startswith("booking 1: local0:cpu0-1 from ")
    assert "clusterd run --booking 1" in made
    (row,) = json.loads(cluster.run("book", "ls", "-o", "json").stdout)
    assert (row["reason"], row["owner"]) == ("deadline", cluster.call("hello")["user"])
    assert "no claims" in cluster.run("claim", "ls").stderr
    assert "cpu0, cpu1 booked by " in cluster.run("host", "ls").stdout
    there = ("--no-snapshot", "-d", "--devices", "2")
    job = cluster.run("run", *there, "--booking", "1", "--name", "own", "--", "sleep", "1000").stdout.strip()
    why = cluster.run("why", "own").stdout
    assert "waits for its booking 1, which has not begun" in why
    assert "its booking 1 begins " in why
    more = cluster.run("run", "--no-snapshot", "-d", "--devices", "3", "--booking", "1", "--", "true", check=False)
    assert "booking 1 has 2 devices, the job requests 3" in more.stderr
    full = cluster.run("book", "--devices", "3", "--from", "+2h", "--for", "1h", check=False)
    assert (full.returncode, "2 of 3 devices can be booked" in full.stderr) == (1, True)
    assert "local0:cpu0, local0:cpu1 are booked by " in full.stderr
    cluster.run("edit", job, "booking=none")
    cluster.wait_for(job, lambda row: row["state"] == "running" and row["booking"] == "")
    cluster.run("cancel", job)
    cluster.run("book", "rm", "1")
    assert "there is no booking '1'" in cluster.run("book", "cancel", "1", check=False).stderr
    assert "booking 1 was removed" in cluster.run("history").stdout


def test_a_booking_of_more_than_there_is_says_how_many_there_are(shared_cluster: RunningCluster) -> None:
    shared_cluster.wait_until_up(2)
    none = shared_cluster.run("book", "--gpus", "a100:2", "--for", "1h", check=False)
    message = "0 of 2 GPUs of type a100 can be booked for all of that time; in service there are 0"
    assert (none.returncode, message in none.stderr) == (1, True)


def test_an_operator_books_for_somebody_else(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    cluster.wait_until_up(2)
    made = cluster.run("book", "--devices", "1", "--from", "+1h", "--for", "1h", "--user", "nobody").stderr
    booking = made.partition(":")[0].removeprefix("booking ")
    assert f"jobs of nobody go there by: clusterd run --booking {booking}" in made
    (row,) = cluster.call("claims")
    assert (row["owner"], row["by"]) == ("nobody", cluster.call("hello")["user"])
    assert " nobody" in cluster.run("book", "ls").stdout
    mine = cluster.run("run", "--no-snapshot", "-d", "--booking", booking, "--devices", "1", "--", "true", check=False)
    assert f"there is no booking '{booking}' of {row['by']}" in mine.stderr
    cluster.run("book", "cancel", booking)
    unknown = cluster.run("book", "--devices", "1", "--for", "1h", "--user", "no-such-account", check=False)
    assert (unknown.returncode, "knows no account 'no-such-account'" in unknown.stderr) == (2, True)


@pytest.mark.parametrize("columns", [80, 160])
def test_the_calendar_shows_who_is_expected_where(
    shared_cluster: RunningCluster, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = shared_cluster
    cluster.wait_until_up(2)
    there = ("--no-snapshot", "-d", "--devices", "1", "--time", "2h", "--host", "local1")
    job = cluster.run("run", *there, "--name", "study", "--", "sleep", "1000").stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    made = cluster.run("book", "--devices", "2", "--on", "local0", "--from", "+1h", "--for", "2h", "--name", "paper")
    booking = made.stderr.partition(":")[0].removeprefix("booking ")
    own = cluster.run("run", *there[:3], "1", "--booking", booking, "--name", "own", "--", "true").stdout.strip()
    monkeypatch.setitem(cluster.environment, "COLUMNS", str(columns))
    shown = cluster.run("calendar").stdout
    me = cluster.call("hello")["user"]
    heading, *lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert heading == "HOST FROM UNTIL DEVICES USER WHAT"
    assert all(len(line) <= columns for line in shown.splitlines())
    at_s = {row["text"]: (row["from_s"], row["until_s"]) for row in cluster.call("calendar")}
    begin, end, limit = (
        time.strftime("%a %H:%M", time.localtime(at))
        for at in (*at_s[f"booking {booking}: paper"], at_s[f"study ({job})"][1])
    )
    assert lines == [
        f"local0 {begin} {end} {me} own ({own}), expected",
        f"{begin} {end} cpu0-1 {me} booking {booking}: paper",
        f"local1 now {limit} cpu0 {me} study ({job})",
    ]
    assert "study" not in cluster.run("calendar", "--host", "local0").stdout
    assert "nothing is expected" in cluster.run("calendar", "--user", "nobody").stderr
    assert "there is no host 'nowhere'" in cluster.run("calendar", "--host", "nowhere", check=False).stderr
    exported = cluster.run("calendar", "-o", "ics").stdout
    assert f"SUMMARY:{me}: booking {booking}: paper" in exported
    assert exported.count("BEGIN:VEVENT") == 1
    cluster.run("cancel", job, own)
    cluster.run("book", "cancel", booking)
    cluster.wait_for(job, lambda row: not row["holds_devices"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--for", "1h"), "give --gpus or --devices"),
        (("--devices", "1", "--for", "0s"), "would be over already"),
        (("--gpus", "some", "--for", "1h"), "no number of GPUs"),
        (("--devices", "1", "--for", "1h", "--name", "two words"), "the booking: the name"),
        (("--devices", "1", "--for", "1h", "--on", "nowhere"), "there is no host"),
    ],
)
def test_bad_input_of_a_booking(shared_cluster: RunningCluster, arguments: tuple[str, ...], message: str) -> None:
    refused = shared_cluster.run("book", *arguments, check=False)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_days_of_a_start() -> None:
    now_s = time.time()
    for text, day in (("mon 9:00", 0), ("Sunday 23:30", 6)):
        at_s = point_in_time_s("--from", text)
        assert (time.localtime(at_s).tm_wday, at_s > now_s - 60.0, at_s < now_s + 8 * 86400.0) == (day, True, True)
    tomorrow = time.localtime(point_in_time_s("--from", "tomorrow 14:00"))
    assert time.localtime(now_s + 86400.0).tm_yday == tomorrow.tm_yday
    with pytest.raises(UsageError, match="mon 9:00"):
        point_in_time_s("--from", "someday 9:00")


def test_an_older_daemon_gets_what_was_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it refused `user`, which it did not know, of a booking for oneself."""
    sent: dict[str, Any] = {}

    class Daemon:
        def __enter__(self) -> Daemon:
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, verb: str, **args: Any) -> dict[str, Any]:
            sent.update(args)
            return {"id": "1", "owner": "ann", "devices": ["a:gpu0"], "from_s": 0.0, "until_s": 9.0, "held_by": []}

    monkeypatch.setattr(claims, "Client", Daemon)
    claims.book_add.main(["--devices", "1", "--for", "1h"], standalone_mode=False)
    assert sent == {"devices": 1, "for_s": 3600.0}


def test_why_tells_when_a_job_may_begin_before_its_start_is_foreseen() -> None:
    begin_s = time.time() + 3600.0
    (line,) = forecast_lines({"state": "queued", "forecast": None, "begin_s": begin_s})
    assert line == f"expected start: not before {clock(begin_s)}"
